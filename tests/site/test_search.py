"""What a reader types, in a browser: the page that answers it comes first."""

import re

import pytest

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
