"""Kernels of the float64 truth for what the other families leave to ONNX Runtime.

ONNX Runtime has no float64 kernel for most of these, and ONNX's reference has known faults in
them: windows of even size, sequences of several lengths, ceilings, uneven padding. Each is written
from the operator's definition and compared with ONNX Runtime in float32, attribute by attribute.
What the definition leaves open is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - as torch's users write it

from .common import (
    WIDE,
    Function,
    Node,
    NotHandledError,
    ShapeError,
    Tensor,
    ints,
    torch_function,
    torch_kernel,
)
from .linear import _auto_pads, _spatial


class _Windows:
    """Where the windows of a pooling operator lie along each axis."""

    def __init__(self, node: Node) -> None:
        self.kernel = list(node.attribute("kernel_shape"))
        rank = len(self.kernel)
        self.rank = rank
        self.stride = _spatial(node, rank, "strides", 1)
        self.dilation = _spatial(node, rank, "dilations", 1)
        self.mode = node.attribute("auto_pad", "NOTSET")
        self.pads = list(node.attribute("pads", [0] * (2 * rank)))
        self.ceil = bool(node.attribute("ceil_mode", 0))
        if self.ceil and self.mode != "NOTSET":
            raise NotHandledError("a rounding mode beside automatic padding")
        if self.mode.startswith("SAME") and max(self.dilation) > 1:
            raise NotHandledError("automatic padding of dilated windows: two readings of its size")

    def places(self, sizes: Sequence[int]) -> list[tuple[int, int, int]]:
        """Of each axis: padding before, padding after to the last window's end, windows."""
        rank, found = self.rank, []
        pads = [0] * (2 * rank) if self.mode == "VALID" else self.pads
        if self.mode.startswith("SAME"):
            pads = _auto_pads(self.mode, sizes, self.kernel, self.stride, self.dilation)
            for n, k, s in zip(sizes, self.kernel, self.stride, strict=True):
                if (-(-n // s) - 1) * s + k < n:
                    raise NotHandledError("automatic padding of less than nothing: two readings")
        for axis, n in enumerate(sizes):
            span = (self.kernel[axis] - 1) * self.dilation[axis] + 1
            before, after, step = pads[axis], pads[rank + axis], self.stride[axis]
            free = n + before + after - span
            if free < 0:
                raise ShapeError("a window is larger than the padded input", got=list(sizes))
            count = (-(-free // step) if self.ceil else free // step) + 1
            if self.ceil and (count - 1) * step >= n + before:  # begins in the padding after
                count -= 1
            found.append((before, max((count - 1) * step + span - n - before, 0), count))
        return found

    def take(self, x: Tensor, fill: Any) -> Tensor:
        """(N, C, windows …, elements of a window), the padding filled."""
        places = self.places(x.shape[2:])
        padding = [p for before, after, _ in places[::-1] for p in (before, after)]
        x = F.pad(x, padding, value=fill)
        for axis, (_, _, count) in enumerate(places):
            span = (self.kernel[axis] - 1) * self.dilation[axis] + 1
            x = x.unfold(2 + axis, span, self.stride[axis]).narrow(2 + axis, 0, count)
            x = x[..., :: self.dilation[axis]]
        return x.flatten(-self.rank)

    def check(self, x: Tensor) -> None:
        if x.dim() != self.rank + 2:
            raise ShapeError("pooling", got=list(x.shape), expected=f"{self.rank + 2} dimensions")


@torch_kernel("MaxPool", 1, 8, 10, 11, 12, 22, table=WIDE)
def _max_pool(node: Node) -> Function:
    windows, by_column = _Windows(node), node.attribute("storage_order", 0)

    def pool(x: Tensor) -> Any:
        windows.check(x)
        least = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
        taken = windows.take(x, least)
        largest = taken.amax(-1)
        if not node.wants(1):
            return largest if len(node.outputs) == 1 else (largest, None)
        order = torch.arange(math.prod(x.shape[2:]), device=x.device)
        sizes = list(x.shape[2:])
        places = order.reshape(sizes[::-1]).permute(*range(len(sizes))[::-1]) if by_column else (
            order.reshape(sizes)
        )  # fmt: skip
        rows = torch.arange(x.shape[0] * x.shape[1], device=x.device).reshape(x.shape[:2])
        offset = (rows * order.numel()).reshape(*x.shape[:2], *[1] * len(sizes))
        taken_places = windows.take(places.expand(1, 1, *sizes).double(), -1.0).long()
        # The first of the largest that is no padding: NaN is the largest, too.
        found = (taken == largest.unsqueeze(-1)) | taken.isnan()
        first = (found & (taken_places >= 0)).int().argmax(-1, keepdim=True)
        at = taken_places.expand(*taken.shape).gather(-1, first).squeeze(-1)
        return (largest if node.wants(0) else None), at + offset

    return pool


@torch_kernel("AveragePool", 7, 10, 11, 19, 22, table=WIDE)
def _average_pool(node: Node) -> Function:
    windows, with_padding = _Windows(node), node.attribute("count_include_pad", 0)
    if windows.ceil and with_padding:
        raise NotHandledError("what lies beyond the padding: counted by some, not by others")

    def pool(x: Tensor) -> Tensor:
        windows.check(x)
        sums = windows.take(x, 0.0).sum(-1)
        ones = torch.ones_like(x[:1, :1])
        return sums / windows.take(ones, float(with_padding)).sum(-1)

    return pool


def _norm(x: Tensor, p: float, axes: Any, keep: bool) -> Tensor:
    return x.abs().pow(p).sum(axes, keepdim=keep).pow(1 / p)


@torch_kernel("LpPool", 2, 11, 18, 22, table=WIDE)
def _lp_pool(node: Node) -> Function:
    windows, p = _Windows(node), node.attribute("p", 2)

    def pool(x: Tensor) -> Tensor:
        windows.check(x)
        return _norm(windows.take(x, 0.0), p, -1, False)

    return pool


@torch_function("GlobalLpPool", 2, 22, p=2, table=WIDE)
def _global_lp_pool(x: Tensor, *, p: int) -> Tensor:
    if x.dim() < 3:
        raise NotHandledError("pooling over no axis")
    return _norm(x, p, list(range(2, x.dim())), True)


@torch_function("LRN", 1, 13, size=0, alpha=1e-4, beta=0.75, bias=1.0, table=WIDE)
def _lrn(x: Tensor, *, size: int, alpha: float, beta: float, bias: float) -> Tensor:
    if x.dim() < 2:
        raise ShapeError("LRN", got=list(x.shape), expected="[N, C, …]")
    # Of an even window one more lies after.
    squares = F.pad(x.square().movedim(1, -1), ((size - 1) // 2, size // 2))
    sums = squares.unfold(-1, size, 1).sum(-1).movedim(-1, 1)
    return x / (bias + alpha / size * sums) ** beta


#: ONNX's newer names, as torch has them.
_SAMPLERS = {"linear": "bilinear", "cubic": "bicubic"}


@torch_function(
    "GridSample", 16, 20, 22, mode="linear", padding_mode="zeros", align_corners=0, table=WIDE
)
def _grid_sample(
    x: Tensor, grid: Tensor, *, mode: str, padding_mode: str, align_corners: int
) -> Tensor:
    if x.dim() not in (4, 5) or (x.dim() == 5 and "cubic" in mode):
        raise NotHandledError(f"GridSample of {x.dim()} dimensions")
    if not bool(grid.isfinite().all()):
        raise NotHandledError("GridSample at NaN or infinity")
    grid, corners = grid.to(x.dtype), bool(align_corners)
    return F.grid_sample(x, grid, _SAMPLERS.get(mode, mode), padding_mode, corners)


@torch_function("AffineGrid", 20, align_corners=0, table=WIDE)
def _affine_grid(theta: Tensor, size: Tensor, *, align_corners: int) -> Tensor:
    return F.affine_grid(theta, ints(size), align_corners=bool(align_corners))


#: Activations of recurrent operators that have no parameters; ONNX's attributes are float32.
_PLAIN: dict[str, Function] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softsign": F.softsign,
    "hardsigmoid": lambda x: (float(np.float32(0.2)) * x + 0.5).clamp(0, 1),
}


def _activations(node: Node, default: list[str], directions: int) -> list[list[Function]]:
    """The functions of each direction."""
    names = [n.lower() for n in node.attribute("activations") or default * directions]
    if node.attribute("activation_alpha") or node.attribute("activation_beta"):
        raise NotHandledError("which of the activations the parameters belong to is left open")
    if len(names) != directions * len(default):
        raise ShapeError("activations", got=names, expected=f"{directions * len(default)} names")
    if not set(names) <= set(_PLAIN):
        raise NotHandledError(f"activations {names}")
    functions, size = [_PLAIN[name] for name in names], len(default)
    return [functions[k : k + size] for k in range(0, len(functions), size)]


def _register_recurrent(op_type: str, default: list[str], gates: int, turn: Function) -> None:
    """*turn* makes the next states from what the gates get of the input at one time."""

    @torch_kernel(op_type, 7, 14, 22, table=WIDE)
    def factory(node: Node) -> Function:
        hidden, layout = node.attribute("hidden_size"), node.attribute("layout", 0)
        directions = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
        backwards = directions.get(node.attribute("direction", "forward"))
        if not hidden or backwards is None:
            raise NotHandledError("hidden_size is not given, or a direction that ONNX lacks")
        functions = _activations(node, default, len(backwards))
        clip = node.attribute("clip", math.inf)

        def run(
            x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None,
            lengths: Tensor | None = None, h: Tensor | None = None, c: Tensor | None = None,
            peep: Tensor | None = None,
        ) -> Any:  # fmt: skip
            states = [h, c] if op_type == "LSTM" else [h]
            if layout:
                x = x.transpose(0, 1)
                states = [None if s is None else s.transpose(0, 1) for s in states]
            times, batch = x.shape[:2]
            counts = torch.full((batch,), times) if lengths is None else lengths.cpu().long()
            if bool((counts < 1).any()) or bool((counts > times).any()):
                raise NotHandledError("a sequence without elements, or longer than the input")
            counts = counts.to(x.device).unsqueeze(-1)
            blank = x.new_zeros(len(backwards), batch, hidden)
            ends = [blank.clone() if s is None else s.clone() for s in states]
            y = x.new_zeros(times, *blank.shape)
            b = x.new_zeros(len(backwards), 2 * gates * hidden) if b is None else b
            peep = x.new_zeros(len(backwards), 3 * hidden) if peep is None else peep
            for d, back in enumerate(backwards):
                added = b[d].chunk(2)
                gate = [lambda v, f=f: f(v.clamp(-clip, clip)) for f in functions[d]]
                current = [end[d] for end in ends]
                for t in range(times)[::-1] if back else range(times):
                    of_x = x[t] @ w[d].T + added[0]
                    after = turn(node, gate, functions[d], of_x, r[d], added[1], peep[d], *current)
                    alive = t < counts
                    current = [
                        torch.where(alive, new, old)
                        for new, old in zip(after, current, strict=True)
                    ]
                    y[t, d] = torch.where(alive, current[0], 0.0)
                for end, state in zip(ends, current, strict=True):
                    end[d] = state
            if layout:
                y, ends = y.permute(2, 0, 1, 3), [end.transpose(0, 1) for end in ends]
            kept = (y, *ends)[: len(node.outputs)]
            return kept if len(kept) > 1 else y

        return run


def _rnn_turn(
    node: Node, gate: list[Function], plain: list[Function], of_x: Tensor, r: Tensor,
    added: Tensor, peep: Tensor, h: Tensor,
) -> list[Tensor]:  # fmt: skip
    return [gate[0](of_x + h @ r.T + added)]


def _gru_turn(
    node: Node, gate: list[Function], plain: list[Function], of_x: Tensor, r: Tensor,
    added: Tensor, peep: Tensor, h: Tensor,
) -> list[Tensor]:  # fmt: skip
    (of_z, of_reset, of_new), weights = of_x.chunk(3, -1), r.chunk(3)
    add = added.chunk(3)
    z = gate[0](of_z + h @ weights[0].T + add[0])
    reset = gate[0](of_reset + h @ weights[1].T + add[1])
    if node.attribute("linear_before_reset", 0):
        inner = reset * (h @ weights[2].T + add[2])
    else:
        inner = (reset * h) @ weights[2].T + add[2]
    return [(1 - z) * gate[1](of_new + inner) + z * h]


def _lstm_turn(
    node: Node, gate: list[Function], plain: list[Function], of_x: Tensor, r: Tensor,
    added: Tensor, peep: Tensor, h: Tensor, cell: Tensor,
) -> list[Tensor]:  # fmt: skip
    i, o, forget, new = (of_x + h @ r.T + added).chunk(4, -1)
    of_i, of_o, of_forget = peep.chunk(3)
    i = gate[0](i + of_i * cell)
    coupled = node.attribute("input_forget", 0)
    forget = 1 - i if coupled else gate[0](forget + of_forget * cell)
    cell = forget * cell + i * gate[1](new)
    return [gate[0](o + of_o * cell) * plain[2](cell), cell]


_register_recurrent("RNN", ["tanh"], 1, _rnn_turn)
_register_recurrent("GRU", ["sigmoid", "tanh"], 3, _gru_turn)
_register_recurrent("LSTM", ["sigmoid", "tanh", "tanh"], 4, _lstm_turn)
