"""The build's own hooks: when pages run again, in which order, and in what state."""

import functools
import gc
import hashlib
import importlib.metadata
import os
import random
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from sphinx.addnodes import toctree
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import roundoff
from roundoff.page import use_style
from roundoff.record import RECORDED

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
        "batch size changes different answer output same bits batch invariance invariant "
        "deterministic inference reproducible padding KV cache",
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
    """A hash of what decides what pages show beside their texts.

    That is the library, the versions, the mode, and the records.
    """
    digest = hashlib.sha256()
    library = sorted(Path(roundoff.__file__).parent.rglob("*.py"))
    for path in (*library, Path(__file__).with_name("figures.py"), *sorted(RECORDED.glob("*/*"))):
        digest.update(path.name.encode() + path.read_bytes())
    versions = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    # Another commit of the same library is the same library.
    versions.pop("roundoff", None)
    digest.update(repr((sorted(versions.items()), os.environ.get("UNITTEST_GOING", ""))).encode())
    return digest.hexdigest()


def drop_names_that_went(app: Sphinx) -> None:
    """A page that the reference no longer lists fails the build: nothing leads to it."""
    for page in Path(app.srcdir, "generated").glob("*.rst"):
        if page.stem not in Path(app.srcdir, "api.rst").read_text("utf-8").split():
            page.unlink()


def forget_stale_pages(app: Sphinx) -> None:
    """Drop the mark "this page has run" where it no longer means anything.

    Sphinx-Gallery's mark is the md5 of the script alone. It says nothing of the library, and it is
    written before the page's text, images and archive are: of an interrupted build only the pages
    whose archive, which comes last, is there count.
    """
    gallery = Path(app.srcdir) / "gallery"
    gallery.mkdir(exist_ok=True)
    running, kept = gallery / "running", gallery / "stamp"
    now = stamp()
    changed = not kept.exists() or kept.read_text("utf-8") != now
    for mark in gallery.rglob("*.py.md5"):
        archive = mark.with_suffix("").with_suffix(".zip")
        whole = archive.exists() and archive.stat().st_mtime_ns >= mark.stat().st_mtime_ns
        if changed or (running.exists() and not whole):
            mark.unlink()
    if running.exists() or changed:
        # A half-written page is newer than its source; a new record is in no page's list of files.
        app.connect("env-get-outdated", lambda app, env, *_: list(env.found_docs))
    running.touch()
    kept.write_text(now, "utf-8")


def finished(app: Sphinx, exception: Exception | None) -> None:
    """Note that the gallery is whole; after a warning the next build reads and warns again."""
    if exception is None and not app._warncount:
        (Path(app.srcdir) / "gallery" / "running").unlink(missing_ok=True)


def finish_page(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Let the keyboard reach what scrolls sideways."""
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = tree.replace(
        'role="heading"', 'role="heading" aria-level="2"'
    )
    body = context.get("body") or ""
    for pattern, replacement in _EDITS:
        body = re.sub(pattern, replacement, body, flags=re.DOTALL)
    body = _THUMB.sub(lambda thumb: _thumbnail(app, thumb), body)
    context["body"] = body.replace("<img ", '<img loading="lazy" ')


def shorten_sidebar(app: Sphinx, env: BuildEnvironment) -> None:
    """The sidebar of a page has the reference, not each of its names: that page lists them."""
    if reference := env.tocs.get("api"):
        for listed in list(reference.findall(toctree)):
            listed.parent.remove(listed)


_EDITS = (
    ('<div class="highlight"><pre>', '<div class="highlight"><pre tabindex="0">'),
    (
        '<div class="table-wrapper',
        '<div tabindex="0" role="region" aria-label="table" class="table-wrapper',
    ),
    (r'<div class="ro-drawing[^"]*"', r'\g<0> tabindex="0" role="group" aria-label="figure"'),
    # A table of pandas is the site's: striped, with a place to scroll, no heading without words.
    (
        r"<div>\s*<style scoped>.*?</style>\s*",
        '<div class="ro-table" tabindex="0" role="region" aria-label="table">',
    ),
    (r'<table border="1" class="dataframe">', "<table>"),
    (r"<th></th>", "<td></td>"),
    # Spans that colour nothing (a third of a page), and four classes on every name.
    (r'<span class="(?:n|p|w|nn|o)">([^<]*)</span>', r"\1"),
    (r' class="sphx-glr-backref[^"]*(reference \w+)"', r' class="\1"'),
)
_THUMB = re.compile(r'<img [^>]*src="([^"]*)sphx_glr_(plot_\w+?)_thumb\.png"[^>]*>')


def _thumbnail(app: Sphinx, thumb: re.Match[str]) -> str:
    """The figure of the page's answer, for each scheme, instead of its picture for a light page."""
    folder, page = thumb.groups()
    if not any(Path(app.srcdir, "gallery").glob(f"**/images/{page}_answer.svg")):
        return thumb[0]  # `make page` draws one page
    return "".join(
        f'<img class="only-{scheme}" alt="" src="{folder}{page}_answer{ending}.svg">'
        for scheme, ending in (("light", ""), ("dark", "_dark"))
    )


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
    app.connect("env-updated", shorten_sidebar)
    app.connect("html-page-context", finish_page, priority=900)
    app.connect("build-finished", finished, priority=999)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
