"""Every *your own* cell, run as in a notebook, with something of a reader's: right, or refused.

A cell runs after the imports of its page, and after nothing else of it. What a reader puts in has
shapes, types and seeds that no page uses.
"""

from __future__ import annotations

import builtins
import math
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from roundoff import TorchOnnxEvaluator, session
from roundoff.compare import scaled_error
from roundoff.errors import RoundoffError
from roundoff.models import load_trained
from roundoff.reductions import add_in_order, round_to

from .pages import PAGES, own_cell, run_cell, run_imports, small_decoder

slow = pytest.mark.slow(reason="it reads a model of 135 million parameters")


class Notebook:
    """A page's own cell, as often as a reader runs it."""

    def __init__(self, page: str) -> None:
        self.page, self.cell = page, own_cell(page)
        # Dynamo and pickle look for a function's module by its name; no worker can import it.
        self.module = types.ModuleType(f"page_{page}")
        sys.modules[self.module.__name__] = self.module
        cloudpickle.register_pickle_by_value(self.module)
        self.names = vars(self.module)
        self.names.update(__doc__="", np=np, torch=torch, small_decoder=small_decoder)
        run_imports(page, self.names)

    def run(self, **changed: str) -> dict[str, Any]:
        """The cell's names after it ran with these values put in; ``_``: its bare expressions."""
        self.names["_"] = run_cell(self.page, self.cell, self.names, **changed)
        return self.names


@pytest.fixture(scope="module")
def own(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Notebook]:
    """The notebook of a page, of quick sizes, in a folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNITTEST_GOING", "1")
        patch.setattr(builtins, "__IPYTHON__", True, raising=False)
        patch.chdir(tmp_path_factory.mktemp("notebook"))
        notebook = Notebook(request.param)
        yield notebook
        torch._dynamo.reset()
        del sys.modules[notebook.module.__name__]


TRIED: set[str] = set()


def on(page: str) -> Any:
    TRIED.add(page)
    return pytest.mark.parametrize("own", [page], indirect=True)


# --- fusion


@on("plot_gemm_fusion")
@pytest.mark.parametrize(
    ("dtype", "rows", "widths"),
    [("float32", 3, "(33, 5, 130)"), ("float16", 1, "(7, 7)"), ("bfloat16", 37, "(1,)")],
)
def test_own_weights_of_a_product(
    own: Notebook, dtype: str, rows: int, widths: str, capsys: pytest.CaptureFixture
) -> None:
    drawn = "torch.randn({}, generator=torch.manual_seed(1)).to(torch." + dtype + ")"
    weights = f"[{drawn.format('n, 70')}.T.requires_grad_() for n in {widths}]"
    names = own.run(X=drawn.format(f"{rows}, 70"), WEIGHTS=weights)
    shown = capsys.readouterr().out.splitlines()
    exact = names["X"].double()
    for line, name in zip(shown, ["separate", "one product"], strict=True):
        assert line.startswith(name)
        assert 0.05 < float(line.split()[-1]) < 8
        for result, weight in zip(names["products"][name](), names["WEIGHTS"], strict=True):
            assert scaled_error(exact @ weight.double(), result).rms < 8


@on("plot_llama_backend")
def test_own_model_under_the_backend(own: Notebook, capsys: pytest.CaptureFixture) -> None:
    names = own.run(
        MODEL="torch.nn.Sequential(torch.nn.Conv1d(3, 8, 5), torch.nn.BatchNorm1d(8), "
        "torch.nn.GELU())",
        INPUTS="(torch.randn(2, 3, 41, generator=torch.manual_seed(2)),)",
    )
    shown = {}
    for line in capsys.readouterr().out.splitlines():
        shown[line[:12].strip()] = float(line.split("error ")[1])
    assert shown.keys() == {"eager", "inductor", "ONNX Runtime"}
    inputs = names["INPUTS"]
    with torch.no_grad():
        made = names["MODEL"](*inputs)
        truth = names["MODEL"].double()(*(t.double() for t in inputs))
    assert shown["eager"] == pytest.approx(scaled_error(truth, made).rms, rel=0.01)
    assert all(error < 2 * shown["eager"] + 0.5 for error in shown.values()), shown


@pytest.mark.usefixtures("fresh")
@on("plot_whole_model")
def test_own_decoder_writes_eagers_text(
    own: Notebook, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    decoder_of(tmp_path, "Qwen2")
    text = "Nobody in the house had heard a kettle"
    names = own.run(MODEL=repr(str(tmp_path)), TEXT=repr(text), TOKENS="9", LAYERS="None")
    shown = [line for line in capsys.readouterr().out.splitlines() if "tokens/s" in line]
    assert len(shown) == 4
    assert all(line.endswith("different tokens: 0") for line in shown), shown
    truth, _ = names["load_decoder"](tmp_path)
    wanted = truth.generate(**names["inputs"], **names["options"], use_cache=False)
    assert names["written"]["roundoff"].tolist() == wanted[0].tolist()


def decoder_of(folder: Path, kind: str) -> None:
    """A small decoder in a folder, with SmolLM2's tokenizer."""
    small_decoder(kind, vocab_size=49152).save_pretrained(folder)
    load_trained(layers=1).tokenizer.save_pretrained(folder)


# --- kernels


OWN_MODELS = {
    "a product": ("torch.nn.Linear(333, 41)", "torch.randn(40, 333)"),
    "left in training": (
        "torch.nn.Sequential(torch.nn.Linear(4096, 64), torch.nn.Dropout(0.5)).train()",
        "torch.randn(9, 4096)",
    ),
    "in bfloat16": ("torch.nn.Linear(1536, 576).bfloat16()", "torch.randn(33, 1536).bfloat16()"),
    "a language model": ("small_decoder('Llama')", "torch.randint(99, (20, 12))"),
}


@on("plot_batch_invariance")
@pytest.mark.parametrize("name", OWN_MODELS)
def test_own_model_in_a_batch(own: Notebook, name: str, capsys: pytest.CaptureFixture) -> None:
    model, batch = OWN_MODELS[name]
    names = own.run(MODEL=model, BATCH=batch)
    lines = re.findall(r"(.+), of (\w+) (.+): (.+)", capsys.readouterr().out)
    changed = {(way, what): found for way, what, _, found in lines}
    padded = {tried for _, what, tried, _ in lines if what == "padding"}
    assert padded == {"[1, 5, 16, 37]" if "language" in name else "[]"}, "where a mask is taken"
    assert changed["invariant(model)", "rows"] == changed["invariant(model)", "padding"] == "[]"
    rows, given = names["BATCH"], {}
    with torch.no_grad():
        for size in (n for n in (1, 2, 3, 4, 8, 16, 32, 64, len(rows)) if n <= len(rows)):
            out = names["MODEL"](rows[:size])
            given[size] = getattr(out, "logits", out)
        fixed = names["FIXED"](rows)
    moved = [n for n in names["sizes"] if not torch.equal(given[n][0], given[1][0])]
    assert changed["torch", "rows"] == str(moved)
    # It computes what the model computes.
    found = getattr(fixed, "logits", fixed)
    torch.testing.assert_close(found, given[len(rows)], rtol=0.05, atol=0.05)


@on("plot_trainer_sampler")
@pytest.mark.parametrize(
    ("kind", "more", "text"),
    [
        ("Llama", ".bfloat16()", "list(range(1, 98))"),
        ("Qwen2", ".train()", "[7, 2]"),
    ],
)
def test_own_model_of_a_trainer(
    own: Notebook, kind: str, more: str, text: str, capsys: pytest.CaptureFixture
) -> None:
    names = own.run(MODEL=f"small_decoder('{kind}'){more}", TEXT=text)
    pattern = r"(.+?) *(\{.*\})  differ: (\d+)  KL: (\S+)  outside: ([\d.]+)%"
    found = re.findall(pattern, capsys.readouterr().out)
    assert [way for way, *_ in found] == ["torch"] * 5 + ["invariant(model)"] * 5
    tokens, scores = torch.tensor([names["TEXT"]]), names["scores"]
    with torch.no_grad():  # the scores are the model's, whatever the way
        truth = names["MODEL"](tokens).logits[0, :-1].double().log_softmax(-1)
    assert torch.equal(scores(names["MODEL"]), truth)
    for way, how, differ, kl, outside in found:
        made = scores(names["MODEL"], **eval(how))
        torch.testing.assert_close(made, truth, rtol=0, atol=0.1)
        changed = (made - truth).gather(1, tokens[0, 1:, None]) != 0
        assert int(differ) == (changed.sum() if way == "torch" else 0)
        assert way == "torch" or float(kl) == float(outside) == 0


MINE = """def mine(x, dy, w, mean, rstd):
    scaled, g = x.float() * rstd[:, None], w.float() * dy.float()
    dx = rstd[:, None] * (g - scaled * (g * scaled).mean(1, keepdim=True))
    return dx.to(x.dtype), (dy.float() * scaled).sum(0).to(w.dtype)
"""


@on("plot_layer_norm_ladder")
@pytest.mark.parametrize(("norm", "m", "n"), [("layer_norm", 13, 77), ("rms_norm", 3, 301)])
def test_own_backward(
    own: Notebook, norm: str, m: int, n: int, capsys: pytest.CaptureFixture
) -> None:
    changed = {"mine": MINE} if norm == "rms_norm" else {}
    names = own.run(ROWS=str(m), COLUMNS=str(n), NORM=f"functional.{norm}", **changed)
    shown = re.findall(r"typical error (\S+), same bits: (\w+)", capsys.readouterr().out)
    assert len(shown) == len(names["results"][0])
    for error, same in shown:
        assert 0.01 < float(error) < 2
        assert same == "True"


@on("plot_triton_layer_norm")
@pytest.mark.parametrize(("m", "n", "dtype"), [(5, 131, "bfloat16"), (9, 3, "float32")])
def test_own_rows_and_columns(
    own: Notebook, m: int, n: int, dtype: str, capsys: pytest.CaptureFixture
) -> None:
    names = own.run(ROWS=str(m), COLUMNS=str(n), DTYPE=f"torch.{dtype}")
    assert "not here:" in capsys.readouterr().out
    assert all(0 < error < 2 for error in names["errors"]["roundoff"])


# --- numerics


@on("plot_all_reduce_order")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_own_gradients(own: Notebook, dtype: torch.dtype, capsys: pytest.CaptureFixture) -> None:
    seeded = torch.Generator().manual_seed(3)
    drawn = torch.randn(3, 37, 41, generator=seeded, dtype=torch.float64).to(dtype)
    drawn[:, 0, 0] = torch.nan
    own.names["drawn"] = drawn
    names = own.run(mine="drawn")
    parts = round_to(drawn.flatten(1).double().numpy(), str(dtype)[6:], storage=True)
    ring = [add_in_order(parts, tree) for tree in (((2, 1), 0), ((0, 2), 1), ((1, 0), 2))]
    total = names["total"].double().numpy().ravel()
    assert (np.array(ring, float) == total)[:, 1:].any(0).all()
    assert names["total"][0, 0].isnan()
    in_order = drawn[0] + drawn[1] + drawn[2]
    count = (in_order.flatten()[1:] != names["total"].flatten()[1:]).sum()
    said = capsys.readouterr().out
    assert f"{count} of 1517 elements differ" in said
    assert "nan" not in said.lower()


@on("plot_bits_to_words")
def test_own_words(own: Notebook, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    decoder_of(tmp_path, "Llama")
    spread = []
    for dtype in "float32", "bfloat16":
        changed = {"MODEL": repr(str(tmp_path)), "DTYPE": f"torch.{dtype}"}
        own.run(**changed, PROMPTS='["A kettle", "Why?"]')
        shown = capsys.readouterr().out
        spread.append(float(shown.split("RMS: ")[1].split()[0]))
        assert dtype == "bfloat16" or "tokens that differ: 0 of " in shown
    assert 1e3 < spread[1] / spread[0] < 1e6, "bfloat16 has 16 bits fewer"


@on("plot_layer_norm_discrepancies")
def test_own_model_gets_a_tolerance_that_holds_on_fresh_inputs(
    own: Notebook, tmp_path: Path
) -> None:
    model, feeds_of = own.names["layer_norm_matmul"](), own.names["layer_norm_feeds"]
    (tmp_path / "mine.onnx").write_bytes(model.SerializeToString())
    (found,) = own.run(
        MODEL=repr(str(tmp_path / "mine.onnx")), FEEDS="layer_norm_feeds(19, 40, seed=5)"
    )["_"]
    output = found.outputs.iloc[0]
    assert found.nearer in ("equal", "torch", "ORT")
    ours, theirs = TorchOnnxEvaluator(model), session(model)
    failed = 0
    for seed in range(100, 160):
        feeds = feeds_of(19, 40, seed=seed)
        (a,), (b,) = ours.run(None, feeds), theirs.run(feeds)
        failed += not torch.allclose(a, b, rtol=output["rtol"], atol=output["atol"])
    assert failed <= 1


@on("plot_reduction_order")
@pytest.mark.parametrize(
    "numbers",
    [
        "[0.1, 0.2, 0.3, 1e9, -1e9]",
        "[]",
        "[math.nan, 1.0]",
        "np.float32([1, -np.inf])",
        "np.random.default_rng(5).standard_normal((3, 1001)).astype(np.float32)",
        "np.array([60000, 60000, -60000], np.float16)",
        "torch.linspace(-1, 1.5, 999)",
    ],
)
@pytest.mark.filterwarnings("error")
def test_own_numbers(own: Notebook, numbers: str, capsys: pytest.CaptureFixture) -> None:
    own.names["math"] = math
    names = own.run(mine=numbers)
    shown = capsys.readouterr().out.splitlines()
    given = np.asarray(names["mine"])
    wide = given.dtype == np.float64
    exact = given.dtype.type(math.fsum(given.ravel().tolist()))
    # Of narrower types math.fsum is rounded twice.
    assert names["exact"] == pytest.approx(exact, rel=2.0**-52 if wide else 1e-6, nan_ok=True)
    said = f"{given.size} numbers of {given.dtype}, their sum is {names['exact']!s}"
    assert shown[0] == said
    if not wide:
        assert shown[2].startswith("added in float64: 1 different sums of 8 orders, 8 right, ")
    right = all(np.array_equal(total, exact, equal_nan=True) for total in names["sums"])
    assert ("the cure is binned" in shown[-1]) == (wide and not right)


@on("plot_reduction_order")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "numbers",
    [
        "np.array([1e30, 1, -1e30], np.float32)",
        "np.array([3e38, 3e38, -3e38, -3e38, 1], np.float32)",  # one result, and a wrong one
        "np.array([2.0**60, 1, -(2.0**60)])",
        "torch.tensor([2.0**60, 1, -(2.0**60)], dtype=torch.bfloat16)",
    ],
)
def test_own_numbers_that_float64_does_not_add(
    own: Notebook, numbers: str, capsys: pytest.CaptureFixture
) -> None:
    names = own.run(mine=numbers)
    assert float(names["exact"]) == 1
    assert "float64 is not enough for these numbers" in capsys.readouterr().out


OWN_PAIR = {
    "new": "def new(x):\n    return torch.softmax(x, -1)",
    "old": "def old(x):\n    return x.exp() / x.exp().sum(-1, keepdim=True)",
}


@on("plot_which_tolerance")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_own_functions_get_a_tolerance_that_fresh_inputs_keep(
    own: Notebook, dtype: str, capsys: pytest.CaptureFixture
) -> None:
    make = (
        "def make(seed):\n"
        "    x = torch.randn(3, 77, generator=torch.Generator().manual_seed(seed))\n"
        f"    return x.to(torch.{dtype})"
    )
    names = own.run(**OWN_PAIR, make=make)
    shown = capsys.readouterr().out
    found = names["found"]
    assert ("keep the tolerance: yes" in shown) == (dtype != "float64")
    assert "keep the tolerance: no" not in shown
    fresh = [names["make"](seed) for seed in range(5000, 5300)]
    pairs = [(names["new"](x), names["old"](x)) for x in fresh]
    assert sum(not found.allows(*pair) for pair in pairs) <= 1
    assert sum(not found.allows(*pair, any_scale=True) for pair in pairs) <= 1
    assert not found.allows(1.5 * names["new"](fresh[0]), names["old"](fresh[0]))


@on("plot_which_tolerance")
@pytest.mark.parametrize(
    ("new", "said"),
    [
        ("x * 1.5", "more than rounding alone explains"),
        ("(100 * x).round().int()", "count the elements that differ"),
        ("x.clamp_min(0).log()", "NaN or infinite where the other is not"),
    ],
)
def test_own_functions_without_a_tolerance_are_told_why(
    own: Notebook, new: str, said: str, capsys: pytest.CaptureFixture
) -> None:
    changed = {"new": f"def new(x):\n    return {new}", "old": "def old(x):\n    return x"}
    names = own.run(**changed)
    shown = " ".join(capsys.readouterr().out.split())  # the page wraps it
    assert not names["found"].found
    assert said in shown
    assert "fresh" not in shown


# --- something broken

BROKEN: list[Any] = [
    ("plot_gemm_fusion", {"X": "torch.randn(1, 3)"}, "multiplied"),
    ("plot_gemm_fusion", {"X": "torch.full((1, 512), torch.nan)"}, "finite"),
    ("plot_llama_backend", {"MODEL": "'model.onnx'"}, "a torch module"),
    ("plot_llama_backend", {"INPUTS": "torch.randn(3, 256)"}, "a tuple"),
    ("plot_llama_backend", {"INPUTS": "(torch.full((3, 256), torch.nan),)"}, "finite"),
    ("plot_batch_invariance", {"BATCH": "torch.randn(1, 4096)"}, "two rows or more"),
    (
        "plot_batch_invariance",
        {"MODEL": "torch.nn.Conv1d(1, 1, 3)", "BATCH": "torch.randn(4, 1, 9)"},
        "rows of these modules may depend on the rest of the batch",
    ),
    ("plot_trainer_sampler", {"TEXT": "[10**6, 3]"}, "index out of range"),
    ("plot_layer_norm_ladder", {"COLUMNS": "-2"}, "negative"),
    ("plot_triton_layer_norm", {"DTYPE": "torch.int32"}, "expected float16"),
    ("plot_layer_norm_discrepancies", {"MODEL": "'nowhere.onnx'"}, "nowhere.onnx"),
    ("plot_layer_norm_discrepancies", {"MODULE": "3"}, "torch.nn.Module"),
    *(
        ("plot_all_reduce_order", {"mine": mine}, "tensors of one shape and floating type")
        for mine in ("[]", "[torch.ones(3), torch.ones(4)]")
    ),
    *(
        pytest.param(*case, marks=slow)
        for case in (
            ("plot_whole_model", {"TEXT": "''"}, "the text has no tokens"),
            ("plot_whole_model", {"MODEL": "'nothing.gguf'"}, "no such model: got nothing.gguf"),
            ("plot_whole_model", {"LAYERS": "0"}, "layers to read"),
        )
    ),
]


@pytest.mark.parametrize(("own", "changed", "said"), BROKEN, indirect=["own"], ids=str)
def test_something_broken_is_refused_by_its_name(
    own: Notebook, changed: dict[str, str], said: str
) -> None:
    with pytest.raises((RoundoffError, RuntimeError, IndexError)) as refused:  # torch's own, too
        own.run(**changed)
    assert said in str(refused.value)


def test_every_page_has_a_path() -> None:
    assert PAGES.keys() == TRIED
