"""Kernels of the float64 truth for what the other families leave to ONNX Runtime.

ONNX Runtime has no float64 kernel for most of these, and ONNX's reference has known faults in
them: windows of even size, sequences of several lengths, ceilings, uneven padding. Each is written
from the operator's definition and compared with ONNX Runtime in float32, attribute by attribute.
What the definition leaves open is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as torch's users write it

from roundoff.errors import ShapeError
from roundoff.evaluator.nodes import Node

from .common import Factory, NotHandledError, ints
from .linear import _CONV_TRANSPOSE, _auto_pads, _spatial

__all__ = ["WIDE"]

Tensor = torch.Tensor
Function = Callable[..., Any]

#: (domain, operator) -> version -> factory of its kernel in float64.
WIDE: dict[tuple[str, str], dict[int, Factory]] = {}


def _wide_kernel(op_type: str, *versions: int) -> Callable[[Factory], Factory]:
    def register(factory: Factory) -> Factory:
        WIDE.setdefault(("", op_type), {}).update(dict.fromkeys(versions, factory))
        return factory

    return register


@_wide_kernel("LRN", 1, 13)
def _lrn(node: Node) -> Function:
    size = node.attribute("size")
    alpha, beta = node.attribute("alpha", 1e-4), node.attribute("beta", 0.75)
    bias = node.attribute("bias", 1.0)
    before, after = (size - 1) // 2, size // 2  # of an even window one more after

    def lrn(x: Tensor) -> Tensor:
        if x.dim() < 2:
            raise ShapeError("LRN", got=list(x.shape), expected="[N, C, …]")
        squares = F.pad(x.square().movedim(1, -1), (before, after))
        sums = squares.unfold(-1, size, 1).sum(-1).movedim(-1, 1)
        return x / (bias + alpha / size * sums) ** beta

    return lrn


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


@_wide_kernel("MaxPool", 1, 8, 10, 11, 12, 22)
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


@_wide_kernel("AveragePool", 7, 10, 11, 19, 22)
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


@_wide_kernel("LpPool", 2, 11, 18, 22)
def _lp_pool(node: Node) -> Function:
    windows, p = _Windows(node), node.attribute("p", 2)

    def pool(x: Tensor) -> Tensor:
        windows.check(x)
        return _norm(windows.take(x, 0.0), p, -1, False)

    return pool


@_wide_kernel("GlobalLpPool", 2, 22)
def _global_lp_pool(node: Node) -> Function:
    p = node.attribute("p", 2)

    def pool(x: Tensor) -> Tensor:
        if x.dim() < 3:
            raise NotHandledError("pooling over no axis")
        return _norm(x, p, list(range(2, x.dim())), True)

    return pool


@_wide_kernel("ConvTranspose", 1, 11, 22)
def _conv_transpose(node: Node) -> Function:
    mode, group = node.attribute("auto_pad", "NOTSET"), node.attribute("group", 1)
    shape = node.attribute("output_shape")

    def conv(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        rank = x.dim() - 2
        if rank not in _CONV_TRANSPOSE or w.dim() != x.dim():
            raise NotHandledError(f"convolution in {rank} dimensions")
        stride = _spatial(node, rank, "strides", 1)
        dilation = _spatial(node, rank, "dilations", 1)
        extra = _spatial(node, rank, "output_padding", 0)
        whole = _CONV_TRANSPOSE[rank](x, w, None, stride, 0, 0, group, dilation)
        pads = [0] * (2 * rank) if mode == "VALID" else list(
            node.attribute("pads", [0] * (2 * rank))
        )  # fmt: skip
        if shape or mode.startswith("SAME"):
            wanted = list(shape or [n * s for n, s in zip(x.shape[2:], stride, strict=True)])
            for axis, target in enumerate(wanted[-rank:]):
                total = whole.shape[2 + axis] + extra[axis] - target
                if total < 0:
                    raise NotHandledError("an output larger than what the input reaches")
                upper = total // 2 if mode == "SAME_UPPER" else total - total // 2
                pads[axis], pads[rank + axis] = upper, total - upper
        crop = []
        for axis in range(rank)[::-1]:
            crop += [-pads[axis], extra[axis] - pads[rank + axis]]
        y = F.pad(whole, crop)
        return y if b is None else y + b.reshape(-1, *[1] * rank)

    return conv


_MODES = {"bilinear": "bilinear", "linear": "bilinear", "nearest": "nearest",
          "bicubic": "bicubic", "cubic": "bicubic"}  # fmt: skip


@_wide_kernel("GridSample", 16, 20, 22)
def _grid_sample(node: Node) -> Function:
    mode = _MODES.get(node.attribute("mode", "linear"))
    padding = node.attribute("padding_mode", "zeros")
    corners = bool(node.attribute("align_corners", 0))
    if mode is None or padding not in ("zeros", "border", "reflection"):
        raise NotHandledError(f"GridSample mode={node.attribute('mode')}, {padding}")

    def sample(x: Tensor, grid: Tensor) -> Tensor:
        if x.dim() not in (4, 5) or (x.dim() == 5 and mode == "bicubic"):
            raise NotHandledError(f"GridSample of {x.dim()} dimensions")
        if not bool(grid.isfinite().all()):
            raise NotHandledError("GridSample at NaN or infinity")
        return F.grid_sample(x, grid.to(x.dtype), mode, padding, corners)

    return sample


@_wide_kernel("AffineGrid", 20)
def _affine_grid(node: Node) -> Function:
    corners = bool(node.attribute("align_corners", 0))
    return lambda theta, size: F.affine_grid(theta, ints(size), align_corners=corners)


#: Activations of recurrent operators that have no parameters.
_PLAIN: dict[str, Function] = {
    "relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "softsign": F.softsign,
}  # fmt: skip


def _hard_sigmoid(x: Tensor) -> Tensor:
    slope = torch.tensor(0.2, dtype=torch.float32).item()  # ONNX's attributes are float32
    return (slope * x + 0.5).clamp(0, 1)


def _activations(node: Node, default: list[str], directions: int) -> list[list[Function]]:
    """The functions of each direction."""
    names = [n.lower() for n in node.attribute("activations") or default * directions]
    if node.attribute("activation_alpha") or node.attribute("activation_beta"):
        raise NotHandledError("which of the activations the parameters belong to is left open")
    if len(names) != directions * len(default):
        raise ShapeError("activations", got=names, expected=f"{directions * len(default)} names")
    functions: list[Function] = []
    for name in names:
        if name in _PLAIN:
            functions.append(_PLAIN[name])
        elif name == "hardsigmoid":
            functions.append(_hard_sigmoid)
        else:
            raise NotHandledError(f"activation {name}")
    return [functions[k : k + len(default)] for k in range(0, len(functions), len(default))]


class _Recurrent:
    """What the recurrent operators share: directions, lengths, layout and clipping."""

    def __init__(self, node: Node, default: list[str], gates: int) -> None:
        if not node.attribute("hidden_size"):
            raise NotHandledError("hidden_size is not given")
        self.hidden, self.gates = node.attribute("hidden_size"), gates
        self.direction = node.attribute("direction", "forward")
        if self.direction not in ("forward", "reverse", "bidirectional"):
            raise NotHandledError(f"direction={self.direction}")
        self.directions = 2 if self.direction == "bidirectional" else 1
        self.functions = _activations(node, default, self.directions)
        self.clip, self.layout = node.attribute("clip"), node.attribute("layout", 0)

    def clipped(self, x: Tensor) -> Tensor:
        return x if self.clip is None else x.clamp(-self.clip, self.clip)

    def run(self, x: Tensor, lengths: Tensor | None, states: list[Any], turn: Function) -> Any:
        """Y and the last states; *turn* is called as (direction, x of a time, states)."""
        if self.layout:
            x = x.transpose(0, 1)
            states = [None if s is None else s.transpose(0, 1) for s in states]
        times, batch = x.shape[:2]
        counts = torch.full((batch,), times) if lengths is None else lengths.cpu().long()
        if bool((counts < 1).any()) or bool((counts > times).any()):
            raise NotHandledError("a sequence without elements, or longer than the input")
        blank = x.new_zeros(self.directions, batch, self.hidden)
        states = [blank if s is None else s for s in states]
        y = x.new_zeros(times, self.directions, batch, self.hidden)
        last: list[list[Tensor]] = [[] for _ in states]
        for d in range(self.directions):
            current = [s[d] for s in states]
            backwards = self.direction == "reverse" or d == 1
            for t in range(times)[::-1] if backwards else range(times):
                alive = (t < counts).to(x.device).unsqueeze(-1)
                after = turn(d, x[t], current)
                current = [torch.where(alive, a, c) for a, c in zip(after, current, strict=True)]
                y[t, d] = torch.where(alive, current[0], 0.0)
            for kept, state in zip(last, current, strict=True):
                kept.append(state)
        ends = [torch.stack(kept) for kept in last]
        if self.layout:
            return y.permute(2, 0, 1, 3), [e.transpose(0, 1) for e in ends]
        return y, ends

    def biases(self, b: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
        if b is None:
            b = like.new_zeros(self.directions, 2 * self.gates * self.hidden)
        one, other = b.chunk(2, -1)
        return one, other


def _outputs(node: Node, values: Sequence[Any]) -> Any:
    kept = tuple(v if node.wants(k) else None for k, v in enumerate(values))[: len(node.outputs)]
    return kept[0] if len(kept) == 1 else kept


@_wide_kernel("RNN", 7, 14, 22)
def _rnn(node: Node) -> Function:
    shared = _Recurrent(node, ["tanh"], 1)

    def rnn(x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None) -> Any:
        wb, rb = shared.biases(b, x)

        def turn(d: int, now: Tensor, states: list[Tensor]) -> list[Tensor]:
            (f,) = shared.functions[d]
            return [f(shared.clipped(now @ w[d].T + states[0] @ r[d].T + wb[d] + rb[d]))]

        y, ends = shared.run(x, lengths, [h], turn)
        return _outputs(node, (y, *ends))

    return rnn


@_wide_kernel("GRU", 7, 14, 22)
def _gru(node: Node) -> Function:
    shared = _Recurrent(node, ["sigmoid", "tanh"], 3)
    after_product = node.attribute("linear_before_reset", 0)

    def gru(x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None) -> Any:
        wb, rb = shared.biases(b, x)

        def turn(d: int, now: Tensor, states: list[Tensor]) -> list[Tensor]:
            f, g = shared.functions[d]
            before = states[0]
            of_x = (now @ w[d].T + wb[d]).chunk(3, -1)
            weights, added = r[d].chunk(3, 0), rb[d].chunk(3, -1)
            z, reset = (
                f(shared.clipped(of_x[k] + before @ weights[k].T + added[k])) for k in (0, 1)
            )
            if after_product:
                inner = reset * (before @ weights[2].T + added[2])
            else:
                inner = (reset * before) @ weights[2].T + added[2]
            new = g(shared.clipped(of_x[2] + inner))
            return [(1 - z) * new + z * before]

        y, ends = shared.run(x, lengths, [h], turn)
        return _outputs(node, (y, *ends))

    return gru


@_wide_kernel("LSTM", 7, 14, 22)
def _lstm(node: Node) -> Function:
    shared = _Recurrent(node, ["sigmoid", "tanh", "tanh"], 4)
    coupled = node.attribute("input_forget", 0)

    def lstm(
        x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None, c: Any = None,
        peep: Any = None,
    ) -> Any:  # fmt: skip
        wb, rb = shared.biases(b, x)
        if peep is None:
            peep = x.new_zeros(shared.directions, 3 * shared.hidden)

        def turn(d: int, now: Tensor, states: list[Tensor]) -> list[Tensor]:
            f, g, last = shared.functions[d]
            before, cell = states
            i, o, forget, new = (
                now @ w[d].T + before @ r[d].T + wb[d] + rb[d]
            ).chunk(4, -1)  # fmt: skip
            of_i, of_o, of_forget = peep[d].chunk(3, -1)
            i = f(shared.clipped(i + of_i * cell))
            forget = 1 - i if coupled else f(shared.clipped(forget + of_forget * cell))
            cell = forget * cell + i * g(shared.clipped(new))
            o = f(shared.clipped(o + of_o * cell))
            return [o * last(cell), cell]

        y, ends = shared.run(x, lengths, [h, c], turn)
        return _outputs(node, (y, *ends))

    return lstm
