"""What to set: sentences chosen by the tables of a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from roundoff.dtypes import dtype_info

from .result import name_of, overflows

if TYPE_CHECKING:
    import pandas

    from roundoff.compare import CalibratedTolerance

    from .quantization import Quantization

#: Outputs whose tolerances are told.
_TOLD = 3


def types_of(outputs: pandas.DataFrame) -> list[str]:
    """Element types of the outputs."""
    return sorted({text.partition("[")[0] for text in outputs["type"]})


def advise(
    frame: pandas.DataFrame,
    outputs: pandas.DataFrame,
    device: str,
    *,
    tf32: Sequence[bool] = (),
    odd: Sequence[str] = (),
    is_elsewhere: bool = False,
    is_optimised: bool = False,
    quantization: Quantization | None = None,
    tolerances: Mapping[str, CalibratedTolerance],
) -> list[str]:
    """The sentences that apply to a comparison, the most important first.

    Parameters
    ----------
    frame, outputs : DataFrame
        As :class:`~roundoff.runtimes.RuntimeComparison` has them.
    device : str
        Its type.
    tf32 : pair of bool, or nothing
        Whether torch and ONNX Runtime may use it.
    odd : sequence of str
        Inputs with NaN, or with infinities that reach an output.
    is_elsewhere : bool
        The module computes something else.
    is_optimised : bool
        Graph optimisation changes bits.
    quantization : Quantization or None
    tolerances : mapping of str to CalibratedTolerance
        Of each output.
    """
    texts, types = [], types_of(outputs)
    differ = set(outputs["output"][outputs["abs"] != 0])
    overflow = next((row for row in frame.to_dict("records") if overflows(row)), None)
    undefined = outputs["output"][outputs["non-finite truth"] > 0]
    half = [name for name in types if name in ("float16", "bfloat16")]
    if odd:
        texts.append(
            f"NaN or infinity in the input {', '.join(odd)}: the elements that it reaches say "
            "nothing of the runtimes. Compare them on finite feeds."
        )
    if is_elsewhere:
        texts.append(
            f"The module is up to {outputs['module abs'].max():.3g} from the ONNX model in "
            "torch: the ONNX model does not compute what the module does. Look at the export "
            "(weights, order of operations, feeds) before the runtimes."
        )
    if quantization is not None:
        texts.append(quantization.sentence())
    if len(undefined) and not odd:
        nodes = frame[frame["non-finite truth"] > 0].to_dict("records")
        first = f", first at node {name_of(nodes[0])}" if nodes else ""
        texts.append(
            f"NaN or infinity in float64, too: output {', '.join(undefined)}{first}. The "
            "model makes them of these inputs, not a runtime: look at what goes into that node."
        )
    if overflow is not None:
        texts.append(
            f"Node {name_of(overflow)} gives NaN or infinity in {overflows(overflow)} where "
            "float64 does not: a Cast to float32 before it and back after it, or a smaller input, "
            "avoids it."
        )
    if len(set(tf32)) == 2 and differ and "float32" in types:
        uses, other = ("torch", "ONNX Runtime") if tf32[0] else ("ONNX Runtime", "torch")
        texts.append(
            f"{uses} may use TF32 for float32 matrix products and {other} may not. Off in both: "
            "the CUDA provider's option use_tf32=0 and torch.set_float32_matmul_precision("
            '"highest"); on in both: use_tf32=1 and "high".'
        )
    if half and device == "cpu" and differ:
        texts.append(
            f"On a CPU ONNX Runtime computes {half[0]} in float32 and rounds less often than "
            "torch, which rounds after each node; no switch changes that. Compare errors, not bits."
        )
    if is_optimised:
        texts.append(
            "Graph optimisation changes bits: SessionOptions.graph_optimization_level = "
            "ORT_DISABLE_ALL gives what ONNX Runtime's kernels give one by one."
        )
    large = _large(outputs, types)
    if not differ:
        texts.append(_equal(outputs, large))
    elif "float64" in types:
        texts.append(
            "The model is in float64 itself: no truth is at hand, and neither side is called "
            "nearer."
        )
    elif overflow is None:
        both = "Both round, in different places: no switch removes that."
        texts.append(f"The error reaches {large}" if large else both)
    told = []
    for name, tolerance in tolerances.items():
        if tolerance.found and tolerance.differ:
            told.append(f"Compare {name} with {tolerance}")
        elif not tolerance.found and name in differ:
            told.append(f"For {name}: {tolerance}")
    texts += told[:_TOLD]
    for runtime, side, own in (("torch", "torch", "torch"), ("ONNX Runtime", "ORT", "ort")):
        operators = sorted(set(frame["op"][frame[f"kernel {side}"] != own]))
        if operators:
            ran = ", ".join(operators)
            texts.append(f"{runtime} has no kernel for {ran}: another kernel ran these nodes.")
    return texts


def _equal(outputs: pandas.DataFrame, large: str) -> str:
    """Both runtimes give the same bits: what that says."""
    odd, elements = (int(outputs[c].sum()) for c in ("non-finite truth", "elements"))
    if (outputs["non-finite torch"] > outputs["non-finite truth"]).any():
        return "Both give the same bits, and both are wrong."
    if odd:
        return (
            f"{elements - odd} of {elements} elements of the outputs are finite, and have "
            "equal bits in both."
        )
    if large:
        return f"Both give the same bits, and both are wrong: the error reaches {large}"
    return "Nothing: every output has equal bits in both."


def _large(outputs: pandas.DataFrame, types: Sequence[str]) -> str:
    """An error that rounding alone does not explain; empty where there is none."""
    eps = max((dtype_info(name).eps for name in types if "float" in name), default=math.nan)
    error = eps * outputs[["error torch", "error ORT"]].max(axis=None)
    if not math.sqrt(eps) < error < math.inf:
        return ""
    return (
        f"{error:.2g} of an output's RMS, more than rounding alone explains without "
        "cancellation or underflow: compute the node with the largest error of its own in a "
        "wider type."
    )
