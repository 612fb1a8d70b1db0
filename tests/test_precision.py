"""TF32 by each of torch's switches: read right, set for a block, put back as it was."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roundoff import ort, timing
from roundoff.environment import environment
from roundoff.errors import ArgumentError
from roundoff.precision import switches, torch_precision, torch_tf32

backends: Any = torch.backends


def start() -> None:
    """Every switch as a fresh process has it."""
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = True
    for place in (backends, backends.cudnn, backends.cuda.matmul, backends.mkldnn.matmul):
        place.fp32_precision = "none"
    backends.cudnn.conv.fp32_precision = backends.cudnn.rnn.fp32_precision = "tf32"


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    start()
    yield
    start()


def setter(place: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(place, name, value)


def by_name(name: str) -> Callable[[], None]:
    return lambda: torch.set_float32_matmul_precision(name)


#: Each way to set TF32 of products, and whether products may use it afterwards.
WAYS: dict[str, tuple[Callable[[], None], bool]] = {
    "matmul.allow_tf32 on": (setter(backends.cuda.matmul, "allow_tf32", True), True),
    "matmul.allow_tf32 off": (setter(backends.cuda.matmul, "allow_tf32", False), False),
    "highest": (by_name("highest"), False),
    "high": (by_name("high"), True),
    "medium": (by_name("medium"), True),
    "matmul tf32": (setter(backends.cuda.matmul, "fp32_precision", "tf32"), True),
    "matmul ieee": (setter(backends.cuda.matmul, "fp32_precision", "ieee"), False),
    "cuda tf32": (setter(backends.cudnn, "fp32_precision", "tf32"), True),
    "all tf32": (setter(backends, "fp32_precision", "tf32"), True),
    "all ieee": (setter(backends, "fp32_precision", "ieee"), False),
}
#: What decides nothing about products on CUDA by itself.
OTHERS: dict[str, Callable[[], None]] = {
    "matmul none": setter(backends.cuda.matmul, "fp32_precision", "none"),
    "cuda none": setter(backends.cudnn, "fp32_precision", "none"),
    "cuda ieee": setter(backends.cudnn, "fp32_precision", "ieee"),
    "all none": setter(backends, "fp32_precision", "none"),
    "all bf16": setter(backends, "fp32_precision", "bf16"),
    "conv ieee": setter(backends.cudnn.conv, "fp32_precision", "ieee"),
    "rnn ieee": setter(backends.cudnn.rnn, "fp32_precision", "ieee"),
    "cudnn.allow_tf32 off": setter(backends.cudnn, "allow_tf32", False),
    "cudnn.allow_tf32 on": setter(backends.cudnn, "allow_tf32", True),
    "processor bf16": setter(backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "processor none": setter(backends.mkldnn.matmul, "fp32_precision", "none"),
}
ALL = {name: way for name, (way, _) in WAYS.items()} | OTHERS


def answer(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:
        return "raises"


def readings() -> list[Any]:
    """What each of torch's own readers says."""
    places = (backends, backends.cudnn, backends.cuda.matmul, backends.cudnn.conv)
    places = (*places, backends.cudnn.rnn, backends.mkldnn, backends.mkldnn.matmul)
    older = (
        torch.get_float32_matmul_precision,
        lambda: backends.cuda.matmul.allow_tf32,
        lambda: backends.cudnn.allow_tf32,
    )
    return [place.fp32_precision for place in places] + [answer(read) for read in older]


@pytest.mark.parametrize("way", WAYS)
def test_each_way_is_read_right(way: str) -> None:
    put, allowed = WAYS[way]
    put()
    found = environment()["precision"]
    assert torch_tf32() is ort.torch_tf32() is found["allow_tf32"] is allowed
    named = answer(torch.get_float32_matmul_precision)
    assert found["float32_matmul_precision"] == (None if named == "raises" else named)


@pytest.mark.parametrize(("first", "then"), list(itertools.permutations(WAYS, 2)))
def test_the_last_of_two_ways_counts(first: str, then: str) -> None:
    """Where the second is not overruled by the first, which is nearer to the product."""
    for way in (first, then):
        WAYS[way][0]()
    overruled = then.startswith(("all", "cuda")) and not first.startswith(("all", "cuda"))
    overruled |= (first, then) == ("cuda tf32", "all ieee")
    assert torch_tf32() is WAYS[first if overruled else then][1]


def test_convolutions_are_told_apart() -> None:
    assert switches()["cudnn_allow_tf32"] is True
    OTHERS["conv ieee"]()  # from here on cudnn.allow_tf32 raises
    assert switches()["cudnn_allow_tf32"] is False
    OTHERS["cudnn.allow_tf32 on"]()
    assert switches() == {
        "allow_tf32": False,
        "cudnn_allow_tf32": True,
        "float32_matmul_precision": "highest",
    }


@settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.sampled_from(list(ALL)), max_size=4),
    st.booleans(),
    st.lists(
        st.sampled_from(["matmul.allow_tf32 on", "high", "medium", "matmul none"]), max_size=2
    ),
    st.lists(st.sampled_from(list(ALL)), max_size=2),
)
def test_a_block_leaves_no_trace(before: list[str], tf32: bool, inside: list, after: list) -> None:
    """Whatever is set afterwards has the effect that it had without the block."""

    def run(block: bool) -> list[Any]:
        start()
        for way in before:
            ALL[way]()
        told = [readings()]
        if block:
            with torch_precision(tf32):
                assert torch_tf32() is tf32
                for way in inside:
                    ALL[way]()
        told.append(readings())
        for way in after:
            ALL[way]()
            told.append(readings())
        return told

    assert run(block=True) == run(block=False)


@pytest.mark.parametrize("tf32", [True, False])
def test_both_families_of_switches_may_be_read_within_a_block(tf32: bool) -> None:
    with torch_precision(tf32):
        assert backends.cuda.matmul.allow_tf32 is tf32
        assert (torch.get_float32_matmul_precision() == "high") is tf32
        assert (backends.cuda.matmul.fp32_precision == "tf32") is tf32


def test_an_error_ends_a_block_and_a_wrong_switch_does_not_begin_one() -> None:
    found = readings()
    with pytest.raises(KeyError), timing.torch_precision(True):
        raise KeyError
    with pytest.raises(ArgumentError), torch_precision("no"):  # type: ignore[arg-type]
        pass
    assert readings() == found
    assert timing.torch_precision is torch_precision


def test_a_function_may_be_run_in_a_precision() -> None:
    assert torch_precision(True)(torch_tf32)() is True
    assert torch_tf32() is False


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_product_on_a_gpu_has_the_digits_that_are_read(way: str) -> None:
    put, allowed = WAYS[way]
    put()
    x = torch.randn(512, 512, device="cuda", dtype=torch.float64)
    error = ((x.float() @ x.float()).double() - x.float().double() @ x.float().double()).abs().max()
    assert (error > 1e-3).item() is allowed
