"""What the page on the LayerNorm kernels counts: errors, bit patterns, registers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ._runtime import interpreting, shuffled_programs
from .layer_norm import _backward_launch, plan_backward
from .rivals import LayerNorm

__all__ = ["RESULTS", "accuracy", "bit_patterns", "draw", "exact", "spills", "unit"]

RESULTS = ("y", "dx", "dw", "db")
_SUM = "dw, not rounded"


def draw(
    rows: int, columns: int, dtype: torch.dtype, device: str = "cpu", *, sets: int = 1,
    seed: int = 0, offset: float = -2.3, sd: float = 0.5,
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor, torch.Tensor]:  # fmt: skip
    """Inputs of a layer norm: sets of (x, dy), weight and bias.

    x is normal with this offset and standard deviation, dy normal with 0.1, both (rows, columns);
    weight and bias are uniform in [0, 1).

    Examples
    --------
    >>> [(x, dy)], w, b = draw(2, 3, torch.float16)
    >>> x.shape == dy.shape, w.dtype
    (True, torch.float16)
    """
    g = torch.Generator(device).manual_seed(seed)
    options: dict[str, Any] = {"generator": g, "device": device}
    w, b = (torch.rand(columns, **options).to(dtype) for _ in "wb")
    pairs = [
        (
            (offset + sd * torch.randn(rows, columns, **options)).to(dtype),
            (0.1 * torch.randn(rows, columns, **options)).to(dtype),
        )
        for _ in range(sets)
    ]
    return pairs, w, b


def exact(
    x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor, b: torch.Tensor, eps: float = 1e-5
) -> dict[str, torch.Tensor]:
    """y, dx, dw and db in float64, written down from the formulas.

    Examples
    --------
    >>> [(x, dy)], w, b = draw(2, 3, torch.float32)
    >>> found = exact(x, dy, w, b)
    >>> expected = torch.nn.functional.layer_norm(x.double(), (3,), w.double(), b.double())
    >>> torch.allclose(found["y"], expected)
    True
    """
    x, dy, w, b = (t.double() for t in (x, dy, w, b))
    centred = x - x.mean(1, keepdim=True)
    rstd = 1 / (centred.square().mean(1, keepdim=True) + eps).sqrt()
    xhat, g = centred * rstd, dy * w
    dx = rstd * (g - g.mean(1, keepdim=True) - xhat * (g * xhat).mean(1, keepdim=True))
    return {"y": xhat * w + b, "dx": dx, "dw": (dy * xhat).sum(0), "db": dy.sum(0)}


def unit(truth: torch.Tensor, dtype: torch.dtype) -> float:
    """A unit in the last place of a whole result: the root mean square of those of its elements.

    A result that is correctly rounded has an error of 0.29 of it, in the root mean square. Units of
    single elements tell less: near a zero of the truth any error is many of them.

    Examples
    --------
    >>> unit(torch.ones(1, dtype=torch.float64), torch.float16) == 2**-10
    True
    """
    info = torch.finfo(dtype)
    exponent = torch.frexp(truth.abs().clamp_min(info.tiny))[1].double() - 1
    return float((torch.exp2(exponent) * info.eps).square().mean().sqrt())


def accuracy(
    norms: Mapping[str, LayerNorm], rows: int, columns: int, dtype: torch.dtype,
    device: str = "cpu", **options: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """Errors against float64, in a :func:`unit` of `dtype`: root mean square and largest.

    For 16-bit types dw is also computed with a float32 weight: its sum before the final rounding.

    Returns
    -------
    list of dict
        Keys: dtype, result, and for each label "<label> rms" and "<label> max".
    """
    [(x, dy)], w, b = draw(rows, columns, dtype, device, **options)
    truth = exact(x, dy, w, b)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for label, norm in norms.items():
        y, *saved = norm.forward(x, w, b, 1e-5)
        results = (y, *norm.backward(dy, x, w, b, *saved))
        found[label] = dict(zip(RESULTS, results, strict=True))
        if dtype.itemsize == 2:
            wide = (w.float(), b.float())
            with contextlib.suppress(RuntimeError):  # a weight of another type is not for everyone
                y, *saved = norm.forward(x, *wide, 1e-5)
                found[label][_SUM] = norm.backward(dy, x, *wide, *saved)[1]
    truth[_SUM] = truth["dw"]
    table = []
    for result in next(iter(found.values())):
        row: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "result": result}
        for label, results_of in found.items():
            if result not in results_of:
                continue
            e = (results_of[result].double() - truth[result]) / unit(truth[result], dtype)
            row[f"{label} rms"] = e.square().mean().sqrt().item()
            row[f"{label} max"] = e.abs().max().item()
        table.append(row)
    return table


def bit_patterns(call: Callable[[], Iterable[torch.Tensor]], runs: int) -> list[int]:
    """How many different results some runs give, for each tensor that `call` returns.

    Interpreted, every run takes the programs in another order: there is no other reason why it
    could differ.

    Examples
    --------
    >>> bit_patterns(lambda: [torch.ones(3)], 5)
    [1]
    """
    seen: list[list[torch.Tensor]] = []
    for run in range(runs):
        if interpreting():
            with shuffled_programs(run):
                tensors = list(call())
        else:
            tensors = list(call())
        seen = seen or [[] for _ in tensors]
        for patterns, tensor in zip(seen, tensors, strict=True):
            bits = tensor.detach().contiguous().view(torch.uint8)
            if not any(torch.equal(bits, known) for known in patterns):
                patterns.append(bits)
    return [len(patterns) for patterns in seen]


def spills(columns: int, dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    """How the backward cuts a row, and what the compiler made of it on this machine.

    Returns
    -------
    dict
        Keys: N, piece, pieces, padded (columns), rows (of a tile), warps, registers and spilled
        (32-bit words of a thread; None in the interpreter, or before such a row was computed).
    """
    plan = plan_backward(columns, dtype.itemsize)
    row: dict[str, Any] = {"N": columns, "piece": plan.piece, "pieces": plan.pieces}
    row |= {"padded": plan.piece * plan.pieces, "rows": plan.rows, "warps": plan.warps}
    row |= {"registers": None, "spilled": None}
    index = -1 if interpreting() else torch.cuda.current_device()
    widths = (columns, columns, columns)
    kernel = _backward_launch(*widths, *(dtype,) * 3, True, False, index).launch.compiled
    if kernel is not None:
        row |= {"registers": kernel.n_regs, "spilled": kernel.n_spills}
    return row
