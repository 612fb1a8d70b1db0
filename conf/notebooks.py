"""Notebooks that a reader can run with nothing but the file: the site carries the library's wheel.

Sphinx-Gallery's own notebooks keep much of reStructuredText. These are written again from the
page's resolved tree, with the page; the code is the page's own, cell by cell, after one cell that
installs roundoff from the site where it is missing.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError
from sphinx.util import logging

import prose
import roundoff

logger = logging.getLogger(__name__)

#: Where ``make serve`` shows the site.
LOCAL = "http://127.0.0.1:8000/"
WHEEL = f"roundoff-{roundoff.__version__}-py3-none-any.whl"
FIRST_CELL = """\
# Where roundoff is installed, this cell does nothing; elsewhere it installs it from its site.
import importlib.util
import os
import shutil

if importlib.util.find_spec("roundoff") is None:
    site = os.environ.get("ROUNDOFF_SITE", "{site}").rstrip("/")
    runtime = "gpu" if shutil.which("nvidia-smi") else "cpu"
    %pip install --quiet "roundoff[{{runtime}}] @ {{site}}/wheels/{wheel}"
    importlib.invalidate_caches()"""
_STEADY = (1980, 1, 1, 0, 0, 0)


def site_address(app: Sphinx) -> str:
    """Address of the published site, or of ``make serve``; it ends with a slash."""
    return (app.config.html_baseurl or LOCAL).rstrip("/") + "/"


def pages(app: Sphinx) -> list[str]:
    """Names of the gallery's pages, in the order of their addresses."""
    return sorted(
        name
        for name in app.env.found_docs
        if name.startswith("gallery/") and Path(name).name.startswith("plot_")
    )


def notebook(cells: list[tuple[str, str]], first: str) -> str:
    """A notebook, format 4.4, as JSON.

    Parameters
    ----------
    cells : list of (kind, text)
        ``"text"`` is Markdown; neighbours become one cell. ``"code"`` is a cell each.
    first : str
        Source of the cell before them.
    """
    joined: list[tuple[str, str]] = [("code", first)]
    for kind, text in cells:
        if kind == "text" and joined[-1][0] == "text":
            joined[-1] = ("text", f"{joined[-1][1]}\n\n{text}")
        else:
            joined.append((kind, text))
    data = {
        "cells": [_cell(kind, text) for kind, text in joined],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 4,
    }
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def _cell(kind: str, text: str) -> dict[str, Any]:
    source = text.strip("\n").splitlines(keepends=True)
    if kind == "text":
        return {"cell_type": "markdown", "metadata": {}, "source": source}
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [],
        "source": source,
    }


def write_beside(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Write the notebook of a page of the gallery as the page itself is written."""
    if doctree is not None and pagename in pages(app):
        _write(app, pagename, doctree)


def write_rest(app: Sphinx) -> list[Any]:
    """Write the notebooks of pages that were not, and the archives of all."""
    for name in pages(app):
        tree = Path(app.doctreedir, f"{name}.doctree")
        if not _is_current(Path(app.srcdir, f"{name}.ipynb"), tree, _first(app)):
            _write(app, name, app.env.get_and_resolve_doctree(name, app.builder, tags=app.tags))
    gallery = Path(app.srcdir, "gallery")
    for ending, language in ((".ipynb", "jupyter"), (".py", "python")):
        files = [Path(app.srcdir, name).with_suffix(ending) for name in pages(app)]
        archive(gallery / f"gallery_{language}.zip", files, gallery)
    app.builder.copy_download_files()  # before the pages Sphinx copied Sphinx-Gallery's own
    return []  # no pages to add


def _first(app: Sphinx) -> str:
    return FIRST_CELL.format(site=site_address(app), wheel=WHEEL)


def _write(app: Sphinx, name: str, tree: nodes.document) -> None:
    """The notebook of a page whose references are resolved, and the page's archive."""
    cells = list(prose.blocks(tree, f"{site_address(app)}{name}.html"))
    script = Path(app.srcdir, name).with_suffix(".py")
    _check(script, [text for kind, text in cells if kind == "code"])
    target = script.with_suffix(".ipynb")
    _put(target, notebook(cells, _first(app)).encode())
    os.utime(target)  # newer than the page's tree, whether or not it has changed
    archive(script.with_suffix(".zip"), [script, target])


def forget_downloads(app: Sphinx, env: BuildEnvironment) -> None:
    """No page is read again for the notebooks and archives that are made from it."""
    for name, files in env.dependencies.items():
        if name.startswith("gallery/"):
            files.difference_update([f for f in files if str(f).endswith((".ipynb", ".zip"))])


def _is_current(target: Path, tree: Path, first: str) -> bool:
    """Whether a notebook was made from this tree, for this site."""
    if not target.exists() or target.stat().st_mtime_ns <= tree.stat().st_mtime_ns:
        return False
    cells = json.loads(target.read_text("utf-8"))["cells"]
    return bool(cells) and cells[0] == _cell("code", first)


def _check(script: Path, shown: list[str]) -> None:
    """A notebook without one of the script's cells would be another study."""
    from sphinx_gallery.py_source_parser import (
        remove_config_comments,
        split_code_and_text_blocks,
    )

    _, parts = split_code_and_text_blocks(str(script))
    code = [remove_config_comments(part[1]).strip() for part in parts if part[0] == "code"]
    written = [text for text in code if text]
    if written != [text.strip() for text in shown]:
        raise ExtensionError(
            f"{script.name}: the page shows {len(shown)} cells, the script has {len(written)}, or "
            "their text differs"
        )


def archive(
    target: Path, files: Iterable[Path] | Mapping[str, str], root: Path | None = None
) -> None:
    """Zip files; the same content gives the same bytes, whatever the dates.

    Parameters
    ----------
    target : path
        The archive.
    files : paths, or dict
        Files, or name -> text.
    root : path, optional
        What the names in the archive are relative to; by default they are the files' names alone.
    """
    if isinstance(files, Mapping):
        held = {name: text.encode() for name, text in files.items()}
    else:
        held = {p.relative_to(root).as_posix() if root else p.name: p.read_bytes() for p in files}
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name in sorted(held):
            zipped.writestr(zipfile.ZipInfo(name, _STEADY), held[name])
    _put(target, made.getvalue())


def _put(path: Path, data: bytes) -> None:
    """Write a file that pages depend on, unless it is there: a new date has them read again."""
    if not path.exists() or path.read_bytes() != data:
        path.write_bytes(data)


def build_wheel(app: Sphinx) -> Path | None:
    """The library's wheel; built again when the library has changed.

    Returns
    -------
    path or None
        None where the library is not a checkout, so that there is nothing to build it from.
    """
    root = Path(roundoff.__file__).resolve().parents[2]
    sources = [root / name for name in ("pyproject.toml", "README.md", "LICENSE")]
    if not all(path.exists() for path in sources):
        return None
    sources += sorted(
        p for p in (root / "src" / "roundoff").rglob("*") if p.suffix in (".py", ".json", ".typed")
    )
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    folder = Path(app.doctreedir).parent / "wheel" / digest.hexdigest()[:16]
    if (folder / WHEEL).exists():
        return folder / WHEEL
    shutil.rmtree(folder.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory() as made:
        # A copy: setuptools leaves files beside its sources, and takes old ones from there.
        for path in sources:
            copy = Path(made, path.relative_to(root))
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        done = subprocess.run(
            [sys.executable, "-c", "from setuptools.build_meta import build_wheel as b; b('out')"],
            cwd=made,
            env=os.environ | {"SOURCE_DATE_EPOCH": "315532800"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ExtensionError(f"the library's wheel cannot be built:\n{done.stderr[-2000:]}")
        folder.mkdir(parents=True)
        shutil.move(Path(made, "out", WHEEL), folder / WHEEL)
    return folder / WHEEL


def begin_wheel(app: Sphinx) -> None:
    """Build the wheel while the pages are read and written: that is another process."""
    if app.builder.format == "html":
        _building.append(_thread.submit(build_wheel, app))


def carry_wheel(app: Sphinx, exception: Exception | None) -> None:
    """Put the wheel where the notebooks' first cell looks for it."""
    if exception is not None or app.builder.format != "html":
        return
    wheel = _building.pop().result()
    folder = Path(app.outdir, "wheels")
    shutil.rmtree(folder, ignore_errors=True)
    if wheel is None:
        logger.info("no pyproject.toml beside the library: the site carries no wheel")
        return
    folder.mkdir(parents=True)
    shutil.copyfile(wheel, folder / wheel.name)


_thread = ThreadPoolExecutor(1)
_building: list[Future[Path | None]] = []


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the steps."""
    app.connect("builder-inited", begin_wheel, priority=900)
    app.connect("env-updated", forget_downloads)
    app.connect("html-page-context", write_beside)
    app.connect("html-collect-pages", write_rest)
    app.connect("build-finished", carry_wheel)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
