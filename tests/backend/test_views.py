"""Views of inputs, writes through them, and what else dynamo does not guard, beside eager.

The search runs on its own, for as long as one likes, and runs again what it printed::

    python tests/backend/test_views.py --minutes 60 --seed 3
    python tests/backend/test_views.py --case failing.py
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import views
from through_backend import through
from views import CALLS, DYNAMIC, Case, Count, check, search

from roundoff.errors import UnsupportedError

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")],
    ),
]


def case(tables: str, inputs: tuple[str, ...], *body: str, returned: tuple[str, ...]) -> Case:
    return Case((tables,), inputs, body, returned)


TABLE, ROWS = "base((4, 10), 'float32')", ("t0[c % 4]", "c + 1")
COMPLEX = "base((3, 4), 'complex64')"

#: Each was another program's answer, a crash, or memory that is another's.
NAMED: dict[str, Case] = {
    "the first numbers of a row": case(TABLE, ROWS, returned=("a[:b]", "a.relu()")),
    "the last numbers of a row": case(TABLE, ROWS, returned=("a[-b:]", "a * 2")),
    "columns, by a size": case(
        TABLE,
        ("t0[:, c:c + 4]", "2 + c % 3"),
        returned=("a[:, -b:]", "a[:b].expand(b, 4)[:1]", "-a"),
    ),
    "a row seen many times": case(
        TABLE, ("t0[c % 4][None]", "c + 2"), returned=("a.expand(b, 10)",)
    ),
    "the imaginary part of a conjugate": case(
        COMPLEX, ("t0[c % 2:]",), returned=("a.conj().imag * 2", "a.conj().imag")
    ),
    "an input that is marked as negative": case(
        COMPLEX, ("t0.conj().imag",), returned=("a + 1", "a.sum(-1)", "a")
    ),
    "a write to an input that is marked as negative": case(
        TABLE, ("torch._neg_view(t0[c % 2:])",), "a.add_(1)", returned=("a * 2", "a[1:]")
    ),
    "a conjugate is written where it was read": case(
        COMPLEX, ("t0[c % 2:]",), "a.copy_(a.conj())", returned=("a.imag", "a * 1")
    ),
    "a written input, seen many times": case(
        TABLE, ("t0[c % 3:c % 3 + 1]", "c + 2"), "a.mul_(2)", returned=("a.expand(b, 10)",)
    ),
    "a part that was written": case(
        TABLE, ("t0[c % 2:]", "c % 2 + 1"), "v = a[b:]", "v.mul_(2)", returned=("v", "a[:, b]")
    ),
    "a copy of a view that is not in memory of its own": case(
        COMPLEX,
        ("t0[c % 2:]",),
        "v = torch.view_as_real(a).clone()",
        "a.add_(1)",
        returned=("v", "a"),
    ),
    "numbers that only pass": case(
        COMPLEX, ("t0", "t0.mT"), returned=("a.flatten()", "a.clone()", "b.unbind()[1]", "a", "a")
    ),
    "other types in one memory": case(
        TABLE, ("t0[c % 4:]",), "v = a * 2", returned=("v", "v.view(torch.int32)", "v.mT[1:]")
    ),
    "memory around an input": case(
        TABLE,
        ("t0[c % 2:]",),
        returned=("a.as_strided((2, 3), (1, 2), 1) * 2", "a[1:].as_strided((2,), (3,)) + 1"),
    ),
    "memory around a value": case(
        TABLE, ("t0",), "v = a.mT * 2", returned=("v[1:, 1:3].as_strided((2, 2), (1, 5), 3) + 1",)
    ),
    "inputs that overlap, of which one is written": case(
        "base((40,), 'float32')",
        ("t0[c:c + 6]", "t0[c + 2:c + 8]"),
        "a.mul_(2)",
        returned=("b + 1",),
    ),
    "inputs that overlap elsewhere at each call": case(
        TABLE, ("t0[c % 3]", "t0[c % 3:, c:c + 3]"), "a.mul_(2)", returned=("b + 1", "a * 1")
    ),
    "an operator that is called copy, and a copy": case(
        TABLE, ("t0[c % 3:]",), "a.view(-1)[1] = 9", "v = a.clone()", returned=("v", "v.flatten()")
    ),
    "complex numbers, cut by their own size": case(
        COMPLEX.replace("(3, 4)", "(6 + c,)"),
        ("t0",),
        *("v = a.tensor_split(3, -1)[1]", "v.masked_fill_(v == v, 2)"),
        returned=("v.unflatten(0, (-1, 1))", "a[v.shape[0]:] * a.shape[0]"),
    ),
    "windows that reach each element": case(
        TABLE, ("t0[c % 2:]",), "a.unfold(1, 5, 5).add_(1)", returned=("a[1:]", "a * 2")
    ),
    "another view of what it was": case(
        TABLE, ("t0[c % 2:]",), "a.t_()", returned=("a", "a[1:]", "a * 2")
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dynamic", DYNAMIC)
@pytest.mark.parametrize("name", NAMED)
def test_a_fact_is_that_of_the_call(name: str, dynamic: bool | None, device: str) -> None:
    count = Count()
    check(NAMED[name], dynamic, count, device)
    assert count.equal == CALLS, count


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", NAMED)
def test_a_fact_is_that_of_the_call_in_a_cuda_graph(name: str) -> None:
    check(NAMED[name], None, device="cuda", mode="reduce-overhead")


JOINED = {
    "a select": (
        lambda a, b: (b.add_(1), (b[..., 0], a + 1))[1],
        lambda t, c: (t, t.flatten()[c : c + 6]),
    ),
    "a slice": (lambda a, b: (a.relu_(), b[..., -2:])[1], lambda t, c: (t[c], t[c, c:])),
    "of what is not written": (
        lambda a, b: (b.fill_(2), a[..., 0])[1],
        lambda t, c: (t[c], t.mT[c:]),
    ),
}


@pytest.mark.parametrize("dynamic", DYNAMIC)
@pytest.mark.parametrize("name", JOINED)
def test_a_view_of_inputs_that_share_what_is_written_is_refused(
    name: str, dynamic: bool | None
) -> None:
    """AOTAutograd takes it where the input began in the traced call: aot_eager is wrong, too."""
    f, inputs = JOINED[name]
    run = torch.compile(f, backend="roundoff", dynamic=dynamic)
    for c in range(3):
        given = inputs(torch.arange(60.0).reshape(5, 12), c)
        with torch.no_grad(), pytest.raises(UnsupportedError, match="shares memory"):
            run(*given)


def test_the_search_finds_nothing() -> None:
    """A minute of it, always the same cases; an hour is run before a release."""
    count, cases, failures = search(seed=0, seconds=60, shrink=False)
    assert not failures, "\n\n".join(failures)
    assert cases > 5, "the machine is too slow to see anything"
    assert count.equal > 3 * cases, count


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_the_search_finds_nothing_on_a_gpu(mode: str | None) -> None:
    _, _, failures = search(seed=1, seconds=60, device="cuda", shrink=False, mode=mode)
    assert not failures, "\n\n".join(failures)


def test_a_search_would_find_an_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view that is taken where the first call's lay is seen."""
    from roundoff.backend import outputs

    def of_the_first(self: Any, place: int, nodes: Any) -> Callable[..., Any]:
        value, self._plain = nodes[-1].meta["val"], False
        size, stride, offset = value.shape, value.stride(), value.storage_offset()
        return lambda args, *_: args[place].as_strided(size, stride, offset)

    monkeypatch.setattr(outputs.Outputs, "_of_input", of_the_first)
    with pytest.raises(views.DifferenceError, match="call"):
        check(NAMED["a row seen many times"], True)


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [None, False])
def test_an_overlap_that_the_traced_call_had_not_is_refused(dynamic: bool | None) -> None:
    """What is read was computed before the write: torch's own capture answers wrongly."""
    run = through(lambda x, y: (x.mul_(2), y + 1)[1], dynamic=dynamic)
    apart = torch.arange(12.0).reshape(2, 6)
    assert torch.equal(run(apart[0], apart[1]), apart[1] + 1), "one memory, no element of both"
    columns = torch.arange(24.0).reshape(2, 12)
    assert torch.equal(run(columns[0, ::2], columns[0, 1::2]), columns[0, 1::2] + 1)
    whole = torch.arange(9.0)
    with pytest.raises(UnsupportedError, match=r"overlaps another.*clone"):
        run(whole[:6], whole[3:])
    assert torch.equal(whole, torch.arange(9.0)), "nothing was written"


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [True, False])
def test_arrays_of_numpy_that_overlap_are_refused(dynamic: bool) -> None:
    """Each has a storage of its own, so that PyTorch's own capture takes them for apart."""
    run = through(lambda x, y: (x.mul_(2), y + 1)[1], dynamic=dynamic)
    for begin in (6, 3, 7, 2, 0):
        whole = np.arange(13, dtype=np.float32)
        x, y = torch.from_numpy(whole[1:7]), torch.from_numpy(whole[begin : begin + 6])
        if begin == 7:
            assert torch.equal(run(x, y), y + 1), "side by side"
            continue
        with pytest.raises(UnsupportedError, match=r"overlaps another.*clone"):
            run(x, y)
        assert (whole == np.arange(13)).all(), "nothing was written"


@torch.no_grad()
@pytest.mark.parametrize("both", [True, False])
def test_a_write_to_elements_that_lie_in_one_place_is_refused(both: bool) -> None:
    """A copy of them has a place for each: what was written to one did not reach the other."""
    run = through(lambda x, y: (x.narrow(0, 1, 1).mul_(2), y + 1)[1], dynamic=False)
    whole = torch.arange(6.0)
    with pytest.raises(UnsupportedError, match="in one place"):
        run(whole.unfold(0, 2, 1), whole if both else torch.ones(2))
    assert torch.equal(whole, torch.arange(6.0)), "nothing was written"


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(("size", "step"), [(2, 2), (2, 3)])
def test_windows_that_leave_elements_out_are_not_written(
    size: int, step: int, dynamic: bool
) -> None:
    """PyTorch's own capture writes zeros between them, and behind the last."""
    run = through(lambda x: (x.unfold(0, size, step)[:1].add_(1), x * 2), dynamic=dynamic)
    whole = torch.arange(7.0)
    with pytest.raises(UnsupportedError, match=r"unfold.*narrow"):
        run(whole)
    assert torch.equal(whole, torch.arange(7.0)), "nothing was written"


def main() -> int:
    """Search for a while, or run a case again; failing cases are printed as text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mode", choices=("default", "reduce-overhead"))
    parser.add_argument("--whole", action="store_true", help="print cases as they were drawn")
    parser.add_argument("--case", type=Path, help="a file with what was printed")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if chosen.case:
        found = eval(chosen.case.read_text(), {"Case": Case})
        for dynamic in DYNAMIC:
            check(found, dynamic, device=chosen.device, mode=chosen.mode)
        return 0
    count, cases, failures = search(
        chosen.seed,
        chosen.minutes * 60,
        device=chosen.device,
        mode=chosen.mode,
        shrink=not chosen.whole,
    )
    print("\n".join(count.examples))
    print(f"seed {chosen.seed}: {cases} cases of {CALLS} calls, {len(failures)} failures; {count}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
