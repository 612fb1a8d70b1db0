"""Two directives that list what the build knows: ``recorded-machines`` and ``running-times``."""

import json
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from hooks import page_order
from roundoff.record import RECORDED, Record, read_record


class _Listing(SphinxDirective):
    """What the two directives share."""

    def page(self, name: str) -> str:
        """A link to a page of the gallery, or its name where this site has no such page."""
        words = name.removeprefix("plot_").replace("_", " ")
        found = (n for n in sorted(self.env.found_docs) if n.endswith(f"/{name}"))
        document = next((n for n in found if n.startswith("gallery/")), None)
        return f":doc:`{words} </{document}>`" if document else words

    def table(self, caption: str, head: list[str], rows: list[list[str]]) -> list[nodes.Node]:
        """A table as reStructuredText makes it, so that its links are checked."""
        lines = [f".. list-table:: {caption}", "   :widths: auto", "   :header-rows: 1",
                 "   :class: ro-listing", ""]  # fmt: skip
        for row in [head, *rows]:
            lines += [f"   {'  ' if i else '* '}- {cell}" for i, cell in enumerate(row)]
        return self.parse_text_to_nodes("\n".join(lines))


class RecordedMachines(_Listing):
    """One row a machine and page; a sentence where nothing has been recorded."""

    def run(self) -> list[nodes.Node]:
        """Make the table."""
        paths = sorted(RECORDED.glob("*/*.json"))
        for path in paths:
            self.env.note_dependency(str(path))
        records = [read_record(path) for path in paths]
        if not records:
            return [nodes.paragraph(text="No machine has been recorded yet.")]
        records.sort(key=lambda record: (record.machine, page_order(f"{record.page}.py")))
        head = ["Machine", "Page", "Date", "Commit", "torch", "Triton", "ONNX Runtime"]
        rows = [self.row(record) for record in records]
        return self.table("Machines and pages recorded so far.", head, rows)

    def row(self, record: Record) -> list[str]:
        """The cells of one record: its newest run."""
        newest = max(record.provenance.values(), key=lambda run: run.date)
        env = newest.environment
        versions = env["versions"]
        runtime = versions.get("onnxruntime-gpu") or versions.get("onnxruntime")
        return [
            env["gpu"]["name"] if env["gpu"] else env["processor"],
            self.page(record.page),
            newest.date[:10],
            ", ".join(record.commits),
            *(
                version or "–"
                for version in (versions.get("torch"), versions.get("triton"), runtime)
            ),
        ]


class RunningTimes(_Listing):
    """One row a page: how long it ran in this build, or in the build that last ran it."""

    def run(self) -> list[nodes.Node]:
        """Make the table."""
        rows = []
        gallery = Path(self.env.srcdir) / "gallery"
        for script in sorted(gallery.glob("*/plot_*.py"), key=page_order):
            cost = script.with_suffix(".cost.json")
            self.env.note_dependency(str(cost))
            seconds = json.loads(cost.read_text("utf-8"))["time"] if cost.exists() else None
            rows.append([self.page(script.stem), "–" if seconds is None else f"{seconds:.1f}"])
        return self.table("Running time of each page.", ["Page", "Seconds"], rows)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("recorded-machines", RecordedMachines)
    app.add_directive("running-times", RunningTimes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
