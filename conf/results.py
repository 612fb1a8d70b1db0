"""What this build and the records of other machines hold, as tables, cards and downloads.

Ours, as the data are: the library's records, and this build's environment. Directives:
``results-table`` (sentences of answers × machines) and ``machine-cards``.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.rst import escape

import evidence
from answer import document
from hooks import page_order
from roundoff.environment import environment, short_name, summary
from roundoff.record import RECORDED, Record, read_record
from roundoff.script import unit_test_going

#: Folder of the site that holds what can be downloaded.
FOLDER = "records"


def records() -> list[Record]:
    """All records; machines with a GPU come first, pages in the gallery's order."""
    return sorted(
        map(read_record, RECORDED.glob("*/*.json")),
        key=lambda record: (
            "nvidia" not in record.machine,
            record.machine,
            page_order(record.page),
        ),
    )


class ResultsTable(SphinxDirective):
    """For each page what its answer says, and what every machine says of it."""

    def run(self) -> list[nodes.Node]:
        """One table a page whose records hold values, in the gallery's order."""
        pages = [script.stem for script in Path(self.env.srcdir).glob("gallery/*/plot_*.py")]
        stories = sorted(filter(evidence.records_of, pages), key=page_order)
        lines = [line for page in stories for line in self.values(page)]
        return self.parse_text_to_nodes("\n".join(lines))

    def values(self, page: str) -> list[str]:
        """The sentences of a page's answer that have numbers, and each machine's numbers."""
        records, name = evidence.records_of(page), document(self.env, page)
        docstring = Path(self.env.srcdir, f"{name}.py").read_text("utf-8").split('"""', 2)[1]
        labels = [short_name(evidence.newest(r).environment) for r in records.values()]
        rows = [["Answer", *map(escape, labels)]]
        for sentence, bound in evidence.answer(docstring):
            cells = [
                ", ".join(filter(None, (evidence.said(r, page, *one) for one in bound)))
                for r in records.values()
            ]
            place = evidence.split(bound[0][1], page)[1]
            link = f"`Evidence <{name}.html#evidence-{place}>`__"
            rows.append([f"{escape(sentence)} {link}", *(escape(cell or "–") for cell in cells)])
        files = [f"{FOLDER}/{page}/{machine}" for machine in records]
        rows.append(["Tables", *(f"`CSV <{f}.zip>`__, `JSON <{f}.json>`__" for f in files)])
        lines = [f".. list-table:: :doc:`/{name}`", "   :widths: auto", "   :header-rows: 1"]
        lines += ["   :class: ro-results", ""]
        for row in rows:
            lines += [f"   {'  ' if i else '* '}- {cell}" for i, cell in enumerate(row)]
        return [*lines, ""]


class MachineCards(SphinxDirective):
    """A card a machine: what it is, with which versions, and what it has recorded when."""

    def run(self) -> list[nodes.Node]:
        """This build's machine, then the recorded ones."""
        label = " (this build, quick)" if unit_test_going() else " (this build)"
        cards = [_machine(environment(), label)]
        for _, group in itertools.groupby(records(), key=lambda record: record.machine):
            runs = [(record, evidence.newest(record)) for record in group]
            card = _machine(max((run for _, run in runs), key=lambda run: run.date).environment)
            for record, run in runs:
                page = f":doc:`/{document(self.env, record.page)}`"
                commits = ", ".join(f"``{commit}``" for commit in record.commits)
                card.append(f"* {page}: {run.date[:10]}, commit {commits}")
            cards.append(card)
        lines = [".. container:: ro-start", ""]
        for card in cards:
            lines += ["   .. container::", "", *(f"      {line}" for line in card), ""]
        return self.parse_text_to_nodes("\n".join(lines))


def _machine(env: Mapping[str, Any], label: str = "") -> list[str]:
    where, _, versions = summary(env).partition("; ")
    lines = [f"**{escape(where)}**{label}", ""]
    if gpu := env.get("gpu"):
        lines += [f"* driver {gpu['driver']}, CUDA {gpu['cuda']}, {gpu['memory_gib']} GiB"]
        lines += [f"* host: {escape(env['processor'])}, {env['cores']} cores"]
    return [*lines, f"* {escape(env['os'])}; {escape(versions)}"]


def offer(app: Sphinx, exception: Exception | None) -> None:
    """Put the records (JSON) and the tables (CSV, and an archive of them) into the site."""
    if exception is not None or app.builder.format != "html":
        return
    shutil.rmtree(Path(app.outdir, FOLDER), ignore_errors=True)
    for record in records():
        page = Path(app.outdir, FOLDER, record.page)
        tables = page / record.machine
        tables.mkdir(parents=True)
        for name, table in record.tables.items():
            table.to_csv(tables / f"{name}.csv", index=False)
        shutil.make_archive(str(tables), "zip", tables)
        shutil.copy(RECORDED / record.page / f"{record.machine}.json", page)
        study = f"{record.page.removeprefix('plot_')}.py"
        shutil.copy(Path(app.confdir).parent / "studies" / study, page)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("results-table", ResultsTable)
    app.add_directive("machine-cards", MachineCards)
    app.connect("build-finished", offer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
