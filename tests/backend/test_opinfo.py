"""PyTorch's own database of operators, each operator through the backend and beside eager."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from through_backend import compiled, tensors
from torch.utils._pytree import tree_leaves, tree_map

from roundoff.backend.convert import UNFORESEEN

# torch's samples are made with it.
pytest.importorskip("expecttest")

#: Types that an operator is tried in, where torch's kernels on a processor have them.
TYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int8", "uint8", "bool",
         "complex64")  # fmt: skip
#: How many tests the operators of one type are.
SHARDS = 8
#: Operators of memory that nobody has written: no two runs agree.
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty",
             "new_empty_strided"}  # fmt: skip
#: Operators that the backend refuses: why. One that no longer fails is found.
KNOWN: dict[str, str] = {
    "as_strided_partial_views": "it reads memory that is not its tensor's",
    "chalf": "ONNX has no complex32",
    **dict.fromkeys(
        ["linalg_cholesky", "linalg_inv", "linalg_ldl_factor", "linalg_lu_factor",
         "linalg_matrix_power", "linalg_solve", "linalg_tensorinv", "linalg_tensorsolve", "lu"],
        "a solver's check has an effect, which no graph of ours keeps",
    ),
}  # fmt: skip
#: Operators that have a form in ONNX, and some that pass complex numbers: tried at each change.
QUICK = {
    "float32": (
        "add addmm arange baddbmm cat clamp constant_pad_nd cumsum expand full gather index_copy "
        "log_softmax matmul mean nn.functional.conv2d nn.functional.gelu nn.functional.layer_norm "
        "nn.functional.linear nn.functional.scaled_dot_product_attention pow repeat select softmax "
        "split sum where"
    ),
    "int64": "add addmm floor_divide pow sum",
    "complex64": "chunk contiguous flatten positive split unbind",
}


@functools.cache
def database() -> dict[str, Any]:
    """Full name -> operator of torch's database, which takes seconds to import."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {op.formatted_name: op for op in op_db}


def samples(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    """The first, the last, two without elements, one that does not lie in order."""
    every = list(op.sample_inputs("cpu", dtype, requires_grad=False))
    yield from every[:1] + every[1:][-1:]
    between = [(s, tensors((s.input, s.args, s.kwargs))) for s in every[1:-1]]
    between = [(s, ts) for s, ts in between if all(t.layout == torch.strided for t in ts)]
    yield from itertools.islice((s for s, ts in between if any(t.numel() == 0 for t in ts)), 2)
    loose = next((s for s, ts in between if not all(t.is_contiguous() for t in ts)), None)
    if loose is not None:
        yield loose
    elif every and all(t.layout == torch.strided for t in tensors(every[0].input)):
        yield every[0].noncontiguous()


def copied(tree: Any) -> Any:
    """A copy that lies as the original does."""

    def one(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.is_conj():
            return x.clone() if isinstance(x, torch.Tensor) else x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)

    return tree_map(one, tree)


def call(f: Callable[..., Any], sample: Any) -> Any:
    """Results, and the arguments after the call; or what it raises."""
    x, args, kwargs = copied((sample.input, tuple(sample.args), dict(sample.kwargs)))
    torch.manual_seed(0)
    try:
        return f(x, *args, **kwargs), tensors((x, args, kwargs))
    except Exception as e:
        return e


def difference(made: Any, expected: Any) -> str:
    """How two results of a call differ; empty where they do not."""
    if isinstance(made, Exception) or isinstance(expected, Exception):
        same = isinstance(made, Exception) and isinstance(expected, Exception)
        return "" if same else f"{made!r:.400} where eager has {expected!r:.200}"
    ours, theirs = tree_leaves(made), tree_leaves(expected)
    try:
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            if isinstance(other, (torch.Tensor, float, int, complex)):
                torch.testing.assert_close(one, other, equal_nan=True)
            else:
                assert one == other
    except AssertionError as e:
        return " ".join(f"{e!s:.400}".split()) if str(e) else f"{made!r:.200}, {expected!r:.200}"
    return ""


def failures(op: Any, dtype: torch.dtype, most: int | None = None) -> Iterator[str]:
    """What differs from eager, and does not differ in the same way through ``aot_eager``."""
    picked = list(samples(op, dtype))[:most]
    for name, function in (("", op.op), (" in place", op.inplace_variant if not most else None)):
        if function is None:
            continue
        torch._dynamo.reset()

        def f(x: Any, *args: Any, function: Any = function, **kwargs: Any) -> Any:
            return function(x, *args, **kwargs)

        run, graphs = compiled(f, dynamic=None, fullgraph=False)
        for i, sample in enumerate(picked):
            expected = call(f, sample)
            found = difference(call(run, sample), expected)
            if found and not isinstance(expected, Exception):
                torch._dynamo.reset()
                if not difference(call(torch.compile(f, backend="aot_eager"), sample), expected):
                    yield f"{op.formatted_name}{name}, {dtype}, sample {i}: {found}"
        for graph in graphs:
            yield from (
                f"{op.formatted_name}{name}: {target}: {why}"
                for target, why in graph.by_torch.items()
                if why.startswith(UNFORESEEN)
            )


def check(names: list[str], kind: str, most: int | None = None) -> None:
    dtype, found, healed = getattr(torch, kind), [], []
    for name in names:
        op = database()[name]
        if op.name in UNDEFINED or dtype not in op.supported_dtypes("cpu"):
            continue
        with torch.no_grad():
            own = list(failures(op, dtype, most))
        if name not in KNOWN:
            found += own
        elif not own and kind == "float32":
            healed.append(name)
    assert not found, "\n".join(found)
    assert not healed, f"no longer fail: {healed}"


@pytest.mark.parametrize("kind", QUICK)
def test_some_operators_are_eagers(kind: str) -> None:
    names = QUICK[kind].split()
    check([n for n, op in database().items() if op.name in names], kind, most=2)


@pytest.mark.slow(reason="a quarter of an hour on four cores; some operators are tried each time")
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_operator_is_eagers(kind: str, shard: int) -> None:
    check(sorted(database())[shard::SHARDS], kind)
