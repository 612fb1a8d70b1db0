"""The build's own hooks: when pages run again, in which order, and in what state."""

import functools
import gc
import hashlib
import importlib
import importlib.metadata
import json
import os
import random
import re
import sys
import warnings
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import tabular_col_spec
from sphinx.application import Sphinx
from sphinx.ext.autosummary import autosummary_table, autosummary_toc
from sphinx.util import logging
from sphinx_gallery import gen_rst
from sphinx_gallery.utils import get_md5sum

import roundoff
from roundoff.page import use_style
from roundoff.record import RECORDED
from roundoff.script import unit_test_going

logger = logging.getLogger(__name__)

SECTIONS = ("numerics", "fusion", "kernels")
# In their order, each with what it is the answer to in words that its title may not have: search.py
# counts each like a title's, and half as much again, as another page may say it more often.
PAGES = {
    "plot_reduction_order": "order summation sum reduction parallel float64 non deterministic",
    "plot_all_reduce_order":
        "all-reduce distributed training reproducible number of workers ranks GPUs DDP loss NCCL",
    "plot_layer_norm_discrepancies":
        "onnxruntime pytorch different results TF32 tolerance fp16 overflow",
    "plot_which_tolerance":
        "which tolerance assert_close allclose rtol atol float16 CI flaky test tolerances fails",
    "plot_bits_to_words":
        "LLM language model temperature 0 nondeterministic answers tokens batch bfloat16 greedy",
    "plot_gemm_fusion": "Gemm MatMul fusion faster ONNX Runtime",
    "plot_llama_backend":
        "write custom torch.compile backend Llama onnxruntime attention inductor bfloat16",
    "plot_whole_model":
        "whole model torch.compile backend decode generate KV static cache ONNX Runtime tokens per "
        "second compile time dynamic shapes lengths recompile fallback",
    "plot_batch_invariance":
        "batch size changes output same bits batch invariance invariant deterministic inference "
        "reproducible padding KV cache",
    "plot_trainer_sampler":
        "reinforcement learning RL PPO GRPO trainer sampler log-probabilities logprobs mismatch "
        "importance ratio clip fraction KL on-policy off-policy vLLM TRL",
    "plot_layer_norm_ladder":
        "write Triton kernel tutorial LayerNorm backward atomics registers spills prefetch tiles",
    "plot_triton_layer_norm":
        "fastest LayerNorm kernel benchmark Liger QuACK inductor lock GPU bandwidth",
    "results": "results figures recorded machines",
    "install": "install installation GPU CUDA driver pip",
    "cite": "cite citation BibTeX",
}  # fmt: skip


def section_order(folder: str) -> int:
    """Place of a section in the gallery."""
    return SECTIONS.index(Path(folder).name)


def page_order(page: str | Path) -> tuple[int, str]:
    """Place of a page, its script or its document; one that has none yet comes last."""
    name = Path(page).stem
    return (list(PAGES).index(name) if name in PAGES else len(PAGES), str(page))


def reset(gallery_conf: dict[str, Any], filename: str) -> None:
    """Give every page the same start, whatever ran before it in this process."""
    import numpy as np
    import torch
    import torch._dynamo

    use_style()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.reset()
    # Else what is compiled a ninth time runs eager, and says so in a log.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    if inductor := sys.modules.get("torch._inductor.config"):  # roundoff.invariant(model) sets it
        inductor.emulate_precision_casts = False
    # By default a warning prints the absolute path of the file that raised it.
    warnings.formatwarning = lambda words, kind, *_, **__: f"{kind.__name__}: {words}\n"


def stamp() -> str:
    """Hash of all that decides what a page shows, the page itself and its records apart."""
    digest = hashlib.sha256()
    library = Path(roundoff.__file__).parent
    for path in sorted(library.rglob("*.py")):
        digest.update(path.relative_to(library).as_posix().encode() + path.read_bytes())
    versions = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    # Another commit of the same library is the same library.
    versions.pop("roundoff", None)
    digest.update(repr(sorted(versions.items())).encode())
    digest.update(Path(__file__).with_name("figures.py").read_bytes())
    digest.update(repr(os.environ.get("UNITTEST_GOING", "")).encode())
    return digest.hexdigest()


def records_stamps(scripts: Iterable[Path]) -> dict[str, str]:
    """For each page a hash of the records of its name and of those that its script names.

    Under ``all`` that of all records, which other pages list.
    """
    texts = {path.name: f"{path.stem} {path.read_text('utf-8')}" for path in scripts}
    digests = {name: hashlib.sha256() for name in (*texts, "all")}
    for path in sorted(RECORDED.glob("*/*.json")):
        record = f"{path.parent.name}/{path.name}".encode() + path.read_bytes()
        digests["all"].update(record)
        for name, text in texts.items():
            if path.parent.name in text:
                digests[name].update(record)
    return {name: digest.hexdigest() for name, digest in digests.items()}


def read_all_again(app: Sphinx) -> None:
    """Let this build read and write every document."""
    app.connect("env-get-outdated", lambda app, env, *_: list(env.found_docs))


def keep_reference(app: Sphinx) -> None:
    """Leave the pages of the reference as they are, where what they are made from is older.

    Making them imports the whole library, torch's compiler included, to write what is there.
    """
    made = list(Path(app.srcdir, "generated").glob("*.rst"))
    templates = Path(app.confdir, "templates", "autosummary").glob("*.rst")
    sources = [Path(app.srcdir, "api.rst"), Path(app.confdir, "conf.py"), *templates]
    dates = [path.stat().st_mtime_ns for path in made]
    if not dates or min(dates) <= max(path.stat().st_mtime_ns for path in sources):
        return
    usual = app.config.autosummary_generate

    def give_back(app: Sphinx, *_: Any) -> list[str]:
        app.config.autosummary_generate = usual
        return []

    app.config.autosummary_generate = False
    # Before the environment is kept: the next build would find the configuration changed.
    app.connect("env-get-outdated", give_back)


def drop_names_that_went(app: Sphinx) -> None:
    """A page that the reference no longer lists fails the build: nothing leads to it."""
    for page in Path(app.srcdir, "generated").glob("*.rst"):
        if page.stem not in Path(app.srcdir, "api.rst").read_text("utf-8").split():
            page.unlink()


def forget_stale_pages(app: Sphinx) -> None:
    """Drop the mark "this page has run" where it no longer means anything.

    Sphinx-Gallery's mark is the md5 of the script alone. It says nothing of the library, and it is
    written before the page's text, images and archive are: of an interrupted build only the pages
    whose archive, which comes last, is there count. A new record runs the pages that show it.
    """
    gallery = Path(app.srcdir) / "gallery"
    gallery.mkdir(exist_ok=True)
    running, seen, shown = gallery / "running", gallery / "stamp", gallery / "records.json"
    marks = list(gallery.rglob("*.py.md5"))
    before = json.loads(shown.read_text("utf-8")) if shown.exists() else {}
    scripts = Path(app.srcdir, app.config.sphinx_gallery_conf["examples_dirs"]).glob("*/*.py")
    records = records_stamps(scripts)
    changed = [m for m in marks if before.get(m.stem) != records.get(m.stem)]
    if running.exists():
        # A half-written page is newer than its source.
        read_all_again(app)
        for mark in marks:
            archive = mark.with_suffix("").with_suffix(".zip")
            if not archive.exists() or archive.stat().st_mtime_ns < mark.stat().st_mtime_ns:
                mark.unlink()
    now = stamp()
    if seen.exists() and seen.read_text("utf-8") == now:
        if before == records:
            keep_reference(app)
        else:
            read_all_again(app)  # a record that was added is in no page's list of files yet
        for mark in changed:
            mark.unlink(missing_ok=True)
    else:
        for mark in marks:
            mark.unlink(missing_ok=True)
        if marks:
            logger.info("library, mode or versions changed: every page runs again")
        read_all_again(app)
    running.touch()
    seen.write_text(now, "utf-8")
    shown.write_text(json.dumps(records), "utf-8")


def finished(app: Sphinx, exception: Exception | None) -> None:
    """Note that the gallery is whole; after a warning the next build reads and warns again."""
    if exception is None and not app._warncount:
        (Path(app.srcdir) / "gallery" / "running").unlink(missing_ok=True)


def share_tree(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Let the reference's pages share a sidebar: they differ in which of them is marked.

    Furo makes a tree of all pages for each of them, a third of the time that reading and writing
    take. This handler comes before Furo's, and :func:`keep_tree` after it.
    """
    if pagename.startswith("generated/") and app in _trees:
        entry = _ENTRY.format(re.escape(Path(app.builder.get_target_uri(pagename)).name))
        tree, count = re.subn(entry, r'\1 current current-page\2current \3#"', _trees[app])
        if count == 1:
            context["toctree"] = lambda **_: ""
            context["tree_of_the_reference"] = tree


def keep_tree(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Keep the sidebar of the first page of the reference for the others, without its mark."""
    if not pagename.startswith("generated/"):
        return
    if tree := context.get("tree_of_the_reference"):
        context["furo_navigation_tree"] = tree
    elif "furo_navigation_tree" in context:
        own = Path(app.builder.get_target_uri(pagename)).name
        tree, count = _MARKED.subn(rf'\1\2\g<3>{own}"', context["furo_navigation_tree"])
        if count == 1:
            _trees[app] = tree


_ENTRY = r'(<li class="toctree-l\d)("><a class=")(reference internal" href="){}"'
_MARKED = re.compile(
    r'(<li class="toctree-l\d) current current-page("><a class=")'
    r'current (reference internal" href=")#"'
)
_trees: weakref.WeakKeyDictionary[Sphinx, str] = weakref.WeakKeyDictionary()


def finish_page(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Let the keyboard reach what scrolls sideways, and give figures their size."""
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = tree.replace(
        'role="heading"', 'role="heading" aria-level="2"'
    )
    body = context.get("body") or ""
    for pattern, replacement in (*_EDITS, *_GALLERY_EDITS * pagename.startswith("gallery/")):
        body = re.sub(pattern, replacement, body, flags=re.DOTALL)
    if "ro-figure" in body:
        body = _FIGURE.sub(lambda figure: figure[0] + _size(app, figure[1]), body)
    if "_thumb.png" in body:
        body = _THUMB.sub(lambda thumb: _thumbnail(app, thumb), body)
    if body:
        context["body"] = re.sub(r"<img (?![^>]*\bloading=)", '<img loading="lazy" ', body)


# A quick build is not for its times; a full one runs one page at a time, to be fair to them.
JOBS = (os.cpu_count() or 1) if unit_test_going() else 1
# They start first: one that starts last leaves the other processors idle.
LONGEST = (
    "plot_batch_invariance",
    "plot_bits_to_words",
    "plot_llama_backend",
    "plot_all_reduce_order",
    "plot_whole_model",
)


def call_workers(app: Sphinx) -> None:
    """Let the processes that will run the pages import what they need while the reference is made.

    Sphinx-Gallery's own start with its first page, and run a section's pages before the next's.
    """
    if JOBS > 1:
        gen_rst.generate_file_rst = _take
        if not list(Path(app.srcdir, "gallery").glob("*/*.py.md5")):
            pages = Path(app.confdir).parent.glob("gallery/*/*.py")
            llama = any(b"transformers" in page.read_bytes() for page in pages)
            for _ in range(JOBS):
                _executor().submit(_import, (*_USED, *[_LLAMA] * llama))


def dismiss_workers(app: Sphinx) -> None:
    """End the workers: left alone they wait, and the end of the build waits for them."""
    gen_rst.generate_file_rst = _generate
    _pages.clear()
    if _executor.cache_info().currsize:
        _executor().shutdown(wait=False)
        _executor.cache_clear()


def _take(name: str, target: Path, source: Path, conf: dict[str, Any]) -> Any:
    """What Sphinx-Gallery asks for, page by page; all that are to run start with the first."""
    if not _pages:
        for page in sorted(source.parent.glob("*/*.py"), key=_longest_first):
            place = target.parent / page.parent.name
            mark = place / f"{page.name}.md5"
            Path(place, "images", "thumb").mkdir(parents=True, exist_ok=True)
            ran = mark.exists() and mark.read_text("utf-8") == get_md5sum(page, "t")
            one = page.name, place, page.parent, conf
            _pages[page] = None if ran else _executor().submit(_make, *one)
    page = _pages.get(source / name)
    try:
        return page.result() if page else _generate(name, target, source, conf)
    except BaseException:
        _executor().shutdown(kill_workers=True)
        raise


def _make(*page: Any) -> Any:
    return gen_rst.generate_file_rst(*page)


@functools.cache
def _executor() -> Any:
    from joblib.externals.loky import get_reusable_executor

    return get_reusable_executor(max_workers=JOBS, timeout=300)


_generate = gen_rst.generate_file_rst
_pages: dict[Path, Any] = {}


def _longest_first(page: Path) -> tuple[int, Any]:
    known = page.stem in LONGEST
    return (LONGEST.index(page.stem) if known else len(LONGEST), page_order(page))


def _import(names: Iterable[str]) -> None:
    for name in names:
        importlib.import_module(name)


_USED = ("matplotlib.pyplot", "pandas", "sphinx_gallery.gen_rst", "torch", "roundoff.ort")
_LLAMA = "transformers.models.llama.modeling_llama"


_TRACELESS = (nodes.comment, tabular_col_spec, autosummary_table, autosummary_toc)


def keep_places(app: Sphinx, tree: nodes.document) -> None:
    """Give the place of a module to its section: what follows the directive may leave no trace."""
    for node in list(tree.findall(nodes.Element)):
        if isinstance(node, _TRACELESS) and node["ids"]:
            node.parent["ids"] += node["ids"]
            node["ids"] = []


_EDITS = (
    ('<div class="highlight"><pre>', '<div class="highlight"><pre tabindex="0">'),
    ('<div class="table-wrapper',
     '<div tabindex="0" role="region" aria-label="table" class="table-wrapper'),
    (r'<div class="ro-drawing[^"]*"', r'\g<0> tabindex="0" role="group" aria-label="figure"'),
)  # fmt: skip
# Spans that colour nothing (a third of a page), and four classes on every name.
_GALLERY_EDITS = (
    # A table of pandas is the site's: striped, with a place to scroll, no heading without words.
    (
        r"<div>\s*<style scoped>.*?</style>\s*",
        '<div class="ro-table" tabindex="0" role="region" aria-label="table">',
    ),
    (r'<table border="1" class="dataframe">', "<table>"),
    (r"<th></th>", "<td></td>"),
    (r'<span class="(?:n|p|w|nn|o)">([^<]*)</span>', r"\1"),
    (r' class="sphx-glr-backref[^"]*(reference \w+)"', r' class="\1"'),
)
_THUMB = re.compile(r'<img [^>]*src="([^"]*)sphx_glr_(plot_\w+?)_thumb\.png"[^>]*>')
_FIGURE = re.compile(r'<img (?=[^>]*ro-figure)(?=[^>]*src="[^"]*/([^"/]+\.svg)")')


def _size(app: Sphinx, name: str) -> str:
    """Size of a figure as attributes, so that a page keeps its place while it loads."""
    drawn = next(Path(app.srcdir, "gallery").glob(f"**/images/{name}"), None)
    head = drawn.read_text("utf-8")[:2000] if drawn else ""
    sizes = re.findall(r'\b(width|height)="([\d.]+)pt"', head)
    return "".join(f'{side}="{float(points):.0f}" ' for side, points in sizes)


def _thumbnail(app: Sphinx, thumb: re.Match[str]) -> str:
    """The figure of the page's answer, for each scheme, instead of its picture for a light page."""
    folder, page = thumb.groups()
    size = _size(app, f"{page}_answer.svg")
    images = (
        f'<img class="only-{scheme}" alt="" src="{folder}{page}_answer{ending}.svg" {size}>'
        for scheme, ending in (("light", ""), ("dark", "_dark"))
    )
    return "".join(images) if size else thumb[0]


@functools.cache
def spare_forks() -> None:
    """Keep processes that Sphinx forks from collecting what a page has left in this one.

    A session of ONNX Runtime waits, as it ends, for its threads: a forked process has none of them
    and waits for ever.
    """
    os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the hooks; the first ones must come before Sphinx-Gallery's own."""
    spare_forks()
    app.connect("builder-inited", drop_names_that_went, priority=0)
    app.connect("builder-inited", forget_stale_pages, priority=1)
    app.connect("builder-inited", call_workers, priority=2)
    app.connect("builder-inited", dismiss_workers, priority=900)
    app.connect("doctree-read", keep_places)
    app.connect("html-page-context", share_tree, priority=400)
    app.connect("html-page-context", keep_tree, priority=600)
    app.connect("html-page-context", finish_page, priority=900)
    app.connect("build-finished", finished, priority=999)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
