"""A reader downloads one notebook, or one script, and runs it: ``make test-notebooks``.

The environment is made for this, from a wheelhouse and without an index; roundoff comes from the
site, by the notebook's own first cell. The tables must be the page's, times aside.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from .conftest import ROOT, SITE

WHEELHOUSE = os.environ.get("ROUNDOFF_WHEELHOUSE", "")
DRIVER = Path(__file__).with_name("execute_notebook.py")
# Columns (table.column) that hold times, or follow from them: only these may differ.
TIMED = {
    "plot_layer_norm_discrepancies": ["switches.cost"],
    "plot_batch_invariance": [
        *(f"{t}.{c}" for t in ("cost", "token") for c in ("µs", "roundoff", "low", "high")),
        "cost.one tile",
    ],
}  # fmt: skip


def pages() -> list[str]:
    """Address of each page in the site, without its ending."""
    found = (ROOT / "gallery").glob("*/plot_*.py")
    return sorted(f"gallery/{p.parent.name}/{p.stem}" for p in found)


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a clean environment that has Jupyter's kernel and no roundoff."""
    if not WHEELHOUSE:
        pytest.fail("ROUNDOFF_WHEELHOUSE is not set: make test-notebooks sets it")
    folder = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    program = folder / "bin" / "python"
    subprocess.run(
        [program, "-m", "pip", "install", "--quiet", "ipykernel", "nbclient"],
        env=reader(folder),
        check=True,
    )
    seen = run(program, "-c", "import roundoff", cwd=folder, env=reader(folder))
    assert "ModuleNotFoundError" in seen.stderr, "the clean environment has roundoff already"
    return program


def reader(folder: Path, **more: str) -> dict[str, str]:
    """What a reader's processes see: nothing of this checkout, no package index."""
    kept = {k: v for k, v in os.environ.items() if k in ("LANG", "OMP_NUM_THREADS", "PATH")}
    return kept | {
        "HOME": str(folder),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_FIND_LINKS": WHEELHOUSE,
        "PIP_NO_COMPILE": "1",
        "PIP_NO_INDEX": "1",
        "UNITTEST_GOING": "1",
        **more,
    }


def run(program: Path, *arguments: str, cwd: Path, env: dict) -> subprocess.CompletedProcess:
    return subprocess.run(
        [program, *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="session")
def ran(python: Path, address: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder in which each page's notebook and script ran; the first notebook installs roundoff."""
    away = tmp_path_factory.mktemp("away")
    jobs = [(page, ending) for ending in (".ipynb", ".py") for page in pages()]
    folders = {}

    def do(job: tuple[str, str]) -> None:
        page, ending = job
        folder = away / f"{Path(page).name}-{ending[1:]}"
        folder.mkdir()
        file = folder / (Path(page).name + ending)
        file.write_bytes(download(address, page, ending))
        call = [str(DRIVER), str(file), str(folder)] if ending == ".ipynb" else [str(file)]
        env = reader(folder, ROUNDOFF_SITE=address)
        done = run(python, *call, cwd=folder, env=env)
        (folder / "log").write_text(done.stdout + done.stderr)
        assert done.returncode == 0, f"{file.name}:\n{done.stderr[-3000:]}"
        folders[page + ending] = folder

    do(jobs[0])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(do, jobs[1:]))
    return folders


def download(address: str, page: str, ending: str) -> bytes:
    """What the page's download button gives."""
    with urllib.request.urlopen(f"{address}/{page}.html") as answer:
        found = re.search(rf'href="([^"]*_downloads/[^"]*{ending})"', answer.read().decode())
    assert found, f"{page} offers no {ending}"
    with urllib.request.urlopen(f"{address}/{page.rsplit('/', 1)[0]}/{found[1]}") as answer:
        return answer.read()


def tables(folder: Path) -> dict[str, pd.DataFrame]:
    return {p.stem: pd.read_csv(p) for p in sorted(folder.glob("*.csv"))}


def is_same(one: pd.Series, other: pd.Series | None) -> bool:
    """Equal; for numbers within what the order of a float64 sum may change."""
    if other is None or len(one) != len(other) or one.dtype != other.dtype:
        return False
    if pd.api.types.is_float_dtype(one):
        return np.allclose(one, other, rtol=1e-9, atol=0, equal_nan=True)
    return one.equals(other)


#: Pages whose tables are kept by name; those in the form print theirs.
KEPT = [page for page in pages() if "Study(" in (ROOT / f"{page}.py").read_text("utf-8")]


@pytest.mark.parametrize("page", [page for page in pages() if page not in KEPT])
def test_a_notebook_of_a_story_shows_as_many_tables(page: str, ran: dict, site: Path) -> None:
    executed = json.loads((ran[f"{page}.ipynb"] / "executed.ipynb").read_text("utf-8"))
    outputs = [output for cell in executed["cells"] for output in cell.get("outputs", ())]
    tables = [output for output in outputs if "text/html" in output.get("data", {})]
    html = (site / f"{page}.html").read_text("utf-8")
    assert len(tables) == html.count('class="output_subarea') > 0
    assert not [output for output in outputs if output["output_type"] == "error"]


@pytest.mark.parametrize("page", KEPT)
def test_a_notebook_and_a_script_show_the_tables_of_the_page(page: str, ran: dict) -> None:
    section, name = page.split("/")[1:]
    shown = tables(SITE / "docs" / "gallery" / section / "tables" / name)
    notebook = tables(ran[f"{page}.ipynb"])
    script = tables(ran[f"{page}.py"] / "build" / name)
    assert shown.keys() == notebook.keys() == script.keys()
    steady, moved = 0, []
    for table, frame in shown.items():
        for column in frame:
            same = [
                is_same(frame[column], other[table].get(column)) for other in (notebook, script)
            ]
            steady += all(same)
            timed = any(fnmatch(f"{table}.{column}", p) for p in TIMED.get(name, ()))
            if not all(same) and not timed:
                moved.append(f"{table}: {column}, in the notebook, in the script: {same}")
    assert not moved, f"other numbers than the page's: {moved}"
    assert steady > len(shown), "hardly a column is compared"


@pytest.mark.parametrize("page", KEPT)
def test_a_notebook_displays_each_table_of_the_page(page: str, ran: dict, site: Path) -> None:
    executed = json.loads((ran[f"{page}.ipynb"] / "executed.ipynb").read_text("utf-8"))
    outputs = [
        "".join(output.get("data", {}).get("text/html", ""))
        for cell in executed["cells"]
        for output in cell.get("outputs", ())
    ]
    caption = r'<(?:caption|p [^>]*|p) ?id="((?:table|caption)-[^"]+)"'
    found = set(re.findall(caption, "".join(outputs)))
    there = set(re.findall(caption, (site / f"{page}.html").read_text("utf-8")))
    assert found == there
    assert there


def test_the_first_cell_installed_roundoff_from_the_site(python: Path, ran: dict) -> None:
    where = run(python, "-m", "pip", "show", "-f", "roundoff", cwd=python.parent,
                env=reader(python.parent))  # fmt: skip
    assert "roundoff/page/study.py" in where.stdout
    first = next(iter(ran))
    executed = json.loads((ran[first] / "executed.ipynb").read_text("utf-8"))
    assert "%pip install" in "".join(executed["cells"][0]["source"])
