"""What this build and the records of other machines hold, as tables, cards and downloads.

Ours, as the data are: the library's records, and this build's environment. Directives:
``results-table`` (sentences of answers × machines) and ``machine-cards``.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import evidence
from answer import document
from hooks import page_order
from notebooks import archive
from roundoff.environment import environment, short_name, summary
from roundoff.record import RECORDED, Provenance, Record, read_record
from roundoff.script import unit_test_going

#: Folder of the site that holds what can be downloaded.
FOLDER = "records"
BUILD = "this-build"


def newest(record: Record) -> Provenance:
    """The last of the runs that a record is made of."""
    return max(record.provenance.values(), key=lambda run: run.date)


def records() -> list[Record]:
    """All records; machines with a GPU come first, pages in the gallery's order."""
    return sorted(
        map(read_record, RECORDED.glob("*/*.json")),
        key=lambda record: (
            newest(record).environment.get("gpu") is None,
            record.machine,
            page_order(record.page),
        ),
    )


def stories(srcdir: Path) -> list[str]:
    """The pages whose records hold values, in the gallery's order."""
    pages = [script.stem for script in srcdir.glob("gallery/*/plot_*.py")]
    return sorted(filter(evidence.records_of, pages), key=page_order)


class _Listing(SphinxDirective):
    """What the two directives share: reStructuredText lines, whose links Sphinx checks."""

    def run(self) -> list[nodes.Node]:
        """Parse the lines; the page is made again when one of the records changes."""
        # Files alone: to Sphinx a folder is a file that is missing, and its page always outdated.
        for path in RECORDED.glob("*/*.json"):
            self.env.note_dependency(str(path))
        return self.parse_text_to_nodes("\n".join(self.lines()))

    def lines(self) -> list[str]:
        """The reStructuredText."""
        raise NotImplementedError

    def link(self, page: str) -> str:
        """A link to a page of the gallery, or its name where this site has no such page."""
        words, name = page.removeprefix("plot_").replace("_", " "), document(self.env, page)
        return f":doc:`{words} </{name}>`" if name else words


def _text(words: str) -> str:
    """Words as they are, whatever reStructuredText would make of them."""
    return "".join(f"\\{c}" if c in "\\*`|_<>" else c for c in words)


class ResultsTable(_Listing):
    """For each page what its answer says, and what every machine says of it."""

    def lines(self) -> list[str]:
        """One table a page."""
        srcdir = Path(self.env.srcdir)
        return [line for page in stories(srcdir) for line in self.values(srcdir, page)]

    def values(self, srcdir: Path, page: str) -> list[str]:
        """The sentences of a page's answer that have numbers, and each machine's numbers."""
        records = evidence.records_of(page)
        name = document(self.env, page)
        docstring = (srcdir / f"{name}.py").read_text("utf-8").split('"""', 2)[1]
        labels = [short_name(newest(record).environment) for record in records.values()]
        rows = [["Answer", *map(_text, labels)]]
        for sentence, bound in evidence.answer(docstring):
            cells = [
                ", ".join(filter(None, (evidence.said(r, page, *one) for one in bound)))
                for r in records.values()
            ]
            place = evidence.split(bound[0][1], page)[1]
            link = f"`Evidence <{name}.html#evidence-{place}>`__"
            rows.append([f"{_text(sentence)} {link}", *(_text(cell or "–") for cell in cells)])
        files = [f"{FOLDER}/{page}/{machine}" for machine in records]
        rows.append(["Tables", *(f"`CSV <{f}.zip>`__, `JSON <{f}.json>`__" for f in files)])
        lines = [f".. list-table:: :doc:`/{name}`", "   :widths: auto", "   :header-rows: 1"]
        lines += ["   :class: ro-results", ""]
        for row in rows:
            lines += [f"   {'  ' if i else '* '}- {cell}" for i, cell in enumerate(row)]
        return [*lines, ""]


class MachineCards(_Listing):
    """A card a machine: what it is, with which versions, and what it has recorded when."""

    def lines(self) -> list[str]:
        """This build's machine, then the recorded ones."""
        label = "this build, quick" if unit_test_going() else "this build"
        cards = {BUILD: _machine(environment(), label)}
        cards[BUILD] += [f"* {self.link(page)}" for page in stories(Path(self.env.srcdir))]
        latest = {r.machine: r for r in sorted(records(), key=lambda r: newest(r).date)}
        for record in records():
            about = newest(latest[record.machine]).environment
            commits = ", ".join(f"``{commit}``" for commit in record.commits)
            card = cards.setdefault(record.machine, _machine(about))
            card.append(f"* {self.link(record.page)}: {newest(record).date[:10]}, commit {commits}")
        inner = [
            line
            for card in cards.values()
            for line in (".. container::", "", *(f"   {line}" for line in card), "")
        ]
        return [".. container:: ro-start", "", *(f"   {line}" for line in inner)]


def _machine(env: Mapping[str, Any], label: str = "") -> list[str]:
    where, _, versions = summary(env).partition("; ")
    lines = [f"**{_text(where)}**" + (f" ({_text(label)})" if label else ""), ""]
    if gpu := env.get("gpu"):
        lines += [f"* driver {gpu['driver']}, CUDA {gpu['cuda']}, {gpu['memory_gib']} GiB"]
        lines += [f"* host: {_text(env['processor'])}, {env['cores']} cores"]
    return [*lines, f"* {_text(env['os'])}; {_text(versions)}"]


def offer(app: Sphinx, exception: Exception | None) -> None:
    """Put the records (JSON) and the tables (CSV, and an archive of them) into the site."""
    if exception is not None or app.builder.format != "html":
        return
    target = Path(app.outdir, FOLDER)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for record in records():
        tables = {f"{name}.csv": t.to_csv(index=False) for name, t in record.tables.items()}
        _put(target / record.page / record.machine, {n: t.encode() for n, t in tables.items()})
        name = f"{record.page}/{record.machine}.json"
        shutil.copyfile(RECORDED / name, target / name)
        study = f"{record.page.removeprefix('plot_')}.py"
        if (script := Path(app.confdir).parent / "studies" / study).exists():
            shutil.copyfile(script, target / record.page / study)


def _put(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    archive(folder.with_name(f"{folder.name}.zip"), files)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("results-table", ResultsTable)
    app.add_directive("machine-cards", MachineCards)
    app.connect("build-finished", offer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
