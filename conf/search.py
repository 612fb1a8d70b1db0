"""Search: the words that readers use instead of ours, and which page is the best answer.

Ours, as Sphinx's own search finds a page that holds every word, whatever the words are about, and
ranks it by whether one of them is in its title. Two things are added to the index:

- other words: a page that says "ONNX Runtime" is found by "ORT" and "onnxruntime", too, so that the
  query stays as it was typed (:class:`Words`);
- answers: for each word the pages that have it in their title or in what they answer
  (:func:`add_answers`). ``search.js`` ranks by them: a word of few pages counts more.
"""

import re
from pathlib import Path

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


class Words(SearchEnglish):
    """English, with the other words for a thing beside each mention of it."""

    def split(self, text: str) -> list[str]:
        """Words of a text, as they go into the index."""
        words = super().split(text)
        for said, typed in _OTHER_WORDS:
            if re.search(said, text, re.IGNORECASE):
                words += typed.split()
        return words


def add_answers(app: Sphinx, exception: Exception | None) -> None:
    """Put into the index that Sphinx has written which pages answer a question with each word."""
    path = Path(app.outdir, "searchindex.js")
    if exception is not None or app.builder.format != "html" or not path.exists():
        return
    language, index = Words({}), js_index.loads(path.read_text("utf-8"))
    answers: dict[str, set[int]] = {}
    for number, name in enumerate(index["docnames"]):
        if not name.startswith("generated/"):
            said = f"{app.env.titles[name].astext()} {PAGES.get(Path(name).name, '')}"
            for word in language.split(said):
                answers.setdefault(language.stem(word), set()).add(number)
    for word, pages in answers.items():
        # Sphinx finds a page by a word only where the index says that it is there.
        held = index["terms"].get(word, [])
        index["terms"][word] = sorted({*(held if isinstance(held, list) else [held]), *pages})
    index["answers"] = {word: sorted(pages) for word, pages in answers.items()}
    path.write_text(js_index.dumps(index), "utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Take the place of English; the scorer's file is named in ``conf.py``."""
    app.add_search_language(Words)
    app.connect("build-finished", add_answers)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
