"""What to set: sentences chosen by the tables of a comparison."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
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
    tolerances: Mapping[str, CalibratedTolerance] = dataclasses.field(default_factory=dict)
    quantization: Quantization | None = None
    odd: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    elsewhere: bool = False

    def sentences(self) -> list[str]:
        """What applies, the most important first."""
        texts = (
            self._inputs(), self._module(), self._quantization(), self._undefined(),
            self._non_finite(), self._tf32(), self._half(), self._session(), self._rounding(),
            self._tolerance(), self._fallback(),
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
        if self.elsewhere and self.quantization is None:
            error = float(self.outputs["error module"].max())
            model = float(self.outputs["error torch"].max())
            told = f"The module's error is {error:.3g}, that of the ONNX model in torch {model:.3g}"
            if math.isnan(error) or math.isnan(model):
                apart = float(self.outputs["module abs"].max())
                told = f"The module is up to {apart:.3g} from the ONNX model in torch"
            return (
                f"{told}: the ONNX model does not compute what the module does. "
                "Look at the export (weights, order of operations, feeds) before the runtimes."
            )
        return ""

    def _inputs(self) -> str:
        """NaN in the inputs, and infinities that reach an output; masks of −inf do not."""
        reached = bool(self.outputs["non-finite truth"].any())
        told = []
        for name, (nans, infinities) in self.odd.items():
            if nans or reached:
                what = [f"{nans} NaN"] * bool(nans) + [_counted(infinities)] * bool(infinities)
                told.append(f"input {name} holds {' and '.join(what)}")
        if not told:
            return ""
        text = "; ".join(told)
        return (
            f"{text[0].upper()}{text[1:]}: the elements that these reach say nothing of the "
            "runtimes. Compare them on finite feeds."
        )

    def _quantization(self) -> str:
        return "" if self.quantization is None else self.quantization.sentence()

    def _undefined(self) -> str:
        """NaN and infinities that float64 gives, too, of finite inputs."""
        rows = self.outputs[self.outputs["non-finite truth"] > 0]
        if not len(rows) or self._inputs():
            return ""
        parts = [
            f"{row['output']} at {row['non-finite truth']} of {row['elements']} elements"
            for row in rows.to_dict("records")
        ]
        nodes = [r for r in self.frame.to_dict("records") if r["non-finite truth"] > 0]
        first = f", first at node {name_of(nodes[0])}" if nodes else ""
        return (
            f"NaN or infinity in float64, too: {', '.join(parts)}{first}. The model makes them of "
            "these inputs, not a runtime: look at what goes into that node."
        )

    def _non_finite(self) -> str:
        for row in self.frame.to_dict("records"):
            sides = overflows(row)
            if not sides:
                continue
            small = self.outputs["error ORT"].max() < 1 / math.sqrt(self._eps())
            kept = small and "ORT" in sides
            alike = not self._differ() and self._overflown()
            return (
                f"Node {name_of(row)} gives NaN or infinity in {sides} where float64 does not: a "
                "Cast to float32 before it and back after it, or a smaller input, avoids it."
                + (" The whole session does so by itself." if kept else "")
                + (" Both runtimes give the same bits, and both are wrong." if alike else "")
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

    def _overflown(self) -> bool:
        """Whether an output has a NaN or an infinity, on both sides, that float64 has not."""
        counts = [self.outputs[f"non-finite {s}"] for s in ("torch", "ORT")]
        return any(bool((c > self.outputs["non-finite truth"]).any()) for c in counts)

    def _rounding(self) -> str:
        if not self._differ():
            return self._equal()
        if "float64" in self._types():
            return (
                "The model is in float64 itself: no truth is at hand, and neither side is called "
                "nearer."
            )
        error, eps = self._errors(), self._eps()
        if not math.isfinite(error) or error == 0 or self._non_finite():
            return ""
        if error * eps > math.sqrt(eps):
            return f"The error reaches {self._large()}"
        return "No switch removes the rest: both round, each in its own places."

    def _large(self) -> str:
        """How large an error is that rounding does not explain, and what to do."""
        return (
            f"{self._errors() * self._eps():.2g} of an output's RMS, more than rounding alone "
            "explains without cancellation or underflow: compute the node with the largest error "
            "of its own in a wider type."
        )

    def _equal(self) -> str:
        """Both runtimes give the same bits: what that says."""
        if self._overflown():
            return ""
        odd, elements = (int(self.outputs[c].sum()) for c in ("non-finite truth", "elements"))
        if odd:
            finite = elements - odd
            return (
                f"The {finite} of {elements} elements of the outputs that are finite have equal "
                "bits in both."
                if finite
                else "No element of an output is finite: nothing was compared."
            )
        if self._module_differs():
            return "Nothing in the runtimes: they give equal bits; the module gives others."
        error, eps = self._errors(), self._eps()
        if math.isfinite(error) and error * eps > math.sqrt(eps):
            return f"Both give the same bits, and both are wrong: the error reaches {self._large()}"
        same = bool((self.frame["isolated abs"] == 0).all())
        return (
            "Nothing: every node and every output has equal bits in both."
            if same
            else "Nothing: every output has equal bits in both, though some nodes differ."
        )

    def _tolerance(self) -> str:
        """What to compare outputs with, or why nothing can be said; nothing for equal bits."""
        told = {
            name: t
            for name, t in self.tolerances.items()
            if t.differ or (not t.found and self._output_differs(name))
        }
        if not told:
            return ""
        found = sorted((n for n, t in told.items() if t.found), key=lambda n: -told[n].rtol)
        texts = []
        if found and not self._differ():
            most = max(told.values(), key=lambda t: t.differ)
            texts.append(f"on {most.differ} of {most.feeds} feeds like these they differ")
        for name in found[:_TOLD]:
            limits = f"rtol={told[name].rtol:.2g}, atol={told[name].atol:.2g}"
            texts.append(f"compare {name} with {limits}")
        if len(found) > _TOLD:
            texts.append(f"{len(found) - _TOLD} more outputs: see .outputs")
        if found:
            texts.append(told[found[0]].terms())
        texts += [f"for {n}: {t}" for n, t in told.items() if not t.found][:_TOLD]
        return ". ".join(text[0].upper() + text[1:] for text in texts)

    def _output_differs(self, name: str) -> bool:
        rows = self.outputs[self.outputs["output"] == name]
        return bool((rows["abs"] != 0).any())

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


def _counted(infinities: int) -> str:
    return f"{infinities} infinit{'y' if infinities == 1 else 'ies'}"
