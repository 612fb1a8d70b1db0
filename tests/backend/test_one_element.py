"""Element by element beside eager: one element, none, many, and numbers, of each type.

A kernel may take another way for one element, and a compiler rounds a number before it is used.
Each operator that :mod:`roundoff.backend.operators.elementwise` writes is a node of a graph of its
own here: torch's tracing would take most of the time.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from through_backend import through
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from roundoff.backend.compiled import Compiled, CompileSettings
from roundoff.backend.operators import TABLE
from roundoff.fusion import OptimizationOptions

ATEN, INF, NAN = torch.ops.aten, math.inf, math.nan
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
WIDE = (*FLOATS, torch.int64, torch.int32)
# Of these ONNX Runtime lacks kernels, and each that it lacks is a conversion more.
NARROW = (torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32)
TYPES = (*WIDE, *NARROW, torch.uint64)
SHAPES = ((), (1,), (1, 1), (0,), (0, 3), (2,), (37,), (5, 7))
NUMBERS = (
    *(0, 1, 2, 3, 7, 12, -1, -2, 300, 2049, 2**31 - 1, 2**31, 2**53 + 1, True, False),
    *(0.1, 1 / 3, 0.7, 3.0, 2.0, 0.5, -0.5, 2.5, 0.08838834764, 1e-8, 1e-40, -0.0, NAN, INF, -INF),
    *(65504.0, 70000.1, 1e300),
)


@dataclasses.dataclass(frozen=True)
class In:
    """An input of the graph, by its place."""

    place: int


X, Y, MASK = In(0), In(1), In(2)
Case = tuple[Any, tuple[Any, ...], dict[str, Any]]

#: Functions that round in several steps, or by other polynomials than torch's.
NEAR = {
    *("exp", "log", "sqrt", "cos", "sin", "tanh", "erf", "sigmoid", "rsqrt", "silu", "gelu"),
    *("softplus", "pow"),
}
#: Of which ONNX leaves the sign of a zero open.
UNSIGNED = {"maximum", "minimum", "clamp", "gelu", "silu"}
UNARY = (
    *("neg", "abs", "exp", "log", "sqrt", "cos", "sin", "tanh", "relu", "erf", "floor"),
    *("reciprocal", "sigmoid", "rsqrt", "silu", "gelu", "softplus", "bitwise_not"),
    *("clone", "lift_fresh_copy"),
)
COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
BINARY = (
    *("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "pow.Tensor_Tensor"),
    *("bitwise_and.Tensor", "bitwise_or.Tensor", "maximum.default", "minimum.default"),
    *(f"{name}.Tensor" for name in COMPARED),
)


def operator(name: str) -> Any:
    name, _, which = name.partition(".")
    return getattr(getattr(ATEN, name), which or "default")


def of_one(types: Iterable[torch.dtype]) -> list[Case]:
    cases: list[Case] = [(operator(name), (X,), {}) for name in UNARY]
    cases.append((operator("gelu"), (X,), {"approximate": "tanh"}))
    for dtype in types:
        cases.append((operator("_to_copy"), (X,), {"dtype": dtype}))
        cases.append((torch.ops.prims.convert_element_type.default, (X, dtype), {}))
    return cases


def of_two() -> list[Case]:
    cases: list[Case] = []
    for name, (a, b) in itertools.product(BINARY, ((X, Y), (Y, X))):
        cases.append((operator(name), (a, b), {}))
    for name, alpha in itertools.product(("add", "sub"), (1, -1, 0, 2, 0.1)):
        cases.append((operator(f"{name}.Tensor"), (X, Y), {"alpha": alpha}))
    cases.append((operator("where.self"), (MASK, X, Y), {}))
    cases.append((operator("where.self"), (MASK, Y, X), {}))
    cases.append((operator("masked_fill.Tensor"), (X, MASK, Y), {}))
    return cases


def of_a_number(n: Any) -> list[Case]:
    """As torch's graphs have a number beside a tensor: ``add.Tensor`` takes one, too."""
    cases: list[Case] = []
    for name in ("add", "sub", "mul", "div"):
        cases.append((operator(f"{name}.Tensor"), (X, n), {}))
    for name in ("add", "sub", "mul", "bitwise_and", "bitwise_or", *COMPARED):
        cases.append((operator(f"{name}.Scalar"), (X, n), {}))
    cases.append((operator("pow.Tensor_Scalar"), (X, n), {}))
    cases.append((operator("pow.Scalar"), (n, X), {}))
    cases.append((operator("masked_fill.Scalar"), (X, MASK, n), {}))
    for bounds in ((n,), (None, n), (n, n)):
        cases.append((operator("clamp"), (X, *bounds), {}))
    cases.append((operator("add.Scalar"), (X, 2), {"alpha": n}))
    cases.append((operator("sub.Tensor"), (X, X), {"alpha": n}))
    return cases


def draw(dtype: torch.dtype, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Numbers of a type, its special ones among them; a single one is another for each seed."""
    n, generator = math.prod(shape), torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return (torch.rand(n, generator=generator) < 0.5).reshape(shape)
    if dtype.is_floating_point:
        special = [300.0, -0.0, 2.5, NAN, INF, -1.2345, 0.0, 46341.0, -88.0, 1e-40, 65504.0, -INF]
        sizes = torch.tensor([1.0, 3.0, 30.0, 0.01, 300.0, 1e-6]).double()[torch.arange(n) % 6]
        numbers = (torch.randn(n, generator=generator, dtype=torch.float64) * sizes).tolist()
    else:
        limits = torch.iinfo(dtype)
        special = [limits.max, limits.min, 3, 94906267, 46341, 200, 2**53 + 1, 7, 0, 1, 2049]
        special = [v for v in special if limits.min <= v <= limits.max]
        numbers = [special[i % len(special)] for i in range(n)]
    for i in range(n if n < 3 else min(n // 2, len(special))):
        numbers[i] = special[(i + seed) % len(special)]
    return torch.tensor(numbers, dtype=dtype).reshape(shape)


def graph(cases: Sequence[Case], inputs: Sequence[torch.Tensor], dynamic: bool) -> Compiled:
    """A graph of these operators, each of which is an output, compiled by the backend."""
    mode = FakeTensorMode(shape_env=ShapeEnv() if dynamic else None)
    nodes: list[torch.fx.Node] = []
    fx = torch.fx.Graph()
    for i, tensor in enumerate(inputs):
        nodes.append(fx.placeholder(f"x{i}"))
        free = [DimDynamic.DUCK if n > 1 else DimDynamic.STATIC for n in tensor.shape]
        sizes = StatelessSymbolicContext(dynamic_sizes=free) if dynamic else None
        source = ConstantSource(f"x{i}")
        nodes[i].meta["val"] = mode.from_tensor(tensor, source=source, symbolic_context=sizes)
    made = []
    for op, args, kwargs in cases:
        node = fx.call_function(op, filled(args, nodes), kwargs)
        with mode:
            node.meta["val"] = op(*filled(args, [n.meta["val"] for n in nodes]), **kwargs)
        made.append(node)
    fx.output(tuple(made))
    examples, names = [n.meta["val"] for n in nodes], [str(n.target) for n in nodes]
    settings = CompileSettings(OptimizationOptions(), None, False, False, True)
    return Compiled(torch.fx.GraphModule(torch.nn.Module(), fx), examples, names, (), settings)


def filled(args: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(inputs[a.place] if isinstance(a, In) else a for a in args)


def masked(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Inputs of a case, with a mask of the first one's shape, on the device."""
    x, y = inputs[0], inputs[-1]
    mask = (torch.arange(x.numel()) % 2 == 0).reshape(x.shape)
    return [t.to(DEVICE) for t in (x, y, mask)]


def check(cases: Sequence[Case], calls: Sequence[Sequence[torch.Tensor]], dynamic: bool) -> None:
    """What eager computes, the backend does; *calls* are inputs, of other sizes if *dynamic*."""
    calls = [masked(inputs) for inputs in calls]
    defined = []
    for op, args, kwargs in cases:
        try:
            op(*filled(args, calls[0]), **kwargs)
        except (RuntimeError, NotImplementedError):
            continue  # eager refuses these types, or this number
        defined.append((op, args, kwargs))
    if not defined:
        return
    run = graph(defined, calls[0], dynamic)
    for inputs in calls:
        for case, made in zip(defined, run(list(inputs)), strict=True):
            op, args, kwargs = case
            given = filled(args, inputs)
            wrong = difference(op, given, kwargs, made)
            shown = [a if not isinstance(a, torch.Tensor) else (a.dtype, a) for a in given]
            assert not wrong, f"{op}{shown}{kwargs}: {wrong}"


def difference(op: Any, args: Sequence[Any], kwargs: dict[str, Any], made: torch.Tensor) -> str:
    """In what *made* is not eager's result; empty if in nothing."""
    expected = op(*args, **kwargs)
    name = str(op).split(".")[1]
    if (made.dtype, made.shape) != (expected.dtype, expected.shape):
        return f"{made.dtype}{tuple(made.shape)}, not {expected.dtype}{tuple(expected.shape)}"
    if not made.dtype.is_floating_point:
        mine, theirs = made.flatten().tolist(), expected.flatten().tolist()
        return next((f"{m}, not {t}" for m, t in zip(mine, theirs, strict=True) if m != t), "")
    mine, theirs = made.double(), expected.double()
    equal = (mine == theirs) & ((mine.signbit() == theirs.signbit()) | (name in UNSIGNED))
    equal |= mine.isnan() & theirs.isnan()
    truth = theirs
    if name in NEAR:
        wide = [x.double() if isinstance(x, torch.Tensor) else x for x in args]
        truth = op(*wide, **kwargs)
        kind = torch.finfo(made.dtype)
        # ONNX Runtime's Tanh multiplies by 1/204 on its way, where subnormal numbers lose digits.
        size = truth.abs().clamp(min=kind.tiny * (64 if name == "tanh" else 1))
        if name in ("silu", "gelu"):  # 1 + x is among their steps: tails have the digits of that
            size = size.maximum(wide[0].abs())
        within = (mine - truth).abs() <= (theirs - truth).abs() + 4 * kind.eps * size
        equal |= within & (mine.signbit() == theirs.signbit())
        if DEVICE == "cuda":  # where ONNX Runtime's kernels make a subnormal result 0
            equal |= (mine == 0) & (truth.abs() < kind.tiny)
    wrong = (~equal).flatten().nonzero().flatten().tolist()
    shown = [tuple(x.flatten()[i].item() for x in (made, expected, truth)) for i in wrong[:3]]
    return f"made, eager, truth at {wrong[:3]}: {shown}" if wrong else ""


def test_each_operator_is_tried() -> None:
    written = {op for op, write in TABLE.items() if write.__module__.endswith(".elementwise")}
    tried = {case[0] for case in (*of_one(TYPES), *of_two(), *of_a_number(1))}
    # Two are views, which no graph returns: AOTAutograd makes them of its inputs.
    assert written - tried == {operator("alias"), operator("detach")}


def batches(dtype: torch.dtype, cases: Sequence[Case]) -> list[Sequence[Case]]:
    """Graphs of few operators for types of which most stay with torch: each is converted anew."""
    most = len(cases) if dtype in WIDE else 16
    return [cases[i : i + most] for i in range(0, len(cases), most)]


@torch.no_grad()
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_one_element_and_none(dtype: torch.dtype) -> None:
    """Drawn: each operator of one tensor, and some beside numbers, of one element and another."""
    pick = random.Random(str(dtype))
    numbers = [case for n in NUMBERS for case in of_a_number(n)]
    powers = [(operator("pow.Tensor_Scalar"), (X, n), {}) for n in (2, 3, 12)]
    cases = [*of_one(pick.sample(TYPES, 4)), *pick.sample(numbers, 60)]
    if dtype not in WIDE:
        cases = pick.sample(cases, 24)
    cases += powers
    single, other = pick.sample(SHAPES[:3], 1) + pick.sample(SHAPES[3:], 1)
    for shape in (single, other):
        for some in batches(dtype, cases):
            check(some, [[draw(dtype, shape, pick.randrange(99))]], False)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(12))
def test_two_tensors_of_any_types(seed: int) -> None:
    """Drawn: shapes that broadcast, one of them often of one element."""
    pick = random.Random(seed)
    types = [pick.choice(WIDE if i else TYPES) for i in (seed % 2, 1)]
    a, b = pick.choice(PAIRS)
    cases = of_two()
    if types[0] not in WIDE:
        cases = pick.sample(cases, 12)
    check(cases, [[draw(types[0], a, seed), draw(types[1], b, seed + 1)]], False)


PAIRS = (
    *(((), ()), ((37,), ()), ((), (1,)), ((1,), (37,)), ((37,), (37,)), ((0, 3), (3,))),
    *(((0,), ()), ((5, 1), (1, 7)), ((2,), (1,)), ((1, 1), ())),
)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
def test_one_graph_for_all_sizes(dtype: torch.dtype) -> None:
    pick = random.Random(1)
    numbers = [case for n in NUMBERS for case in of_a_number(n)]
    cases = [*of_one(TYPES[:5]), *pick.sample(numbers, 50), *pick.sample(of_two(), 20)]
    # torch takes the sizes for fixed where one of these makes a float of an integer.
    cases = [case for case in cases if case[0]._overloadname != "Scalar" or dtype.is_floating_point]
    calls = [[draw(dtype, (n, 3), n), draw(dtype, (n, 3), n + 1)] for n in (2, 5, 1, 0, 13)]
    check(cases, calls, True)


@pytest.mark.slow(reason="all operators, numbers, types and shapes")
@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_number_beside_every_type(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    cases = of_one(TYPES) + [case for n in NUMBERS for case in of_a_number(n)]
    for seed in range(3 if math.prod(shape) == 1 else 1):
        for some in batches(dtype, cases):
            check(some, [[draw(dtype, shape, seed)]], False)


@pytest.mark.slow(reason="all operators, pairs of types and of shapes")
@torch.no_grad()
@pytest.mark.parametrize("second", TYPES, ids=str)
@pytest.mark.parametrize("first", TYPES, ids=str)
def test_every_pair_of_types(first: torch.dtype, second: torch.dtype) -> None:
    for seed, (a, b) in enumerate(PAIRS):
        for some in batches(first if second in WIDE else second, of_two()):
            check(some, [[draw(first, a, seed), draw(second, b, seed + 1)]], False)


# As a program is compiled


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16, torch.uint8], ids=str)
def test_powers_of_integers_wrap_around(dtype: torch.dtype, dynamic: bool | None) -> None:
    """ONNX Runtime's Pow of one element saturated, and was off beyond 2**53."""

    def f(x: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
        return x**2, x**3, x.square(), x**9, x**n, x.pow(x.clamp(0, 3)), 3 ** x.clamp(0, 9), x**0

    run = through(f, dynamic=dynamic)
    limits = torch.iinfo(dtype)
    values = [v for v in (limits.max, 94906267, 46341, 181, limits.min, 11) if v <= limits.max]
    for n, exponent in ((1, 2), (len(values), 5), (2, 2), (0, 3)):
        x = torch.tensor(values[:n], dtype=dtype)
        for made, expected in zip(run(x, exponent), f(x, exponent), strict=True):
            assert torch.equal(made, expected)
    single = torch.tensor(values[0], dtype=dtype)
    for made, expected in zip(run(single, 2), f(single, 2), strict=True):
        assert torch.equal(made, expected)


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_number_beside_16_bits_is_a_float32(dtype: torch.dtype, dynamic: bool | None) -> None:
    """Rounded to the type first, it made every product up to 0.03 % too small."""

    def f(x: torch.Tensor, s: float, single: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = (x * s, x / s, x + s, x - s, s - x, s / x, x * single, x + single, x / single)
        return (*made, x * x.shape[0], x + x.shape[0], x / x.shape[0], x * s * 0.7, x == s)

    run = through(f, dynamic=dynamic)
    for n, s in enumerate((0.1, 0.7, 0.08838834764, 3, 0.1, 70000.1, -0.0)):
        x = draw(dtype, (2049 + n,), n).to(DEVICE)
        single = torch.tensor(1 / 3 + n)
        for made, expected in zip(run(x, s, single), f(x, s, single), strict=True):
            torch.testing.assert_close(made, expected, rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
def test_float16_overflows_where_eager_does() -> None:
    """ONNX Runtime computes it in float32 on a processor: (300 * 300) / 300 was 300."""
    x = torch.tensor([300.0, 2.0, 1e-4, 2049.0]).half().to(DEVICE)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            (x * x) / x,
            (x * x).sqrt(),
            (x + x) - x,
            (x * x).int(),
            x.float() * x,
            (x * 3).long(),
        )

    for made, expected in zip(through(f)(x), f(x), strict=True):
        torch.testing.assert_close(made, expected, rtol=0, atol=0)
