"""A reader downloads one notebook, or one script, and runs it: ``make test-notebooks``.

The environment is made for this, from a wheelhouse and without an index; roundoff comes from the
site, by the notebook's own first cell. It shows as many tables as the page.
"""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ..paths.pages import PAGES
from .conftest import ROOT

WHEELHOUSE = os.environ.get("ROUNDOFF_WHEELHOUSE", "")


def pages() -> list[str]:
    """Address in the site of each page, or of those that PAGE names, without its ending."""
    names = os.environ.get("PAGE") or ",".join(PAGES)
    return [f"gallery/{PAGES[name].parent.name}/{name}" for name in names.split(",")]


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


@pytest.fixture(scope="session")
def ran(
    python: Path, site: Path, address: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Each page's notebook and script, after it ran; the first notebook installs roundoff."""
    away = tmp_path_factory.mktemp("away")
    jobs = [(page, ending) for ending in (".ipynb", ".py") for page in pages()]
    files = {}

    def do(job: tuple[str, str]) -> None:
        page, ending = job
        folder = away / f"{Path(page).name}-{ending[1:]}"
        folder.mkdir()
        file = folder / (Path(page).name + ending)
        (offered,) = site.glob(f"_downloads/*/{file.name}")
        shutil.copy(offered, file)
        call = [python, file]
        if ending == ".ipynb":
            call = [python.with_name("jupyter-execute"), "--inplace", "--timeout=600", file]
        env = reader(folder, ROUNDOFF_SITE=address)
        done = subprocess.run(call, cwd=folder, env=env, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 0, f"{file.name}:\n{done.stderr[-3000:]}"
        files[page + ending] = file

    do(jobs[0])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(do, jobs[1:]))
    return files


@pytest.mark.parametrize("page", pages())
def test_a_notebook_shows_as_many_tables_as_the_page(page: str, ran: dict, site: Path) -> None:
    executed = json.loads(ran[f"{page}.ipynb"].read_text("utf-8"))
    outputs = [output for cell in executed["cells"] for output in cell.get("outputs", ())]
    tables = [output for output in outputs if "text/html" in output.get("data", {})]
    html = (site / f"{page}.html").read_text("utf-8")
    assert len(tables) == html.count('class="output_subarea') > 0
    assert not [output for output in outputs if output["output_type"] == "error"]
