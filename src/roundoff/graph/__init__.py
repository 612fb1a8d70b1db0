"""An ONNX graph as text (:func:`onnx_simple_text_plot`) and as a picture (:func:`plot_dot`)."""

from __future__ import annotations

from .picture import Svg, plot_dot
from .text import onnx_simple_text_plot

__all__ = ["Svg", "onnx_simple_text_plot", "plot_dot"]
