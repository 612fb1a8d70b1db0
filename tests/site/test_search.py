"""What a reader types, in a browser: the right page comes first, and old addresses lead to it.

The ranking is tried on the site's own pages, the synonyms and the redirects on small ones.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

sys.path.insert(0, str(ROOT / "conf"))
import search
from redirects import FILE

pytestmark = pytest.mark.site

NUMERICS, FUSION, KERNELS = "gallery/numerics/", "gallery/fusion/", "gallery/kernels/"
# What a reader types -> the page that answers it.
FIRST = {
    "onnxruntime pytorch different results": NUMERICS + "plot_layer_norm_discrepancies",
    "tf32": NUMERICS + "plot_layer_norm_discrepancies",
    "non-deterministic sum": NUMERICS + "plot_reduction_order",
    "allreduce different results": NUMERICS + "plot_all_reduce_order",
    "which tolerance": NUMERICS + "plot_which_tolerance",
    "llm temperature 0 nondeterministic": NUMERICS + "plot_bits_to_words",
    "different answer batch size": KERNELS + "plot_batch_invariance",
    "trainer sampler logprobs mismatch": KERNELS + "plot_trainer_sampler",
    "layernorm backward triton": KERNELS + "plot_layer_norm_ladder",
    "triton register spills": KERNELS + "plot_layer_norm_ladder",
    "fastest layer norm kernel": KERNELS + "plot_triton_layer_norm",
    "gemm fusion": FUSION + "plot_gemm_fusion",
    "generate with kv cache torch.compile onnxruntime": FUSION + "plot_whole_model",
    "torch.compile backend": FUSION + "plot_llama_backend",
    "results machines": "results",
    "install cuda": "install",
    "stash type": "glossary",
}
# A gallery page comes first; which of them is no matter.
STUDY = ("ORT", "half precision", "layer normalization")
# A name as only code has it: the reference comes first.
NAMES = ("TorchOnnxEvaluator", "roundoff.dtypes.ulp")


def answers(tab, root: str, query: str) -> list[str]:
    """Documents that a query finds, best first."""
    tab.goto(f"{root}/search.html?q={query.replace(' ', '+')}", wait_until="load")
    tab.wait_for_function("document.querySelector('.search-summary')?.innerText.match(/earch/)")
    links = tab.locator("ul.search li > a").evaluate_all("links => links.map(a => a.pathname)")
    return [link.split("/", link.startswith("/"))[-1].removesuffix(".html") for link in links]


@pytest.fixture(scope="module")
def tab(browser):
    page = browser.new_page()
    yield page
    page.close()


@pytest.mark.parametrize("query", FIRST)
def test_the_page_that_answers_comes_first(address: str, tab, query: str) -> None:
    assert answers(tab, address, query)[:1] == [FIRST[query]]


def test_a_page_without_a_query_here_answers_its_own_question(site, address: str, tab) -> None:
    """A new page needs no line in this file."""
    for page in site.glob("gallery/*/plot_*.html"):
        name = page.relative_to(site).with_suffix("").as_posix()
        if name not in FIRST.values():
            question = re.search(r"<h1>(.*?)<a", page.read_text("utf-8"))[1]
            typed = re.sub(r"<[^>]+>|[?&#]", "", question)
            assert answers(tab, address, typed)[:1] == [name]


@pytest.mark.parametrize("query", STUDY)
def test_a_study_comes_first(address: str, tab, query: str) -> None:
    assert re.match(r"gallery/\w+/plot_", answers(tab, address, query)[0])


@pytest.mark.parametrize("query", NAMES)
def test_a_name_of_the_library_leads_to_the_reference(address: str, tab, query: str) -> None:
    assert answers(tab, address, query)[0].startswith("generated/roundoff.")


@pytest.mark.parametrize("query", ["tolerance", "kernel"])
def test_the_reference_comes_after_the_prose(address: str, tab, query: str) -> None:
    found = [name.startswith("generated/") for name in answers(tab, address, query)]
    assert True in found
    assert found == sorted(found)


def test_what_is_shown_of_a_page_is_its_prose(address: str, tab) -> None:
    answers(tab, address, "import torch")
    tab.wait_for_selector("ul.search p.context")
    shown = tab.locator("ul.search p.context").all_inner_texts()
    assert shown
    assert not [text for text in shown if re.search(r"^import \w+$|>>> ", text, re.M)]


def test_the_index_holds_what_readers_may_type_instead() -> None:
    words = search.Words({}).split("ONNX Runtime and PyTorch: TensorFloat-32, float16, LayerNorm")
    typed = ("ort", "onnxruntime", "torch", "tf32", "fp16", "half", "layer", "norm")
    assert not set(typed) - set(words)
    assert "fp16" not in search.Words({}).split("half an ULP")
    assert "allreduce" in search.Words({}).split("an all-reduce")


def built(folder: Path, old: dict, *pages: str) -> subprocess.CompletedProcess:
    """A small site with the extension, and what its build says."""
    conf = f"import sys\nsys.path.insert(0, {str(ROOT / 'conf')!r})\nextensions = ['redirects']\n"
    (folder / "conf.py").write_text(conf + "html_theme = 'basic'\n")
    (folder / FILE).write_text(json.dumps(old))
    for name in ("index", *pages):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        orphan = "" if name == "index" else ":orphan:\n\n"
        (folder / f"{name}.rst").write_text(
            f"{orphan}{name}\n{'=' * 20}\n\nWords.\n\nSecond <part>\n{'-' * 20}\n\nMore words.\n"
        )
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--no-color", folder, folder / "out"]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
    )


def place(page: Path, anchor: str) -> str:
    """The heading that a link to an anchor shows."""
    text = page.read_text("utf-8")
    assert text.count(f'id="{anchor}"') == 1
    return re.search(r"<h\d>(.*?)<a", text[text.index(f'id="{anchor}"') :])[1]


def test_an_old_anchor_leads_to_where_its_text_is(tmp_path: Path) -> None:
    old = {"here": "", "gone": "", "renamed": "second-part", "second-part": ""}
    done = built(tmp_path, {"here": old}, "here")
    assert done.returncode == 0, done.stderr
    page = tmp_path / "out" / "here.html"
    assert place(page, "gone") == place(page, "here") == "here"
    assert place(page, "renamed") == place(page, "second-part") == "Second &lt;part&gt;"


def test_an_anchor_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    done = built(tmp_path, {"index": {"gone": "nowhere"}})
    assert done.returncode != 0
    assert "#nowhere, which is not there" in done.stderr


def test_anchors_that_were_published_are_still_there(site: Path) -> None:
    known = json.loads((ROOT / "conf" / FILE).read_text("utf-8"))
    assert len(known["gallery/numerics/plot_reduction_order"]) > 10
    missing = []
    for name, anchors in known.items():
        text = (site / f"{name}.html").read_text("utf-8")
        missing += [f"{name}#{a}" for a in anchors if text.count(f'id="{a}"') != 1]
    assert not missing
