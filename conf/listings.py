"""Two directives that list what the build knows: ``recorded-machines`` and ``running-times``."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from roundoff.page import Table
from roundoff.record import RECORDED, Record, read_record


def _row(record: Record) -> dict[str, Any]:
    newest = max(record.provenance.values(), key=lambda run: run.date)
    env = newest.environment
    versions = env["versions"]
    runtime = versions.get("onnxruntime-gpu") or versions.get("onnxruntime")
    return {
        "machine": env["gpu"]["name"] if env["gpu"] else env["processor"],
        "page": record.page.removeprefix("plot_").replace("_", " "),
        "date": newest.date[:10],
        "commit": (newest.commit or "unknown")[:10],
        "python": env["python"],
        "torch": versions.get("torch"),
        "triton": versions.get("triton"),
        "onnxruntime": runtime,
    }


class RecordedMachines(SphinxDirective):
    """One row a machine and page; a sentence where nothing has been recorded."""

    def run(self) -> list[nodes.Node]:
        """Make the table."""
        self.env.note_dependency(str(RECORDED))
        paths = sorted(RECORDED.glob("*/*.json"))
        if not paths:
            return [nodes.paragraph(text="No machine has been recorded yet.")]
        frame = pd.DataFrame([_row(read_record(path)) for path in paths])
        frame = frame.sort_values(["machine", "page"], ignore_index=True)
        table = Table(frame, "Machines and pages recorded so far.", identifier="table-machines")
        return [nodes.raw("", table._repr_html_(), format="html")]


class RunningTimes(SphinxDirective):
    """One row a page: how long it ran in this build, or in the build that last ran it."""

    def run(self) -> list[nodes.Node]:
        """Make the table."""
        rows = []
        gallery = Path(self.env.srcdir) / "gallery"
        for script in sorted(gallery.glob("*/plot_*.py")):
            cost = script.with_suffix(".cost.json")
            self.env.note_dependency(str(cost))
            seconds = json.loads(cost.read_text("utf-8"))["time"] if cost.exists() else None
            rows.append({"page": f"{script.parent.name}/{script.stem}", "seconds": seconds})
        frame = pd.DataFrame(rows, columns=["page", "seconds"])
        table = Table(
            frame, "Running time of each page.", units={"seconds": "s"}, formats={"seconds": ".1f"},
            labels={"seconds": "time"}, identifier="table-running-times",
        )  # fmt: skip
        return [nodes.raw("", table._repr_html_(), format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("recorded-machines", RecordedMachines)
    app.add_directive("running-times", RunningTimes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
