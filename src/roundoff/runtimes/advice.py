"""What to set: sentences chosen by the tables of a comparison."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from roundoff.dtypes import DTYPES

from .result import name_of, overflows

if TYPE_CHECKING:
    import pandas

    from roundoff.compare import CalibratedTolerance

    from .quantization import Quantization

__all__ = ["Advice"]

#: Outputs whose tolerances are told; of more, the widest.
_TOLD = 3
_HALF = ("float16", "bfloat16")


@dataclasses.dataclass
class Advice:
    """Chooses the sentences that apply to a comparison."""

    frame: pandas.DataFrame
    outputs: pandas.DataFrame
    tf32: tuple[bool, bool]  # of torch and of ONNX Runtime
    level: str | None
    module: Any
    device: torch.device
    tolerances: Mapping[str, CalibratedTolerance] = dataclasses.field(default_factory=dict)
    quantization: Quantization | None = None
    odd: Sequence[str] = ()  # inputs with NaN, or with infinities that reach an output
    elsewhere: bool = False

    def sentences(self) -> list[str]:
        """What applies, the most important first."""
        texts = (
            self._inputs(),
            self._module(),
            self._quantization(),
            self._undefined(),
            self._non_finite(),
            self._tf32(),
            self._half(),
            self._session(),
            self._rounding(),
            self._tolerance(),
            self._fallback(),
        )
        return [text for text in texts if text]

    def _types(self) -> set[str]:
        return {text.partition("[")[0] for text in self.outputs["type"]}

    def _eps(self) -> float:
        """That of the coarsest output; NaN where no output is floating."""
        found = (d.eps for d in DTYPES.values() if d.name in self._types() and d.is_float)
        return max(found, default=math.nan)

    def _error(self) -> float:
        """Largest error of both sides over the RMS; NaN where no output is floating."""
        return float(self.outputs[["error torch", "error ORT"]].max(axis=None)) * self._eps()

    def _is_large(self) -> bool:
        """Whether rounding alone does not explain the error."""
        return math.sqrt(self._eps()) < self._error() < math.inf

    def _inputs(self) -> str:
        if not self.odd:
            return ""
        return (
            f"NaN or infinity in the input {', '.join(self.odd)}: the elements that it reaches say "
            "nothing of the runtimes. Compare them on finite feeds."
        )

    def _module(self) -> str:
        if hasattr(self.module, "parameters"):
            device = next((p.device for p in self.module.parameters()), self.device)
            if device.type != self.device.type:
                return f"The module is on {device}, the model on {self.device}: move the module."
        if not self.elsewhere or self.quantization is not None:
            return ""
        return (
            f"The module is up to {self.outputs['module abs'].max():.3g} from the ONNX model in "
            "torch: the ONNX model does not compute what the module does. Look at the export "
            "(weights, order of operations, feeds) before the runtimes."
        )

    def _quantization(self) -> str:
        return "" if self.quantization is None else self.quantization.sentence()

    def _undefined(self) -> str:
        """NaN and infinities that float64 gives, too, of finite inputs."""
        rows = self.outputs[self.outputs["non-finite truth"] > 0]
        if not len(rows) or self.odd:
            return ""
        nodes = [r for r in self.frame.to_dict("records") if r["non-finite truth"] > 0]
        first = f", first at node {name_of(nodes[0])}" if nodes else ""
        return (
            f"NaN or infinity in float64, too: output {', '.join(rows['output'])}{first}. The "
            "model makes them of these inputs, not a runtime: look at what goes into that node."
        )

    def _non_finite(self) -> str:
        for row in self.frame.to_dict("records"):
            if sides := overflows(row):
                return (
                    f"Node {name_of(row)} gives NaN or infinity in {sides} where float64 does not: "
                    "a Cast to float32 before it and back after it, or a smaller input, avoids it."
                )
        return ""

    def _tf32(self) -> str:
        if self.tf32[0] == self.tf32[1] or not self._differ() or "float32" not in self._types():
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
        """What remains when the switches agree."""
        if not self._differ():
            return self._equal()
        if "float64" in self._types():
            return (
                "The model is in float64 itself: no truth is at hand, and neither side is called "
                "nearer."
            )
        if self._non_finite() or not self._error() > 0:
            return ""
        if self._is_large():
            return f"The error reaches {self._large()}"
        return "Both round, in different places: no switch removes that."

    def _large(self) -> str:
        return (
            f"{self._error():.2g} of an output's RMS, more than rounding alone explains without "
            "cancellation or underflow: compute the node with the largest error of its own in a "
            "wider type."
        )

    def _equal(self) -> str:
        """Both runtimes give the same bits: what that says."""
        odd, elements = (int(self.outputs[c].sum()) for c in ("non-finite truth", "elements"))
        if (self.outputs["non-finite torch"] > self.outputs["non-finite truth"]).any():
            return "Both give the same bits, and both are wrong."
        if odd:
            return (
                f"{elements - odd} of {elements} elements of the outputs are finite, and have "
                "equal bits in both."
            )
        if self.module is not None and bool((self.outputs["module abs"] != 0).any()):
            return "Nothing in the runtimes: they give equal bits; the module gives others."
        if self._is_large():
            return f"Both give the same bits, and both are wrong: the error reaches {self._large()}"
        return "Nothing: every output has equal bits in both."

    def _tolerance(self) -> str:
        """What to compare outputs with, or why nothing can be said; nothing for equal bits."""
        differ = set(self.outputs["output"][self.outputs["abs"] != 0])
        told = {
            name: t
            for name, t in self.tolerances.items()
            if t.differ or (not t.found and name in differ)
        }
        found = sorted((n for n, t in told.items() if t.found), key=lambda n: -told[n].rtol)
        texts = [
            f"Compare {n} with rtol={told[n].rtol:.2g}, atol={told[n].atol:.2g}"
            for n in found[:_TOLD]
        ]
        if found and not differ:
            most = max(told.values(), key=lambda t: t.differ)
            texts.insert(0, f"On {most.differ} of {most.feeds} feeds like these they differ")
        if found:
            terms = told[found[0]].terms()
            texts.append(terms[0].upper() + terms[1:])
        texts += [f"For {n}: {t}" for n, t in told.items() if not t.found][:_TOLD]
        return ". ".join(texts)

    def _fallback(self) -> str:
        one = self.frame[(self.frame["kernel torch"] != "torch")]
        other = self.frame[(self.frame["kernel ORT"] != "ort") & (self.frame["op"] != "If")]
        parts = [
            f"{runtime} has no kernel for {', '.join(sorted(set(rows['op'])))}"
            for runtime, rows in (("torch", one), ("ONNX Runtime", other))
            if len(rows)
        ]
        return f"{'; '.join(parts)}: another kernel ran these nodes." if parts else ""

    def _differ(self) -> bool:
        return bool((self.outputs["abs"] != 0).any())
