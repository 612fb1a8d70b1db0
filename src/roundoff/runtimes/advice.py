"""What to set: sentences chosen by the tables of a comparison."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

from roundoff.dtypes import DTYPES

from .result import name_of, overflows

if TYPE_CHECKING:
    import pandas

__all__ = ["Advice"]

#: A module whose error is this many times those of both runtimes computes something else.
_ELSEWHERE = 16.0
_HALF = ("float16", "bfloat16")
_CONTROL = ("If", "Loop", "Scan")


@dataclasses.dataclass
class Advice:
    """Chooses the sentences that apply to a comparison."""

    frame: pandas.DataFrame
    outputs: pandas.DataFrame
    tf32: tuple[bool, bool]  # of torch and of ONNX Runtime
    level: str | None
    module: Any
    device: torch.device

    def sentences(self) -> list[str]:
        """What applies, the most important first."""
        texts = (
            self._module(), self._non_finite(), self._tf32(), self._half(),
            self._session(), self._rounding(), self._fallback(),
        )  # fmt: skip
        return [text for text in texts if text]

    def _types(self) -> set[str]:
        return {text.partition("[")[0] for text in self.outputs["type"]}

    def _errors(self) -> float:
        """The largest error of both sides; 0 where no output is floating."""
        worst = self.outputs[["error torch", "error ORT"]].max(axis=None)
        return 0.0 if math.isnan(worst) else float(worst)

    def _eps(self) -> float:
        """Of the coarsest type among the outputs; NaN where none is floating."""
        floats = [d for d in DTYPES.values() if d.name in self._types() and d.is_float]
        return max((d.eps for d in floats), default=math.nan)

    def _module(self) -> str:
        if self.module is None:
            return ""
        if hasattr(self.module, "parameters"):
            device = next((p.device for p in self.module.parameters()), self.device)
            if device.type != self.device.type:
                return f"The module is on {device}, the model on {self.device}: move the module."
        error = float(self.outputs["error module"].max())
        if error > _ELSEWHERE * max(self._errors(), 1.0):
            return (
                f"The module's error is {error:.3g}, those of both runtimes are at most "
                f"{self._errors():.3g}: the ONNX model does not compute what the module does. "
                "Look at the export (weights, order of operations, feeds) before the runtimes."
            )
        return ""

    def _non_finite(self) -> str:
        for row in self.frame.to_dict("records"):
            sides = overflows(row)
            if not sides:
                continue
            small = self.outputs["error ORT"].max() < 1 / math.sqrt(self._eps())
            kept = small and "ORT" in sides
            return (
                f"Node {name_of(row)} gives NaN or infinity in {sides} where float64 does not: a "
                "Cast to float32 before it and back after it, or a smaller input, avoids it."
                + (" The whole session does so by itself." if kept else "")
            )
        return ""

    def _tf32(self) -> str:
        if self.tf32[0] == self.tf32[1] or not self._differ():
            return ""
        if "float32" not in self._types():
            return ""
        sides = ("ONNX Runtime", "torch")
        uses, other = sides if self.tf32[1] else sides[::-1]
        return (
            f"{uses} may use TF32 for float32 matrix products and {other} may not. Off in both: "
            "the CUDA provider's option use_tf32=0 and torch.set_float32_matmul_precision("
            '"highest"); on in both: use_tf32=1 and "high".'
        )

    def _half(self) -> str:
        half = sorted(self._types() & set(_HALF))
        if not half or self.device.type != "cpu" or not self._differ():
            return ""
        return (
            f"On a CPU ONNX Runtime computes {half[0]} in float32 and rounds less often than "
            "torch, which rounds after each node; no switch changes that. Compare errors, not bits."
        )

    def _session(self) -> str:
        if self.level is None or (self.level == "none" and self._half()):
            return ""
        if self.level == "none":
            return (
                "One session of the whole model differs from ONNX Runtime's kernels one by one "
                "even without graph optimisation: graph_optimization_level does not change that."
            )
        return (
            f"Graph optimisation changes bits, from ORT_ENABLE_{str(self.level).upper()} on: "
            "SessionOptions.graph_optimization_level = ORT_DISABLE_ALL gives what ONNX Runtime's "
            "kernels give one by one."
        )

    def _rounding(self) -> str:
        if not self._differ():
            same = bool((self.frame["isolated abs"] == 0).all())
            if self._module_differs():
                return "Nothing in the runtimes: they give equal bits; the module gives others."
            return (
                "Nothing: every node and every output has equal bits in both." if same else
                "Nothing: every output has equal bits in both, though some nodes differ."
            )  # fmt: skip
        eps = self._eps()
        if "float64" in self._types():
            return (
                "The model is in float64 itself: no truth is at hand, and neither side is called "
                "nearer."
            )
        error = self._errors()
        if not math.isfinite(error) or error == 0 or self._non_finite():
            return ""
        if error * eps > math.sqrt(eps):
            return (
                f"The error reaches {error * eps:.2g} of an output's RMS, more than rounding alone "
                "explains without cancellation: compute the node with the largest error of its own "
                "in a wider type."
            )
        worst = self.outputs.loc[self.outputs["atol"].idxmax()]
        return (
            "No switch removes the rest: both round, each in its own places. On feeds like these "
            f"compare {worst['output']} with rtol=0, atol={worst['atol']:.2g}."
        )

    def _module_differs(self) -> bool:
        return self.module is not None and bool((self.outputs["module abs"] != 0).any())

    def _fallback(self) -> str:
        one = self.frame[(self.frame["kernel torch"] != "torch")]
        other = self.frame[(self.frame["kernel ORT"] != "ort") & ~self.frame["op"].isin(_CONTROL)]
        parts = [
            f"{runtime} has no kernel for {', '.join(sorted(set(rows['op'])))}"
            for runtime, rows in (("torch", one), ("ONNX Runtime", other))
            if len(rows)
        ]
        if not parts:
            return ""
        return f"{'; '.join(parts)}: another kernel ran these nodes."

    def _differ(self) -> bool:
        return bool((self.outputs["abs"] != 0).any())
