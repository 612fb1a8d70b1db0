"""What this build and the records of other machines hold, as tables, cards and downloads.

Ours, as the data are: ``claims.json`` and the tables that a page leaves when it runs, and the
library's records. Directives: ``results-table`` (claims × machines), ``machine-cards``,
``recorded-machines``, ``running-times``. Sphinx-Gallery's own page of running times loads scripts
from elsewhere.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import evidence
from answer import claims_of, document
from hooks import page_order
from notebooks import archive
from roundoff.environment import short_name
from roundoff.record import RECORDED, Provenance, Record, read_record

#: Folder of the site that holds what can be downloaded.
FOLDER = "records"
BUILD = "this-build"
#: How a label ends where rows were computed by a GPU's processor.
HOST = "'s host"
# On a phone a row of this class is a card, in which each cell says whose column it is.
CARDS, COLUMN = "ro-results", "ro-column"


def newest(record: Record) -> Provenance:
    """The last of the runs that a record is made of."""
    return max(record.provenance.values(), key=lambda run: run.date)


def records() -> list[Record]:
    """All records; machines with a GPU come first, pages in the gallery's order."""
    return sorted(
        map(read_record, RECORDED.glob("*/*.json")),
        key=lambda record: (newest(record).environment.get("gpu") is None, record.machine,
                            page_order(record.page)),
    )  # fmt: skip


def built(srcdir: Path) -> list[Path]:
    """Folders of the tables of this build's pages, or of an earlier one's that it goes on from."""
    folders = (p.parent for p in (srcdir / "gallery").glob("*/tables/*/environment.json"))
    there = (f for f in folders if (f.parents[1] / f"{f.name}.py").exists())
    return sorted(there, key=lambda folder: page_order(folder.name))


class _Listing(SphinxDirective):
    """What the four directives share: reStructuredText lines, whose links Sphinx checks."""

    def run(self) -> list[nodes.Node]:
        """Parse the lines; the page is made again when one of the files changes."""
        gallery = Path(self.env.srcdir, "gallery")
        # Files alone: to Sphinx a folder is a file that is missing, and its page always outdated.
        for path in (*RECORDED.glob("*/*.json"), *gallery.glob("*/tables/*/*"),
                     *gallery.glob("*/*.cost.json")):  # fmt: skip
            self.env.note_dependency(str(path))
        return self.parse_text_to_nodes("\n".join(self.lines()))

    def lines(self) -> list[str]:
        """The reStructuredText."""
        raise NotImplementedError

    def link(self, page: str) -> str:
        """A link to a page of the gallery, or its name where this site has no such page."""
        words, name = page.removeprefix("plot_").replace("_", " "), document(self.env, page)
        return f":doc:`{words} </{name}>`" if name else words


def _table(caption: str, rows: list[list[str]], kind: str = "ro-listing") -> list[str]:
    lines = [f".. list-table:: {caption}", "   :widths: auto", "   :header-rows: 1",
             f"   :class: {kind}", ""]  # fmt: skip
    for row in rows:
        lines += [f"   {'  ' if i else '* '}- {cell}" for i, cell in enumerate(row)]
    return [*lines, ""]


def _links(page: str, machines: Iterable[str]) -> list[str]:
    """The last row of a page: each machine's tables, and its record."""
    links = ["Tables"]
    for machine in machines:
        link = f"`CSV <{FOLDER}/{page}/{machine}.zip>`__"
        if (RECORDED / page / f"{machine}.json").exists():
            link += f", `JSON <{FOLDER}/{page}/{machine}.json>`__"
        links.append(link)
    return links


def _said(label: str, words: str) -> str:
    return f"{words or '–'}{' (on its host)' if label.endswith(HOST) and words else ''}"


def _text(words: str) -> str:
    """Words as they are, whatever reStructuredText would make of them."""
    return "".join(f"\\{c}" if c in "\\*`|_<>" else c for c in words)


class ResultsTable(_Listing):
    """For each page what its answer says, and what every machine says of it."""

    def lines(self) -> list[str]:
        """One table a page."""
        srcdir = Path(self.env.srcdir)
        pages = {folder.name: self.page for folder in built(srcdir)}
        for script in srcdir.glob("gallery/*/plot_*.py"):
            if evidence.records_of(script.stem):
                pages[script.stem] = self.values
        ordered = sorted(pages, key=page_order)
        return [line for page in ordered for line in pages[page](srcdir, page)]

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
        return _table(f":doc:`/{name}`", [*rows, _links(page, records)], CARDS)

    def page(self, srcdir: Path, page: str) -> list[str]:
        """The claims that the answer of a page quotes; nothing where it quotes none."""
        name = document(self.env, page)
        docstring = (srcdir / f"{name}.py").read_text("utf-8").split('"""', 2)[1]
        quoted = re.findall(r":bound:`[^`]*<([\w-]+)[^>]*>`", docstring)
        claims = [claim for claim in claims_of(srcdir, page) if claim["name"] in quoted]
        if not claims:
            return []
        # A claim on a GPU's host is of the same machine: the cell says so, not the heading.
        machines = {
            m: label.removesuffix(HOST)
            for claim in claims
            for m, (label, _) in claim["said"].items()
        }
        rows = [["Answer", *map(_text, machines.values())]]
        for claim in claims:
            words = _text(re.sub(r"[`*]", "", claim["sentence"]))
            said = [_said(*claim["said"].get(m, ("", ""))) for m in machines]
            evidence = f"`Evidence <{name}.html#claim-{claim['name']}>`__"
            rows.append([f"{words} {evidence}", *map(_text, said)])
        return _table(f":doc:`/{name}`", [*rows, _links(page, machines)], CARDS)


class MachineCards(_Listing):
    """A card a machine: what it is, with which versions, and what it has recorded when."""

    def lines(self) -> list[str]:
        """This build's machine, then the recorded ones."""
        cards: dict[str, list[str]] = {}
        for folder in built(Path(self.env.srcdir)):
            about = json.loads((folder / "environment.json").read_text("utf-8"))
            card = cards.setdefault(BUILD, _machine(about["environment"], about["label"]))
            card.append(f"* {self.link(folder.name)}")
        scripts = Path(self.env.srcdir).glob("gallery/*/plot_*.py")
        stories = sorted((s.stem for s in scripts if evidence.records_of(s.stem)), key=page_order)
        for card in cards.values():  # of this build
            card += [f"* {self.link(page)}" for page in stories]
        latest = {r.machine: r for r in sorted(records(), key=lambda r: newest(r).date)}
        for record in records():
            environment = newest(latest[record.machine]).environment
            commits = ", ".join(f"``{commit}``" for commit in record.commits)
            card = cards.setdefault(record.machine, _machine(environment))
            card.append(f"* {self.link(record.page)}: {newest(record).date[:10]}, commit {commits}")
        inner = [line for card in cards.values() for line in
                 (".. container::", "", *(f"   {line}" for line in card), "")]  # fmt: skip
        return [".. container:: ro-start", "", *(f"   {line}" for line in inner)]


def _machine(env: Mapping[str, Any], label: str = "") -> list[str]:
    gpu = env.get("gpu")
    name = gpu["name"] if gpu else f"{env['processor']}, {env['cores']} cores"
    lines = [f"**{_text(name)}**" + (f" ({_text(label)})" if label else ""), ""]
    if gpu:
        lines += [f"* driver {gpu['driver']}, CUDA {gpu['cuda']}, {gpu['memory_gib']} GiB",
                  f"* host: {_text(env['processor'])}, {env['cores']} cores"]  # fmt: skip
    versions = ", ".join(
        f"{k} {v}" for k, v in env["versions"].items() if v and k not in ("pandas", "numpy")
    )
    return [*lines, f"* {_text(env['os'])}, Python {env['python']}", f"* {_text(versions)}"]


class RecordedMachines(_Listing):
    """One row a machine and page; a sentence where nothing has been recorded."""

    def lines(self) -> list[str]:
        """Machine, page, date, commits and versions of the newest run of each record."""
        rows = [["Machine", "Page", "Date", "Commit", "torch", "Triton", "ONNX Runtime"]]
        for record in records():
            env = newest(record).environment
            v = env["versions"]
            runtime = v.get("onnxruntime-gpu") or v.get("onnxruntime")
            rows.append([
                env["gpu"]["name"] if env["gpu"] else env["processor"], self.link(record.page),
                newest(record).date[:10], ", ".join(record.commits),
                *(version or "–" for version in (v.get("torch"), v.get("triton"), runtime)),
            ])  # fmt: skip
        if not rows[1:]:
            return ["No machine has been recorded yet."]
        return _table("Machines and pages recorded so far.", rows)


class RunningTimes(_Listing):
    """One row a page: how long it ran in this build, or in the build that last ran it."""

    def lines(self) -> list[str]:
        """Page and seconds."""
        rows = [["Page", "Seconds"]]
        gallery = Path(self.env.srcdir, "gallery")
        for script in sorted(gallery.glob("*/plot_*.py"), key=lambda path: page_order(path.stem)):
            cost = script.with_suffix(".cost.json")
            seconds = f"{json.loads(cost.read_text('utf-8'))['time']:.1f}" if cost.exists() else "–"
            rows.append([self.link(script.stem), seconds])
        return _table("Running time of each page.", rows)


def label_cells(app: Sphinx, tree: nodes.document) -> None:
    """Write the heading of its column into each cell but the first, which is the card's title.

    ``roundoff.css`` shows it where the headings are out of sight; it does not know them by itself.
    """
    for table in tree.findall(nodes.table):
        if CARDS in table["classes"]:
            head, *rows = table.findall(nodes.row)
            for row in rows:
                for heading, entry in list(zip(head, row, strict=True))[1:]:
                    entry.insert(0, nodes.paragraph("", heading.astext(), classes=[COLUMN]))


def offer(app: Sphinx, exception: Exception | None) -> None:
    """Put the records (JSON) and the tables (CSV, and an archive of them) into the site."""
    if exception is not None or app.builder.format != "html":
        return
    target, claims = Path(app.outdir, FOLDER), []
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for folder in built(Path(app.srcdir)):
        _put(target / folder.name / BUILD, {p.name: p.read_bytes() for p in folder.iterdir()})
        claims += claims_of(Path(app.srcdir), folder.name)
    (target / "claims.json").write_text(json.dumps(claims, indent=1, ensure_ascii=False), "utf-8")
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
    app.add_directive("recorded-machines", RecordedMachines)
    app.add_directive("running-times", RunningTimes)
    app.connect("doctree-read", label_cells)
    app.connect("build-finished", offer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
