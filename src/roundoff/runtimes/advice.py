"""What to set: sentences chosen by the tables of a comparison."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from roundoff.dtypes import DTYPES

from .result import name_of, overflows

if TYPE_CHECKING:
    import pandas

    from roundoff.compare import CalibratedTolerance

    from .quantization import Quantization

__all__ = ["Advice"]

#: Outputs whose tolerances are told.
_TOLD = 3


@dataclasses.dataclass
class Advice:
    """Chooses the sentences that apply to a comparison."""

    frame: pandas.DataFrame
    outputs: pandas.DataFrame
    device: str
    tf32: tuple[bool, bool] = (False, False)  # of torch and of ONNX Runtime
    odd: Sequence[str] = ()  # inputs with NaN, or with infinities that reach an output
    elsewhere: bool = False  # the module computes something else
    optimised: bool = False  # graph optimisation changes bits
    quantization: Quantization | None = None
    tolerances: Mapping[str, CalibratedTolerance] = dataclasses.field(default_factory=dict)

    def sentences(self) -> list[str]:
        """What applies, the most important first."""
        self.differ = set(self.outputs["output"][self.outputs["abs"] != 0])
        texts = [
            self._inputs(),
            self._module(),
            "" if self.quantization is None else self.quantization.sentence(),
            self._undefined(),
            self._overflow(),
            self._tf32(),
            self._half(),
            self._optimised(),
            self._rounding() if self.differ else self._equal(),
            *self._tolerances(),
            self._other_kernels("torch", "kernel torch", "torch"),
            self._other_kernels("ONNX Runtime", "kernel ORT", "ort"),
        ]
        return [text for text in texts if text]

    def types(self) -> set[str]:
        """Element types of the outputs."""
        return {text.partition("[")[0] for text in self.outputs["type"]}

    def _inputs(self) -> str:
        if not self.odd:
            return ""
        return (
            f"NaN or infinity in the input {', '.join(self.odd)}: the elements that it reaches say "
            "nothing of the runtimes. Compare them on finite feeds."
        )

    def _module(self) -> str:
        if not self.elsewhere or self.quantization is not None:
            return ""
        return (
            f"The module is up to {self.outputs['module abs'].max():.3g} from the ONNX model in "
            "torch: the ONNX model does not compute what the module does. Look at the export "
            "(weights, order of operations, feeds) before the runtimes."
        )

    def _undefined(self) -> str:
        """NaN and infinities that float64 gives, too, of finite inputs."""
        names = self.outputs["output"][self.outputs["non-finite truth"] > 0]
        if not len(names) or self.odd:
            return ""
        nodes = self.frame[self.frame["non-finite truth"] > 0].to_dict("records")
        first = f", first at node {name_of(nodes[0])}" if nodes else ""
        return (
            f"NaN or infinity in float64, too: output {', '.join(names)}{first}. The "
            "model makes them of these inputs, not a runtime: look at what goes into that node."
        )

    def _overflow(self) -> str:
        for row in self.frame.to_dict("records"):
            if sides := overflows(row):
                return (
                    f"Node {name_of(row)} gives NaN or infinity in {sides} where float64 does not: "
                    "a Cast to float32 before it and back after it, or a smaller input, avoids it."
                )
        return ""

    def _tf32(self) -> str:
        if self.tf32[0] == self.tf32[1] or not self.differ or "float32" not in self.types():
            return ""
        uses, other = "ONNX Runtime", "torch"
        if self.tf32[0]:
            uses, other = other, uses
        return (
            f"{uses} may use TF32 for float32 matrix products and {other} may not. Off in both: "
            "the CUDA provider's option use_tf32=0 and torch.set_float32_matmul_precision("
            '"highest"); on in both: use_tf32=1 and "high".'
        )

    def _half(self) -> str:
        half = sorted(self.types() & {"float16", "bfloat16"})
        if not half or self.device != "cpu" or not self.differ:
            return ""
        return (
            f"On a CPU ONNX Runtime computes {half[0]} in float32 and rounds less often than "
            "torch, which rounds after each node; no switch changes that. Compare errors, not bits."
        )

    def _optimised(self) -> str:
        if not self.optimised:
            return ""
        return (
            "Graph optimisation changes bits: SessionOptions.graph_optimization_level = "
            "ORT_DISABLE_ALL gives what ONNX Runtime's kernels give one by one."
        )

    def _rounding(self) -> str:
        """What remains when the switches agree."""
        if "float64" in self.types():
            return (
                "The model is in float64 itself: no truth is at hand, and neither side is called "
                "nearer."
            )
        if self._overflow():
            return ""
        if large := self._large():
            return f"The error reaches {large}"
        return "Both round, in different places: no switch removes that."

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
        if large := self._large():
            return f"Both give the same bits, and both are wrong: the error reaches {large}"
        return "Nothing: every output has equal bits in both."

    def _large(self) -> str:
        """An error that rounding alone does not explain; empty where there is none."""
        floats = [d.eps for d in DTYPES.values() if d.name in self.types() and d.is_float]
        eps = max(floats, default=math.nan)
        error = eps * self.outputs[["error torch", "error ORT"]].max(axis=None)
        if not math.sqrt(eps) < error < math.inf:
            return ""
        return (
            f"{error:.2g} of an output's RMS, more than rounding alone explains without "
            "cancellation or underflow: compute the node with the largest error of its own in a "
            "wider type."
        )

    def _tolerances(self) -> list[str]:
        """What to compare outputs with, or why nothing can be said; nothing for equal bits."""
        texts = []
        for name, tolerance in self.tolerances.items():
            if tolerance.found and tolerance.differ:
                texts.append(f"Compare {name} with {tolerance}")
            elif not tolerance.found and name in self.differ:
                texts.append(f"For {name}: {tolerance}")
        return texts[:_TOLD]

    def _other_kernels(self, runtime: str, column: str, own: str) -> str:
        operators = sorted(set(self.frame["op"][self.frame[column] != own]) - {"If"})
        if not operators:
            return ""
        return (
            f"{runtime} has no kernel for {', '.join(operators)}: another kernel ran these nodes."
        )
