"""Any nest of tensors in one line (:func:`string_type`), and what such a nest is made of."""

from __future__ import annotations

from .held import Held, as_tensor, is_text, parts
from .line import string_type

__all__ = ["Held", "as_tensor", "is_text", "parts", "string_type"]
