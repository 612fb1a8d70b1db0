r"""Layer normalisation step by step: from kernels as one would first write them to the real ones.

Each step runs, and is right; :func:`roundoff.kernels.layer_norm` is the one to use. The page
:ref:`layer-norm-ladder` explains them. A step has the sums over rows added in two stages, but for
``"atomic"``. The last step of each direction is the library's own kernel, and ``"read twice"`` is
its own for rows that no registers hold.

Rows are those of the page: contiguous, of float16, bfloat16 or float32, all tensors of one type.
"""

# A language of its own, typed by Triton.
# ruff: noqa: RUF005
# mypy: ignore-errors

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..errors import ArgumentError, ShapeError
from ._layer_norm_kernels import backward_sums, backward_wide, columns_of, same_bits
from ._layer_norm_wide import backward_shared, put_share, sums_of
from ._norm_tilings import CHUNKS
from ._row_norm import LAYER, Backward, Case, _like
from ._runtime import check_device, interpreting, kernel, multiprocessors, sum_along
from .lessons import add_partial_sums, simple_backward

__all__ = [
    "BACKWARD", "FORWARD", "REAL", "Step", "atomic_backward", "backward", "backward_shared",
    "backward_sums", "backward_wide", "columns_of", "fits", "forward", "pieces_backward",
    "pieces_forward", "put_share", "row_forward", "same_bits", "step_of", "sums_of",
]  # fmt: skip

#: The steps of each direction, in their order.
FORWARD = ("one block", "pieces", "prefetch", "roundoff")
BACKWARD = (
    "atomic", "two stages", "two programs", "pieces", "packed", "prefetch", "tiles", "read twice",
    "roundoff",
)  # fmt: skip


@kernel
def row_forward(X, W, B, Y, MEAN, RSTD, N, EPS: tl.constexpr, P: tl.constexpr):
    """A program for each row, which is one block: P is the power of two not below N."""
    row = tl.program_id(0)
    cols = tl.arange(0, P)
    here = cols < N
    x = tl.load(X + row * N + cols, mask=here, other=0.0).to(tl.float32)
    mean = sum_along(x, 0) / N
    centred = tl.where(here, x - mean, 0.0)
    rstd = 1 / tl.sqrt(sum_along(centred * centred, 0) / N + EPS)
    w = tl.load(W + cols, mask=here, other=0.0).to(tl.float32)
    b = tl.load(B + cols, mask=here, other=0.0).to(tl.float32)
    y = centred * rstd * w + b
    tl.store(Y + row * N + cols, y.to(Y.dtype.element_ty), mask=here)
    tl.store(MEAN + row, mean)
    tl.store(RSTD + row, rstd)


@kernel
def pieces_forward(
    X, W, B, Y, MEAN, RSTD, M, N,
    EPS: tl.constexpr, P: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A row is K pieces of P columns, which stay in registers; a program may take many rows."""
    cols = tl.arange(0, P)
    last = (K - 1) * P + cols < N  # only the last piece ends beyond the row
    w, b = (), ()
    if STAGES > 1:  # once for all rows
        for k in tl.static_range(K):
            w = w + (columns_of(W, k, K, P, cols, last),)
            b = b + (columns_of(B, k, K, P, cols, last),)
    for row in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=STAGES):
        x = ()
        total = tl.full((P,), 0.0, tl.float32)
        for k in tl.static_range(K):
            x = x + (columns_of(X + row * N, k, K, P, cols, last),)
            total += x[k].to(tl.float32)
        mean = sum_along(total, 0) / N
        squares = tl.full((P,), 0.0, tl.float32)
        for k in tl.static_range(K):
            centred = x[k].to(tl.float32) - mean
            if k == K - 1:
                centred = tl.where(last, centred, 0.0)
            squares += centred * centred
        rstd = 1 / tl.sqrt(sum_along(squares, 0) / N + EPS)
        for k in tl.static_range(K):
            weight = w[k] if STAGES > 1 else columns_of(W, k, K, P, cols, last)
            bias = b[k] if STAGES > 1 else columns_of(B, k, K, P, cols, last)
            xhat = (x[k].to(tl.float32) - mean) * rstd
            y = xhat * weight.to(tl.float32) + bias.to(tl.float32)
            inside = k * P + cols < N
            tl.store(Y + row * N + k * P + cols, y.to(Y.dtype.element_ty), mask=inside)
        tl.store(MEAN + row, mean)
        tl.store(RSTD + row, rstd)


@kernel
def atomic_backward(X, DY, W, MEAN, RSTD, DX, SUMS, N, P: tl.constexpr):
    """A program for each row, which adds to one sum of dw and one of db in memory."""
    row = tl.program_id(0)
    cols = tl.arange(0, P)
    here = cols < N
    x = tl.load(X + row * N + cols, mask=here, other=0.0).to(tl.float32)
    g = tl.load(DY + row * N + cols, mask=here, other=0.0).to(tl.float32)
    w = tl.load(W + cols, mask=here, other=0.0).to(tl.float32)
    rstd = tl.load(RSTD + row)
    xhat = (x - tl.load(MEAN + row)) * rstd
    c1 = sum_along(xhat * w * g, 0) / N  # beyond the row g is 0
    c2 = sum_along(w * g, 0) / N
    dx = rstd * (w * g - c2 - xhat * c1)
    tl.store(DX + row * N + cols, dx.to(DX.dtype.element_ty), mask=here)
    tl.atomic_add(SUMS + cols, g * xhat, mask=here)  # in the order in which programs come
    tl.atomic_add(SUMS + N + cols, g, mask=here)


@kernel
def pieces_backward(
    X, DY, W, MEAN, RSTD, DX, PART, M, N, tiles, zero,
    R: tl.constexpr, P: tl.constexpr, K: tl.constexpr, PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """First stage: a row is K pieces of P columns, and R rows are worked on at a time."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    cols = tl.arange(0, P)[None, :]
    last = (K - 1) * P + cols < N
    w, dw, db = (), (), ()
    for k in tl.static_range(K):
        w = w + (columns_of(W, k, K, P, cols, last),)
        dw = dw + (tl.full((1, P), 0.0, tl.float32),)
        db = db + (tl.full((1, P), 0.0, tl.float32),)
    for tile in tl.range(program, tiles, programs, num_stages=STAGES):
        rows = (tile * R + tl.arange(0, R))[:, None]
        mean = tl.load(MEAN + rows, mask=rows < M, other=0.0)
        rstd = tl.load(RSTD + rows, mask=rows < M, other=0.0)
        at = rows * N + cols
        x, dy = (), ()
        for k in tl.static_range(K):
            # cols >= 0 is always true: it gives the mask the shape (R, P).
            mask = (rows < M) & (last if k == K - 1 else cols >= 0)
            x = x + (tl.load(X + at + k * P, mask=mask, other=0.0),)
            dy = dy + (tl.load(DY + at + k * P, mask=mask, other=0.0),)
        s1 = tl.full((R, P), 0.0, tl.float32)
        s2 = tl.full((R, P), 0.0, tl.float32)
        for k in tl.static_range(K):  # the first look at the rows: two sums
            wg = w[k].to(tl.float32) * dy[k].to(tl.float32)
            s1 += (x[k].to(tl.float32) - mean) * rstd * wg
            s2 += wg
        c1 = (sum_along(s1, 1) / N)[:, None]
        c2 = (sum_along(s2, 1) / N)[:, None]
        next_dw, next_db = (), ()  # a tuple is made anew: its elements cannot be assigned
        for k in tl.static_range(K):  # the second: dx, dw, db
            xhat = (same_bits(x[k], zero, PACKED).to(tl.float32) - mean) * rstd
            g = same_bits(dy[k], zero, PACKED).to(tl.float32)
            dx = rstd * (w[k].to(tl.float32) * g - c2 - xhat * c1)
            mask = (rows < M) & (k * P + cols < N)
            tl.store(DX + at + k * P, dx.to(DX.dtype.element_ty), mask=mask)
            next_dw = next_dw + (dw[k] + sum_along(g * xhat, 0)[None, :],)
            next_db = next_db + (db[k] + sum_along(g, 0)[None, :],)
        dw, db = next_dw, next_db
    for k in tl.static_range(K):
        inside = k * P + cols < N
        tl.store(PART + program * N + k * P + cols, dw[k], mask=inside)
        tl.store(PART + (programs + program) * N + k * P + cols, db[k], mask=inside)


# --- which kernel a step is, and how it is launched -----------------------------------------------


class Step(NamedTuple):
    """A kernel of this page with its launch parameters, for rows of one width.

    Attributes
    ----------
    function
        The kernel.
    warps : int
        Warps of a program.
    per_sm : int
        Programs for each multiprocessor; 0: one for each row.
    constants : dict
        What the kernel is compiled for, by name.
    """

    function: Any
    warps: int
    per_sm: int
    constants: dict[str, Any]


def _sizes(columns: int, piece: int) -> dict[str, int]:
    return {"P": piece, "K": -(-columns // piece)}


def _forward_step(name: str, columns: int, itemsize: int, piece: int | None) -> Step | None:
    size = columns * itemsize // 2
    block = triton.next_power_of_2(columns)
    if name == "one block":
        return Step(row_forward, _warps(block), 0, {"P": block})
    warps = 8 if size > 16384 else 4
    sizes = _sizes(columns, piece or (1024 if size <= 7168 else warps * 512) * 2 // itemsize)
    if name == "pieces":
        return Step(pieces_forward, warps, 0, {**sizes, "STAGES": 1})
    # A program holds w and b beside its row: above, they no longer fit its registers.
    several = 4 if size <= 4096 else 2
    return Step(pieces_forward, warps, several, {**sizes, "STAGES": 3}) if size <= 10240 else None


def _backward_step(name: str, columns: int, itemsize: int, piece: int | None) -> Step | None:
    size = columns * itemsize // 2
    block = triton.next_power_of_2(columns)
    if name == "atomic":
        return Step(atomic_backward, _warps(block), 0, {"P": block})
    if name == "two stages":
        return Step(simple_backward, _warps(block), 1, {"P": block})
    warps = 16 if size > 16384 else 8
    rows, per_sm, stages = {
        "two programs": (1, 2, 1), "prefetch": (1, 1, 3 if size <= 14336 else 2), "tiles": (2, 1, 3)
    }.get(name, (1, 1, 1))  # fmt: skip
    # Two programs or two rows need the registers of two; a tile that is prefetched lies in shared
    # memory, of which there are 227 KiB.
    if size > {"two programs": 4096, "tiles": 4096, "prefetch": 16384}.get(name, size):
        return None
    constants = {"R": rows, **_sizes(columns, piece or warps * 512 // itemsize), "STAGES": stages}
    constants["PACKED"] = name != "pieces" and itemsize == 2 and not interpreting()
    return Step(pieces_backward, warps, per_sm, constants)


def _warps(block: int) -> int:
    """As Triton's tutorial has it up to 16,384 columns; a wider block has more threads."""
    return 16 if block > 16384 else min(max(block // 256, 1), 8)


_STEPS = {"forward": _forward_step, "backward": _backward_step}
#: Steps that are the library's kernels.
REAL = ("read twice", "roundoff")


def step_of(direction: str, name: str, columns: int, itemsize: int, piece: int | None) -> Any:
    """The kernel of a step with its launch parameters; None where a row does not fit it."""
    return _STEPS[direction](name, columns, itemsize, piece)


def fits(direction: str, name: str, columns: int, dtype: torch.dtype = torch.float16) -> bool:
    """Whether a step is there for rows of so many columns.

    Parameters
    ----------
    direction : str
        "forward" or "backward".
    name : str
        One of :data:`FORWARD` or :data:`BACKWARD`.
    columns : int
        Elements of a row.
    dtype : torch.dtype
        Their type.

    Returns
    -------
    bool
        False where a program's registers or shared memory do not hold what the step keeps there.

    Raises
    ------
    ArgumentError
        There is no such step.

    Examples
    --------
    >>> from roundoff.kernels.ladder import fits
    >>> fits("backward", "prefetch", 8704), fits("backward", "prefetch", 32768)
    (True, False)
    """
    _check_name(direction, name)
    return name in REAL or step_of(direction, name, columns, dtype.itemsize, None) is not None


def _check_name(direction: str, name: str) -> None:
    known = {"forward": FORWARD, "backward": BACKWARD}.get(direction, ())
    if name not in known:
        raise ArgumentError(
            "there is no such step", got=(direction, name), expected=f"one of {FORWARD + BACKWARD}"
        )


def _step_for(direction: str, name: str, x: torch.Tensor, piece: int | None) -> Step:
    step = step_of(direction, name, x.shape[1], x.element_size(), piece)
    if step is None:
        raise ShapeError(
            f"a row does not fit the step {name}", got=x.shape[1], expected="fewer columns",
            hint="fits() says which",
        )  # fmt: skip
    return step


def _check(direction: str, name: str, rows: tuple[torch.Tensor, ...], w: torch.Tensor) -> None:
    _check_name(direction, name)
    x = rows[0]
    check_device(x.device, "x")
    if x.ndim != 2 or not 1 <= x.numel() < 2**31 or any(r.shape != x.shape for r in rows):
        raise ShapeError(
            "rows of a lesson", got=[tuple(r.shape) for r in rows],
            expected="one shape (M, N), fewer than 2**31 elements",
        )  # fmt: skip
    if w.shape != x.shape[1:]:
        raise ShapeError("the weight", got=tuple(w.shape), expected=tuple(x.shape[1:]))
    if any(t.dtype != x.dtype or not t.is_contiguous() for t in (*rows, w)):
        raise ArgumentError(
            "rows of a lesson", got=[str(t.dtype) for t in (*rows, w)],
            expected="contiguous tensors of one type",
        )  # fmt: skip


def _launch(step: Step, programs: int, values: dict[str, Any]) -> None:
    names = [name for name in inspect.signature(step.function.fn).parameters if name in values]
    constants = step.constants | ({"EPS": values["EPS"]} if "EPS" in values else {})
    given = {name: values[name] for name in names if name not in constants}
    step.function[(programs,)](*given.values(), **constants, num_warps=step.warps)


def forward(
    name: str, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, eps: float = 1e-5,
    *, piece: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Layer normalisation by one step of the ladder.

    Parameters
    ----------
    name : str
        One of :data:`FORWARD`.
    x : torch.Tensor
        Shape (M, N), contiguous, float16, bfloat16 or float32.
    w, b : torch.Tensor
        Shape (N,), of the type of `x`.
    eps : float
        Added to the variance.
    piece : int, optional
        Columns of a piece, a power of two; by default what suits a GPU.

    Returns
    -------
    tuple of torch.Tensor
        y (M, N) in the type of `x`; mean and rstd (2, M), float32.

    Raises
    ------
    ArgumentError
        There is no such step, or tensors are not contiguous or not of one type.
    ShapeError
        Shapes that differ, an empty one, or rows too wide for the step.
    UnsupportedError
        `x` is on the CPU and the kernels of this process are compiled for a GPU.

    Examples
    --------
    >>> import torch
    >>> from roundoff.kernels import ladder
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> x, one = torch.tensor([[1.0, 3.0]], device=device), torch.ones(2, device=device)
    >>> y, stats = ladder.forward("pieces", x, one, one, eps=0.0)
    >>> y.tolist(), stats.flatten().tolist()
    ([[0.0, 2.0]], [2.0, 1.0])
    """
    _check("forward", name, (x,), w)
    m, n = x.shape
    if name in REAL:
        return _case(m, n, x.dtype, x.device, eps).forward(x, w, b, None, True)[::2]
    step = _step_for("forward", name, x, piece)
    y, stats = torch.empty_like(x), x.new_empty((2, m), dtype=torch.float32)
    values = {"X": x, "W": w, "B": b, "Y": y, "MEAN": stats[0], "RSTD": stats[1], "M": m, "N": n}
    _launch(step, _programs(step, m, x), values | {"EPS": eps})
    return y, stats


def backward(
    name: str, dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, stats: torch.Tensor,
    *, piece: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of layer normalisation by one step of the ladder.

    Parameters
    ----------
    name : str
        One of :data:`BACKWARD`.
    dy, x : torch.Tensor
        Shape (M, N), contiguous, of one type: float16, bfloat16 or float32.
    w : torch.Tensor
        Shape (N,), of the same type.
    stats : torch.Tensor
        mean and rstd, shape (2, M), float32, as :func:`forward` gives them.
    piece : int, optional
        As for :func:`forward`.

    Returns
    -------
    tuple of torch.Tensor
        dx (M, N), dw and db (N,), in the type of `x`.

    Raises
    ------
    ArgumentError, ShapeError, UnsupportedError
        As :func:`forward`.

    Examples
    --------
    >>> import torch
    >>> from roundoff.kernels import ladder
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> x, one = torch.tensor([[1.0, 3.0]], device=device), torch.ones(2, device=device)
    >>> stats = torch.tensor([[2.0], [1.0]], device=device)
    >>> dx, dw, db = ladder.backward("pieces", torch.ones_like(x), x, one, stats)
    >>> dx.tolist(), dw.tolist(), db.tolist()
    ([[0.0, 0.0]], [-1.0, 1.0], [1.0, 1.0])
    """
    _check("backward", name, (x, dy), w)
    m, n = x.shape
    if name in REAL:
        return _gradients(name, m, n, x.dtype, x.device)(dy, x, w, stats, None)
    step = _step_for("backward", name, x, piece)
    dx = torch.empty_like(x)
    tiles = -(-m // step.constants.get("R", 1))
    programs = _programs(step, tiles, x)
    values = {"X": x, "DY": dy, "W": w, "MEAN": stats[0], "RSTD": stats[1], "DX": dx,
              "M": m, "N": n, "tiles": tiles, "zero": 0}  # fmt: skip
    if name == "atomic":
        sums = x.new_zeros((2, n), dtype=torch.float32)
        _launch(step, programs, values | {"SUMS": sums})
        dw, db = sums.to(w.dtype)
        return dx, dw, db
    part = x.new_empty((2 * programs, n), dtype=torch.float32)
    sums = w.new_empty((2, n))
    _launch(step, programs, values | {"PART": part})
    columns = 1024 if interpreting() else 16
    grid = (-(-n // columns), 2)
    add_partial_sums[grid](part, sums, programs, n, triton.next_power_of_2(programs), columns)
    return dx, sums[0], sums[1]


def _programs(step: Step, tiles: int, x: torch.Tensor) -> int:
    most = step.per_sm * multiprocessors(x.get_device())
    return min(tiles, most) if step.per_sm else tiles


@lru_cache(256)
def _case(m: int, n: int, dtype: torch.dtype, device: torch.device, eps: float) -> Case:
    x, w = _like(torch.empty(m, n, dtype=dtype, device="meta")), _like(torch.empty(n, dtype=dtype))
    return Case(LAYER, (n,), eps, None, (*x[:3], device), *((*w[:3], device),) * 2)


@lru_cache(256)
def _gradients(name: str, m: int, n: int, dtype: torch.dtype, device: torch.device) -> Backward:
    tiling = CHUNKS if name == "read twice" else None
    return Backward(LAYER, (m, n), n, n, n, dtype, dtype, dtype, dtype, dtype, False, 0, device,
                    tiling)  # fmt: skip
