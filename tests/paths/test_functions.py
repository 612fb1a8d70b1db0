"""Functions of torch beside eager: the samples that torch is tested with, and special values.

Whatever ``torch.compile(f, backend="roundoff")`` answers is eager's answer: NaN and infinities
where eager has them, its types and shapes, finite numbers within a few units. Or it is refused with
a typed error.
"""

from __future__ import annotations

import itertools
import math
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import roundoff.backend as rb
from roundoff.errors import RoundoffError

# torch's database of its functions needs a package of torch's developers, and locks switches.
stand_in = types.ModuleType("expecttest")
stand_in.__dict__["TestCase"] = unittest.TestCase
sys.modules.setdefault("expecttest", stand_in)
with mock.patch.object(torch.backends, "disable_global_flags"):
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo, OpInfo, UnaryUfuncInfo

pytestmark = pytest.mark.usefixtures("fresh")
F = torch.nn.functional
INF, NAN = math.inf, math.nan
TYPES = (
    *(torch.float32, torch.bfloat16, torch.float64, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
OPS = {f"{op.name} {op.variant_test_name}".strip(): op for op in op_db}
#: What ONNX Runtime computes, and in the last line some that torch computes in between.
NAMES = (
    *("abs", "square", "exp", "log", "sqrt", "rsqrt", "reciprocal", "tanh", "erf", "floor"),
    *("sigmoid", "nn.functional.relu", "nn.functional.gelu", "nn.functional.silu", "add", "sub"),
    *("mul", "div no_rounding_mode", "pow", "maximum", "minimum", "gt", "eq", "isclose"),
    *("bitwise_and", "bitwise_not", "sum", "mean", "softmax", "log_softmax", "cumsum", "byte"),
    *("char", "bool", "float", "half", "long", "gather", "__getitem__", "masked_fill", "cat"),
    *("tril", "nn.functional.embedding", "nn.functional.cross_entropy", "addmm", "bmm", "einsum"),
    *("nn.functional.linear", "nn.functional.layer_norm", "nn.functional.rms_norm"),
    *("nn.functional.conv2d", "nn.functional.batch_norm"),
    "nn.functional.scaled_dot_product_attention",
    *("neg", "clamp", "nn.functional.softplus", "nn.functional.pad constant"),
    *("floor_divide", "where", "sort", "nn.functional.embedding_bag", "linalg.inv"),
    *("bitwise_or", "cos", "sin", "ge", "le", "lt", "ne", "expand", "repeat", "permute", "view"),
    *("split", "split_with_sizes", "squeeze", "unsqueeze", "full_like"),
)


def cases() -> Iterator[Any]:
    """Each function with one type, so that the types come in turn; slow, with more of them."""
    more = pytest.mark.slow(reason="the types that models have, of each function")
    for turn, name in enumerate(NAMES):
        types = [dtype for dtype in TYPES if OPS[name].supports_dtype(dtype, "cpu")]
        quick = types.pop(turn % len(types))
        yield pytest.param(name, quick)
        for dtype in torch.float32, torch.float16, torch.int64:
            if dtype in types:
                yield pytest.param(name, dtype, marks=more)


#: Whose errors are near in absolute terms: of what is made of 1 + x or exp(x) - 1.
ABSOLUTE = {"sigmoid", "nn.functional.gelu", "nn.functional.silu"}
#: Units in the last place that a finite result may differ by.
ULPS = 64


def by_element(op: OpInfo) -> bool:
    return isinstance(op, (UnaryUfuncInfo, BinaryUfuncInfo))


def specials(op: OpInfo, dtype: torch.dtype) -> list[float]:
    """The numbers of a type at which functions are known to go wrong."""
    if dtype == torch.bool:
        return [True, False]
    if not dtype.is_floating_point:
        kind = torch.iinfo(dtype)
        return [0, 1, 2, 7, 31, kind.max, kind.min, kind.min + 1]
    if not by_element(op):  # a sum of the largest numbers has no order-free result
        return [NAN, 0.0, -0.0, 1.0, INF, 2.5, -INF]
    limits = torch.finfo(dtype)
    found = [0.0, limits.smallest_normal, limits.eps, 1e-3, 0.5, 1.0, 2.5, 20.5, 89.5]
    found += [limits.max / 2, limits.max, INF]
    return [NAN, *found, *(-x for x in found)]


def spoiled(op: OpInfo, x: torch.Tensor, turn: int) -> torch.Tensor:
    """A copy with special values at every second place, beginning with that of a number."""
    values = torch.tensor(specials(op, x.dtype), dtype=x.dtype).roll(turn)
    y = x.detach().clone(memory_format=torch.contiguous_format)
    places = y.view(-1)[::2]
    places.copy_(values.repeat(math.ceil(len(places) / len(values)))[: len(places)])
    return y


def near(got: torch.Tensor, expected: torch.Tensor, floor: float) -> None:
    """Hold a result to eager's: some units in the last place, or in that of a larger *floor*."""
    unit = 0.0
    if expected.is_floating_point() or expected.is_complex():
        kind = torch.finfo(expected.dtype)
        unit, floor = ULPS * kind.eps, max(floor, kind.smallest_normal)
    torch.testing.assert_close(got, expected, rtol=unit, atol=unit * floor, equal_nan=True)


def beside_eager(
    run: Any, function: Any, inputs: list[torch.Tensor], floor: float | None = None
) -> None:
    """A compiled function beside eager; without a floor that is a result's largest number."""
    with torch.no_grad():
        expected = function(*(x.clone() for x in inputs))
        try:
            got = run(*(x.clone() for x in inputs))
        except RoundoffError:
            return  # refused
    for one, other in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        if not isinstance(other, torch.Tensor):
            assert one == other
            continue
        finite = other[other.isfinite()].double().abs()
        largest = finite.max().item() if len(finite) else 0.0
        near(one, other, largest if floor is None else floor)


def traced(op: Any, sample: Any) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """The call of a sample as a function of its tensors, and these: the rest is constant."""
    leaves, spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(*tensors: torch.Tensor) -> Any:
        values = list(leaves)
        for i, tensor in zip(places, tensors, strict=True):
            values[i] = tensor
        args, kwargs = tree_unflatten(values, spec)
        return op(*args, **kwargs)

    return call, [leaves[i] for i in places]


@pytest.mark.parametrize(("name", "dtype"), cases(), ids=str)
def test_a_function(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    for sample in itertools.islice(op.sample_inputs("cpu", dtype), 2):
        function, inputs = traced(op.op, sample)
        if name != "nn.functional.gelu":  # of an infinity eager's is NaN
            inputs = [
                spoiled(op, x, 3 * turn) if x.dtype == dtype else x for turn, x in enumerate(inputs)
            ]
        try:
            function(*inputs)
        except RuntimeError:  # torch itself refuses the special values
            continue
        torch.compiler.reset()
        run = torch.compile(function, backend=rb.onnx_custom_backend)
        floor = 1.0 if name in ABSOLUTE else 1e-30 if by_element(op) else None
        beside_eager(run, function, inputs, floor)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


#: Functions in which a size decides a number or an index, and their inputs from a size.
MOVING: dict[str, tuple[Callable[..., Any], Callable[[int], list[torch.Tensor]]]] = {
    "interpolate": (
        lambda x: F.interpolate(x, (5, 9), mode="bilinear"),
        lambda n: [drawn(2, 3, 7, n)],
    ),
    "index": (
        lambda x, i: (x[i], x[:, i], x[-1]),
        lambda n: [drawn(n, 5), torch.tensor([4, -1, -5])],
    ),
    "cross_entropy": (
        lambda x, y: (F.cross_entropy(x, y), F.cross_entropy(x, y, label_smoothing=0.1)),
        lambda n: [drawn(n, 5), torch.arange(n) % 5],
    ),
}


@pytest.mark.parametrize("name", MOVING)
def test_a_function_at_three_sizes(name: str) -> None:
    function, inputs = MOVING[name]
    run = torch.compile(function, backend=rb.onnx_custom_backend, dynamic=True)
    for size in (64, 5, 19):
        beside_eager(run, function, inputs(size))
