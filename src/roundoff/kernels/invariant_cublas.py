"""cuBLAS where its product is the chain of :func:`roundoff.kernels.matmul`: which calls those are.

cuBLAS chooses by shape, layout, alignment and room for partial sums whether it splits K. What it
chose cannot be asked, but it shows in the bits.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

Route = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]


def plainly(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Torch's product as it is."""
    return torch.nn.functional.linear(x, weight, bias)


def _unsplit(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """By cuBLASLt, which is told not to split K.

    torch's switches are of the process: a product of another thread in these microseconds is
    not split, either.
    """
    switches, name = torch.backends.cuda.matmul, _switch_of(x.dtype)
    with _LOCK:
        before = getattr(switches, name), getattr(switches, f"{name}_split_k")
        backend = torch.backends.cuda.preferred_blas_library()
        try:
            setattr(switches, name, (False, False))
            torch.backends.cuda.preferred_blas_library("cublaslt")
            return torch.nn.functional.linear(x, weight, bias)
        finally:
            setattr(switches, name, before)
            torch.backends.cuda.preferred_blas_library(backend)


def _in_pieces(
    parts: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Some rows of the weight at a time, in one launch: cuBLAS has less reason to split K."""
    y = x.new_empty(len(x), len(weight))
    into = y.view(len(x), parts, -1).transpose(0, 1)
    factors = x.expand(parts, *x.shape), weight.view(parts, -1, weight.shape[1]).mT
    if bias is None:
        torch.bmm(*factors, out=into)
    else:
        torch.baddbmm(bias.view(parts, 1, -1), *factors, out=into)
    return y


def _switch_of(dtype: torch.dtype) -> str:
    kind = "bf16" if dtype == torch.bfloat16 else "fp16"
    return f"allow_{kind}_reduced_precision_reduction"


#: Ways to have cuBLAS compute a product, by name, in the order in which they are tried.
_ROUTES: dict[str, Route] = {
    "cuBLAS": plainly,
    "cuBLASLt, no split": _unsplit,
    "cuBLAS, halves": partial(_in_pieces, 2),
    "cuBLAS, eighths": partial(_in_pieces, 8),
}
#: Of fewer terms a probe in 16 bits tells orders apart seldom, or never (to 8 terms): our kernel.
_TELLING = 64
#: Elements in which two orders have to agree: each does in up to one case of four at 64 terms.
_ELEMENTS = 64
_LOCK = threading.RLock()
_CHOSEN: dict[tuple[Any, ...], str | None] = {}


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kernel: Route
) -> Route | None:
    """What of cuBLAS has the bits of *kernel* for such tensors, found out when they are first seen.

    None where nothing has, or nothing can be found out: in a capture, for expanded tensors, of few
    terms.
    """
    if x.shape[1] < _TELLING:
        return None
    if x.dtype == torch.float32:
        return None  # cuBLAS has TF32 cut its factors off, and float32 kernels of other orders
    switches, name = torch.backends.cuda.matmul, _switch_of(x.dtype)
    with _LOCK:  # another thread may be within _unsplit
        # What torch is told of products in a type: another library has other kernels.
        told = (
            torch.backends.cuda.preferred_blas_library(),
            getattr(switches, name),
            getattr(switches, f"{name}_split_k"),
            switches.allow_fp16_accumulation,
        )
    key = (
        *told,
        x.get_device(),
        x.dtype,
        x.shape,
        x.stride(),
        weight.shape,
        weight.stride(),
        _alignment(x),
        _alignment(weight),
        None if bias is None else (bias.stride(0), _alignment(bias)),
    )
    if key not in _CHOSEN:
        if 0 in (*x.stride(), *weight.stride()):
            return None  # an expanded tensor
        if torch.cuda.is_current_stream_capturing():
            return None  # a check waits for the device, which a capture forbids
        with _LOCK:  # what a check finds is of these switches
            _CHOSEN[key] = _proved(x, weight, bias, kernel)
    chosen = _CHOSEN[key]
    return None if chosen is None else _ROUTES[chosen]


def _alignment(tensor: torch.Tensor) -> int:
    """Bytes, up to 256, that the address is a multiple of: what cuBLAS is told."""
    address = tensor.data_ptr()
    return min(address & -address, 256)


def _proved(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kernel: Route
) -> str | None:
    """The route whose bits are the kernel's, for tensors laid out as these; None is the kernel.

    torch's own where it has them. Of the others, and the kernel, the quickest: all have one result,
    so that a choice by time moves no bits. Without its splits cuBLASLt takes for few rows and a
    long K up to 17 times as long (measured on an H200).
    """
    generator = torch.Generator(x.device).manual_seed(1)
    draw = partial(torch.randn, generator=generator, device=x.device, dtype=x.dtype)
    # The first probes show the order of the sum: a bias would hide what cancels. A bias as small as
    # the roundings shows its place in that order, a large one whether the sum was rounded before.
    none = None if bias is None else torch.zeros_like(bias)
    count = -(-_ELEMENTS // (len(x) * len(weight)))
    probes = [(*cancelling(x, weight, seed), none) for seed in range(count)]
    if bias is not None:
        probes += [(a, b, draw(bias.shape) / 4096) for a, b, _ in probes]
        probes += [(draw(x.shape), draw(weight.shape), draw(bias.shape)) for _ in range(count)]
    like = (x, weight, bias)
    with torch.no_grad():
        laid = [tuple(map(_like, like, probe)) for probe in probes]
        wanted = [kernel(*operands).view(torch.int16) for operands in laid]
        equal: dict[str | None, Route] = {}
        for name, way in _ROUTES.items():
            try:
                made = [way(*operands).view(torch.int16) for operands in laid]
                if all(map(torch.equal, made, wanted)):
                    equal[name] = way
            except RuntimeError:  # torch has no such kernel
                continue
            if "cuBLAS" in equal:  # what torch takes, and no slower than it
                return "cuBLAS"
        if not equal:
            return None
        equal[None] = kernel
        sets = _sets(*laid[0])
        times = {name: _milliseconds(way, sets) for name, way in equal.items()}
    return min(times, key=times.__getitem__)


def _sets(x: Any, weight: torch.Tensor, bias: Any) -> list[tuple[Any, ...]]:
    """Operands to be taken in turn: one weight would stay in the cache, those of a model do not.

    Up to 16 weights and 256 MiB; smaller ones stay there in a model, too.
    """
    nbytes = max(1, weight.numel() * weight.element_size())
    count = max(1, min(16, 2**28 // nbytes))
    return [(x, w, bias) for w in (weight, *(_like(weight, weight) for _ in range(count - 1)))]


def _milliseconds(way: Route, sets: list[tuple[Any, ...]]) -> float:
    """The GPU's least time for ten calls or more in a row, launched while it waits."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(2):
        torch.cuda._sleep(1_500_000)  # cycles: longer than the host takes for the launches
        begin.record()
        for operands in sets * -(-10 // len(sets)):
            way(*operands)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times)


def _like(tensor: Any, values: Any) -> Any:
    """*values* with the strides and the alignment of a tensor; None of none."""
    if tensor is None:
        return None
    offset = tensor.data_ptr() % 256 // tensor.element_size()
    extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    room = tensor.new_empty(extent + offset)
    laid = room.as_strided(tensor.shape, tensor.stride(), offset)
    # Rows that are one row in memory (a stride of 0) stay equal.
    return laid.copy_(values)


def cancelling(
    x: torch.Tensor, weight: torch.Tensor, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands whose products cancel: what remains is the rounding, which shows every order.

    The second half of x is the first with the other sign, against equal columns of the weight,
    in a random order of K; columns of x are scaled by powers of two from 1/64 to 64. In a sum of
    that kind two orders hardly ever agree, not even rounded to bfloat16; of random operands few
    elements would differ. Without the powers a product of two bfloat16 numbers, 16 bits wide, often
    fits into the 24 of the sum: nothing is rounded, and every order gives the same. So it is of few
    terms, whatever the type: a sum of eight shows no order of 16-bit numbers.

    Examples
    --------
    >>> import torch
    >>> from roundoff.kernels.invariant_cublas import cancelling
    >>> x, w = cancelling(torch.empty(1, 64), torch.empty(3, 64))
    >>> float((x.double() @ w.double().T).abs().max()) < 1e-12
    True
    """
    k = x.shape[1]
    generator = torch.Generator(x.device).manual_seed(seed)
    draw = partial(torch.randn, generator=generator, device=x.device, dtype=x.dtype)
    a, b = (draw(len(t), k // 2) for t in (x, weight))
    a = a * torch.exp2((torch.arange(k // 2, device=x.device) % 13 - 6).to(x.dtype))
    place = torch.randperm(k, generator=generator, device=x.device)
    rest = [t.new_zeros(len(t), k % 2) for t in (a, b)]
    left, right = torch.cat([a, -a, rest[0]], 1), torch.cat([b, b, rest[1]], 1)
    return left[:, place], right[:, place]


def routes() -> dict[str, int]:
    """How many of the shapes seen so far take which way on CUDA; "kernel" is ours.

    Examples
    --------
    >>> from roundoff.kernels.invariant_cublas import routes
    >>> isinstance(routes(), dict)
    True
    """
    return dict(Counter(name or "kernel" for name in _CHOSEN.values()))
