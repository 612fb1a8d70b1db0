"""Every snippet that an answer or a text prints, run as printed, and its result against the truth.

A snippet gets the names that its text says the reader has, with shapes, types and seeds that no
page uses. A new snippet needs a path here: ``test_every_snippet_has_a_path`` says which one lacks.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import pytest
import torch
import torch.distributed as dist
import transformers

import roundoff
import roundoff.reductions
from roundoff.compare import scaled_error
from roundoff.kernels import interpreting
from roundoff.workers import Workers

from .pages import Snippet, prompts_of, small_decoder, snippets, study_of

DEVICE = "cpu" if interpreting() else "cuda"
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def snippet(request: pytest.FixtureRequest) -> Snippet:
    return snippets()[request.param]


TRIED: set[str] = set()


def path_of(place: str) -> Any:
    """Marks a test as the path of a snippet."""
    TRIED.add(place)
    return pytest.mark.parametrize("snippet", [place], indirect=True)


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def off(truth: torch.Tensor, made: torch.Tensor) -> float:
    """The largest error, in ε of the type times the root mean square of the truth."""
    return scaled_error(truth, made.detach()).largest


def test_every_snippet_has_a_path() -> None:
    assert snippets().keys() == TRIED


@pytest.fixture
def only_imported(monkeypatch: pytest.MonkeyPatch) -> Any:
    """roundoff as ``import roundoff`` alone leaves it: no submodule is an attribute of it yet."""
    for name, value in list(vars(roundoff).items()):
        if inspect.ismodule(value) and value.__name__ == f"roundoff.{name}":
            monkeypatch.delattr(roundoff, name)
    return roundoff


# --- fusion


@path_of("plot_gemm_fusion")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("rows", "widths"), [(1, [80, 16, 16]), (37, [7, 130, 1])], ids=str)
def test_joined_weights_give_the_three_products(
    snippet: Snippet, dtype: torch.dtype, rows: int, widths: list[int]
) -> None:
    x = drawn(rows, 83, seed=1, dtype=dtype)
    query, key, value = (drawn(83, n, seed=n + 2, dtype=dtype) for n in widths)
    given = {"query": query, "key": key, "value": value}
    left = snippet.run(torch=torch, x=x, widths=widths, **given)
    for name, weight in given.items():
        made = left[name[0]]
        assert made.dtype == dtype
        assert off(x.double() @ weight.double(), made) < 16
        # "views: PyTorch's split copies nothing"
        assert made.untyped_storage().data_ptr() == left["q"].untyped_storage().data_ptr()


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh")
@path_of("plot_llama_backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_fastest_backend_gives_eagers_result_call_after_call(
    snippet: Snippet, dtype: torch.dtype, only_imported: Any
) -> None:
    parts = [torch.nn.Embedding(53, 40), torch.nn.LayerNorm(40), torch.nn.Linear(40, 24)]
    model = torch.nn.Sequential(*parts, torch.nn.SiLU()).eval().cuda().to(dtype)
    exact = copy.deepcopy(model).double()
    prompts = torch.randint(0, 53, (4, 2, 19), device="cuda")
    given = {"roundoff": only_imported, "partial": functools.partial, "torch": torch}
    with torch.no_grad():
        left = snippet.run(**given, model=model, ids=prompts[0])
        assert torch.equal(left["mine"](prompts[0]), model(prompts[0])), "the shortest is eager"
        for ids in prompts:
            made, truth, eager = left["fast"](ids), exact(ids), model(ids)
            assert made.dtype == dtype
            assert scaled_error(truth, made).rms < 2 * scaled_error(truth, eager).rms + 0.5


@pytest.mark.usefixtures("fresh")
@path_of("plot_whole_model")
def test_a_compiled_model_writes_eagers_tokens(
    snippet: Snippet, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_new_tokens": 20, "do_sample": False}
    asked = [prompts_of([5, 9]) | options, prompts_of([13, 4]) | options]
    eager, model = small_decoder("Llama"), small_decoder("Llama")
    # transformers compiles on a GPU only, unless it is told otherwise.
    monkeypatch.setattr(transformers.CompileConfig, "_compile_all_devices", True)
    backends, plain = [], torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda *a, **k: backends.append(k["backend"]) or plain(*a, **k)
    )
    with torch.no_grad():
        made = [snippet.run(model=model, inputs=inputs)["_"] for inputs in asked]
        wanted = [eager.generate(**inputs).tolist() for inputs in asked]
    for (static, configured), text in zip(made, wanted, strict=True):
        assert static.tolist() == configured.tolist() == text
    assert "roundoff" in backends


# --- kernels


@path_of("plot_batch_invariance")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_invariant_texts_have_the_same_bits_alone_and_in_a_batch(
    snippet: Snippet, dtype: torch.dtype, only_imported: Any
) -> None:
    model, lengths = small_decoder("Llama").to(dtype), [9, 4, 6]
    options = {
        "max_new_tokens": 5,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    batch = prompts_of(lengths)
    together = snippet.run(model=model, batch=batch | options)["text"]
    for i, length in enumerate(lengths):
        given = {name: t[i : i + 1, -length:] for name, t in batch.items()}
        left = snippet.run(model=model, batch=given | options)
        assert left["model"] is model, "changed in place"
        alone = left["text"]
        assert torch.equal(alone.sequences[0, -5:], together.sequences[i, -5:])
        for batched, single in zip(together.logits, alone.logits, strict=True):
            assert torch.equal(batched[i], single[0])


@path_of("plot_trainer_sampler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_trainer_reads_the_bits_that_a_sampler_wrote(
    snippet: Snippet, dtype: torch.dtype, only_imported: Any
) -> None:
    model = small_decoder("Llama").to(dtype)
    batch = prompts_of([7, 2, 5])
    kept: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda *call: kept.append(call[2]))
    torch.manual_seed(4)
    left = snippet.run(model=model, batch=batch | {"max_new_tokens": 12})
    assert left["texts"].shape == (3, 19)
    *written, read = kept
    assert torch.equal(read[:, 6:-1], torch.stack([logits[:, -1] for logits in written], 1))
    read.float().log_softmax(-1)[..., 0].sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def norm_of(m: int, n: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Inputs of a layer norm with a mean, its float64 gradients, and what a forward keeps."""
    given = {"x": drawn(m, n, seed=m) * 3 + 2, "dy": drawn(m, n, seed=m + 1)}
    given |= {"weight": 1 + drawn(n, seed=n) / 4, "bias": drawn(n, seed=n + 1)}
    given = {name: t.to(DEVICE, dtype) for name, t in given.items()}
    x, dy, w, b = (t.double().requires_grad_() for t in given.values())
    y = torch.nn.functional.layer_norm(x, (n,), w, b)
    exact = dict(zip(("dx", "dw", "db"), torch.autograd.grad(y, [x, w, b], dy), strict=True))
    given["mean"] = x.detach().mean(1).float()
    given["rstd"] = (x.detach().var(1, correction=0) + 1e-5).rsqrt().float()
    return given | {f"exact {name}": t.detach() for name, t in ({"y": y} | exact).items()}


@path_of("plot_layer_norm_ladder")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_in_pieces_give_the_gradients_of_a_layer_norm(
    snippet: Snippet, dtype: torch.dtype
) -> None:
    page = study_of("layer_norm_ladder")["ours"]
    norm = norm_of(30, 33, dtype)
    kernels = {name: getattr(page, name) for name in ("pieces_backward", "add_partial_sums")}
    left = snippet.run(torch=torch, w=norm["weight"], **kernels, **norm)
    dx, sums = left["dx"], left["sums"].to(dtype)
    for name, made in (("dx", dx), ("dw", sums[0]), ("db", sums[1])):
        assert off(norm[f"exact {name}"], made) < 16, name


@path_of("plot_triton_layer_norm")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("m", "n"), [(7, 200), (3, 1)])
def test_our_layer_norm_is_torchs_with_its_gradients(
    snippet: Snippet, m: int, n: int, dtype: torch.dtype
) -> None:
    given = norm_of(m, n, dtype)
    leaves = {k: given[k].clone().requires_grad_() for k in ("x", "weight", "bias")}
    left = snippet.run(**leaves, dy=given["dy"])
    assert off(given["exact y"], left["y"]) < 16
    for name, leaf in zip(("dx", "dw", "db"), leaves.values(), strict=True):
        truth = given[f"exact {name}"]
        # The gradient of one column is zero, and so is that of x where it is all that counts.
        assert off(truth, leaf.grad) < 16 or truth.abs().max() < 1e-6


# --- numerics


@path_of("plot_all_reduce_order")
def test_gathered_gradients_have_the_same_sum_on_any_number_of_ranks(snippet: Snippet) -> None:
    data = drawn(6, 1003, seed=11) * torch.logspace(-3, 3, 1003)

    def total(mine: torch.Tensor) -> torch.Tensor:
        names = {"torch": torch, "dist": dist, "functools": functools, "mine": mine}
        exec(snippet.code, names)
        return names["total"]

    with Workers(6) as workers:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            micro_batches = data.to(dtype)
            totals = [
                found
                for world in (1, 2, 3, 6)
                for found in workers.map(total, micro_batches.chunk(world))
            ]
            assert all(torch.equal(found, totals[0]) for found in totals)
            rounded = micro_batches.double()
            # Five additions, each within half a unit of what is added.
            bound = 5 * torch.finfo(dtype).eps * rounded.abs().sum(0)
            assert ((totals[0].double() - rounded.sum(0)).abs() <= bound).all()


@path_of("plot_bits_to_words")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gap_is_that_of_the_two_best_and_float32_writes_float64s_text(
    snippet: Snippet, dtype: torch.dtype
) -> None:
    model = small_decoder("Llama").to(dtype)
    exact = copy.deepcopy(model).double()
    inputs = prompts_of([7, 7, 7]) | {"max_new_tokens": 24, "do_sample": False}
    logits = model(inputs["input_ids"]).logits
    left = snippet.run(model=model, logits=logits)
    best, second = logits.double().topk(2).values.unbind(-1)
    truth = best - second
    error = (left["gap"].double() - truth).abs()
    assert (error <= torch.finfo(dtype).eps / 2 * truth).all()
    assert {p.dtype for p in left["model"].parameters()} == {torch.float32}
    wanted = exact.generate(**inputs)
    assert len(set(wanted[0].tolist())) > 10
    assert left["model"].generate(**inputs).tolist() == wanted.tolist()


@path_of("plot_layer_norm_discrepancies")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.filterwarnings("ignore:Specified provider")
def test_without_tf32_both_have_float32s_error(
    snippet: Snippet, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = drawn(37, 210, seed=3), drawn(210, 85, seed=4)
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]>'
        "product (float[N,210] X, float[210,85] W) => (float[N,85] Y) { Y = MatMul(X, W) }"
    )
    monkeypatch.chdir(tmp_path)
    onnx.save(model, "model.onnx")
    torch.set_float32_matmul_precision("high")  # what a reader may have
    (session, _) = snippet.run(onnxruntime=onnxruntime, torch=torch)["_"]
    assert torch.get_float32_matmul_precision() == "highest"
    if device == "cuda":
        assert session.get_providers()[0] == "CUDAExecutionProvider"
    truth = x.double() @ w.double()
    (ours,) = session.run(None, {"X": x.numpy(), "W": w.numpy()})
    assert off(truth, torch.from_numpy(ours)) < 16
    assert off(truth, (x.to(device) @ w.to(device)).cpu()) < 16
    picture, filters = drawn(2, 6, 19, 23, seed=5), drawn(9, 6, 3, 3, seed=6)
    convolved = torch.nn.functional.conv2d(picture.to(device), filters.to(device)).cpu()
    assert off(torch.nn.functional.conv2d(picture.double(), filters.double()), convolved) < 16


KINDS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "normal": lambda rng: rng.standard_normal(1000),
    "positive": lambda rng: rng.random(2**20),
    "spread": lambda rng: rng.standard_normal(1000) * 10.0 ** rng.uniform(-18, 18, 1000),
}


@path_of("plot_reduction_order")
@pytest.mark.parametrize("kind", KINDS)
def test_a_sum_is_right_in_every_order(snippet: Snippet, kind: str, only_imported: Any) -> None:
    """In float64 within its bound, and rounded once; exactly, with the same bits, by the others."""
    rng = np.random.default_rng(9)
    values = KINDS[kind](rng).astype(np.float32)
    exact = math.fsum(values)
    # Any order of n - 1 additions in float64 is within this of the truth; half a unit is rounding.
    bound = len(values) * 2.0**-53 * math.fsum(np.abs(values))
    bound += 0.5001 * float(np.spacing(np.float32(abs(exact))))
    of_numpy, of_torch, of_binned, imports, of_kernel = snippet.statements()
    names = imports.run()
    for x in (values, np.sort(values), values[::-1].copy(), rng.permutation(values)):
        tensor = torch.from_numpy(x)
        wide = [of_numpy.run(np=np, x=x), of_torch.run(torch=torch, x=tensor)]
        for (made,) in (left["_"] for left in wide):
            assert made.dtype in (np.float32, torch.float32)
            assert abs(float(made) - exact) <= bound
        results = [of_binned.run(roundoff=only_imported, x=x)]
        if len(x) == 1000:  # one that is interpreted takes long
            results.append(of_kernel.run(**names, x=tensor.to(DEVICE)))
        assert {float(left["_"][0]) for left in results} == {float(np.float32(exact))}


def tolerance_of(snippet: Snippet, which: int, names: dict[str, Any]) -> bool:
    """Whether a result passes the first or the second part of the snippet."""
    statements = snippet.statements()
    try:
        for statement in statements[:3] if which == 0 else statements[3:]:
            names |= statement.run(**names)
    except AssertionError:
        return False
    return True


@path_of("plot_which_tolerance")
@pytest.mark.parametrize("scale", [1.0, 2.0**-24, 2.0**30])
@pytest.mark.parametrize("terms", [1, 37, 1500])
def test_a_bound_passes_another_order_and_fails_a_missing_term(
    snippet: Snippet, terms: int, scale: float, only_imported: Any
) -> None:
    names = {"roundoff": only_imported, "b": drawn(terms, 23, seed=2)}
    for seed in range(9):
        names["a"] = a = scale * drawn(7, terms, seed=50 + seed)
        order = torch.randperm(terms, generator=torch.Generator().manual_seed(seed))
        names["got"] = a[:, order] @ names["b"][order]
        assert tolerance_of(snippet, 0, names)
        names["got"] = a[:, 1:] @ names["b"][1:]
        assert not tolerance_of(snippet, 0, names)


@path_of("plot_which_tolerance")
@pytest.mark.parametrize(
    ("dtype", "scale", "fault"),
    [
        (torch.float32, 2.0**-24, 1.0001),
        (torch.float32, 4.0, 1.0001),
        (torch.float16, 1.0, 1.2),
        (torch.bfloat16, 1.0, 1.2),
    ],
    ids=str,
)
def test_a_calibrated_tolerance_passes_fresh_inputs_and_fails_a_fault(
    snippet: Snippet, dtype: torch.dtype, scale: float, fault: float, only_imported: Any
) -> None:
    """In any type, and at another scale."""
    weight = drawn(300, 17, seed=5, dtype=dtype)

    def old(x: torch.Tensor) -> torch.Tensor:
        return x @ weight

    def new(x: torch.Tensor) -> torch.Tensor:  # fused: rounded once
        y = x[:, ::2].float() @ weight[::2].float() + x[:, 1::2].float() @ weight[1::2].float()
        return y.to(dtype)

    inputs = [drawn(9, 300, seed=seed, dtype=dtype) for seed in range(33)]
    names = {"roundoff": only_imported, "torch": torch, "old": old, "new": new, "inputs": inputs}
    failed = 0
    for seed in range(1000, 1060):
        names["y"] = scale * drawn(9, 300, seed=seed, dtype=dtype)
        failed += not tolerance_of(snippet, 1, names)
    assert failed <= 1
    names["new"] = lambda x: new(x) * (fault if x is names["y"] else 1)
    assert not tolerance_of(snippet, 1, names)


# --- texts


@path_of("README.md")
def test_the_file_of_a_reader_is_compared(
    snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A model that torch exports, with its weights in a second file, in an empty folder."""
    parts = [torch.nn.Linear(19, 37), torch.nn.Tanh(), torch.nn.LayerNorm(37)]
    module = torch.nn.Sequential(*parts).eval()
    for i, p in enumerate(module.parameters()):
        p.data = drawn(*p.shape, seed=i)
    example = (drawn(5, 19, seed=9),)
    torch.onnx.export(module, example, tmp_path / "model.onnx", dynamo=True, verbose=False)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    snippet.run()
    # What its comments say is printed.
    said = capsys.readouterr().out
    for begins in ("first differs at node: ", "nearer the truth: ", "advice: "):
        assert f"\n{begins}" in f"\n{said}"
    # "or feeds={name: array}", and the errors that it gives.
    provider = "CUDAExecutionProvider" if torch.cuda.is_available() else "CPUExecutionProvider"
    evaluator = roundoff.TorchOnnxEvaluator("model.onnx", [provider])
    feeds = {evaluator.input_names[0]: example[0].numpy()}
    found = roundoff.compare_runtimes("model.onnx", feeds=feeds).outputs
    truth = copy.deepcopy(module).double()(example[0].double())
    error = off(truth, evaluator.run(None, feeds)[0])
    assert found["error torch"].tolist() == pytest.approx([error], rel=1e-6)
