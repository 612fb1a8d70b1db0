"""The page of results and the machines' cards: made from ``claims.json``, records and this build.

Directives: ``results-table``, ``machine-cards``.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from answer import CLAIMS
from hooks import page_order
from notebooks import archive
from roundoff.environment import summary
from roundoff.record import RECORDED, read_record

#: Folder of the site that holds what can be downloaded.
FOLDER = "records"


@dataclasses.dataclass(frozen=True)
class Run:
    """The tables of one page on one machine.

    Attributes
    ----------
    page : str
        Name of the page, such as ``plot_gemm_fusion``.
    key : str
        Name of the machine in addresses; ``this-build`` for the build's own.
    label : str
        Name of the machine for readers.
    tables : dict
        Tables by name.
    environment : dict
        What it ran on.
    date : str
        When; empty for this build.
    commits : sequence of str
        With which code; one for each run that a record is made of.
    """

    page: str
    key: str
    label: str
    tables: Mapping[str, pd.DataFrame]
    environment: Mapping[str, Any]
    date: str = ""
    commits: Sequence[str] = ()

    @property
    def is_build(self) -> bool:
        """Whether it is this build's."""
        return self.key == "this-build"


def built(gallery: Path) -> list[Run]:
    """What this build's pages showed, or an earlier build's that it goes on from."""
    runs = []
    for about in sorted(gallery.glob("*/tables/*/environment.json")):
        data = json.loads(about.read_text("utf-8"))
        tables = {p.stem: pd.read_csv(p) for p in sorted(about.parent.glob("*.csv"))}
        page = about.parent.name
        if (about.parents[2] / f"{page}.py").exists():
            runs.append(Run(page, "this-build", data["label"], tables, data["environment"]))
    return runs


def recorded(folder: Path = RECORDED) -> list[Run]:
    """What the records hold; machines with a GPU come first."""
    runs = []
    for path in sorted(folder.glob("*/*.json")):
        record = read_record(path)
        newest = max(record.provenance.values(), key=lambda run: run.date)
        runs.append(
            Run(
                record.page,
                record.machine,
                summary(newest.environment).split("; ")[0],
                record.tables,
                newest.environment,
                newest.date[:10],
                record.commits,
            )
        )
    return sorted(runs, key=lambda run: (run.environment.get("gpu") is None, run.key))


class _Results(SphinxDirective):
    """What the four directives share."""

    option_spec = {}  # noqa: RUF012 - docutils' own form

    def runs(self) -> list[Run]:
        """This build's, then the recorded; the page is made again when one of them changes."""
        gallery = Path(self.env.srcdir) / "gallery"
        # Files alone: to Sphinx a folder is a file that is missing, and its page always outdated.
        for path in (*RECORDED.glob("*/*.json"), *gallery.glob("*/tables/*/*")):
            self.env.note_dependency(str(path))
        return built(gallery) + recorded()

    def document(self, page: str) -> str | None:
        """Name of the page's document, where the gallery has it."""
        found = (n for n in sorted(self.env.found_docs) if n.endswith(f"/{page}"))
        return next((n for n in found if n.startswith("gallery/")), None)

    def parsed(self, lines: list[str]) -> list[nodes.Node]:
        """Nodes of generated reStructuredText."""
        return self.parse_text_to_nodes("\n".join(lines))


class ResultsTable(_Results):
    """Claims × machines: for each page what its answer says, and what every machine says of it."""

    def run(self) -> list[nodes.Node]:
        """Make the tables, one a page."""
        lines: list[str] = []
        gallery = Path(self.env.srcdir, "gallery")
        runs = self.runs()
        for path in sorted(gallery.glob(f"*/tables/*/{CLAIMS}"), key=_place):
            page = path.parent.name
            document = self.document(page)
            claims = json.loads(path.read_text("utf-8"))
            chosen = [c for c in claims if c["name"] in quoted(gallery, page)]
            if document and chosen:
                lines += _table(page, document, chosen, [r for r in runs if r.page == page])
        return self.parsed(lines or ["No page has run yet."])


def quoted(gallery: Path, page: str) -> list[str]:
    """Names of the claims that the answer of a page quotes."""
    script = next(gallery.glob(f"*/{page}.py")).read_text("utf-8")
    docstring = script.split('"""', 2)[1]
    return re.findall(r":bound:`[^`]*<([\w-]+)[^>]*>`", docstring)


def _place(path: Path) -> tuple[int, str]:
    return page_order(f"{path.parent.name}.py")


def _table(page: str, document: str, claims: list[dict[str, Any]], runs: list[Run]) -> list[str]:
    machines = {m: said for c in claims for m, said in c["said"].items()}
    rows = [["Answer", *(_text(name) for name, _ in machines.values())]]
    for claim in claims:
        words = re.sub(r"[`*]", "", claim["sentence"])
        address = f"{document}.html#claim-{claim['name']}"
        said = [claim["said"].get(m, ["", "–"])[1] or "–" for m in machines]
        rows.append([f"{_text(words)} `Evidence <{address}>`__", *map(_text, said)])
    links = ["Tables"]
    for machine in machines:
        run = next((r for r in runs if r.key == machine), None)
        link = f"`CSV <{FOLDER}/{page}/{machine}.zip>`__"
        if run is not None and not run.is_build:
            link += f", `JSON <{FOLDER}/{page}/{machine}.json>`__"
        links.append(link if run else "–")
    lines = [f".. list-table:: :doc:`/{document}`", "   :widths: auto", "   :header-rows: 1",
             "   :class: ro-results", ""]  # fmt: skip
    for row in [*rows, links]:
        lines += [f"   {'  ' if i else '* '}- {cell}" for i, cell in enumerate(row)]
    return [*lines, ""]


def _text(words: str) -> str:
    """Words as they are, whatever reStructuredText would make of them."""
    return "".join(f"\\{c}" if c in "\\*`|_<>" else c for c in words)


class MachineCards(_Results):
    """A card a machine: what it is, with which versions, and what it has recorded when."""

    def run(self) -> list[nodes.Node]:
        """Make the cards."""
        machines: dict[str, list[Run]] = {}
        for run in self.runs():
            machines.setdefault(run.key, []).append(run)
        lines = [".. container:: ro-start", ""]
        for runs in machines.values():
            runs.sort(key=lambda run: page_order(f"{run.page}.py"))
            lines += ["   .. container::", "", *(f"      {line}" for line in _card(runs)), ""]
        return self.parsed(lines) if machines else []


def _card(runs: list[Run]) -> list[str]:
    env = max(runs, key=lambda run: run.date).environment
    gpu, versions = env.get("gpu"), env["versions"]
    name = gpu["name"] if gpu else f"{env['processor']}, {env['cores']} cores"
    lines = [f"**{_text(name)}**" + (f" ({_text(runs[0].label)})" if runs[0].is_build else ""), ""]
    if gpu:
        lines.append(f"* driver {gpu['driver']}, CUDA {gpu['cuda']}, {gpu['memory_gib']} GiB")
        lines.append(f"* host: {_text(env['processor'])}, {env['cores']} cores")
    named = ", ".join(f"{k} {v}" for k, v in versions.items() if v and k not in ("pandas", "numpy"))
    lines.append(f"* {_text(env['os'])}, Python {env['python']}")
    lines.append(f"* {_text(named)}")
    for run in runs:
        what = run.page.removeprefix("plot_").replace("_", " ")
        commits = ", ".join(f"``{commit}``" for commit in run.commits)
        lines.append(f"* {what}" + (f": {run.date}, commit {commits}" if run.date else ""))
    return lines


def offer(app: Sphinx, exception: Exception | None) -> None:
    """Put the records (JSON) and the tables (an archive of CSV) into the site."""
    if exception is not None or app.builder.format != "html":
        return
    target = Path(app.outdir, FOLDER)
    shutil.rmtree(target, ignore_errors=True)
    gallery = Path(app.srcdir, "gallery")
    for run in built(gallery):
        folder = next(gallery.glob(f"*/tables/{run.page}"))
        (target / run.page / run.key).mkdir(parents=True, exist_ok=True)
        archive(target / run.page / f"{run.key}.zip", list(folder.iterdir()))
        for table in folder.glob("*.csv"):
            shutil.copyfile(table, target / run.page / run.key / table.name)
    claims = [c for p in sorted(gallery.glob("*/tables/*/claims.json"))
              for c in json.loads(p.read_text("utf-8"))]  # fmt: skip
    target.mkdir(parents=True, exist_ok=True)
    (target / "claims.json").write_text(json.dumps(claims, indent=1, ensure_ascii=False), "utf-8")
    for run in recorded():
        (target / run.page).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(RECORDED / run.page / f"{run.key}.json",
                        target / run.page / f"{run.key}.json")  # fmt: skip
        tables = {f"{name}.csv": frame.to_csv(index=False) for name, frame in run.tables.items()}
        archive(target / run.page / f"{run.key}.zip", tables)
        (target / run.page / run.key).mkdir(parents=True, exist_ok=True)
        for name, text in tables.items():
            (target / run.page / run.key / name).write_text(text, "utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("results-table", ResultsTable)
    app.add_directive("machine-cards", MachineCards)
    app.connect("build-finished", offer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
