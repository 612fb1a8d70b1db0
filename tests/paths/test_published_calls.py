"""The calls of the five published pages from which this project began, a function a page.

Whoever copies a page's code and changes its imports has it run here: the same names, arguments,
keys and formats. None of it may be cut.
"""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper as oh
import onnxruntime
import pandas
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaModel

from roundoff import (
    LayerNormalizationOrt,
    MatMulOrt,
    OptimizationOptions,
    TorchOnnxEvaluator,
    get_parsed_args,
    layer_norm,
    max_diff,
    onnx_custom_backend,
    onnx_dtype_name,
    onnx_dtype_to_np_dtype,
    onnx_dtype_to_torch_dtype,
    onnx_simple_text_plot,
    plot_dot,
    string_diff,
    string_type,
    unit_test_going,
)
from roundoff.errors import ArgumentError
from roundoff.kernels import interpreting

pytestmark = pytest.mark.usefixtures("fresh")
TFLOAT, TFLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
NUMBER = r"-?[\d.]+(?:e[+-]?\d+)?"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
THRESHOLDS = [">0.0", ">0.0001", ">0.001", ">0.01", ">0.1", ">1.0", ">10.0", ">100.0"]


# LayerNormalization implementation cannot be exchanged


def normed_product(itype: int) -> onnx.ModelProto:
    """LayerNormalization, MatMul, Add, in one type, with names for the sizes."""
    shapes: dict[str, list[str]] = {
        "X": ["a", "b", "c"],
        "scale": ["c"],
        "bias": ["c"],
        "weights": ["c", "c"],
        "bias2": ["c"],
    }
    nodes = [
        oh.make_node("LayerNormalization", ["X", "scale", "bias"], ["norm"], axis=-1),
        oh.make_node("MatMul", ["norm", "weights"], ["mm"]),
        oh.make_node("Add", ["mm", "bias2"], ["Z"]),
    ]
    inputs = [oh.make_tensor_value_info(n, itype, shape) for n, shape in shapes.items()]
    output = oh.make_tensor_value_info("Z", itype, ["a", "b", "c"])
    graph = oh.make_graph(nodes, "normed_product", inputs, [output])
    return oh.make_model(graph, ir_version=9, opset_imports=[oh.make_opsetid("", 18)])


@pytest.mark.parametrize("device", DEVICES)
def test_layer_normalization_cannot_be_exchanged(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNITTEST_GOING", "1")
    last_dim = 64 if unit_test_going() else 1152
    assert last_dim == 64
    assert plot_dot(normed_product(TFLOAT16)).startswith("<svg")
    provider = f"{device.upper()}ExecutionProvider"
    kws: dict[str, Any] = {"with_shape": True, "with_min_max": True, "with_device": True}
    vector = torch.rand((4, last_dim), dtype=torch.float16)
    feeds = {
        "X": (torch.rand((2, 1024, last_dim), dtype=torch.float16) - 0.5) * 120,
        "scale": vector[0],
        "bias": vector[1],
        "weights": torch.rand((last_dim, last_dim), dtype=torch.float16),
        "bias2": vector[2],
    }
    rows, mixed = [], []
    for itype in (TFLOAT, TFLOAT16):
        model = normed_product(itype)
        ttype, np_dtype = onnx_dtype_to_torch_dtype(itype), onnx_dtype_to_np_dtype(itype)
        tch_feeds = {k: v.to(device).to(ttype) for k, v in feeds.items()}
        ort_feeds = {k: v.detach().numpy().astype(np_dtype) for k, v in feeds.items()}

        expected = TorchOnnxEvaluator(model, providers=[provider]).run(None, tch_feeds)
        letter = "C" if device == "cpu" else "G"
        values = rf"\[{NUMBER},{NUMBER}:A{NUMBER}\]"
        size = f"s2x1024x{last_dim}"
        assert re.fullmatch(rf"#1\[{letter}T{itype}{size}{values}\]", string_type(expected, **kws))
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=[provider])
        got = session.run(None, ort_feeds)
        assert re.fullmatch(rf"#1\[A{itype}{size}{values}\]", string_type(got, **kws))

        diff = max_diff(expected, got, hist=True)
        assert list(diff["rep"]) == THRESHOLDS
        assert diff["n"] == 2 * 1024 * last_dim
        apart = np.abs(expected[0].double().cpu().numpy() - got[0].astype(np.float64))
        assert diff["abs"] == apart.max()
        assert diff["sum"] == pytest.approx(apart.sum())
        assert diff["rep"] == {t: (apart > float(t[1:])).sum() for t in THRESHOLDS}
        counts = "-".join(f"#{n}{t}" for t, n in diff["rep"].items() if n)
        line = f"abs={diff['abs']}, rel={diff['rel']}, n={diff['n']}/{counts}"
        assert string_diff(diff).startswith(line if diff["abs"] else "abs=0, rel=0")

        diff["dtype"], diff["provider"] = onnx_dtype_name(itype), device.upper()
        diff.update(diff["rep"])
        for key in ("rep", "dnan", ">100.0", ">10.0"):
            del diff[key]
        rows.append(diff)

        for kernels in (
            {("", "LayerNormalization"): LayerNormalizationOrt},
            {("", "MatMul"): MatMulOrt},
        ):
            evaluator = TorchOnnxEvaluator(model, custom_kernels=kernels, providers=[provider])
            other = evaluator.run(None, tch_feeds)
            assert other[0].device.type == device
            difft, diffo = max_diff(expected, other), max_diff(got, other)
            for each in (difft, diffo):
                assert "rep" not in each
                found = re.match(rf"abs=({NUMBER}), rel=({NUMBER}|inf)", string_diff(each))
                assert found is not None
                assert float(found[1]) == each["abs"] < 2  # of sums of some 30
            mixed.append({"dtype": onnx_dtype_name(itype), "diff_torch": difft["abs"]})

    frame = pandas.DataFrame(rows).set_index(["provider", "dtype"])
    assert frame.loc[(device.upper(), "FLOAT16"), "abs"] == rows[1]["abs"]
    assert frame[THRESHOLDS[:6]].to_numpy().sum() > 0
    assert pandas.DataFrame(mixed)["dtype"].tolist() == ["FLOAT"] * 2 + ["FLOAT16"] * 2


def test_types_by_their_number_and_a_line_for_a_difference() -> None:
    assert onnx_dtype_name(TFLOAT16) == "FLOAT16"
    assert onnx_dtype_to_np_dtype(TFLOAT16) == np.float16
    assert onnx_dtype_to_torch_dtype(TFLOAT16) == torch.float16
    expected = torch.full((4,), 256.0)
    got = expected.numpy() + np.float32([0, 0.25, 0.25, 0.0005])
    counts = "#3>0.0-#3>0.0001-#2>0.001-#2>0.01-#2>0.1"
    for pair in ((expected, got), ([expected], [got]), ([got], (expected,)), (expected, [got])):
        assert max_diff(*pair)["abs"] == 0.25
    diff = max_diff([expected], [got], hist=True)
    assert string_diff(diff) == f"abs=0.25, rel=0.0009765625, n=4.0/{counts}"
    assert string_diff(max_diff(expected, got)) == "abs=0.25, rel=0.0009765625, n=4.0"
    assert string_diff(max_diff(expected, expected.numpy(), hist=True)) == "abs=0, rel=0"
    assert {"abs", "rel", "sum", "n", "dnan"} <= diff.keys()
    assert len(pandas.DataFrame([diff])) == 1


# Fuse kernels in a small Llama model


def parsed(monkeypatch: pytest.MonkeyPatch, *line: str, **options: Any) -> Any:
    """What a script finds in its options when it is called with a command line."""
    monkeypatch.setattr(sys, "argv", ["page.py", *line])
    return get_parsed_args("page", **options)


def llama(device: str) -> tuple[LlamaModel, torch.Tensor, torch.Tensor]:
    """A small one with eager attention, its ids, and a mask as the page makes it."""
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=1,
        vocab_size=128,
        intermediate_size=96,
        max_position_embeddings=64,
        num_attention_heads=4,
    )
    config._attn_implementation = "eager"
    model = LlamaModel(config).to(device)
    ids = torch.randint(0, 127, (2, 16)).to(device)
    return model, ids, torch.tril(torch.ones(2, 16, dtype=torch.float32)).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_mask", [0, 1])
def test_fuse_kernels_in_a_small_llama(
    device: str,
    with_mask: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    model, ids, mask = llama(device)
    inputs = (ids, mask) if with_mask else (ids,)
    custom = {}
    with torch.no_grad():
        expected = model(*inputs).last_hidden_state
        tiers = ["", "default", "default+onnxruntime", "default+onnxruntime+experimental"]
        for optim in tiers:
            storage: dict[str, Any] = {}
            options = OptimizationOptions(
                constant_folding=True,
                patterns=None if optim == "" else optim,
                verbose=0,
                processor=device.upper(),
            )
            prefix = f"dump_{optim.replace('+', '_')}"

            def backend(
                *args: Any,
                optim: str = optim,
                options: OptimizationOptions = options,
                storage: dict[str, Any] = storage,
                prefix: str = prefix,
                **kwargs: Any,
            ) -> Any:
                return onnx_custom_backend(
                    *args,
                    target_opset=18,
                    verbose=0,
                    options=options,
                    optimize=optim != "",
                    storage=storage,
                    dump_prefix=prefix,
                    **kwargs,
                )

            compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
            for _ in range(3):
                got = compiled(*inputs).last_hidden_state
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
            graph = storage["instance"][0]["onnx"]
            assert {o.domain: o.version for o in graph.opset_import}[""] == 18
            custom[optim] = len([node for node in graph.graph.node if node.domain != ""])
            exported, optimised = (
                onnx.load(tmp_path / f"{prefix}_0{end}") for end in (".exported.onnx", ".onnx")
            )
            assert [i.name for i in exported.graph.input] == [i.name for i in optimised.graph.input]
            few, many = len(optimised.graph.node), len(exported.graph.node)
            assert few == many if optim == "" else few < many
    assert custom[""] == custom["default"] < custom["default+onnxruntime"]
    assert len(list(tmp_path.iterdir())) == 2 * len(tiers)
    assert capsys.readouterr().out == ""


def two_graphs(x: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.gelu(x @ x.T)
    torch._dynamo.graph_break()
    return y.sort(-1).values


def test_what_the_backend_says_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = torch.randn(3, 3)
    for verbose in (0, 1, 2):
        torch.compiler.reset()
        torch.compile(
            two_graphs,
            backend=lambda *args, verbose=verbose: onnx_custom_backend(
                *args, verbose=verbose, dump_prefix=tmp_path / "graph"
            ),
        )(x)
        said = capsys.readouterr().out
        if not verbose:
            assert said == ""
            continue
        for words in (
            r"converted to \d+ nodes of opset 20: .*Gelu 1",
            "fused by default.onnxruntime: .*matched: TransposedProduct 1",
            "left to torch: nothing",
            "left to torch: aten.sort.default, because no form in ONNX",
            f"wrote {tmp_path}/graph_{2 * verbose}.exported.onnx",
            f"wrote {tmp_path}/graph_{2 * verbose + 1}.onnx",
        ):
            assert re.search(words, said), words
        assert ("onnxruntime: TransposedProduct at" in said) is (verbose == 2)
    names = [f"graph_{n}{end}" for n in range(6) for end in (".exported.onnx", ".onnx")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_arguments_of_the_backend_that_cannot_be_had_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wrong: list[tuple[str, Any, str]] = [
        *(("target_opset", opset, "from 18 to") for opset in (0, 17, 99, -1)),
        *(("target_opset", opset, "number") for opset in ("18", 18.0, True)),
        *(("verbose", value, "number") for value in (-1, "no", None, 0.5)),
        *(("optimize", value, "True or False") for value in (1, "no", None)),
        *(("dump_prefix", value, "folder") for value in (3, "", tmp_path / "no" / "x", b"x")),
        ("dump_prefix", tmp_path / "file" / "x", "folder"),
    ]
    for name, value, words in wrong:
        torch.compiler.reset()
        run = torch.compile(
            torch.relu,
            backend=lambda *args, name=name, value=value: onnx_custom_backend(
                *args, **{name: value}
            ),
        )
        with pytest.raises(ArgumentError, match=f"{name}.*{words}"):
            run(torch.ones(2))


def test_options_of_the_llama_page(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {
        "config": ("medium", "large or medium"),
        "num_hidden_layers": (1, "number of hidden layers"),
        "with_mask": (0, "with a mask as a second input"),
        "description": "What the page does.\n\n::\n\n    python page.py --config large",
        "expose": "config,num_hidden_layers,with_mask",
    }
    found = parsed(monkeypatch, **options)
    assert (found.config, found.num_hidden_layers, found.with_mask) == ("medium", 1, 0)
    found = parsed(monkeypatch, "--config", "large", "--with_mask", "1", **options)
    assert (found.config, int(found.num_hidden_layers), found.with_mask) == ("large", 1, 1)


# Gemm exploration with CUDA


def test_options_of_the_gemm_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {
        "description": "One large product, or two small ones.",
        "config": ("small", "small, the default, ", "medium or large sizes"),
        "warmup": 3,
        "repeat": 5,
        "itype": (1, "1 or 10 for float or float16"),
        "expose": "config,itype,warmup,repeat",
    }
    found = parsed(monkeypatch, **options)
    assert (found.config, found.warmup, found.repeat, found.itype) == ("small", 3, 5, 1)
    assert not hasattr(found, "expose")
    line = ("--config", "512,1024", "--itype", "10", "--warmup", "1", "--repeat", "2")
    found = parsed(monkeypatch, *line, **options)
    assert (found.config, found.warmup, found.repeat, found.itype) == ("512,1024", 1, 2, 10)
    with pytest.raises(SystemExit):
        parsed(monkeypatch, "--help", **options)
    shown = " ".join(capsys.readouterr().out.split())
    assert "small, the default, medium or large sizes (default: small)" in shown
    assert "1 or 10 for float or float16 (default: 1)" in shown
    assert "--expose" not in shown


@pytest.mark.parametrize("itype", [TFLOAT, TFLOAT16])
def test_the_models_of_the_gemm_page_as_text(itype: int) -> None:
    def info(name: str) -> onnx.ValueInfoProto:
        return oh.make_tensor_value_info(name, itype, [None, None])

    nodes = [
        oh.make_node("Gemm", ["X", "Y"], ["XY"]),
        oh.make_node("Gemm", ["X", "Z"], ["XZ"]),
        oh.make_node("Concat", ["XY", "XZ"], ["XYZ"], axis=1),
    ]
    graph = oh.make_graph(nodes, "nd", [*map(info, "XYZ")], [info("XYZ")])
    model = oh.make_model(graph, opset_imports=[oh.make_opsetid("", 18)], ir_version=9)
    kind = {TFLOAT: "float32", TFLOAT16: "float16"}[itype]
    lines = onnx_simple_text_plot(model).splitlines()
    assert lines[0] == "opset: domain='' version=18"
    assert [line.split(" shape")[0] for line in lines[1:4]] == [
        f"input: name='{name}' type='{kind}'" for name in "XYZ"
    ]
    assert lines[4:7] == ["Gemm(X, Y) -> XY", "Gemm(X, Z) -> XZ", "  Concat(XY, XZ, axis=1) -> XYZ"]
    assert lines[7].startswith(f"output: name='XYZ' type='{kind}'")


# Layer normalization, in Triton


@pytest.mark.gpu
def test_layer_norm_forwards_and_twice_backwards() -> None:
    device = "cpu" if interpreting() else "cuda"
    rows, n, eps, dtype = 5, 40, 1e-5, torch.float16
    weight = torch.rand((n,), dtype=dtype, device=device, requires_grad=True)
    bias = torch.rand((n,), dtype=dtype, device=device, requires_grad=True)
    x = -2.3 + 0.5 * torch.randn((rows, n), dtype=dtype, device=device)
    dy = 0.1 * torch.randn_like(x)
    x.requires_grad_(True)
    results = []
    for norm in (layer_norm, torch.nn.functional.layer_norm):
        y = norm(x, (n,), weight, bias, eps)
        passes = []
        for _ in range(2):
            y.backward(dy, retain_graph=True)
            passes.append([t.grad.clone() for t in (x, weight, bias)])  # type: ignore[union-attr]
            x.grad, weight.grad, bias.grad = None, None, None
        assert all(map(torch.equal, *passes))
        results.append([y, *passes[0]])
    for ours, torchs in zip(*results, strict=True):
        assert torch.allclose(ours, torchs, atol=1e-2, rtol=0)


@pytest.mark.gpu
def test_layer_norm_is_timed_as_triton_does() -> None:
    import triton

    n, dtype = 4096, torch.float16
    weight = torch.rand((n,), dtype=dtype, device="cuda", requires_grad=True)
    bias = torch.rand((n,), dtype=dtype, device="cuda", requires_grad=True)
    x = torch.randn((64, n), dtype=dtype, device="cuda", requires_grad=True)
    dy = 0.1 * torch.randn_like(x)

    def forwards() -> torch.Tensor:
        return layer_norm(x, (n,), weight, bias, 1e-5)

    quantiles = [0.5, 0.2, 0.8]
    y = forwards()
    for timed in (
        triton.testing.do_bench(forwards, quantiles=quantiles, rep=50),
        triton.testing.do_bench(
            lambda: y.backward(dy, retain_graph=True), quantiles=quantiles, grad_to_none=[x], rep=50
        ),
    ):
        assert len(timed) == 3
        assert min(timed) > 0


# Reproducible parallelized reduction is difficult


def test_sums_in_several_orders_are_numpy_and_pandas_alone() -> None:
    values = np.random.default_rng(0).standard_normal(1024).astype(np.float32)
    orders = itertools.islice(itertools.permutations(range(8)), 40)
    sums = [float(values.reshape(8, 128)[list(order)].cumsum()[-1]) for order in orders]
    frame = pandas.DataFrame({"sum": sums})
    assert frame["sum"].nunique() > 1
