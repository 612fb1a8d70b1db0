"""A study: what one page shows, and where it is kept."""

from __future__ import annotations

import argparse
import dataclasses
import html
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..environment import environment, summary
from ..errors import ArgumentError
from ..record import RECORDED, Provenance, read_records, write_record
from ..script import run_mode, unit_test_going
from .legacy_table import Shown, Table, inline, minus, unmarked
from .style import PAPER, use_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Run", "Study"]


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a page: this build's, or a recorded machine's.

    Attributes
    ----------
    label : str
        "This build", or the recorded machine with versions, date and commit.
    tables : dict
        Its tables (:class:`pandas.DataFrame`), by name.
    environment : dict
        As :func:`roundoff.environment.environment` gives it.
    is_build : bool
        Whether this is the running process.

    Examples
    --------
    >>> run = Run("This build", {"t": pd.DataFrame({"n": [1, 2]})}, {"gpu": None}, is_build=True)
    >>> run.tables["t"]["n"].max() == 2
    np.True_
    """

    label: str
    tables: Mapping[str, pd.DataFrame]
    environment: Mapping[str, Any]
    is_build: bool


class Study:
    """Collects what a page shows, and keeps it where the way it is run asks for.

    Parameters
    ----------
    page : str
        Name of the page, such as ``"plot_reduction_order"``.
    args : argparse.Namespace, optional
        What :func:`roundoff.script.get_parsed_args` returned.
    records : path
        Folder of the recorded runs to show; the package's own by default.
    output : path
        Folder that a script saves tables and figures in, ``build/<page>`` by default.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     study = Study("plot_x", output=folder)
    ...     shown = study.say("Two and two is **four**.")
    ...     table = study.table("sums", pd.DataFrame({"sum": [4]}), caption="One sum.")
    Two and two is four.
    One sum.
    sum
      4
    This build...
    >>> table.cells().values.tolist()
    [['4']]
    """

    def __init__(
        self,
        page: str,
        args: argparse.Namespace | None = None,
        *,
        records: str | Path = RECORDED,
        output: str | Path | None = None,
    ) -> None:
        self.page = page
        self.args = args or argparse.Namespace(record=None, commit=None)
        self.environment = environment(getattr(self.args, "commit", None))
        self.output = Path(output) if output else Path("build") / page
        self._build = "This build, in quick mode" if unit_test_going() else "This build"
        self._records = read_records(page, records)
        self._tables: dict[str, Table] = {}
        self._figures: set[str] = set()
        self._is_script = run_mode() == "script"
        use_style()

    def table(
        self,
        name: str,
        frame: pd.DataFrame,
        *,
        caption: str,
        index: bool = False,
        recorded: bool = True,
        **options: Any,
    ) -> Table:
        """Show a table, and keep it for the record.

        Parameters
        ----------
        name : str
            Name of the table in files and records; once a page.
        frame : pandas.DataFrame
            The numbers.
        caption : str
            One sentence that says what the table shows; ``code`` and **bold** may mark words.
        index : bool
            Make the index the first columns.
        recorded : bool
            Whether the table belongs in a record.
        **options
            ``formats``, ``units``, ``emphasize``, ``labels``, ``missing``: see :class:`Table`.

        Raises
        ------
        ArgumentError
            When the page already has a table of that name.
        """
        if name in self._tables:
            raise ArgumentError("two tables of one name", got=name, expected="a new name")
        frame = _flat(frame, index)
        table = Table(
            frame,
            caption,
            source=f"{self._build}: {summary(self.environment)}",
            identifier=f"table-{name}",
            is_recorded=recorded,
            **options,
        )
        self._tables[name] = table
        if self._is_script:
            frame.to_csv(self._file(f"{name}.csv"), index=False)
            print(table)
        return table

    def recorded(
        self,
        name: str,
        *,
        caption: str | None = None,
        units: Callable[[Mapping[str, Any]], Mapping[str, str]] | None = None,
        like: str | None = None,
    ) -> Shown:
        """The table *name* of every machine that recorded rows of it, formatted as this build's.

        Parameters
        ----------
        name : str
            A table that this page has shown, unless *like* is given.
        caption : str, optional
            Where this build's does not fit.
        units : callable, optional
            Column -> unit for the environment of the machine, where they depend on it: a GPU's
            times are absolute, a CPU's are ratios.
        like : str, optional
            A table that this page has shown, to format it like: for one that only records have.

        Raises
        ------
        ArgumentError
            When this page has shown no table of that name before.
        """
        shown = like or name
        if shown not in self._tables:
            raise ArgumentError("no such table yet", got=shown, expected=", ".join(self._tables))
        model = self._tables[shown]
        found = [
            dataclasses.replace(
                model,
                frame=record.tables[name],
                source=f"Recorded: {_label(record.provenance[name])}",
                identifier=f"table-{name}-{record.machine}",
                caption=caption or model.caption,
                units=units(record.provenance[name].environment) if units else model.units,
            )
            for record in self._records
            if len(record.tables.get(name, ()))
        ]
        if not found:
            return self.say("No other machine has recorded this table yet.")
        return self._print(
            Shown("".join(t._repr_html_() for t in found), "\n".join(map(repr, found)))
        )

    def figure(self, name: str, figure: Figure, *, alt: str) -> None:
        """Show a figure: the site scrapes it, a script saves it as PNG.

        Parameters
        ----------
        name : str
            Name of the file; once a page.
        figure : matplotlib.figure.Figure
            The drawing.
        alt : str
            What the figure shows, in words, for those who cannot see it.

        Raises
        ------
        ArgumentError
            When the page already has a figure of that name.
        """
        if name in self._figures:
            raise ArgumentError("two figures of one name", got=name, expected="a new name")
        self._figures.add(name)
        figure.set_label(alt)
        if self._is_script:
            import matplotlib.pyplot as plt

            path = self._file(f"{name}.png")
            figure.savefig(path, dpi=150, facecolor=PAPER)
            plt.close(figure)
            print(f"figure: {path}")

    def svg(self, name: str, markup: str, *, alt: str) -> Shown:
        """Show a drawing that is SVG already, such as a graph; a script saves it."""
        if self._is_script:
            path = self._file(f"{name}.svg")
            path.write_text(markup, "utf-8")
        label = html.escape(alt, quote=True)
        shown = (
            f'<div class="ro-svg" role="img" aria-label="{label}" tabindex="0" '
            f'style="overflow-x:auto">{markup}</div>'
        )
        return self._print(Shown(shown, f"drawing: {alt}"))

    def say(self, sentences: str | Iterable[str], *, label: str = "") -> Shown:
        """Show sentences made from numbers; several become a list.

        Parameters
        ----------
        sentences : str or iterable of str
            Plain text, in which ``code`` in backquotes and **bold** are marked.
        label : str
            What the sentences are about, set before them.
        """
        lines = [minus(s) for s in ([sentences] if isinstance(sentences, str) else sentences)]
        items = [inline(line) for line in lines]
        inner = (
            items[0] if len(items) == 1 else "<ul>" + "".join(f"<li>{i}" for i in items) + "</ul>"
        )
        head = f'<p class="ro-label">{html.escape(label)}</p>' if label else ""
        markup = f'<div class="ro-say">{head}{inner if len(items) > 1 else f"<p>{inner}</p>"}</div>'
        text = "\n".join(([label + ":"] if label else []) + [unmarked(line) for line in lines])
        return self._print(Shown(markup, text))

    def runs(self, *names: str) -> list[Run]:
        """This build, then every recorded machine that has all the tables *names*."""
        own = {name: table.frame for name, table in self._tables.items()}
        runs = [Run(self._build, own, self.environment, True)]
        for record in self._records:
            if set(names) <= set(record.tables):
                provenance = record.provenance[names[0] if names else next(iter(record.tables))]
                runs.append(Run(_label(provenance), record.tables, provenance.environment, False))
        return runs

    def conclude(self, sentences: Callable[[Run], str | list[str]], *names: str) -> Shown:
        """What follows from the tables *names*, for this build and each recorded machine.

        Parameters
        ----------
        sentences : callable
            Takes a :class:`Run`, returns what is true of it; holds the assertions for its words.
        *names : str
            Tables the function reads; a record without one of them is left out.
        """
        shown = []
        for run in self.runs(*names):
            label = run.label if run.is_build else f"Recorded: {run.label}"
            shown.append(self.say(sentences(run), label=label))
        return Shown("".join(s._repr_html_() for s in shown), "\n".join(map(repr, shown)))

    def finish(self) -> Shown:
        """Close the page: write the record when ``--record`` asks for it, and say what ran it."""
        folder = getattr(self.args, "record", None)
        if self._is_script and folder is not None:
            tables = {n: t.frame for n, t in self._tables.items() if t.is_recorded}
            path = write_record(
                folder or RECORDED, self.page, tables, self.environment, self._options()
            )
            print(f"record: {path}", file=sys.stderr)
        env = self.environment
        rows = [
            ("Machine", summary(env).split("; ")[0]),
            ("System", env["os"]),
            ("Threads", env["threads"]),
            ("Versions", ", ".join(f"{k} {v}" for k, v in env["versions"].items() if v)),
            ("BLAS of NumPy", env["blas"]),
            ("Commit", (env["commit"] or "unknown")[:10]),
        ]
        shown = "".join(
            f"<dt>{name}</dt><dd>{html.escape(str(value))}</dd>" for name, value in rows if value
        )
        markup = (
            f'<details class="ro-build"><summary>This build</summary><dl>{shown}</dl></details>'
        )
        return self._print(Shown(markup, "\n".join(f"{name}: {value}" for name, value in rows)))

    def _options(self) -> dict[str, Any]:
        skipped = ("record", "commit")
        return {k: v for k, v in vars(self.args).items() if k not in skipped}

    def _file(self, name: str) -> Path:
        self.output.mkdir(parents=True, exist_ok=True)
        return self.output / name

    def _print(self, shown: Shown) -> Shown:
        if self._is_script:
            print(shown)
        return shown


def _label(run: Provenance) -> str:
    commit = f"commit {run.commit[:10]}" if run.commit else "commit unknown"
    return f"{summary(run.environment)}; {run.date[:10]}; {commit}"


def _flat(frame: pd.DataFrame, index: bool) -> pd.DataFrame:
    """A copy with plain columns: a pivot's levels are joined."""
    frame = frame.reset_index() if index else frame.reset_index(drop=True)
    frame.columns = pd.Index(
        [
            " ".join(str(part) for part in c if str(part)) if isinstance(c, tuple) else str(c)
            for c in frame.columns
        ]
    )
    return frame
