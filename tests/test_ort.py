"""Sessions and zero-copy exchange with ONNX Runtime."""

import gc
import sys

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from roundoff import ort
from roundoff.dtypes import DTYPES
from roundoff.errors import (
    DtypeError,
    ModelError,
    ShapeError,
    UnsupportedError,
)
from roundoff.ort import binding

CPU = "CPUExecutionProvider"
SHARED = [
    getattr(torch, info.name)
    for info in DTYPES.values()
    if info.kind != "complex" and info.bits >= (16 if info.is_float else 8)
]


def one_node(
    op, n_inputs, itype=TensorProto.FLOAT, out_type=None, shape=None, opset=20, **attributes
):
    names = [f"X{i}" for i in range(n_inputs)]
    info = [helper.make_tensor_value_info(n, itype, shape) for n in names]
    out = helper.make_tensor_value_info("Y", out_type or itype, None)
    graph = helper.make_graph([helper.make_node(op, names, ["Y"], **attributes)], "g", info, [out])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


@pytest.mark.parametrize("dtype", SHARED, ids=str)
def test_exchange_shares_the_memory(dtype):
    x = torch.tensor([[0, 1, 2], [3, 0, 1]]).to(dtype)
    value = ort.to_ort(x)
    back = ort.from_ort(value)
    assert value.data_ptr() == x.data_ptr()
    assert back.data_ptr() == x.data_ptr()
    assert back.dtype == dtype
    assert torch.equal(back.float(), x.float())
    for view in (x.t(), x[:, ::2], x[None].expand(3, -1, -1)):
        back = ort.from_ort(ort.to_ort(view))
        assert back.shape == view.shape
        assert torch.equal(back.float(), view.float())


@pytest.mark.parametrize(
    "array",
    [np.arange(4.0)[::-1], np.array([True, False]), np.array([1.5, -2.0], ml_dtypes.bfloat16)],
    ids=lambda a: a.dtype.name,
)
def test_arrays(array):
    back = ort.from_ort(ort.to_ort(array))
    assert np.array_equal(back.double().numpy(), array.astype(np.float64))


def test_the_memory_outlives_tensors_and_session():
    value = ort.to_ort(torch.full((100_000,), 7.0, requires_grad=True))
    back = ort.from_ort(ort.to_ort(np.full(100_000, 7.0)))
    made = ort.session(one_node("Neg", 1))
    outs = [made.run({"X0": torch.full((100_000,), float(i))})[0] for i in range(5)]
    del made
    gc.collect()
    torch.zeros(100_000), np.zeros(100_000)
    assert value.numpy().sum() == back.sum() == 700_000
    assert [o.mean().item() for o in outs] == [0.0, -1, -2, -3, -4]


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(2, dtype=torch.float8_e5m2),
        np.zeros(2, complex),
        np.zeros(2, ml_dtypes.int4),
    ],
)
def test_types_that_cannot_cross(value):
    with pytest.raises(DtypeError):
        ort.to_ort(value)


@pytest.mark.parametrize("onnx_type", [TensorProto.INT4, TensorProto.FLOAT8E4M3FN])
def test_an_output_that_cannot_cross(onnx_type):
    made = ort.session(one_node("Cast", 1, out_type=onnx_type, opset=23, to=onnx_type))
    with pytest.raises(DtypeError, match=r"share.*Cast in the model"):
        made.run({"X0": torch.ones(2)})


def test_a_binding_reads_and_writes_in_place():
    made = ort.session(one_node("Neg", 1))
    x = torch.ones(3)
    bound = made.bind({"X0": x})
    (first,) = bound.run()
    x.fill_(5)
    (second,) = bound.run()
    assert first.data_ptr() == second.data_ptr()
    assert first.tolist() == [-5, -5, -5]


def test_a_bound_run_raises_no_exception_inside():
    """onnxruntime looks up an entry of the run options by exception where it is not set: 80 µs."""
    bound = ort.session(one_node("Neg", 1)).bind({"X0": torch.ones(3)})
    bound.run()
    exceptions = []
    sys.setprofile(
        lambda _, event, function: event == "c_exception" and exceptions.append(function)
    )
    try:
        bound.run()
    finally:
        sys.setprofile(None)
    assert exceptions == []


def test_feeds_that_do_not_fit_are_refused_without_a_log(capfd):
    fed = {"X0": torch.ones(2, 2), "X1": torch.ones(3, 2)}
    with pytest.raises(ShapeError, match="mismatch"):
        ort.session(one_node("Gemm", 2)).run(fed)
    with pytest.raises(DtypeError, match="expected float32"):
        ort.session(one_node("Gemm", 2)).run({name: x.double() for name, x in fed.items()})
    assert capfd.readouterr().err == ""  # ONNX Runtime's own log stays quiet


@pytest.mark.filterwarnings("ignore:Specified provider")
@pytest.mark.parametrize(
    ("model", "provider", "error", "match"),
    [
        # Built in, yet absent when asked for: ONNX Runtime then quietly computes on the CPU.
        (one_node("Neg", 1), "MIGraphXExecutionProvider", UnsupportedError, "does not start"),
        (one_node("Gemm", 2, TensorProto.BFLOAT16), CPU, UnsupportedError, ""),
        ("/no/such/file.onnx", CPU, ModelError, ""),
    ],
)
def test_what_makes_no_session(monkeypatch, model, provider, error, match):
    built_in = ["MIGraphXExecutionProvider", CPU]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: built_in)
    with pytest.raises(error, match=match):
        ort.session(model, [provider])


def test_options_reach_the_session(tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(one_node("Neg", 1), path)
    entries = {"session.disable_prepacking": True}
    made = ort.session(path, threads=2, optimization="none", session_options=entries)
    options, levels = made.raw.get_session_options(), onnxruntime.GraphOptimizationLevel
    assert options.intra_op_num_threads == 2
    assert options.graph_optimization_level == levels.ORT_DISABLE_ALL
    assert options.get_session_config_entry("session.disable_prepacking") == "1"
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_strings_and_sequences():
    strings = ort.session(one_node("StringConcat", 2, TensorProto.STRING, shape=[None]))
    (joined,) = strings.run({f"X{i}": np.array(["a", "b"], dtype=object) for i in range(2)})
    assert joined.tolist() == ["aa", "bb"]
    with pytest.raises(UnsupportedError, match="bound"):
        strings.bind({})
    model = one_node("SequenceConstruct", 2)
    model.graph.output[0].CopyFrom(
        helper.make_tensor_sequence_value_info("Y", TensorProto.FLOAT, None)
    )
    (sequence,) = ort.session(model).run({"X0": torch.ones(2), "X1": torch.zeros(1)})
    assert [t.tolist() for t in sequence] == [[1, 1], [0]]


@pytest.fixture
def _keep_precision():
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("_keep_precision")
def test_tf32_follows_torch_unless_told():
    for switch in (True, False):
        torch.backends.cuda.matmul.allow_tf32 = switch
        assert ort.torch_tf32() is switch
    assert ort.session(one_node("Neg", 1)).tf32 is False


def test_an_initializer_may_be_overridden():
    model = one_node("Add", 2)
    model.graph.initializer.append(helper.make_tensor("X1", TensorProto.FLOAT, [1], [10.0]))
    made = ort.session(model)
    assert made.run({"X0": torch.ones(1)})[0].item() == 11
    assert made.run({"X0": torch.ones(1), "X1": torch.ones(1)})[0].item() == 2


def test_out_of_memory_is_a_memory_error():
    class RuntimeException(Exception): ...  # noqa: N818 - the name ONNX Runtime gives it

    arena = RuntimeException(
        "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : /x/y.cc:376 void* f() Failed to allocate "
        "memory for requested buffer of size 68719476736"
    )
    found = binding.translated(arena, "run")
    assert type(found) is MemoryError
    assert "/x/y.cc" not in str(found)


@pytest.mark.skipif(
    not torch.cuda.is_available()
    or "CUDAExecutionProvider" not in onnxruntime.get_available_providers(),
    reason="needs a GPU and onnxruntime-gpu",
)
class TestCuda:
    @pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
    def test_a_chain_of_runs_keeps_its_order(self, side):
        stream = torch.cuda.Stream() if side else torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            made = ort.session(one_node("Gemm", 2), ["CUDAExecutionProvider"], tf32=False)
            assert (made.stream is not None) == side
            g = torch.Generator("cuda").manual_seed(0)
            w = torch.randn(2048, 2048, device="cuda", generator=g) / 2048**0.5
            x = want = torch.randn(2048, 2048, device="cuda", generator=g)
            for _ in range(10):
                x = made.run({"X0": x * 1.0, "X1": w})[0]
                want = want.double() @ w.double()
            assert x.device.type == "cuda"
            assert (x.double() - want).abs().max() < 1e-2

    def test_tf32_reaches_the_provider(self):
        for tf32 in (False, True):
            made = ort.session(one_node("Gemm", 2), ["CUDAExecutionProvider"], tf32=tf32)
            assert made.tf32 is tf32
