"""The table that ``test_functions.py`` runs: small functions beside eager, with special values.

A row is a name, a function, and what makes its inputs from a size. A function gives one tensor or
a tuple of them, and may take inputs of several types: each is a result of its own then.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

F = torch.nn.functional
INF, NAN = math.inf, math.nan

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SIGNED = INTS[:4]
BOOL = (torch.bool,)


@dataclasses.dataclass(frozen=True)
class Case:
    """A function, its inputs, and how near to eager's its results have to be.

    Attributes
    ----------
    name : str
    function : callable
        Takes the tensors that *inputs* makes.
    inputs : callable
        A size, 5, 19 or 64, to the inputs.
    ulps : float
        Units in the last place of eager's type that a finite result may differ by: two correct
        programs round exp, tanh and the like differently, by one or two each.
    scale : bool
        Whether these units are those of the largest result of a tensor: where terms cancel
        (sums, products of matrices), an element's own unit says nothing.
    floor : float
        Units are at least those of this number: ONNX Runtime's sigmoid, erf and exp(x) - 1 are
        near in absolute terms, and so are all functions that are made of them.
    zeros : bool
        Whether the sign of a zero is kept: ONNX leaves it open for Max and Min, and for sums.
    wrong : str
        Why the results differ, where they are known to.
    """

    name: str
    function: Callable[..., Any]
    inputs: Callable[[int], Sequence[torch.Tensor]]
    ulps: float = 4
    scale: bool = False
    floor: float = 0.0
    zeros: bool = True
    wrong: str = ""


# Inputs


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def specials(dtype: torch.dtype) -> list[float]:
    """The numbers of a type at which functions are known to go wrong."""
    if dtype == torch.bool:
        return [True, False]
    if not dtype.is_floating_point:
        kind = torch.iinfo(dtype)
        numbers = [0, 1, 2, 3, 5, 7, 8, 31, kind.max, kind.max - 1, kind.min, kind.min + 1]
        return numbers + ([-1, -2, -3, -7, -8, -31] if kind.min else [100, 200])
    kind = torch.finfo(dtype)
    positive = [
        0.0,
        kind.smallest_normal / 4,
        kind.smallest_normal,
        kind.eps,
        1e-3,
        0.25,
        0.5,
        1.0,
        1.5,
        2.0,
        2.5,
        3.0,
        3.5,
        7.0,
        11.0,
        20.0,
        20.5,
        88.0,
        89.5,
        105.0,
        3e4,
        kind.max / 2,
        kind.max,
        INF,
    ]
    return [NAN, *positive, *(-p for p in positive)]


def special(dtype: torch.dtype, n: int) -> torch.Tensor:
    """*n* numbers: special ones in an order of their own, then normal ones."""
    known = torch.tensor(specials(dtype), dtype=dtype)
    known = known[torch.randperm(len(known), generator=generator(1))]
    if dtype == torch.bool or not dtype.is_floating_point:
        return known.repeat(math.ceil(n / len(known)))[:n].clone()
    return torch.cat([known, normal(64, dtype=dtype) * 3])[:n].clone()


def tame(dtype: torch.dtype, n: int) -> torch.Tensor:
    """Special numbers without those whose multiples overflow: eager's vectors fuse or reorder."""
    x = special(dtype, n)
    return torch.where(x.abs() > torch.finfo(dtype).max ** 0.5, torch.full_like(x, 3.0), x)


def moderate(dtype: torch.dtype, n: int) -> torch.Tensor:
    """*n* numbers, none of which is special."""
    if dtype == torch.bool:
        return torch.rand(n, generator=generator(2)) > 0.5
    if not dtype.is_floating_point:
        low = -9 if dtype.is_signed else 0
        return torch.randint(low, 10, (n,), generator=generator(2), dtype=dtype)
    return normal(n, dtype=dtype) * 3


def rows(dtype: torch.dtype, n: int) -> torch.Tensor:
    """Rows of *n* numbers each: normal, ties, constants, one of each special value, zeros."""
    if not dtype.is_floating_point:
        return torch.stack([moderate(dtype, n), special(dtype, n), special(dtype, n).flip(0)])
    x = normal(10, n, dtype=dtype)
    x[1] = x[1].round()
    x[2] = 3.0
    x[3, n // 2] = NAN
    x[4, 1], x[4, n // 2] = INF, INF
    x[5, 0], x[5, n - 2] = -INF, INF
    x[6] = -INF
    x[7] = 0.0
    x[7, ::2] = -0.0
    x[8] *= torch.finfo(dtype).max / 64
    x[9, 0], x[9, n - 1] = NAN, NAN
    return x


def _with_nan(dtype: torch.dtype, n: int) -> torch.Tensor:
    """Two axes with one NaN, behind an infinity of either sign."""
    x = normal(4, n, dtype=dtype)
    x[1, 0], x[1, 1], x[2, n - 1] = INF, -INF, NAN
    return x


def pairs(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every number of one beside every number of the other."""
    return x[:, None].contiguous(), y[None].contiguous()


# Rows of the table


def each(
    function: Callable[..., Any],
    types: Sequence[torch.dtype] = FLOATS,
    make: Any = special,
    name: str = "",
    **more: Any,
) -> list[Case]:
    """A function of one tensor."""
    name = name or function.__name__
    return [
        Case(f"{name} {str(t)[6:]}", function, functools.partial(_one, make, t), **more)
        for t in types
    ]


def _one(make: Any, dtype: torch.dtype, n: int) -> tuple[torch.Tensor, ...]:
    return (make(dtype, n),)


def both(
    function: Callable[..., Any],
    types: Sequence[torch.dtype] = FLOATS,
    make: Any = special,
    second: Any = None,
    name: str = "",
    **more: Any,
) -> list[Case]:
    """A function of two tensors: every number of the first beside every one of the second."""
    name = name or function.__name__
    return [
        Case(
            f"{name} {str(t)[6:]}",
            function,
            functools.partial(_two, make, second or make, t),
            **more,
        )
        for t in types
    ]


def _two(make: Any, second: Any, dtype: torch.dtype, n: int) -> tuple[torch.Tensor, ...]:
    return pairs(make(dtype, n), second(dtype, n).flip(0))


def nonzero(dtype: torch.dtype, n: int) -> torch.Tensor:
    """Integers without a zero, which torch refuses to divide by, and without -1."""
    x = special(dtype, n)
    return torch.where((x == 0) | (x == -1), torch.full_like(x, 3), x)


def positive(dtype: torch.dtype, n: int) -> torch.Tensor:
    return special(dtype, n).abs()


def shifts(dtype: torch.dtype, n: int) -> torch.Tensor:
    """Shifts from zero to the width of the type, less one."""
    return (torch.arange(n) % torch.iinfo(dtype).bits).to(dtype)


def module(
    make: Callable[[], torch.nn.Module],
    *shape: Any,
    types: Sequence[torch.dtype] = FLOATS[:1],
    name: str = "",
    **more: Any,
) -> list[Case]:
    """A module in eval(), on normal numbers; ``n`` in its shape is the size.

    A sum that underflows to zero has the sign that its order gives it.
    """
    torch.manual_seed(0)
    made = make().eval()
    name = name or type(made).__name__

    def inputs(dtype: torch.dtype, n: int) -> tuple[torch.Tensor, ...]:
        return (normal(*[n if s == "n" else s for s in shape], dtype=dtype),)

    cases = []
    for t in types:
        typed = made if t == torch.float32 else _to(make, t)
        more_of = {"ulps": 64, "scale": True, "zeros": False, **more}
        cases.append(Case(f"{name} {str(t)[6:]}", typed, functools.partial(inputs, t), **more_of))
    return cases


def _to(make: Callable[[], torch.nn.Module], dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return make().eval().to(dtype)


def call(
    name: str, function: Callable[..., Any], inputs: Callable[[int], Any], **more: Any
) -> list[Case]:
    """A function of inputs of its own."""
    return [Case(name, function, inputs, **more)]


# The table: element by element

ELEMENTWISE = [
    *each(torch.abs, FLOATS + INTS),
    *each(torch.neg, FLOATS + INTS),
    *each(torch.sign, FLOATS + INTS),
    *each(torch.sgn),
    *each(torch.square, FLOATS + INTS),
    *each(torch.exp, FLOATS + INTS[:1]),
    *each(torch.exp2),
    *each(torch.expm1),
    *each(torch.log, FLOATS + INTS[:1]),
    *each(torch.log2),
    *each(torch.log10),
    *each(torch.log1p),
    *each(torch.sqrt),
    *each(torch.rsqrt),
    *each(torch.reciprocal),
    *each(torch.sin, make=moderate, floor=1, ulps=8),
    *each(torch.cos, make=moderate, floor=1, ulps=8),
    *each(torch.tan, make=moderate),
    *each(torch.asin),
    *each(torch.acos),
    *each(torch.atan),
    *each(torch.sinh),
    *each(torch.cosh),
    *each(torch.tanh, floor=1e-30),
    *each(torch.asinh),
    *each(torch.acosh),
    *each(torch.atanh),
    *each(torch.erf, floor=1e-30),
    *each(torch.erfc),
    *each(torch.erfinv),
    *each(torch.lgamma, ulps=8),
    *each(torch.digamma, ulps=8),
    *each(torch.i0),
    *each(torch.sinc, make=moderate),
    *each(torch.floor, FLOATS + INTS),
    *each(torch.ceil),
    *each(torch.round, FLOATS + INTS),
    *each(torch.trunc),
    *each(torch.frac),
    *each(lambda x: torch.round(x, decimals=2), FLOATS[:2], name="round to 2"),
    *each(torch.isnan, FLOATS + INTS[:1]),
    *each(torch.isinf, FLOATS + INTS[:1]),
    *each(torch.isfinite, FLOATS + INTS[:1]),
    *each(torch.signbit, FLOATS + INTS[:1]),
    *each(torch.isposinf),
    *each(torch.isneginf),
    *each(torch.nan_to_num),
    *each(lambda x: torch.nan_to_num(x, 1.0, 2.0, -3.0), name="nan_to_num of three"),
    *each(torch.logical_not, FLOATS + INTS + BOOL),
    *each(torch.bitwise_not, INTS + BOOL),
    *each(torch.deg2rad),
    *each(lambda x: x * 2 + 1, FLOATS + INTS, name="x * 2 + 1"),
    *each(lambda x: x - 3, FLOATS + INTS, name="x - 3"),
    *each(lambda x: 3 - x, FLOATS + INTS, name="3 - x"),
    *each(lambda x: x / 3, FLOATS + INTS + BOOL, name="x / 3"),
    *each(lambda x: 3 / x, FLOATS + INTS, name="3 / x"),
    *each(lambda x: x // 3, FLOATS + INTS, name="x // 3"),
    *each(lambda x: x // -3, FLOATS + SIGNED, name="x // -3"),
    *each(lambda x: x % 3, FLOATS + INTS, name="x % 3"),
    *each(lambda x: x % -3, FLOATS + SIGNED, name="x % -3"),
    *each(lambda x: torch.fmod(x, 3), FLOATS + INTS, name="fmod 3"),
    *each(lambda x: torch.fmod(x, 2.5), name="fmod 2.5"),
    *each(lambda x: torch.div(x, 2, rounding_mode="trunc"), FLOATS + INTS, name="div trunc 2"),
    *[
        c
        for p in (2, 3, 0, 1, -1, -2)
        for c in each(functools.partial(lambda x, p: x**p, p=p), FLOATS, name=f"x**{p}")
    ],
    *[
        c
        for p in (2, 3, 0)
        for c in each(functools.partial(lambda x, p: x**p, p=p), INTS, name=f"x**{p}")
    ],
    *[
        c
        for p in (0.5, -0.5, 1.5, 1 / 3)
        for c in each(
            functools.partial(lambda x, p: x**p, p=p),
            FLOATS + INTS[:1],
            name=f"x**{p:.2f}",
            ulps=16,
        )
    ],
    *[
        c
        for b in (2, 0.5, -2.0, 0)
        for c in each(functools.partial(lambda x, b: b**x, b=b), name=f"{b}**x")
    ],
    *each(lambda x: x << 2, INTS, name="x << 2"),
    *each(lambda x: x >> 2, INTS, name="x >> 2"),
    *each(lambda x: x & 6, INTS, name="x & 6"),
    *each(lambda x: x | 6, INTS, name="x | 6"),
    *each(lambda x: x ^ 6, INTS, name="x ^ 6"),
    *each(lambda x: ~x & (x ^ True) | False, BOOL, name="bool & | ^ ~"),
    *each(lambda x: x > 0, FLOATS + INTS, name="x > 0"),
    *each(lambda x: x == 2.5, FLOATS + INTS, name="x == 2.5"),
    *each(lambda x: x <= 2.5, FLOATS + INTS, name="x <= 2.5"),
    *each(lambda x: x != x, FLOATS, name="x != x"),
    *each(lambda x: x >= 2**62 + 1, INTS[:1], name="x >= 2**62 + 1"),
    *each(lambda x: x > 1e10, INTS, name="x > 1e10"),
    *each(lambda x: x > 300, INTS, name="x > 300"),
    *each(lambda x: x == -1, INTS, name="x == -1"),
]

BINARY = [
    *both(torch.add, FLOATS + INTS + BOOL),
    *both(torch.sub, FLOATS + INTS),
    *both(torch.mul, FLOATS + INTS + BOOL),
    *both(torch.div),
    *both(torch.div, INTS, second=nonzero, name="div int"),
    *both(torch.floor_divide),
    *both(torch.floor_divide, INTS, second=nonzero, name="floor_divide int"),
    *both(torch.remainder),
    *both(torch.remainder, INTS, second=nonzero, name="remainder int"),
    *both(torch.fmod),
    *both(torch.fmod, INTS, second=nonzero, name="fmod int"),
    *both(lambda x, y: torch.div(x, y, rounding_mode="trunc"), name="div trunc"),
    *both(
        lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        INTS,
        second=nonzero,
        name="div trunc int",
    ),
    *both(torch.pow),
    *both(torch.pow, INTS, second=lambda t, n: special(t, n).clamp(0, 5), name="pow int"),
    *both(torch.atan2),
    *both(torch.hypot),
    *both(torch.copysign),
    *both(torch.nextafter, FLOATS[:2]),
    *both(torch.maximum, FLOATS + INTS + BOOL, zeros=False),
    *both(torch.minimum, FLOATS + INTS + BOOL, zeros=False),
    *both(torch.fmax, FLOATS + INTS[:1]),
    *both(torch.fmin, FLOATS + INTS[:1]),
    *both(torch.logaddexp),
    *both(torch.logaddexp2),
    *both(torch.xlogy, FLOATS + INTS[:1]),
    *both(torch.special.xlog1py, FLOATS[:2]),
    *both(torch.heaviside),
    *both(torch.ldexp, FLOATS[:1], second=lambda t, n: torch.arange(n) - 9),
    *both(torch.eq, FLOATS + INTS + BOOL),
    *both(torch.ne, FLOATS + INTS),
    *both(torch.lt, FLOATS + INTS + BOOL),
    *both(torch.le, FLOATS + INTS),
    *both(torch.gt, FLOATS + INTS),
    *both(torch.ge, FLOATS + INTS + BOOL),
    *both(torch.isclose, FLOATS + INTS[:1]),
    *both(torch.logical_and, FLOATS + INTS + BOOL),
    *both(torch.logical_or, FLOATS + INTS + BOOL),
    *both(torch.logical_xor, FLOATS + INTS + BOOL),
    *both(torch.bitwise_and, INTS + BOOL),
    *both(torch.bitwise_or, INTS + BOOL),
    *both(torch.bitwise_xor, INTS + BOOL),
    *both(torch.bitwise_left_shift, INTS, second=shifts),
    *both(torch.bitwise_right_shift, INTS, second=shifts),
    *both(torch.gcd, INTS[:2], make=moderate),
    *both(torch.lcm, INTS[:2], make=moderate),
    *both(torch.add, FLOATS, second=lambda t, n: moderate(torch.int64, n), name="add of int64"),
    *both(torch.mul, FLOATS, second=lambda t, n: special(torch.bool, n), name="mul of bool"),
    *both(torch.lt, FLOATS, second=lambda t, n: moderate(torch.int64, n), name="lt of int64"),
    *both(torch.eq, FLOATS, second=lambda t, n: moderate(torch.int64, n), name="eq of int64"),
    *both(
        torch.lt,
        FLOATS,
        second=lambda t, n: special(torch.int64, n),
        name="lt of large int64",
    ),
    *both(torch.add, INTS, second=lambda t, n: special(torch.int8, n), name="add of int8"),
    *both(
        torch.maximum,
        FLOATS[2:],
        second=lambda t, n: special(torch.float32, n),
        name="maximum of float32",
        zeros=False,
    ),
    *both(lambda x, y: torch.add(x, y, alpha=2), FLOATS, tame, name="add alpha"),
    *both(lambda x, y: torch.add(x, y, alpha=2), INTS, name="add alpha int"),
    *both(lambda x, y: torch.sub(x, y, alpha=0.5), FLOATS, name="sub alpha"),
    *both(lambda x, y: torch.rsub(x, y, alpha=2), FLOATS + INTS, name="rsub alpha"),
    *both(lambda x, y: torch.where(x > 0, x, y), FLOATS + INTS, name="where"),
    *both(lambda x, y: torch.where(x > 0, x, 0.0), FLOATS, name="where scalar"),
    *both(lambda x, y: torch.where(x < 1, x, y), FLOATS, name="where below"),
    *both(lambda x, y: torch.where(x < 1, x, 1.0), FLOATS, name="where below scalar"),
    *both(lambda x, y: torch.lerp(x, y, 0.3), FLOATS, make=moderate, name="lerp"),
    *both(lambda x, y: torch.lerp(x, y, 0.3), FLOATS, name="lerp special"),
    *both(lambda x, y: torch.addcmul(x, x, y, value=2), FLOATS, name="addcmul"),
    *both(
        lambda x, y: torch.addcdiv(x, x, y, value=2), FLOATS[:3], tame, scale=True, name="addcdiv"
    ),
    *both(torch.dist, FLOATS[:1], make=moderate, scale=True),
]

BOUNDS = [
    *each(lambda x: x.clamp(-1, 2), FLOATS + SIGNED, name="clamp"),
    *each(lambda x: x.clamp(1, 2), INTS, name="clamp of unsigned"),
    *each(lambda x: x.clamp(2, -1), FLOATS + SIGNED, name="clamp crossed"),
    *each(lambda x: x.clamp(min=NAN), FLOATS, name="clamp NaN"),
    *each(lambda x: x.clamp(min=0), FLOATS + INTS, name="clamp_min", zeros=False),
    *each(lambda x: x.clamp(max=0.5), FLOATS + INTS[:1], name="clamp_max"),
    *both(
        lambda x, y: torch.clamp(x, y, y + 1), FLOATS + INTS, make=moderate, name="clamp tensors"
    ),
    *both(lambda x, y: torch.clamp(x, min=y), FLOATS + INTS, name="clamp_min tensor", zeros=False),
    *both(lambda x, y: torch.clamp(x, max=y), FLOATS + INTS, name="clamp_max tensor", zeros=False),
]

_A = (
    F.relu,
    F.hardtanh,
    F.leaky_relu,
    F.celu,
    F.softplus,
    F.hardswish,
    F.hardsigmoid,
    F.logsigmoid,
    F.softsign,
    F.hardshrink,
    torch.logit,
)
ACTIVATIONS = [
    *[c for f in _A for c in each(f, name=f.__name__)],
    *[c for f in (F.elu, F.selu, F.mish, torch.sigmoid) for c in each(f, name=f.__name__, floor=1)],
    *each(F.silu, ulps=16, floor=1),
    *each(F.tanhshrink, floor=1, zeros=False),
    *each(F.relu6, zeros=False),
    *each(F.softshrink, zeros=False),
    # torch underflows to −0 with AVX-512, to 0 with AVX2.
    *each(F.gelu, make=tame, name="gelu", ulps=16, floor=1, zeros=False),
    *each(F.relu, INTS, name="relu int"),
    *each(torch.relu, INTS[:1], name="torch.relu int"),
    *each(lambda x: F.gelu(x, approximate="tanh"), make=tame, name="gelu tanh", ulps=16, floor=1),
    *each(lambda x: F.threshold(x, 0.5, -2.0), name="threshold"),
    *each(lambda x: F.elu(x, 0.5), name="elu 0.5", floor=1),
    *each(lambda x: F.celu(x, 0.5), name="celu 0.5"),
    *each(lambda x: F.softplus(x, 2, 10), name="softplus of two"),
    *each(lambda x: F.softplus(x, 1, 30), name="softplus 30"),
    *each(lambda x: F.leaky_relu(x, -0.5), name="leaky_relu -0.5"),
    *each(lambda x: F.prelu(x, torch.full((1,), -0.25, dtype=x.dtype)), name="prelu -0.25"),
    *each(lambda x: F.softshrink(x, 0.0), name="softshrink 0", zeros=False),
    *each(lambda x: torch.logit(x, 1e-6), name="logit eps"),
    *each(lambda x: F.prelu(x, torch.full((1,), 0.25, dtype=x.dtype)), name="prelu"),
    *each(lambda x: F.rrelu(x), name="rrelu"),
    *each(lambda x: F.glu(torch.stack([x, x.flip(0)])[:, None], 0), name="glu"),
    *each(lambda x: torch.special.expit(x), name="expit", floor=1),
    *each(torch.special.entr),
    *each(torch.special.ndtr, floor=1),
    *each(torch.special.ndtri, FLOATS[:2]),
    *each(torch.special.erfcx, FLOATS[:2]),
    *each(torch.special.log_ndtr, FLOATS[:2]),
    *each(torch.special.i1, FLOATS[:2]),
]


def reduced(
    function: Callable[..., Any], types: Sequence[torch.dtype] = FLOATS, name: str = "", **more: Any
) -> list[Case]:
    """Along the last axis of rows with special values, the first axis, and both."""
    name = name or function.__name__

    def f(x: torch.Tensor) -> Any:
        return function(x, dim=-1), function(x, dim=0, keepdim=True)

    more_of = {"ulps": 16, "scale": False, **more}
    return each(f, types, rows, name=f"{name} of axes", **more_of)


def whole(
    function: Callable[..., Any], types: Sequence[torch.dtype] = FLOATS, name: str = "", **more: Any
) -> list[Case]:
    """Of all of a tensor: normal numbers, and each row of special ones alone."""
    name = name or function.__name__

    def f(x: torch.Tensor) -> Any:
        return tuple(function(row) for row in x.unbind(0))

    return each(f, types, rows, name=f"{name} of all", **{"ulps": 16, **more})


def empty(
    function: Callable[..., Any],
    types: Sequence[torch.dtype] = FLOATS[:1],
    name: str = "",
    **more: Any,
) -> list[Case]:
    """Of a tensor with an axis of nothing."""
    name = name or function.__name__
    return [
        Case(
            f"{name} of nothing {str(t)[6:]}",
            function,
            functools.partial(lambda t, n: (torch.zeros(n, 0, dtype=t),), t),
            **more,
        )
        for t in types
    ]


REDUCTIONS = [
    *reduced(torch.sum, FLOATS + INTS + BOOL, scale=True),
    *reduced(torch.mean, scale=True),
    *reduced(torch.prod, FLOATS + INTS + BOOL),
    *reduced(torch.amax, FLOATS + INTS + BOOL, zeros=False),
    *reduced(torch.amin, FLOATS + INTS + BOOL, zeros=False),
    *reduced(torch.max, FLOATS + INTS + BOOL, zeros=False),
    *reduced(torch.min, FLOATS + INTS + BOOL, zeros=False),
    *reduced(torch.argmax, FLOATS + INTS),
    *reduced(torch.argmin, FLOATS + INTS),
    *reduced(torch.any, FLOATS + INTS + BOOL),
    *reduced(torch.all, FLOATS + INTS + BOOL),
    *reduced(torch.logsumexp),
    *reduced(torch.var, scale=True),
    *reduced(torch.std, scale=True),
    *reduced(
        lambda x, dim, keepdim=False: torch.var(x, dim, correction=0, keepdim=keepdim),
        name="var correction 0",
        scale=True,
    ),
    *reduced(
        lambda x, dim, keepdim=False: torch.var_mean(x, dim, keepdim=keepdim),
        name="var_mean",
        scale=True,
    ),
    *reduced(
        lambda x, dim, keepdim=False: torch.std_mean(x, dim, correction=2, keepdim=keepdim),
        name="std_mean",
        scale=True,
    ),
    *reduced(torch.nansum, scale=True),
    *reduced(torch.nanmean, scale=True),
    *reduced(torch.median, FLOATS + INTS),
    *reduced(torch.nanmedian),
    *reduced(torch.mode, FLOATS[:1] + INTS[:1]),
    *reduced(
        lambda x, dim, keepdim=False: torch.count_nonzero(x, dim),
        FLOATS + INTS + BOOL,
        name="count_nonzero",
    ),
    *reduced(
        lambda x, dim, keepdim=False: (x.sort(dim).values, x.sort(dim, True).values),
        FLOATS + INTS,
        name="sort values",
        zeros=False,
    ),
    *reduced(torch.aminmax, zeros=False),
    *reduced(
        lambda x, dim, keepdim=False: torch.quantile(x, 0.3, dim, keepdim),
        FLOATS[:2],
        name="quantile",
    ),
    *reduced(
        lambda x, dim, keepdim=False: torch.kthvalue(x, 2, dim, keepdim),
        FLOATS[:1],
        name="kthvalue",
    ),
    *[
        c
        for p in (2, 1, 0, INF, -INF, 3, 0.5)
        for c in reduced(
            functools.partial(
                lambda x, dim, keepdim=False, p=2: torch.linalg.vector_norm(x, p, dim, keepdim), p=p
            ),
            name=f"norm {p}",
        )
    ],
    *reduced(lambda x, dim, keepdim=False: F.normalize(x, dim=dim), name="normalize"),
    *reduced(lambda x, dim, keepdim=False: F.softmax(x, dim), name="softmax"),
    *reduced(lambda x, dim, keepdim=False: F.log_softmax(x, dim), name="log_softmax"),
    *reduced(lambda x, dim, keepdim=False: F.softmin(x, dim), name="softmin"),
    *reduced(
        lambda x, dim, keepdim=False: torch.cumsum(x, dim),
        FLOATS + INTS + BOOL,
        name="cumsum",
        scale=True,
        zeros=False,
    ),
    *reduced(lambda x, dim, keepdim=False: torch.cumprod(x, dim), FLOATS + INTS, name="cumprod"),
    *reduced(lambda x, dim, keepdim=False: torch.cummax(x, dim), FLOATS + INTS, name="cummax"),
    *reduced(lambda x, dim, keepdim=False: torch.cummin(x, dim), FLOATS + INTS, name="cummin"),
    *reduced(lambda x, dim, keepdim=False: torch.logcumsumexp(x, dim), name="logcumsumexp"),
    *reduced(
        lambda x, dim, keepdim=False: torch.sort(x, dim=dim, stable=True),
        FLOATS + INTS,
        name="sort",
    ),
    *reduced(
        lambda x, dim, keepdim=False: torch.sort(x, dim=dim, descending=True, stable=True),
        FLOATS + INTS,
        name="sort down",
    ),
    *reduced(
        lambda x, dim, keepdim=False: torch.argsort(x, dim=dim, stable=True),
        FLOATS + INTS,
        name="argsort",
    ),
    *reduced(
        lambda x, dim, keepdim=False: torch.topk(x, 3, dim).values,
        FLOATS + INTS,
        name="topk values",
        zeros=False,
    ),
    *reduced(
        lambda x, dim, keepdim=False: torch.topk(x, 3, dim, largest=False).values,
        FLOATS + INTS,
        name="topk smallest",
        zeros=False,
    ),
    *reduced(
        lambda x, dim, keepdim=False: torch.diff(x, dim=dim), FLOATS + INTS, name="diff", ulps=0
    ),
    *each(lambda x: x.topk(4).values, FLOATS, name="topk special"),
    *each(lambda x: x.topk(4, largest=False).values, FLOATS, name="topk smallest special"),
    *each(lambda x: x.logsumexp((0, 1)), FLOATS, _with_nan, name="logsumexp of two axes"),
    *each(lambda x: (x + 1e5).var(-1), FLOATS[:2], rows, name="var far from zero"),
    *reduced(
        lambda x, dim, keepdim=False: torch.sum(x, dim, dtype=torch.float32),
        FLOATS,
        name="sum in float32",
        scale=True,
    ),
    *reduced(
        lambda x, dim, keepdim=False: torch.sum(x, dim, dtype=torch.int32),
        INTS,
        name="sum in int32",
    ),
    *whole(torch.sum, FLOATS + INTS + BOOL, scale=True),
    *whole(torch.mean, scale=True),
    *whole(torch.prod, FLOATS + INTS),
    *whole(torch.max, FLOATS + INTS),
    *whole(torch.min, FLOATS + INTS),
    *whole(torch.argmax, FLOATS + INTS),
    *whole(torch.argmin, FLOATS + INTS),
    *whole(torch.any, FLOATS + INTS + BOOL),
    *whole(torch.all, FLOATS + INTS + BOOL),
    *whole(torch.var, scale=True),
    *whole(torch.std, scale=True),
    *whole(torch.norm, scale=True),
    *whole(torch.median),
    *whole(torch.amax),
    *whole(lambda x: x.flatten().softmax(0), name="softmax"),
    *empty(lambda x: x.sum(), FLOATS + INTS + BOOL, name="sum"),
    *empty(lambda x: x.sum(1), FLOATS + INTS + BOOL, name="sum of an axis"),
    *empty(lambda x: (x.mean(), x.mean(1)), FLOATS, name="mean"),
    *empty(lambda x: (x.prod(), x.prod(1)), FLOATS + INTS, name="prod"),
    *empty(
        lambda x: (x.any(), x.all(), x.any(1), x.all(1)), FLOATS + INTS + BOOL, name="any and all"
    ),
    *empty(lambda x: (x.var(), x.std(1)), FLOATS, name="var"),
    *empty(lambda x: x.amax(0), FLOATS, name="amax"),
    *empty(lambda x: (x.softmax(1), x.softmax(0), x.log_softmax(1)), FLOATS, name="softmax"),
    *empty(lambda x: x.logsumexp(1), FLOATS, name="logsumexp"),
    *empty(lambda x: x.cumsum(1), FLOATS + INTS, name="cumsum"),
    *empty(lambda x: (x.norm(), x.norm(dim=1), x.norm(p=1)), FLOATS, name="norm"),
    *empty(lambda x: (x + 1, x * x, x.relu()), FLOATS + INTS, name="elementwise"),
    *empty(lambda x: torch.cat([x, x + 1], 1), FLOATS, name="cat"),
    *empty(lambda x: x @ x.T, FLOATS, name="matmul"),
    *empty(lambda x: x.T @ x, FLOATS, name="matmul to nothing"),
    *empty(lambda x: F.layer_norm(x, (0,)), name="layer_norm"),
    *empty(lambda x: torch.stack([x, x]), FLOATS, name="stack"),
    *empty(lambda x: x.sort(1), FLOATS, name="sort"),
    *empty(lambda x: x.reshape(0, 3).max(1), FLOATS, name="max"),
    *call(
        "a row of one: var",
        lambda x: (x.var(1), x.std(1), x.var(1, correction=0)),
        lambda n: (normal(n, 1),),
    ),
]


def square(n: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return (normal(n, n, dtype=dtype),)


def table_and_ids(dtype: torch.dtype, *ids: int) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda n: (normal(n, 6, dtype=dtype), torch.tensor(ids))


def cast(to: torch.dtype, types: Sequence[torch.dtype]) -> list[Case]:
    return each(lambda x: x.to(to), types, name=f"to {str(to)[6:]} from")


def inside(dtype: torch.dtype, n: int) -> torch.Tensor:
    """Numbers that every integer type of eight bits, signed or not, can hold the whole part of."""
    x = special(dtype, n).nan_to_num(0, 0, 0)
    return torch.where(x.abs() < 100, x, torch.zeros_like(x)).abs()


CASTS = [
    *[c for t in (*FLOATS, *INTS, *BOOL) for c in cast(t, INTS + BOOL)],
    *[c for t in FLOATS for c in cast(t, FLOATS)],
    *cast(torch.bool, FLOATS),
    *[
        c
        for t in INTS
        for c in each(
            functools.partial(lambda x, t: x.to(t), t=t),
            FLOATS,
            inside,
            name=f"to {str(t)[6:]} from",
        )
    ],
    *each(lambda x: x.view(torch.int32), FLOATS[:1], name="view as int32"),
]

INDEXING = [
    *call(
        "gather",
        lambda x, i: x.gather(0, i),
        lambda n: (normal(n, 3), torch.arange(6).view(2, 3) % n),
    ),
    *call(
        "gather of the last axis",
        lambda x, i: x.gather(-1, i),
        lambda n: (normal(n, 3), torch.ones(2, 3, dtype=torch.int64)),
    ),
    *call("take_along_dim", lambda x: torch.take_along_dim(x, x.argsort(1), 1), square),
    *call(
        "scatter",
        lambda x, i: x.scatter(0, i, 2.0),
        lambda n: (normal(n, 3), torch.tensor([[0, 1, 2], [1, 2, 3]])),
    ),
    *call(
        "scatter of a tensor",
        lambda x, i, s: x.scatter(1, i, s),
        lambda n: (normal(n, 3), torch.tensor([[0, 2], [1, 0]]), normal(2, 2)),
    ),
    *call(
        "scatter_add with duplicates",
        lambda x, i, s: x.scatter_add(0, i, s),
        lambda n: (normal(n, 3), torch.zeros(4, 3, dtype=torch.int64), normal(4, 3)),
    ),
    *[
        c
        for r in ("sum", "prod", "mean", "amax", "amin")
        for w in (True, False)
        for c in call(
            f"scatter_reduce {r} {w}",
            functools.partial(
                lambda x, i, s, r, w: x.scatter_reduce(0, i, s, r, include_self=w), r=r, w=w
            ),
            lambda n: (
                normal(n, 3),
                torch.tensor([[0, 0, 1], [0, 2, 1], [3, 0, 1]]),
                normal(3, 3, seed=3),
            ),
        )
    ],
    *call(
        "index_add with duplicates",
        lambda x, i, s: x.index_add(0, i, s),
        lambda n: (normal(n, 3), torch.tensor([1, 1, 0]), normal(3, 3)),
    ),
    *call(
        "index_copy",
        lambda x, i, s: x.index_copy(0, i, s),
        lambda n: (normal(n, 3), torch.tensor([1, 3, 0]), normal(3, 3)),
    ),
    *call(
        "index_fill",
        lambda x, i: x.index_fill(1, i, 7.0),
        lambda n: (normal(n, 3), torch.tensor([2, 0])),
    ),
    *call(
        "index_select",
        lambda x, i: (x.index_select(0, i), x.index_select(-1, i)),
        lambda n: (normal(n, 5), torch.tensor([4, 0, 0])),
    ),
    *call(
        "index by a tensor",
        lambda x, i: (x[i], x[:, i], x[i, i], x[-1], x[..., -2]),
        lambda n: (normal(n, 5), torch.tensor([4, -1, 0, -5])),
    ),
    *call(
        "index by two apart",
        lambda x, i: x[i, :, i],
        lambda n: (normal(n, 3, 5), torch.tensor([4, -1, 0])),
    ),
    *call(
        "index by a grid",
        lambda x, i: x[i[:, None], i],
        lambda n: (normal(n, 5), torch.tensor([4, -1, 0])),
    ),
    *call("index by a mask", lambda x: torch.where((x > 0)[..., None], x[..., None], 0), square),
    *call(
        "index_put",
        lambda x, i, s: x.index_put((i,), s),
        lambda n: (normal(n, 3), torch.tensor([1, -1, 0]), normal(3, 3)),
    ),
    *call(
        "index_put of two",
        lambda x, i, s: x.index_put((i, i), s),
        lambda n: (normal(n, 3), torch.tensor([1, -1, 0]), normal(3)),
    ),
    *call(
        "index_put accumulate",
        lambda x, i, s: x.index_put((i,), s, accumulate=True),
        lambda n: (normal(n, 3), torch.tensor([1, 1, -1]), normal(3, 3)),
    ),
    *call("index_put of a mask", lambda x: x.index_put((x > 0,), torch.tensor(9.0)), square),
    *call("assign by a mask", lambda x: _assigned(x), square),
    *call("masked_fill", lambda x: x.masked_fill(x > 0, -INF), square),
    *call("masked_fill NaN", lambda x: x.masked_fill(x > 0, NAN), square),
    *call("masked_scatter", lambda x: x.masked_scatter(x > 0, x.flip(0)), square),
    *call("embedding", lambda x, i: F.embedding(i, x), table_and_ids(torch.float32, 0, 4, 4, 1)),
    *call(
        "embedding of half",
        lambda x, i: F.embedding(i, x),
        table_and_ids(torch.bfloat16, 0, 4, 4, 1),
    ),
    *call(
        "embedding padding_idx",
        lambda x, i: F.embedding(i, x, padding_idx=0),
        table_and_ids(torch.float32, 0, 4, 4, 1),
    ),
    *call("take", lambda x, i: x.take(i), lambda n: (normal(n, 3), torch.tensor([0, -1, 7]))),
    *call(
        "put",
        lambda x, i: x.put(i, torch.ones(3)),
        lambda n: (normal(n, 3), torch.tensor([0, -1, 7])),
    ),
    *call("one_hot", lambda i: F.one_hot(i, 7), lambda n: (torch.arange(n) % 7,)),
    *call("searchsorted", lambda x: torch.searchsorted(x.sort().values, x), lambda n: (normal(n),)),
    *call(
        "bucketize",
        lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])),
        lambda n: (special(torch.float32, n),),
    ),
    *call(
        "bucketize right",
        lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0]), right=True),
        lambda n: (special(torch.float32, n),),
    ),
    *call("isin", lambda x: torch.isin(x, torch.tensor([1, 3])), lambda n: (torch.arange(n) % 5,)),
    *call(
        "tril triu",
        lambda x: (x.tril(), x.triu(1), x.tril(-2), x.triu(-1)),
        square,
    ),
    *call(
        "tril of int and bool",
        lambda x: ((x > 0).tril(), (x * 9).int().triu(), x.half().tril(), x.bfloat16().triu()),
        square,
    ),
    *call(
        "diagonal",
        lambda x: (x.diagonal(), x.diagonal(1), torch.diag(x), torch.diag_embed(x)),
        square,
    ),
    *call("trace", torch.trace, square, scale=True),
    *call("flip", lambda x: (x.flip(0), x.flip(0, 1), x.flip(-1), torch.fliplr(x)), square),
    *call(
        "roll", lambda x: (x.roll(2, 0), x.roll(-3, 1), x.roll(7), x.roll((1, 2), (0, 1))), square
    ),
    *call("rot90", lambda x: (torch.rot90(x), torch.rot90(x, 2)), square),
    *call("select_scatter", lambda x: torch.select_scatter(x, x[0], 0, -1), square),
    *call("slice_scatter", lambda x: torch.slice_scatter(x, x[:2] + 1, 0, 1, 3), square),
    *call("slice_scatter by two", lambda x: torch.slice_scatter(x, x[:2] + 1, 0, 1, 4, 2), square),
    *call("diagonal_scatter", lambda x: torch.diagonal_scatter(x, torch.ones(x.shape[0])), square),
    *call(
        "slices",
        lambda x: (x[1:], x[:-1], x[::2], x[1:4:2], x[-3:], x[:, -100:100], x[10:2], x[2:2]),
        square,
    ),
    *call(
        "cat",
        lambda x: (torch.cat([x, x.int()]), torch.cat([x, x], -1), torch.cat([x, torch.zeros(0)])),
        square,
    ),
    *call(
        "stack",
        lambda x: (
            torch.stack([x, x]),
            torch.stack([x, x], -1),
            torch.hstack([x, x]),
            torch.vstack([x, x]),
            torch.dstack([x, x]),
        ),
        square,
    ),
    *call(
        "split chunk",
        lambda x: (
            *x.split(2),
            *x.chunk(3, 1),
            *x.tensor_split(3),
            *x.split([1, x.shape[1] - 1], 1),
        ),
        square,
    ),
    *call("unbind", lambda x: x[:, :3].unbind(1), square),
    *call("unfold", lambda x: (x.unfold(0, 2, 1), x.unfold(1, 3, 2)), square),
    *call(
        "repeat",
        lambda x: (x.repeat(2, 1), x.repeat(1, 1, 3), x.repeat_interleave(2, 0), x.tile(2)),
        square,
    ),
    *call(
        "expand",
        lambda x: (
            x[:, None].expand(-1, 3, -1),
            x[0].expand(2, 3, -1),
            x.broadcast_to(2, *x.shape),
        ),
        square,
    ),
    *call(
        "reshape",
        lambda x: (
            x.flatten(),
            x.reshape(-1, 1),
            x[None].squeeze(),
            x.T.reshape(-1),
            x.view(1, -1),
            x.unflatten(1, (1, -1)),
        ),
        square,
    ),
    *call(
        "permute",
        lambda x: (x[None].permute(2, 0, 1), x.mT, x[None].movedim(0, 2), x[None].swapaxes(0, 1)),
        square,
    ),
    *call("meshgrid", lambda x: torch.meshgrid(x[0], x[1], indexing="ij"), square),
    *call("cartesian", lambda x: torch.combinations(x[0, :4]), square),
    *call(
        "pads",
        lambda x: (
            F.pad(x, (1, 2)),
            F.pad(x, (-1, 1, 2, 0), value=NAN),
            F.pad(x[None], (2, 1, 1, 2), "reflect"),
            F.pad(x[None], (2, 1, 1, 2), "replicate"),
            F.pad(x[None, None], (2, 1, 1, 2), "circular"),
        ),
        square,
    ),
    *call(
        "pad of integers",
        lambda x: (
            F.pad((x * 9).int(), (1, 2)),
            F.pad((x > 0), (1, 1), value=True),
            F.pad((x * 9).to(torch.uint8), (1, 2), value=3),
        ),
        lambda n: (normal(n, n).abs(),),
    ),
    *call(
        "arange",
        lambda x: (
            torch.arange(x.shape[0]),
            torch.arange(0, 1, 0.1),
            torch.arange(5, 1, -2),
            torch.arange(3, dtype=torch.float16),
        ),
        square,
    ),
    *call(
        "linspace", lambda x: (torch.linspace(0, 1, 7) + x[0, 0], torch.logspace(0, 2, 5)), square
    ),
    *call(
        "full",
        lambda x: (
            torch.full_like(x, INF),
            torch.zeros_like(x),
            x.new_ones(3),
            torch.eye(3),
            torch.full((2, 2), 7),
            torch.full_like(x, 3, dtype=torch.int8),
        ),
        square,
    ),
    *call(
        "histc",
        lambda x: (
            torch.histc(x, 5, -2, 2),
            torch.histc(x.round(), 4, -2, 2),
            torch.histc(x.int().float(), 3, 0, 2),
            torch.histc(torch.where(x > 1, NAN, x), 4, -2, 2),
        ),
        square,
    ),
    *call("bincount", lambda x: torch.bincount(x, minlength=9), lambda n: (torch.arange(n) % 9,)),
    *call("cumulative_trapezoid", lambda x: torch.cumulative_trapezoid(x), square, scale=True),
    *call("trapezoid", torch.trapezoid, square, scale=True),
    *call("vander", lambda x: torch.vander(x, 4), lambda n: (normal(n),)),
    *call("tril_indices", lambda x: x[tuple(torch.tril_indices(4, 4))], square),
]


def _assigned(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[y > 0] = 5
    y[1:3, ::2] = 7
    y[-1] += 1
    return y


LOSSES = [
    *call(
        "mse",
        lambda x, y: (F.mse_loss(x, y), F.mse_loss(x, y, reduction="none")),
        lambda n: (normal(n, 5), normal(n, 5, seed=1)),
        ulps=16,
    ),
    *call("l1", F.l1_loss, lambda n: (normal(n, 5), normal(n, 5, seed=1)), ulps=16),
    *call(
        "smooth_l1",
        lambda x, y: (F.smooth_l1_loss(x, y), F.smooth_l1_loss(x, y, beta=0.5)),
        lambda n: (normal(n, 5), normal(n, 5, seed=1)),
        ulps=16,
    ),
    *call(
        "huber",
        lambda x, y: F.huber_loss(x, y, delta=0.7),
        lambda n: (normal(n, 5), normal(n, 5, seed=1)),
        ulps=16,
    ),
    *call(
        "cross_entropy",
        lambda x, y: (
            F.cross_entropy(x, y),
            F.cross_entropy(x, y, reduction="none"),
            F.cross_entropy(x, y, label_smoothing=0.1),
        ),
        lambda n: (normal(n, 5), torch.arange(n) % 5),
        ulps=16,
    ),
    *call(
        "cross_entropy ignored",
        lambda x, y: (
            F.cross_entropy(x, y),
            F.cross_entropy(x, y, reduction="sum"),
            F.cross_entropy(x, y, reduction="none"),
        ),
        lambda n: (normal(n, 5), torch.where(torch.arange(n) % 3 == 0, -100, torch.arange(n) % 5)),
        ulps=16,
    ),
    *call(
        "cross_entropy all ignored",
        lambda x, y: F.cross_entropy(x, y),
        lambda n: (normal(n, 5), torch.full((n,), -100)),
    ),
    *call(
        "cross_entropy weighted",
        lambda x, y: F.cross_entropy(x, y, torch.tensor([1.0, 2, 0, 4, 5])),
        lambda n: (normal(n, 5), torch.arange(n) % 5),
        ulps=16,
    ),
    *call(
        "cross_entropy of shares",
        lambda x, y: F.cross_entropy(x, y.softmax(1)),
        lambda n: (normal(n, 5), normal(n, 5, seed=1)),
        ulps=16,
    ),
    *call(
        "cross_entropy of images",
        lambda x, y: F.cross_entropy(x, y),
        lambda n: (normal(2, 5, n), torch.arange(2 * n).view(2, n) % 5),
        ulps=16,
    ),
    *call(
        "nll",
        lambda x, y: F.nll_loss(x.log_softmax(1), y, ignore_index=1),
        lambda n: (normal(n, 5), torch.arange(n) % 5),
        ulps=16,
    ),
    *call(
        "bce",
        lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
        lambda n: (normal(n, 5), normal(n, 5, seed=1)),
        ulps=16,
    ),
    *call(
        "bce at 0 and 1",
        lambda x, y: F.binary_cross_entropy(x, y, reduction="none"),
        lambda n: (torch.tensor([0.0, 0, 1, 1, 0.5]), torch.tensor([0.0, 1, 0, 1, 1])),
    ),
    *call(
        "bce with logits",
        lambda x, y: (
            F.binary_cross_entropy_with_logits(x * 60, y.sigmoid()),
            F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=torch.full((5,), 2.0)),
        ),
        lambda n: (normal(n, 5), normal(n, 5, seed=1)),
        ulps=16,
    ),
    *call(
        "kl_div",
        lambda x, y: (
            F.kl_div(x, y.softmax(1), reduction="batchmean"),
            F.kl_div(x, y, log_target=True, reduction="sum"),
        ),
        lambda n: (normal(n, 5), normal(n, 5, seed=1)),
        ulps=32,
        scale=True,
    ),
    *call(
        "gaussian nll",
        lambda x, y: F.gaussian_nll_loss(x, y, x.abs()),
        lambda n: (normal(n, 5), normal(n, 5, seed=1)),
        ulps=32,
    ),
    *call(
        "poisson nll",
        lambda x, y: F.poisson_nll_loss(x, y.abs()),
        lambda n: (normal(n, 5), normal(n, 5, seed=1)),
        ulps=32,
    ),
    *call(
        "hinge",
        lambda x, y: F.hinge_embedding_loss(x, y.sign()),
        lambda n: (normal(n, 5), normal(n, 5, seed=1)),
        ulps=16,
    ),
    *call(
        "margin",
        lambda x, y: (F.margin_ranking_loss(x, y, y.sign()), F.soft_margin_loss(x, y.sign())),
        lambda n: (normal(n, 5), normal(n, 5, seed=1)),
        ulps=16,
    ),
    *call(
        "multi margin",
        lambda x, y: F.multi_margin_loss(x, y),
        lambda n: (normal(n, 5), torch.arange(n) % 5),
        ulps=16,
    ),
    *call(
        "multilabel",
        lambda x, y: F.multilabel_soft_margin_loss(x, (y > 0).float()),
        lambda n: (normal(n, 5), normal(n, 5, seed=1)),
        ulps=32,
    ),
    *call(
        "triplet",
        lambda x, y: F.triplet_margin_loss(x, y, x.flip(0)),
        lambda n: (normal(n, 5), normal(n, 5, seed=1)),
        ulps=32,
    ),
    *call(
        "cosine embedding",
        lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(x.shape[0])),
        lambda n: (normal(n, 5), normal(n, 5, seed=1)),
        ulps=64,
    ),
    *call(
        "cosine_similarity",
        F.cosine_similarity,
        lambda n: (normal(n, 5), normal(n, 5, seed=1)),
        ulps=16,
        scale=True,
    ),
    *call(
        "pairwise_distance",
        F.pairwise_distance,
        lambda n: (normal(n, 5), normal(n, 5, seed=1)),
        ulps=32,
    ),
    *call(
        "cdist", torch.cdist, lambda n: (normal(n, 5), normal(4, 5, seed=1)), ulps=64, scale=True
    ),
    *call("pdist", F.pdist, lambda n: (normal(n, 5),), ulps=64, scale=True),
    *call(
        "ctc",
        lambda x, y: F.ctc_loss(x.log_softmax(-1), y, (12, 12), (3, 3)),
        lambda n: (normal(12, 2, 5), torch.tensor([[1, 2, 3], [2, 2, 4]])),
        ulps=32,
    ),
]


def spd(n: int) -> tuple[torch.Tensor, ...]:
    a = normal(n, n, dtype=torch.float64)
    return (a @ a.T + n * torch.eye(n, dtype=torch.float64),)


def products(*shapes: Sequence[Any]) -> Callable[[torch.dtype, int], tuple[torch.Tensor, ...]]:
    def make(dtype: torch.dtype, n: int) -> tuple[torch.Tensor, ...]:
        return tuple(
            normal(*[n if s == "n" else s for s in shape], dtype=dtype, seed=i)
            if dtype.is_floating_point
            else moderate(dtype, math.prod(n if s == "n" else s for s in shape)).reshape(
                [n if s == "n" else s for s in shape]
            )
            for i, shape in enumerate(shapes)
        )

    return make


def typed(
    function: Callable[..., Any],
    make: Any,
    types: Sequence[torch.dtype] = FLOATS,
    name: str = "",
    **more: Any,
) -> list[Case]:
    name = name or function.__name__
    return [
        Case(
            f"{name} {str(t)[6:]}",
            function,
            functools.partial(make, t),
            **{"ulps": 8, "scale": True, **more},
        )
        for t in types
    ]


def with_nan(make: Any) -> Any:
    def spoiled(dtype: torch.dtype, n: int) -> tuple[torch.Tensor, ...]:
        tensors = make(dtype, n)
        tensors[0].view(-1)[1] = NAN
        tensors[0].view(-1)[-1] = INF
        return tensors

    return spoiled


LINEAR_ALGEBRA = [
    *typed(torch.matmul, products(("n", 7), (7, 5)), FLOATS + INTS),
    *typed(torch.matmul, products((2, "n", 7), (7, 5)), name="matmul of three axes"),
    *typed(torch.matmul, products((7,), (7, 5)), FLOATS + INTS[:1], name="vector by matrix"),
    *typed(torch.matmul, products(("n", 7), (7,)), FLOATS + INTS[:1], name="matrix by vector"),
    *typed(torch.dot, products((7,), (7,)), FLOATS + INTS[:1]),
    *typed(torch.matmul, products((3, 1, "n", 7), (2, 7, 5)), name="matmul broadcast"),
    *typed(torch.matmul, with_nan(products(("n", 7), (7, 5))), name="matmul NaN"),
    *typed(torch.matmul, products(("n", 0), (0, 5)), name="matmul of an axis of nothing"),
    *typed(torch.mm, products(("n", 7), (7, 5)), FLOATS + INTS[:1]),
    *typed(torch.mv, products(("n", 7), (7,)), FLOATS + INTS[:1]),
    *typed(torch.bmm, products((3, "n", 7), (3, 7, 5)), FLOATS + INTS[:1]),
    *typed(torch.addmm, products((5,), ("n", 7), (7, 5)), FLOATS + INTS[:1]),
    *typed(
        lambda b, x, y: torch.addmm(b, x, y, beta=0),
        with_nan(products((5,), ("n", 7), (7, 5))),
        name="addmm without a NaN bias",
    ),
    *typed(
        lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=-2),
        products(("n", 5), ("n", 7), (7, 5)),
        name="addmm of scales",
    ),
    *typed(torch.addmv, products(("n",), ("n", 7), (7,)), FLOATS + INTS[:1]),
    *typed(torch.addbmm, products(("n", 5), (3, "n", 7), (3, 7, 5)), FLOATS[:2]),
    *typed(torch.baddbmm, products((3, 1, 5), (3, "n", 7), (3, 7, 5)), FLOATS + INTS[:1]),
    *typed(torch.outer, products(("n",), (5,)), FLOATS + INTS),
    *typed(torch.ger, products(("n",), (5,)), FLOATS[:2]),
    *typed(torch.inner, products(("n", 4), (3, 4)), FLOATS[:2]),
    *typed(
        lambda a, b: torch.tensordot(a, b, 2),
        products(("n", 3, 4), (3, 4, 2)),
        FLOATS[:2],
        name="tensordot",
    ),
    *typed(
        lambda a, b: torch.einsum("bij,bjk->bik", a, b),
        products((2, "n", 4), (2, 4, 3)),
        name="einsum",
    ),
    *typed(
        lambda a, b: torch.einsum("ij,kj->", a, b),
        products(("n", 4), (3, 4)),
        FLOATS[:2],
        name="einsum of all",
        ulps=64,
    ),
    *typed(torch.kron, products(("n", 2), (3, 2)), FLOATS[:2]),
    *typed(torch.linalg.cross, products(("n", 3), ("n", 3)), FLOATS[:2]),
    *typed(F.linear, products((3, "n", 7), (5, 7), (5,)), FLOATS),
    *typed(F.linear, products(("n", 7), (5, 7), (5,)), FLOATS, name="linear of two axes"),
    *typed(F.linear, products((7,), (5, 7), (5,)), FLOATS, name="linear of one axis"),
    *typed(F.linear, with_nan(products(("n", 7), (5, 7), (5,))), name="linear NaN"),
    *typed(F.bilinear, products(("n", 4), ("n", 3), (2, 4, 3), (2,)), FLOATS[:2]),
    *call("cholesky", torch.linalg.cholesky, spd, ulps=64, scale=True),
    *call("inv", torch.linalg.inv, spd, ulps=64, scale=True),
    *call(
        "det",
        lambda x: (torch.linalg.det(x / x.shape[0]), torch.linalg.slogdet(x)),
        spd,
        ulps=512,
        scale=True,
    ),
    *call("solve", lambda x: torch.linalg.solve(x, x[:, :2]), spd, ulps=64, scale=True),
    *call("qr", torch.linalg.qr, spd, ulps=64, scale=True),
    *call("svdvals", torch.linalg.svdvals, spd, ulps=64, scale=True),
    *call("eigvalsh", torch.linalg.eigvalsh, spd, ulps=64, scale=True),
    *call(
        "triangular",
        lambda x: torch.linalg.solve_triangular(x.tril(), x[:, :2], upper=False),
        spd,
        ulps=64,
        scale=True,
    ),
    *call("pinv", torch.linalg.pinv, spd, ulps=1024, scale=True),
    *call(
        "matrix norms",
        lambda x: (
            torch.linalg.matrix_norm(x),
            torch.linalg.matrix_norm(x, 1),
            torch.linalg.matrix_norm(x, INF),
            torch.linalg.matrix_norm(x, 2),
        ),
        spd,
        ulps=64,
    ),
    *call(
        "matrix_power",
        lambda x: torch.linalg.matrix_power(x / 100, 3),
        spd,
        ulps=64,
        scale=True,
    ),
    *call("fft", lambda x: torch.fft.fft(x).abs(), square, ulps=64, scale=True),
    *call(
        "rfft and back",
        lambda x: torch.fft.irfft(torch.fft.rfft(x), n=x.shape[-1]),
        square,
        ulps=64,
        scale=True,
    ),
    *call(
        "complex",
        lambda x: (torch.complex(x, x).abs(), torch.view_as_real(torch.complex(x, x) * 1j)),
        square,
    ),
    *call("complex exp", lambda x: torch.exp(1j * x).real, square),
]


def attention(dtype: torch.dtype, n: int) -> tuple[torch.Tensor, ...]:
    return tuple(normal(2, 3, n, 8, dtype=dtype, seed=i) for i in range(3))


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(
        -1
    )  # the first row sees nothing
    return F.scaled_dot_product_attention(q, k, v, mask)


def biased(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    bias = torch.zeros(q.shape[2], k.shape[2], dtype=q.dtype).masked_fill(
        torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(0), -INF
    )
    return F.scaled_dot_product_attention(q, k, v, bias)


ATTENTION = [
    *typed(F.scaled_dot_product_attention, attention, ulps=64),
    *typed(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        attention,
        name="causal attention",
        ulps=64,
    ),
    *typed(masked, attention, name="attention with a row that sees nothing", ulps=64),
    *typed(biased, attention, name="attention with a bias of -inf", ulps=64),
    *typed(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3),
        attention,
        name="attention of a scale",
        ulps=64,
    ),
    *typed(
        lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True),
        attention,
        name="grouped attention",
        ulps=64,
    ),
    *typed(
        lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0]),
        attention,
        FLOATS[:1] + FLOATS[2:],
        name="attention of three axes",
        ulps=64,
    ),
    *typed(
        lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0]),
        attention,
        FLOATS[1:2],
        name="attention of three axes",
        ulps=64,
    ),
    *typed(
        lambda q, k, v: F.scaled_dot_product_attention(q[:, :, :3], k, v, is_causal=True),
        attention,
        name="causal, fewer queries",
        ulps=64,
    ),
]


def norms(
    function: Callable[..., Any], name: str, types: Sequence[torch.dtype] = FLOATS, **more: Any
) -> list[Case]:
    """Of rows with constants, large numbers, NaN and infinities."""
    return each(function, types, norm_rows, name=name, ulps=64, scale=True, zeros=False, **more)


def norm_rows(dtype: torch.dtype, n: int) -> torch.Tensor:
    """Rows whose squares do not overflow: where they do, eager's layer_norm is NaN and ours 0."""
    x = rows(dtype, n)
    x[8] /= torch.finfo(dtype).max ** 0.5
    return x


NORMS = [
    *norms(lambda x: F.layer_norm(x, x.shape[-1:]), "layer_norm"),
    *norms(
        lambda x: F.layer_norm(x, x.shape[-1:], torch.full_like(x[0], 2), torch.full_like(x[0], 1)),
        "layer_norm with weights",
    ),
    *norms(
        lambda x: F.layer_norm(x.unflatten(0, (2, 5)), (5, x.shape[-1])), "layer_norm of two axes"
    ),
    *norms(lambda x: F.rms_norm(x, x.shape[-1:]), "rms_norm"),
    *norms(
        lambda x: F.rms_norm(x, x.shape[-1:], torch.full_like(x[0], 2), 1e-3),
        "rms_norm with weights",
        (torch.float32, *FLOATS[2:]),
    ),
    *norms(
        lambda x: F.rms_norm(x, x.shape[-1:], torch.full_like(x[0], 2), 1e-3),
        "rms_norm with weights",
        FLOATS[1:2],
    ),
    *norms(lambda x: F.group_norm(x.T[None].contiguous(), 1), "group_norm"),
    *norms(
        lambda x: F.group_norm(
            x[None], 5, torch.full_like(x[:, 0], 2), torch.full_like(x[:, 0], 1)
        ),
        "group_norm with weights",
    ),
    *norms(lambda x: F.instance_norm(x[None]), "instance_norm"),
    *norms(
        lambda x: F.batch_norm(
            x.T.contiguous(), torch.zeros_like(x[:, 0]), torch.ones_like(x[:, 0])
        ),
        "batch_norm",
    ),
    *norms(
        lambda x: F.batch_norm(
            x.T.contiguous(),
            torch.zeros_like(x[:, 0]),
            torch.ones_like(x[:, 0]),
            torch.full_like(x[:, 0], 2),
            torch.full_like(x[:, 0], 1),
        ),
        "batch_norm with weights",
    ),
    *norms(
        lambda x: F.local_response_norm(x[None].abs().nan_to_num(0, 0, 0).clamp(max=9), 3),
        "local_response_norm",
        FLOATS[:2],
    ),
    *norms(lambda x: F.normalize(x), "normalize"),
]

N = torch.nn
MODULES = [
    *module(lambda: N.Linear(7, 5), "n", 7, types=FLOATS),
    *module(lambda: N.Conv1d(4, 6, 3), 2, 4, 9, types=FLOATS),
    *module(lambda: N.Conv1d(4, 6, 3, padding="same", dilation=2), "n", 4, 9, name="Conv1d same"),
    *module(lambda: N.Conv1d(4, 6, 4, padding="same"), "n", 4, 9, name="Conv1d same even"),
    *module(lambda: N.Conv2d(4, 6, 3, 2, 1), "n", 4, 9, 8, types=FLOATS),
    *module(
        lambda: N.Conv2d(4, 8, (3, 1), groups=4, dilation=(1, 2)),
        2,
        4,
        9,
        "n",
        name="Conv2d groups",
    ),
    *module(
        lambda: N.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
        2,
        4,
        9,
        8,
        name="Conv2d reflect",
    ),
    *module(
        lambda: N.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
        2,
        4,
        9,
        8,
        name="Conv2d circular",
    ),
    *module(lambda: N.Conv2d(4, 6, 3), 4, 9, 8, name="Conv2d unbatched"),
    *module(lambda: N.Conv3d(2, 3, 3, padding=1), 2, 2, 5, 6, "n"),
    *module(lambda: N.ConvTranspose1d(4, 6, 3, 2), "n", 4, 9),
    *module(lambda: N.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2), "n", 4, 5, 6, types=FLOATS),
    *module(lambda: N.ConvTranspose3d(2, 3, 3), 1, 2, 3, 4, 5),
    *module(lambda: N.MaxPool1d(3), "n", 4, 10),
    *module(lambda: N.MaxPool2d(3, 2, 1), "n", 4, 9, 8, types=FLOATS),
    *module(lambda: N.MaxPool2d(3, 2, 1, ceil_mode=True), "n", 4, 8, 8, name="MaxPool2d ceil"),
    *module(
        lambda: N.MaxPool2d(2, dilation=2, return_indices=True),
        "n",
        4,
        8,
        8,
        name="MaxPool2d indices",
    ),
    *module(lambda: N.MaxPool3d(2), 1, 2, 5, 6, 7),
    *module(lambda: N.AvgPool1d(3, 2, 1), "n", 4, 10),
    *module(lambda: N.AvgPool2d(3, 2, 1), "n", 4, 9, 8, types=FLOATS),
    *module(
        lambda: N.AvgPool2d(3, 2, 1, count_include_pad=False),
        "n",
        4,
        9,
        8,
        name="AvgPool2d without pad",
    ),
    *module(lambda: N.AvgPool2d(3, 2, 1, ceil_mode=True), "n", 4, 8, 8, name="AvgPool2d ceil"),
    *module(
        lambda: N.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
        "n",
        4,
        8,
        8,
        name="AvgPool2d ceil without pad",
    ),
    *module(lambda: N.AvgPool2d(2, divisor_override=3), "n", 4, 8, 8, name="AvgPool2d divisor"),
    *module(lambda: N.AvgPool3d(2), 1, 2, 5, 6, 7),
    *module(lambda: N.LPPool2d(2, 2), "n", 4, 8, 8),
    *module(lambda: N.AdaptiveAvgPool1d(3), "n", 4, 10),
    *module(lambda: N.AdaptiveAvgPool2d(1), "n", 4, 9, 8),
    *module(lambda: N.AdaptiveAvgPool2d((3, 2)), "n", 4, 9, 8, name="AdaptiveAvgPool2d 3 2"),
    *module(lambda: N.AdaptiveAvgPool2d((4, 3)), "n", 4, 9, 8, name="AdaptiveAvgPool2d uneven"),
    *module(lambda: N.AdaptiveMaxPool2d(2), "n", 4, 9, 8),
    *module(lambda: N.AdaptiveMaxPool1d(3), "n", 4, 10),
    *module(
        lambda: N.FractionalMaxPool2d(2, output_ratio=0.5, _random_samples=torch.rand(3, 4, 2)),
        3,
        4,
        8,
        8,
    ),
    *[
        c
        for m in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
        for s in (2, 0.6)
        for c in module(
            functools.partial(N.Upsample, scale_factor=s, mode=m),
            2,
            3,
            7,
            "n",
            name=f"Upsample {m} {s}",
        )
    ],
    *[
        c
        for m in ("bilinear", "bicubic")
        for c in module(
            functools.partial(N.Upsample, size=(5, 9), mode=m, align_corners=True),
            2,
            3,
            7,
            6,
            name=f"Upsample {m} corners",
        )
    ],
    *[
        c
        for m in ("nearest", "nearest-exact", "bilinear", "bicubic")
        for c in module(
            functools.partial(N.Upsample, size=(5, 9), mode=m),
            2,
            3,
            7,
            6,
            name=f"Upsample {m} to a size",
        )
    ],
    *module(lambda: N.Upsample(scale_factor=2, mode="linear"), 2, 3, 7, name="Upsample linear"),
    *module(
        lambda: N.Upsample(scale_factor=2, mode="trilinear"),
        1,
        2,
        3,
        4,
        5,
        name="Upsample trilinear",
    ),
    *call(
        "interpolate antialias",
        lambda x: F.interpolate(x, (4, 5), mode="bilinear", antialias=True),
        lambda n: (normal(1, 2, 9, 8),),
        ulps=64,
        scale=True,
    ),
    *call(
        "grid_sample",
        lambda x, g: (
            F.grid_sample(x, g, align_corners=False),
            F.grid_sample(x, g, mode="nearest", padding_mode="border", align_corners=True),
            F.grid_sample(x, g, padding_mode="reflection", align_corners=False),
            F.grid_sample(x, g, mode="bicubic", align_corners=False),
        ),
        lambda n: (normal(2, 3, 5, 6), normal(2, 4, 4, 2)),
        ulps=512,
        scale=True,
    ),
    *call(
        "affine_grid",
        lambda t: F.affine_grid(t, [2, 3, 4, 5], align_corners=False),
        lambda n: (normal(2, 2, 3),),
        ulps=16,
        scale=True,
    ),
    *module(lambda: N.PixelShuffle(2), "n", 8, 3, 4),
    *module(lambda: N.PixelUnshuffle(2), "n", 2, 4, 6),
    *module(lambda: N.ChannelShuffle(2), "n", 4, 3, 3),
    *module(lambda: N.Fold((4, 5), 2), 2, 8, 12),
    *module(lambda: N.Unfold(3, padding=1, stride=2), "n", 2, 6, 7),
    *module(lambda: N.ReflectionPad2d(2), "n", 3, 5, 6),
    *module(lambda: N.ReplicationPad2d((1, 2, 3, 0)), "n", 3, 5, 6),
    *module(lambda: N.ZeroPad2d(1), "n", 3, 5, 6),
    *module(lambda: N.ConstantPad1d((1, -2), 3.0), "n", 3, 6),
    *module(lambda: N.CircularPad2d(1), "n", 3, 5, 6),
    *module(lambda: N.ReflectionPad3d(1), 1, 2, 3, 4, 5),
    *module(lambda: N.BatchNorm1d(5), "n", 5),
    *module(lambda: N.BatchNorm2d(5), "n", 5, 4, 4, types=FLOATS),
    *module(lambda: N.BatchNorm3d(5), "n", 5, 2, 2, 2),
    *module(lambda: N.BatchNorm2d(5, affine=False), "n", 5, 4, 4, name="BatchNorm2d plain"),
    *module(
        lambda: N.BatchNorm2d(5, track_running_stats=False),
        "n",
        5,
        4,
        4,
        name="BatchNorm2d without statistics",
    ),
    *module(lambda: N.InstanceNorm2d(5, affine=True), "n", 5, 4, 4),
    *module(
        lambda: N.InstanceNorm1d(5, track_running_stats=True),
        "n",
        5,
        6,
        name="InstanceNorm1d with statistics",
    ),
    *module(lambda: N.GroupNorm(2, 6), "n", 6, 4, types=FLOATS),
    *module(lambda: N.LayerNorm(6), "n", 6, types=FLOATS),
    *module(lambda: N.RMSNorm(6), "n", 6, types=(torch.float32, *FLOATS[2:])),
    *module(lambda: N.RMSNorm(6), "n", 6, types=FLOATS[1:2]),
    *module(lambda: N.LocalResponseNorm(3), "n", 6, 4, 4),
    *module(lambda: N.Dropout(0.5), "n", 6, name="Dropout in eval"),
    *module(lambda: N.AlphaDropout(0.5), "n", 6, name="AlphaDropout in eval"),
    *module(lambda: N.PReLU(6), "n", 6),
    *module(lambda: N.Softmax2d(), "n", 3, 4, 4),
    *module(lambda: N.Flatten(), "n", 3, 4),
    *module(lambda: N.LSTM(6, 4, batch_first=True), "n", 7, 6),
    *module(lambda: N.GRU(6, 4, 2, batch_first=True), "n", 7, 6),
    *module(lambda: N.RNN(6, 4, bidirectional=True), 5, 3, 6),
    *module(lambda: N.LSTMCell(6, 4), "n", 6),
    *module(lambda: N.GRUCell(6, 4), "n", 6),
    *module(lambda: N.RNNCell(6, 4), "n", 6),
    *module(lambda: N.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, "n", 8, types=FLOATS),
    *module(
        lambda: N.TransformerEncoder(N.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        2,
        "n",
        8,
    ),
    *module(
        lambda: N.TransformerEncoderLayer(8, 2, 16, norm_first=True, activation="gelu"),
        5,
        2,
        8,
        name="TransformerEncoderLayer norm first",
    ),
    *call(
        "MultiheadAttention",
        N.MultiheadAttention(8, 2, batch_first=True).eval(),
        lambda n: (normal(2, n, 8),) * 3,
        ulps=64,
        scale=True,
    ),
    *call(
        "EmbeddingBag mean",
        functools.partial(lambda e, i: e(i), N.EmbeddingBag(10, 4)),
        lambda n: (torch.arange(3 * n).view(n, 3) % 10,),
        ulps=16,
    ),
    *call(
        "EmbeddingBag sum",
        functools.partial(lambda e, i: e(i), N.EmbeddingBag(10, 4, mode="sum")),
        lambda n: (torch.arange(3 * n).view(n, 3) % 10,),
        ulps=16,
    ),
    *call(
        "EmbeddingBag max",
        functools.partial(lambda e, i: e(i), N.EmbeddingBag(10, 4, mode="max")),
        lambda n: (torch.arange(3 * n).view(n, 3) % 10,),
        ulps=16,
    ),
    *call(
        "EmbeddingBag offsets",
        functools.partial(lambda e, i, o: e(i, o), N.EmbeddingBag(10, 4)),
        lambda n: (torch.arange(9) % 10, torch.tensor([0, 2, 2, 5])),
        ulps=16,
    ),
    *call(
        "EmbeddingBag padding",
        functools.partial(lambda e, i: e(i), N.EmbeddingBag(10, 4, padding_idx=3)),
        lambda n: (torch.arange(3 * n).view(n, 3) % 10,),
        ulps=16,
    ),
    *call(
        "Embedding max_norm",
        functools.partial(lambda e, i: e(i), N.Embedding(10, 4, max_norm=1.0)),
        lambda n: (torch.arange(n) % 10,),
        ulps=16,
    ),
    *call(
        "AdaptiveLogSoftmax",
        functools.partial(
            lambda m, x: m.log_prob(x), N.AdaptiveLogSoftmaxWithLoss(6, 12, [4, 8]).eval()
        ),
        lambda n: (normal(n, 6),),
        ulps=64,
    ),
    *call(
        "max_unpool",
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
        lambda n: (normal(2, 3, 6, 8),),
    ),
    *call(
        "pools of NaN",
        lambda x: (
            F.max_pool1d(x[None], 3, 1, 1),
            F.avg_pool1d(x[None], 3, 1, 1),
            F.max_pool2d(x[None, None], 3, 1, 1),
            F.adaptive_avg_pool2d(x[None, None], 2),
            F.adaptive_max_pool2d(x[None, None], 2),
        ),
        lambda n: (rows(torch.float32, n),),
        ulps=64,
        scale=True,
    ),
    *call(
        "channels_last",
        functools.partial(
            lambda m, x: m(x.to(memory_format=torch.channels_last)), N.Conv2d(4, 6, 3).eval()
        ),
        lambda n: (normal(n, 4, 6, 6),),
        ulps=64,
        scale=True,
    ),
    *call(
        "ModuleList of norms",
        functools.partial(
            lambda m, x: m(x),
            N.Sequential(
                N.Linear(6, 6), N.LayerNorm(6), N.GELU(), N.Linear(6, 3), N.Softmax(-1)
            ).eval(),
        ),
        lambda n: (normal(n, 6),),
        ulps=64,
        scale=True,
    ),
]

PARTS = {
    "elementwise": ELEMENTWISE,
    "binary": BINARY,
    "bounds": BOUNDS,
    "activations": ACTIVATIONS,
    "reductions": REDUCTIONS,
    "casts": CASTS,
    "indexing": INDEXING,
    "losses": LOSSES,
    "linear algebra": LINEAR_ALGEBRA,
    "attention": ATTENTION,
    "norms": NORMS,
    "modules": MODULES,
}
TABLE = [case for part in PARTS.values() for case in part]
