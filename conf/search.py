"""Search: the words that readers use instead of ours, and which page is the best answer.

Ours, as Sphinx's own search finds a page that holds every word, whatever the words are about, and
ranks it by whether one of them is in its title. Two things are added:

- other words: a page that says "ONNX Runtime" is found by "ORT" and "onnxruntime", too. They are
  put into the index, so that the query stays as it was typed (:class:`Words`);
- weights: how much each page of prose is about each word, by BM25 over titles, headings and
  paragraphs, not code (:func:`weigh`). They travel in the index, and ``search.js`` ranks by them.
"""

import math
import re
from collections import Counter
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.search import js_index
from sphinx.search.en import SearchEnglish

from hooks import PAGES

# What a page may say -> what readers may type.
_OTHER_WORDS = (
    (r"\bORT\b|\bonnx ?runtime", "ort onnxruntime onnx runtime"),
    (r"\b(py)?torch\b", "torch pytorch"),
    (r"\bTF32\b|\btensor-?float", "tf32 tensorfloat tensorfloat32"),
    # A half and a double are everyday words: they are found, but do not count as a mention.
    (r"\bfp16\b|\bfloat16\b", "fp16 float16 half precision"),
    (r"\bbf16\b|\bbfloat16\b", "bf16 bfloat16"),
    (r"\bfp32\b|\bfloat32\b", "fp32 float32 single precision"),
    (r"\bfp64\b|\bfloat64\b", "fp64 float64 double precision"),
    (r"layer[ _-]?norm", "layernorm layer norm normalization layernormalization"),
    (
        r"\bmat ?mul\b|\bgemm|\bmatrix (product|multipl)",
        "matmul gemm matrix product multiplication",
    ),
    (r"\ball-?reduce\b|\ball reduce\b", "allreduce reduce"),
    (r"\bdiscrepan|\bdiffer(s|ent|ence|ences)?\b|\bmismatch", "different discrepancy mismatch"),
    (
        r"\bnot deterministic|\bdeterminis|\brepeatab|\breproducib",
        "deterministic nondeterministic repeatable reproducible",
    ),
)
_COUNTED = [(re.compile(said, re.IGNORECASE), typed.split()) for said, typed in _OTHER_WORDS]
# What a page answers, as readers ask for it.
_ANSWERS = PAGES | {"results": "results machines"}
# How often a word in a title or a heading counts, against one in a paragraph.
_TITLE, _HEADING = 12, 4
# BM25's usual constants: how soon more of one word adds nothing, and how much a page's length is
# held against it.
_SOON, _LENGTH = 1.5, 0.6
_SCALE = 20


class Words(SearchEnglish):
    """English, with the other words for a thing beside each mention of it."""

    def split(self, text: str) -> list[str]:
        """Words of a text, as they go into the index."""
        words = super().split(text)
        for said, typed in _COUNTED:
            for _ in said.findall(text):
                words += typed
        return words


def counts(tree: nodes.document, language: Words, answer: str = "") -> Counter[str]:
    """How often a page says each word; code, output and notes on machines say nothing.

    The words of its *answer* count as if the title said them.
    """
    found: Counter[str] = Counter()
    titles = [section[0].astext() for section in tree.findall(nodes.section)]
    texts = [(text, _TITLE) for text in (answer, *titles[:1])]
    texts += [(text, _HEADING) for text in titles[1:]]
    said = (n for kind in (nodes.paragraph, nodes.term) for n in tree.findall(kind))
    texts += [(node.astext(), 1) for node in said]
    for text, times in texts:
        for word in language.split(text):
            stem = language.stem(word)
            if language.word_filter(stem) and language.word_filter(word.lower()):
                found[stem] += times
    return found


def weigh(pages: dict[int, Counter[str]]) -> dict[str, dict[int, int]]:
    """BM25 of each word in each page, as small integers; what rounds to nothing is left out."""
    holders = Counter(word for page in pages.values() for word in page)
    mean = sum(page.total() for page in pages.values()) / len(pages)
    weights: dict[str, dict[int, int]] = {}
    for number, page in pages.items():
        length = 1 - _LENGTH + _LENGTH * page.total() / mean
        for word, count in page.items():
            rare = math.log(1 + (len(pages) - holders[word] + 0.5) / (holders[word] + 0.5))
            weight = round(_SCALE * rare * count * (_SOON + 1) / (count + _SOON * length))
            if weight:
                weights.setdefault(word, {})[number] = weight
    return weights


def add_weights(app: Sphinx, exception: Exception | None) -> None:
    """Put the weights into the index that Sphinx has written."""
    path = Path(app.outdir, "searchindex.js")
    if exception is not None or app.builder.format != "html" or not path.exists():
        return
    language, index = Words({}), js_index.loads(path.read_text("utf-8"))
    pages, lifted = {}, []
    for number, name in enumerate(index["docnames"]):
        answer = _ANSWERS.get(Path(name).name, "")
        if not name.startswith("generated/"):
            pages[number] = counts(app.env.get_doctree(name), language, answer)
        for word in {language.stem(word) for word in language.split(answer)}:
            # Sphinx finds a page by a word only where the index says that it is there.
            held = index["terms"].get(word, [])
            index["terms"][word] = sorted({*(held if isinstance(held, list) else [held]), number})
            lifted.append((word, number))
    index["weights"] = weights = weigh(pages)
    for word, number in lifted:
        if number in weights.get(word, {}):
            weights[word][number] = weights[word][number] * 3 // 2
    path.write_text(js_index.dumps(index), "utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Take the place of English; the scorer's file is named in ``conf.py``."""
    app.add_search_language(Words)
    app.connect("build-finished", add_weights)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
