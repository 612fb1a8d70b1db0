"""Random programs over views, and what can be seen of a call: the backend beside eager.

A program is drawn statement by statement: one that eager cannot run on the inputs of all its calls
is drawn again. It is called five times, with other rows, offsets and sizes. A case is a text that
can be pasted into a file and run again::

    python tests/backend/test_views.py --minutes 60 --seed 3
    python tests/backend/test_views.py --case failing.py

Where ``backend="aot_eager"`` differs from eager, PyTorch's own capture decided: such calls are
counted by what differs, with their programs, and other numbers are a fault that is left to look at.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import roundoff.backend as rb
from roundoff.errors import RoundoffError

CALLS = 5
DYNAMIC = (None, True, False)


def base(call: int, shape: Sequence[int], dtype: str, device: str = "cpu") -> torch.Tensor:
    """A table of other numbers for each call: small integers, a NaN, an infinity and a -0."""
    kind = getattr(torch, dtype)
    count = 1
    for n in shape:
        count *= n
    numbers = (torch.arange(count, dtype=torch.float64) * 7 + call * 11) % 61 - 20
    if kind.is_floating_point and count > 6:
        numbers[3], numbers[5] = -0.0, float("nan") if call % 2 else float("inf")
    if kind.is_complex:
        numbers = torch.complex(numbers, numbers.flip(0) + 1)
    elif kind == torch.bool:
        numbers = numbers > 0
    return numbers.to(kind).to(device).reshape(tuple(shape))


@dataclasses.dataclass(frozen=True)
class Case:
    """A program: what makes the inputs of a call, and the function.

    Parameters
    ----------
    tables : tuple of str
        Expressions of ``c``, the number of the call: tensors of which the inputs are parts.
    inputs : tuple of str
        Expressions of ``c`` and the tables ``t0``, ``t1``...; a number is passed as one.
    body : tuple of str
        Statements over the inputs ``a``, ``b``...
    returned : tuple of str
        Expressions.
    """

    tables: tuple[str, ...]
    inputs: tuple[str, ...]
    body: tuple[str, ...]
    returned: tuple[str, ...]

    def __str__(self) -> str:
        lines = ["Case("]
        for field in dataclasses.fields(self):
            parts = [f"        {line!r}," for line in getattr(self, field.name)]
            lines += [f"    {field.name}=(", *parts, "    ),"]
        return "\n".join([*lines, ")"])

    @property
    def names(self) -> list[str]:
        return list("abcdefg"[: len(self.inputs)])

    def function(self) -> Callable[..., Any]:
        """The program as a function."""
        lines = [f"def f({', '.join(self.names)}):", *(f"    {line}" for line in self.body)]
        lines.append(f"    return ({''.join(r + ', ' for r in self.returned)})")
        scope: dict[str, Any] = {"torch": torch}
        exec("\n".join(lines), scope)
        made: Callable[..., Any] = scope["f"]
        return made

    def arguments(self, call: int, device: str) -> tuple[list[torch.Tensor], list[Any]]:
        """The tables and the inputs of a call."""
        scope: dict[str, Any] = {
            "torch": torch,
            "c": call,
            "base": functools.partial(base, call, device=device),
        }
        tables = []
        for i, text in enumerate(self.tables):
            tables.append(eval(text, scope))
            scope[f"t{i}"] = tables[-1]
        inputs = []
        for name, text in zip(self.names, self.inputs, strict=True):
            inputs.append(eval(text, scope))
            scope[name] = inputs[-1]
        return tables, inputs


# What can be seen of a call


def plain(t: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor, apart from how they lie."""
    return t.detach().clone().resolve_conj().resolve_neg().contiguous()


def dense(t: torch.Tensor) -> bool:
    """Whether a tensor's elements lie side by side, in some order: then torch promises strides."""
    expected = 1
    pairs = sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n != 1)
    for stride, size in pairs:
        if stride != expected:
            return False
        expected *= size
    return True


def strides(t: torch.Tensor) -> tuple[int, ...]:
    """Those of the axes that have more than one element; none of a tensor without elements."""
    if not t.numel():
        return ()
    return tuple(s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1)


def storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


@dataclasses.dataclass
class Seen:
    """What a call did: facts that are compared as they are, and numbers."""

    facts: list[Any]
    #: Whose they are (a result, an input, a table), and the numbers.
    numbers: list[tuple[str, torch.Tensor]]

    def differs(self, other: Seen) -> str:
        """In words where two calls are not the same; else empty. The kind stands before a colon."""
        for i, (mine, its) in enumerate(zip(self.facts, other.facts, strict=False)):
            if mine != its and its != ("gaps",):  # which are left out
                return f"fact, {_unlike(mine, its)}: number {i}, {mine} where eager has {its}"
        if len(self.facts) != len(other.facts):
            return "another number of results: "
        return self.computes(other)

    def computes(self, other: Seen) -> str:
        """In words where results, inputs or tables have other numbers; else empty."""
        for i, ((who, x), (_, y)) in enumerate(zip(self.numbers, other.numbers, strict=True)):
            if not torch.allclose(x, y, rtol=1e-5, atol=1e-6, equal_nan=True):
                return f"numbers of {who}: number {i}, {x.tolist()} where eager has {y.tolist()}"
        return ""


def _unlike(mine: tuple[Any, ...], its: tuple[Any, ...]) -> str:
    """Which kind of fact it is, and which of its parts is another."""
    if mine[0] != its[0] or len(mine) != len(its):
        return f"{mine[0]} for {its[0]}"
    return " ".join(
        [str(its[0]), *(str(i) for i, (m, t) in enumerate(zip(mine, its, strict=True)) if m != t)]
    )


def seen(f: Callable[..., Any], case: Case, call: int, device: str) -> tuple[Seen, list[Any]]:
    """Call *f*, and look at its results, at its arguments, and at the tables behind them."""
    tables, inputs = case.arguments(call, device)
    results = f(*inputs)
    facts: list[Any] = []
    numbers: list[tuple[str, torch.Tensor]] = []
    known = [*tables, *(i for i in inputs if isinstance(i, torch.Tensor))]
    before = len(known)
    at = [storage(t) for t in known]
    for x in results:
        if not isinstance(x, torch.Tensor):
            facts.append((type(x).__name__, x))
            continue
        same = next((k for k, t in enumerate(known) if t is x), None)
        shared = at.index(storage(x)) if storage(x) in at else None
        facts.append(("result", x.dtype, tuple(x.shape), "is", same, "shares", shared))
        # Which of the results owns memory that only results share is of no matter.
        if same is not None:
            pass
        elif shared is not None and x.numel():
            where = x.storage_offset() if shared < before else None
            facts.append(("lies", strides(x), where, x.is_conj(), x.is_neg()))
        elif dense(x):
            facts.append(("strides", strides(x)))
        else:
            facts.append(("gaps",))
        numbers.append(("a result", plain(x)))
        known.append(x)
        at.append(storage(x))
    for x in inputs:
        if isinstance(x, torch.Tensor):
            facts.append(("input", tuple(x.shape), strides(x), x.storage_offset()))
            numbers.append(("an input", plain(x)))
    numbers += [("a table", plain(t)) for t in tables]
    return Seen(facts, numbers), [r for r in results if isinstance(r, torch.Tensor)]


class DifferenceError(AssertionError):
    """What is wrong with a case."""


@dataclasses.dataclass
class Count:
    """How many calls were the same as eager's, and what else they were."""

    equal: int = 0
    #: Calls that are ``aot_eager``'s and not eager's: what differs from eager -> how many.
    aot: dict[str, int] = dataclasses.field(default_factory=dict)
    refused: dict[str, int] = dataclasses.field(default_factory=dict)
    #: Calls that end with an error that no user is meant to see, here and in ``aot_eager``.
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    examples: list[str] = dataclasses.field(default_factory=list, repr=False)


def check(
    case: Case,
    dynamic: bool | None,
    count: Count | None = None,
    device: str = "cpu",
    calls: int = CALLS,
    **options: Any,
) -> None:
    """Compare a case's calls with eager's; :class:`DifferenceError` where they differ."""
    count = count or Count()
    f = case.function()
    backend = functools.partial(rb.onnx_custom_backend, **options)
    torch._dynamo.reset()
    run = torch.compile(f, backend=backend, dynamic=dynamic)
    later: list[tuple[torch.Tensor, torch.Tensor]] = []
    wrong: dict[int, str] = {}
    others: dict[int, str] = {}
    ours: dict[int, Seen] = {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(calls):
            wanted, _ = seen(f, case, call, device)
            try:
                ours[call], results = seen(run, case, call, device)
            except RoundoffError as e:
                reason = str(e).split(": got")[0][:90]
                if reason not in count.refused:
                    count.examples.append(f"refused: {e}\n{case}")
                count.refused[reason] = count.refused.get(reason, 0) + 1
                continue
            except Exception as e:
                wrong[call] = f"{type(e).__name__}: {e}"
                continue
            if difference := ours[call].differs(wanted):
                wrong[call], others[call] = difference, ours[call].computes(wanted)
            else:
                count.equal += 1
            later += [(r, plain(r)) for r in results]
        if wrong:
            wrong = as_aot(case, dynamic, device, calls, wrong, others, ours, count)
        for result, kept in later:
            if not torch.allclose(plain(result), kept, equal_nan=True):
                wrong.setdefault(calls, "a result changed after its call")
    if wrong:
        said = "\n".join(f"call {call}: {what}" for call, what in sorted(wrong.items()))
        raise DifferenceError(f"dynamic={dynamic}\n{said}\n{case}")


def as_aot(
    case: Case,
    dynamic: bool | None,
    device: str,
    calls: int,
    wrong: dict[int, str],
    others: dict[int, str],
    ours: dict[int, Seen],
    count: Count,
) -> dict[int, str]:
    """Those calls of the *wrong* ones that are not as ``aot_eager`` runs them.

    The others are counted by what differs from eager; *others* says which compute other numbers.
    """
    torch._dynamo.reset()
    run = torch.compile(case.function(), backend="aot_eager", dynamic=dynamic)
    left = {}
    for call in range(calls):
        try:
            standard, _ = seen(run, case, call, device)
        except Exception as e:  # aot_eager refuses the program: an answer has to be eager's
            if call in wrong and call in ours:
                left[call] = f"{wrong[call]}; aot_eager raises {type(e).__name__}"
            elif call in wrong:
                said = f"{wrong[call].split(':')[0]}, aot_eager {type(e).__name__}"
                count.skipped[said] = count.skipped.get(said, 0) + 1
                if count.skipped[said] <= 2 and str(case) not in "".join(count.examples[-1:]):
                    said = f"neither runs, dynamic={dynamic}, call {call}: {wrong[call]}"
                    count.examples.append(f"{said[:300]}\nand aot_eager: {str(e)[:300]}\n{case}")
            continue
        if call not in wrong:
            continue
        if call in ours and not ours[call].differs(standard):
            reason = (others[call] or wrong[call]).split(":")[0]
            count.aot[reason] = count.aot.get(reason, 0) + 1
            if count.aot[reason] <= 9 and str(case) not in "".join(count.examples[-1:]):
                said = f"as aot_eager, dynamic={dynamic}, call {call}, {wrong[call]}"
                count.examples.append(f"{said}\n{case}")
        else:
            left[call] = wrong[call]
    return left


# Drawing

TABLES = ("(4 + c % 2, 6 + c)", "(5, 8)", "(6 + c,)", "(3, 4, 5)", "(4, 4)", "(2 + c, 3, 4)")
TYPES = ("float32",) * 6 + ("complex64",) * 3 + ("float64", "int64", "float16", "bool")
PARTS = (
    *("{t}", "{t}[c % 3]", "{t}[{t}.shape[0] - 1 - c % 2]", "{t}[1:]", "{t}[c % 2:]", "{t}[:1]"),
    *("{t}[..., 1:]", "{t}[..., c % 3:c % 3 + 3]", "{t}[..., ::2]", "{t}[::2]", "{t}.mT", "{t}.T"),
    *("{t}[:1].expand(3, *{t}.shape[1:])", "{t}[..., :1].expand_as({t})", "{t}[c % 2:c % 2 + 1]"),
    *("{t}.diagonal()", "{t}.flatten()[c:]", "{t}.flatten()[c:c + 4]", "{t}[c % 3, c % 2:]"),
    *("{t}.conj()", "{t}.imag", "{t}.real", "{t}.conj().imag", "torch._neg_view({t})"),
    *("{t}.flatten()[c:c + 4].view(2, 2)", "{t}[0, 0]", "{t}.unfold(-1, 2, 1)", "{t}[:0]"),
    *("{t}[1:3]", "{t}[c % 2:c % 2 + 2]", "{t}[c % 2:c % 2 + 3].detach()"),
)
NUMBERS = ("2 + c % 3", "c + 1", "3", "c % 2 + 1", "-1 - c % 2")

#: What a statement computes of ``{x}``, ``{y}``, the axis ``{d}`` and the number ``{n}``.
VIEWS = (
    *("{x}[:{n}]", "{x}[{n}:]", "{x}[-{n}:]", "{x}[..., -{n}:]", "{x}[..., :{n}]", "{x}[::2]"),
    *("{x}[..., 1:]", "{x}[..., ::2]", "{x}[1:]", "{x}[0]", "{x}[-1]", "{x}[{n}]", "{x}[:, 0]"),
    *("{x}.select({d}, 1)", "{x}.narrow({d}, 1, 2)", "{x}.narrow({d}, {n}, 1)", "{x}[None]"),
    *("{x}.transpose(0, -1)", "{x}.mT", "{x}.T", "{x}.mH", "{x}.movedim(0, -1)", "{x}.t()"),
    *("{x}.permute(*range({x}.dim())[::-1])", "{x}.diagonal()", "{x}.diagonal(offset=1)"),
    *("{x}.unfold({d}, 2, 1)", "{x}.unfold({d}, {n}, 2)", "{x}.as_strided((2, 2), (1, 2))"),
    *("{x}.as_strided(({n}, 2), (2, 1), 1)", "{x}.as_strided((2,), (1,), {x}.storage_offset())"),
    *("{x}.expand({n}, *{x}.shape)", "{x}[:1].expand({n}, *{x}.shape[1:])", "{x}.expand_as({y})"),
    *("{x}.chunk(2, {d})[0]", "{x}.chunk(2, {d})[1]", "{x}.split(2, {d})[0]", "{x}.unbind({d})[1]"),
    *("{x}.split({n}, {d})[-1]", "{x}.tensor_split(3, {d})[1]", "{x}.view(-1)", "{x}.flatten()"),
    *("{x}.reshape(-1)", "{x}.view(2, -1)", "{x}.unflatten(0, (-1, 1))", "{x}.unsqueeze({d})"),
    *("{x}.squeeze()", "{x}.squeeze(0)", "{x}.real", "{x}.imag", "{x}.conj()", "{x}.conj().imag"),
    *("torch.view_as_real({x})", "torch.view_as_complex({x})", "{x}.detach()", "{x}.contiguous()"),
    *("{x}.view(torch.int32)", "{x}.view(torch.float32)", "{x}.resolve_conj()", "{x}.view_as({x})"),
    *("{x}.resolve_neg()", "torch._neg_view({x})", "{x}.positive()", "torch.atleast_2d({x})"),
    *("{x}.to({x}.dtype)", "{x}.reshape({x}.shape)", "{x}.swapaxes(0, -1)", "{x}.ravel()"),
    *("{x}.view({x}.shape)", "{x}.adjoint()", "{x}.hsplit(2)[1]", "{x}.expand({x}.shape)"),
)
COMPUTED = (
    *("{x} * 2", "{x} + 1", "{x} + {y}", "{x} * {y}", "{x}.relu()", "{x}.clone()", "-{x}"),
    *("{x} * {n}", "{x} + {x}.shape[0]", "{x}.sum(-1)", "torch.cat([{x}, {x}])", "{x}.abs()"),
    *("{x}.to(torch.float64)", "{x} == {y}", "{x}.flip(0)", "torch.zeros_like({x})", "{x}.isnan()"),
    *("torch.stack([{x}, {x}])", "torch.empty_like({x}).copy_({x})", "{x}.sum()", "{x} - {y}"),
    *("torch.where({x} == {x}, {x}, {y})", "torch.complex({x}, {x})", "{x}.index_select(0, ONE)"),
    *("{x}.roll(1, 0)", "torch.zeros({n}, 3)", "{x}.repeat(2, 1)", "{x}.to(torch.complex64)"),
)
WRITES = (
    *("{x}.mul_(2)", "{x}.add_(1)", "{x}.zero_()", "{x}.fill_(3)", "{x}.copy_({y})", "{x}.neg_()"),
    *("{x}.add_({y})", "{x}[:] = {y}", "{x}[0] = 5", "{x}[1:].mul_(3)", "{x}[..., -1] += 2"),
    *("{x}[:{n}].zero_()", "{x}.index_copy_(0, ONE, {x}[:1] + 1)", "{x}.index_fill_(0, ONE, 4)"),
    *("{x}.masked_fill_({x} == {x}, 2)", "{x}.index_add_(0, ONE, {x}[:1].clone())", "{x}.conj_()"),
    *("{x}.mT.add_(1)", "{x}.view(-1)[1] = 9", "{x}.t_()", "{x}.unsqueeze_(0)", "{x}.squeeze_()"),
    *("{x}.transpose_(0, -1)", "{x}.real.mul_(2)", "{x}.imag.zero_()", "{x}.diagonal().fill_(7)"),
    *("{x}.copy_({x}.flip(0))", "{x}.copy_({x}.conj())", "{x}.relu_()", "{x}.sub_({y})"),
    *("{x}.copy_({x}.mT)", "{x}.data.add_(1)", "{x}.as_strided((2,), (1,)).mul_(2)"),
    *("{x}.scatter_(0, ONE.view(*([1] * {x}.dim())), 6)", "{x}.unfold(0, 2, 2).add_(1)"),
)


#: Of a brief program: inputs that lie elsewhere at each call, of one size or of several.
SLIDING = (
    *("{t}[c % 3]", "{t}[c % 3:c % 3 + 1]", "{t}[c % 2:]", "{t}[c % 2:c % 2 + 2]", "{t}"),
    *("{t}[..., c % 3:c % 3 + 3]", "{t}[..., c:c + 2]", "{t}[c % 3][None]", "{t}.mT[c % 2:]"),
    *("{t}[c % 3, c % 2:]", "{t}[..., c % 2::2]", "{t}.flatten()[c:c + 6]", "{t}[c % 3, 1]"),
)
#: What it returns: parts of an input that a number cuts, and what is computed beside them.
CUT = (
    *("{x}[:{n}]", "{x}[-{n}:]", "{x}[{n}:]", "{x}[..., :{n}]", "{x}[..., -{n}:]", "{x}[{n}]"),
    *("{x}.narrow({d}, 0, {n})", "{x}.narrow({d}, {n}, 1)", "{x}.unfold({d}, {n}, 1)"),
    *("{x}.expand({n}, *{x}.shape)", "{x}.expand({n}, *{x}.shape[1:])", "{x}.split({n}, {d})[0]"),
    *("{x}[:1].expand({n}, *{x}.shape[1:])", "{x}.as_strided(({n}, 2), (1, 1))", "{x}.mT"),
    *("{x}", "{x}[..., 0]", "{x}.diagonal()", "{x}.conj()", "{x}.imag", "{x}.conj().imag"),
)
BESIDE = (
    *("{x} * 2", "{x} + 1", "{x}.relu()", "{x}.sum()", "{x} + {x}", "-{x}", "{x}.clone()"),
    *("{x}.imag * 2", "{x}.conj().imag + 1", "{x}.conj().imag * {x}.real", "{x}.mT + 1"),
)


def draw(rng: random.Random) -> Case:
    """A case that eager can run: a brief one as often as a long one."""
    while True:
        case = (_brief if rng.random() < 0.5 else _draw)(rng)
        if case is not None:
            return case


def _runs(case: Case) -> bool:
    """Whether eager can run all calls, on the CPU."""
    try:
        for call in range(CALLS):
            seen(case.function(), case, call, "cpu")
    except Exception:
        return False
    return True


def _brief(rng: random.Random) -> Case | None:
    """Parts of inputs that lie elsewhere at each call, cut by a number, returned as they are."""
    table = f"base({rng.choice(TABLES)}, {rng.choice(TYPES)!r})"
    case = Case((table,), (), (), ())
    for _ in range(rng.choice((1, 1, 1, 2))):
        text = rng.choice(SLIDING).format(t="t0")
        case = dataclasses.replace(case, inputs=(*case.inputs, text))
    if not _runs(case):
        return None
    tensors = list(case.names)
    numbers = ["1", "2"]
    if rng.random() < 0.8:
        case = dataclasses.replace(case, inputs=(*case.inputs, rng.choice(NUMBERS)))
        numbers = [case.names[-1]]

    def drawn(pool: Sequence[str]) -> str:
        text = rng.choice(pool).format(
            x=rng.choice(tensors), y=rng.choice(tensors), n=rng.choice(numbers), d=rng.choice("01")
        )
        return text.replace("ONE", f"torch.tensor([1], device={tensors[0]}.device)")

    if rng.random() < 0.4:
        case = dataclasses.replace(case, body=(drawn(WRITES),))
    pools = [CUT, rng.choice((CUT, BESIDE, BESIDE)), rng.choice((CUT, BESIDE))]
    for pool in pools[: rng.randint(1, 3)]:
        for _ in range(20):
            more = dataclasses.replace(case, returned=(*case.returned, drawn(pool)))
            if _runs(more):
                case = more
                break
        else:
            return None
    return case


def _draw(rng: random.Random) -> Case | None:
    tables = tuple(
        f"base({rng.choice(TABLES)}, {rng.choice(TYPES)!r})" for _ in range(rng.choice((1, 1, 2)))
    )
    names = [f"t{i}" for i in range(len(tables))]
    case = Case(tables, (), (), ())
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        for _ in range(20):
            part = rng.choice(PARTS) if rng.random() < 0.8 else "{t}"
            text = part.format(t=rng.choice(names))
            if rng.random() < 0.05 and case.inputs:
                text = rng.choice(case.names)  # one argument twice
            more = dataclasses.replace(case, inputs=(*case.inputs, text))
            if _runs(more):
                case = more
                break
        else:
            return None
    tensors = list(case.names)
    numbers = []
    if rng.random() < 0.5:
        case = dataclasses.replace(case, inputs=(*case.inputs, rng.choice(NUMBERS)))
        numbers = [case.names[-1]] * 3
    numbers += ["1", "2"]
    writes = rng.random() < 0.6
    for at in range(rng.randint(1, 7)):
        for _ in range(30):
            kind = rng.random()
            pool = VIEWS if kind < 0.6 else WRITES if kind > 0.8 and writes else COMPUTED
            words = {
                "x": rng.choice(tensors[-2:] + tensors),
                "y": rng.choice(tensors),
                "n": rng.choice(numbers),
                "d": rng.choice(("0", "-1", "1")),
            }
            text = rng.choice(pool).format(**words)
            text = text.replace("ONE", f"torch.tensor([1], device={words['x']}.device)")
            name = f"v{at}"
            if pool is not WRITES:
                text = f"{name} = {text}"
            more = dataclasses.replace(case, body=(*case.body, text))
            # Each value is looked at: what grows without bound would slow all others.
            probe = (words["x"],) if pool is WRITES else (name,)
            if _runs(dataclasses.replace(more, returned=probe)):
                case = more
                if pool is not WRITES:
                    tensors.append(name)
                break
    returned = [rng.choice(tensors[-3:] + tensors) for _ in range(rng.randint(1, 4))]
    returned += rng.sample([*numbers[:1], f"{returned[0]}.shape"], rng.choice((0, 0, 0, 1)))
    case = dataclasses.replace(case, returned=tuple(returned))
    return case if _runs(case) else None


def smaller(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The case with all taken out that it fails without."""
    changed = True
    while changed:
        changed = False
        for less in _less(case):
            if _runs(less) and fails(less):
                case, changed = less, True
                break
    return case


def _less(case: Case) -> Iterator[Case]:
    for name in ("body", "returned"):
        parts = getattr(case, name)
        for i in reversed(range(len(parts))):
            yield dataclasses.replace(case, **{name: (*parts[:i], *parts[i + 1 :])})
    if len(case.inputs) > 1:
        yield dataclasses.replace(case, inputs=case.inputs[:-1])
    for i, text in enumerate(case.inputs):
        if "t0" in text and text != "t0":
            inputs = (*case.inputs[:i], "t0", *case.inputs[i + 1 :])
            yield dataclasses.replace(case, inputs=inputs)
    for i, line in enumerate(case.body):  # a value that passes through
        name, _, rest = line.partition(" = ")
        words = [w for w in case.names + [f"v{k}" for k in range(i)] if w in rest]
        for word in words:
            if rest != word:
                body = (*case.body[:i], f"{name} = {word}", *case.body[i + 1 :])
                yield dataclasses.replace(case, body=body)


def search(
    seed: int,
    seconds: float,
    most: int | None = None,
    device: str = "cpu",
    stop: bool = False,
    shrink: bool = True,
    **options: Any,
) -> tuple[Count, int, list[str]]:
    """Draw cases for a while: what was counted, how many cases there were, and what failed."""
    logging.disable(logging.CRITICAL)  # of what aot_eager refuses, too
    count, failures, at = Count(), [], 0
    begin = time.monotonic()
    end = begin + seconds
    while time.monotonic() < end and (most is None or at < most):
        case = draw(random.Random(f"{seed}/{at}"))
        at += 1
        try:
            check(case, dynamic := DYNAMIC[at % len(DYNAMIC)], count, device, **options)
        except DifferenceError as e:
            after = f"case {at}, seed {seed}/{at - 1}, after {time.monotonic() - begin:.0f} s"
            said = f"{after}, {e}"
            if shrink:
                case = smaller(case, functools.partial(_fails, dynamic, device, options))
                try:
                    check(case, dynamic, Count(), device, **options)
                except DifferenceError as less:
                    said = f"{after}, {less}"
            failures.append(said)
            print(said, flush=True)
            if stop:
                break
    return count, at, failures


def _fails(dynamic: bool | None, device: str, options: dict[str, Any], case: Case) -> bool:
    try:
        check(case, dynamic, Count(), device, **options)
    except DifferenceError:
        return True
    return False
