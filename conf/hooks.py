"""The build's own hooks: when pages run again, in which order, and in what state."""

import functools
import hashlib
import importlib
import importlib.metadata
import os
import random
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import tabular_col_spec
from sphinx.application import Sphinx
from sphinx.ext.autosummary import autosummary_table, autosummary_toc
from sphinx.util import logging
from sphinx_gallery.utils import get_md5sum

import roundoff

logger = logging.getLogger(__name__)

REFERENCE = "generated/"
SECTIONS = ("numerics", "fusion", "kernels")
PAGES = (
    "plot_reduction_order.py",
    "plot_layer_norm_discrepancies.py",
    "plot_gemm_fusion.py",
    "plot_llama_backend.py",
    "plot_triton_layer_norm.py",
)


def section_order(folder: str) -> int:
    """Place of a section in the gallery."""
    return SECTIONS.index(Path(folder).name)


def page_order(filename: str | Path) -> tuple[int, str]:
    """Place of a page in its section; a page that has none yet comes last."""
    name = Path(filename).name
    return (PAGES.index(name) if name in PAGES else len(PAGES), name)


def reset(gallery_conf: dict[str, Any], filename: str) -> None:
    """Give every page the same start, whatever ran before it in this process."""
    import matplotlib as mpl
    import numpy as np
    import torch

    mpl.rcdefaults()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    if "torch._dynamo" in sys.modules:  # its import takes seconds, and not every page compiles
        torch._dynamo.reset()
    # By default a warning prints the absolute path of the file that raised it.
    warnings.formatwarning = _warning_without_path


def _warning_without_path(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: Any = None
) -> str:
    return f"{category.__name__}: {message}\n"


def stamp() -> str:
    """Hash of all that decides what a page shows, the page itself apart."""
    digest = hashlib.sha256()
    library = Path(roundoff.__file__).parent
    for path in sorted(library.rglob("*")):
        if path.is_file() and path.suffix in (".py", ".json"):
            digest.update(path.relative_to(library).as_posix().encode() + path.read_bytes())
    versions = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    # Another commit of the same library is the same library.
    versions.pop("roundoff", None)
    digest.update(repr(sorted(versions.items())).encode())
    digest.update(Path(__file__).with_name("figures.py").read_bytes())
    digest.update(repr(os.environ.get("UNITTEST_GOING", "")).encode())
    return digest.hexdigest()


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


def forget_stale_pages(app: Sphinx) -> None:
    """Drop the mark "this page has run" where it no longer means anything.

    Sphinx-Gallery's mark is the md5 of the script alone. It says nothing of the library, and it is
    written before the page's text, images and archive are: of an interrupted build only the pages
    whose archive, which comes last, is there count.
    """
    gallery = Path(app.srcdir) / "gallery"
    gallery.mkdir(exist_ok=True)
    running, seen = gallery / "running", gallery / "stamp"
    marks = list(gallery.rglob("*.py.md5"))
    if running.exists():
        # A half-written page is newer than its source.
        read_all_again(app)
        for mark in marks:
            archive = mark.with_suffix("").with_suffix(".zip")
            if not archive.exists() or archive.stat().st_mtime_ns < mark.stat().st_mtime_ns:
                mark.unlink()
    now = stamp()
    if seen.exists() and seen.read_text("utf-8") == now:
        keep_reference(app)
    else:
        for mark in marks:
            mark.unlink(missing_ok=True)
        if marks:
            logger.info("library, mode or versions changed: every page runs again")
        # A record that was added is in no page's list of files yet.
        read_all_again(app)
    running.touch()
    seen.write_text(now, "utf-8")


def finished(app: Sphinx, exception: Exception | None) -> None:
    """Note that the gallery is whole."""
    if exception is None:
        (Path(app.srcdir) / "gallery" / "running").unlink(missing_ok=True)


def share_navigation(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Make the sidebar of the reference's pages once, not a hundred times.

    It lists all of them, takes most of the time that writing one takes, and differs from page to
    page in one mark: :func:`mark_current` sets it.
    """
    if not pagename.startswith(REFERENCE) or "toctree" not in context:
        return
    made, here = context["toctree"], Path(pagename).name

    @functools.wraps(made)
    def shared(**options: Any) -> str:
        kept = vars(app).setdefault("_roundoff_navigation", {})
        key = tuple(sorted(options.items()))
        if key not in kept:
            kept[key] = made(**options).replace(_marked("#", True), _marked(f"{here}.html", False))
        return kept[key]

    context["toctree"] = shared


def mark_current(tree: str, pagename: str) -> str:
    """The shared sidebar, with one page of the reference as the one that is open."""
    here = _marked(f"{Path(pagename).name}.html", False)
    assert tree.count(here) == 1, f"{pagename} is not in the sidebar once"
    opened = _marked("#", True).replace(" current", " current current-page", 1)
    return tree.replace(" current-page", "").replace(here, opened)


def _marked(address: str, current: bool) -> str:
    """An entry of the second level, as Sphinx writes it."""
    mark, first = (" current", "current ") if current else ("", "")
    return f'<li class="toctree-l2{mark}"><a class="{first}reference internal" href="{address}">'


def finish_page(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Let the keyboard reach what scrolls sideways, and fold the long cells of a gallery page."""
    tree = context.get("furo_navigation_tree", "")
    if pagename.startswith(REFERENCE):
        tree = mark_current(tree, pagename)
    context["furo_navigation_tree"] = tree.replace(
        'role="heading"', 'role="heading" aria-level="2"'
    )
    body = context.get("body")
    if not body:
        return
    body = body.replace('<div class="highlight"><pre>', '<div class="highlight"><pre tabindex="0">')
    body = body.replace(
        '<div class="table-wrapper',
        '<div tabindex="0" role="region" aria-label="table" class="table-wrapper',
    )
    body = re.sub(
        r'<div class="ro-drawing[^"]*"',
        r'\g<0> tabindex="0" role="group" aria-label="figure"',
        body,
    )
    if pagename.startswith("gallery/"):
        # Spans that colour nothing (a third of a page), and four classes on every name.
        body = re.sub(r'<span class="(?:n|p|w|nn|o)">([^<]*)</span>', r"\1", body)
        body = re.sub(r' class="sphx-glr-backref[^"]*(reference \w+)"', r' class="\1"', body)
        body = _CELL.sub(_fold, body)
    if "ro-figure" in body:
        body = _FIGURE.sub(lambda figure: figure[0] + _size_of(app, figure[1]), body)
    if "_thumb.png" in body:
        body = _THUMB.sub(lambda found: _thumbnail(app, found), body)
    body = re.sub(r"<img (?![^>]*\bloading=)", '<img loading="lazy" ', body)
    context["body"] = body


def call_workers(app: Sphinx) -> None:
    """Let the processes that will run the pages import what they need while the reference is made.

    Sphinx-Gallery starts them when it comes to its first page, and leaves them waiting after its
    last: see :func:`await_workers` and :func:`dismiss_workers`.
    """
    count = app.config.sphinx_gallery_conf["parallel"]
    if count and any(_will_run(app)):
        from joblib import Parallel, delayed

        pool = Parallel(n_jobs=count, pre_dispatch="n_jobs", batch_size=1, backend="loky")
        _starting.append(threading.Thread(target=pool, args=([delayed(_import)()] * count,)))
        _starting[-1].start()


def _will_run(app: Sphinx) -> Iterator[bool]:
    """For each page: whether its mark says that it has not run as it is."""
    scripts = Path(app.srcdir, app.config.sphinx_gallery_conf["examples_dirs"])
    for script in scripts.glob("*/plot_*.py"):
        mark = Path(app.srcdir, "gallery", script.parent.name, f"{script.name}.md5")
        now = get_md5sum(script, mode="t")
        yield not mark.exists() or mark.read_text("utf-8").strip() != now


def await_workers(app: Sphinx) -> None:
    """The workers are ready for the first page."""
    while _starting:
        _starting.pop().join()


def dismiss_workers(app: Sphinx) -> None:
    """End the workers: left alone they wait, and the end of the build waits for them."""
    if app.config.sphinx_gallery_conf["parallel"]:
        from joblib.externals.loky import get_reusable_executor

        get_reusable_executor(reuse=True).shutdown(wait=False)


def _import() -> None:
    for name in ("matplotlib.pyplot", "pandas", "sphinx_gallery.gen_rst", "torch", "roundoff.ort"):
        importlib.import_module(name)


_starting: list[threading.Thread] = []


_TRACELESS = (nodes.comment, tabular_col_spec, autosummary_table, autosummary_toc)


def keep_places(app: Sphinx, tree: nodes.document) -> None:
    """Give the place of a module to its section: what follows the directive may leave no trace."""
    for node in list(tree.findall(nodes.Element)):
        if isinstance(node, _TRACELESS) and node["ids"]:
            node.parent["ids"] += node["ids"]
            node["ids"] = []


_THUMB = re.compile(r'<img [^>]*src="([^"]*)sphx_glr_(plot_\w+?)_thumb\.png"[^>]*>')
_FIGURE = re.compile(r'<img (?=[^>]*ro-figure)(?=[^>]*src="[^"]*/([^"/]+\.svg)")')
_CELL = re.compile(
    r'<div class="highlight-Python notranslate"><div class="highlight"><pre.*?</pre></div></div>',
    re.DOTALL,
)
LONG_CELL = 16


def _size_of(app: Sphinx, name: str) -> str:
    """Size of a figure that some page has drawn; nothing where it is not there."""
    drawn = next(Path(app.srcdir, "gallery").glob(f"**/images/{name}"), None)
    return _size(drawn) if drawn else ""


def _size(drawing: Path) -> str:
    """Width and height as attributes, so that the page keeps its place while the figure loads."""
    head = drawing.read_text("utf-8")[:2000]
    sizes = [float(re.search(rf'{side}="([\d.]+)pt"', head)[1]) for side in ("width", "height")]
    return 'width="{:.0f}" height="{:.0f}" '.format(*sizes)


def _thumbnail(app: Sphinx, found: re.Match[str]) -> str:
    """The figure of the page's answer, for each scheme, instead of its picture for a light page."""
    folder, page = found.groups()
    drawn = list(Path(app.srcdir, "gallery").glob(f"*/images/{page}_answer.svg"))
    if not drawn:
        return found[0]
    size = _size(drawn[0])
    return "".join(
        f'<img class="only-{scheme}" alt="" src="{folder}{page}_answer{ending}.svg" {size}>'
        for scheme, ending in (("light", ""), ("dark", "_dark"))
    )


def _fold(cell: re.Match[str]) -> str:
    """A cell longer than a screen's third is closed at first: the story is what is read."""
    lines = cell[0].count("\n")
    first = re.sub(r"<[^>]+>", "", cell[0].split("\n", 1)[0])
    if found := re.search(r"study\s*\.\s*(claim|dots|lines|svg|finish)\(", first):
        # How a sentence is tested, or a chart drawn: one click away.
        kind = "ro-test" if found[1] == "claim" else "ro-drawn"
        return f'<details class="ro-code {kind}"><summary>Code</summary>{cell[0]}</details>'
    if lines <= LONG_CELL:
        return cell[0]
    return f'<details class="ro-code"><summary>Code, {lines} lines</summary>{cell[0]}</details>'


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the hooks; the first ones must come before Sphinx-Gallery's own."""
    app.connect("builder-inited", forget_stale_pages, priority=1)
    app.connect("builder-inited", call_workers, priority=2)
    app.connect("builder-inited", await_workers)
    app.connect("builder-inited", dismiss_workers, priority=900)
    app.connect("doctree-read", keep_places)
    app.connect("html-page-context", share_navigation, priority=100)
    app.connect("html-page-context", finish_page, priority=900)
    app.connect("build-finished", finished, priority=999)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
