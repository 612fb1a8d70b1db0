"""A study: what one page shows, and where it is kept."""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import html
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..environment import environment, short_commit, short_name, summary
from ..errors import ArgumentError, UnsupportedError, WorkerError
from ..record import RECORDED, Record, read_record, read_records, row_parts, write_record
from ..script import run_mode, unit_test_going, usage_error
from . import charts
from .claims import Claim, ClaimError, Outcome, choose
from .style import PAPER, use_style
from .table import AGAIN, WIDEST, Shown, Table, inline, tabs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["STRICT", "Run", "Study", "attempt"]

#: Environment variable of continuous integration: what a script finds wrong ends it, too.
STRICT = "ROUNDOFF_STRICT"
BUILD = "this-build"
_SECOND_S = 200  # seconds that a second process may take
#: The most telling machines come first; others follow by name.
FIRST = ("nvidia-h200", "nvidia-h100-80gb-hbm3")
_SOME = 6
_MARKS = {"true": "✓", "false": "✗", "outdated": "record outdated", "not tested": "not tested"}


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a page: this build's, or a recorded machine's.

    Attributes
    ----------
    machine : str
        Name of the machine in files and addresses; ``this-build`` for the running process.
    tables : dict
        Its tables (:class:`pandas.DataFrame`), by name; a recorded second run adds the column
        "median, second run" to a table with a column "median".
    environment : dict
        As :func:`roundoff.environment.environment` gives it.
    record : Record, optional
        Where it was read from.

    Examples
    --------
    >>> run = Run("this-build", {"t": pd.DataFrame({"n": [1, 2]})}, {"gpu": None})
    >>> run.is_build, run.tables["t"]["n"].max() == 2
    (True, np.True_)
    """

    machine: str
    tables: Mapping[str, pd.DataFrame]
    environment: Mapping[str, Any]
    record: Record | None = None

    @property
    def is_build(self) -> bool:
        """Whether this is the running process."""
        return self.record is None

    def name(self, table: str = "", rows: pd.DataFrame | None = None) -> str:
        """Name for a reader: "H200", "H200's host" for rows that its processor computed."""
        if self.record is None:
            return "This build (quick)" if unit_test_going() else "This build"
        run = self.record.provenance.get(table)
        part = self.part(table, rows)
        return short_name(run.environment if run else dict(self.environment), part)

    def part(self, table: str, rows: pd.DataFrame | None = None) -> str | None:
        """What computed a table, or some of its rows: "cpu", "gpu", or None for both."""
        if self.record is None or table not in self.tables:
            return None
        frame = self.tables[table] if rows is None else rows
        parts = set(row_parts(frame, self.record.parts.get(table)))
        return parts.pop() if len(parts) == 1 else None

    def source(self, table: str) -> str:
        """What it was measured on, or when and with which commit."""
        if self.record is None:
            return summary(dict(self.environment)).split("; ")[0]
        run = self.record.provenance[table]
        return f"{run.date[:10]}, commit {short_commit(run.commit)}"


class Study:
    """Collects what a page shows and claims, and keeps it where the way it is run asks for.

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
    ...     frame = pd.DataFrame({"terms": [2], "sum": [4]})
    ...     table = study.table("sums", frame, "One sum.", part="cpu")
    ...     claim = study.claim("The sum is even.", of="sums", test=lambda t: t["sum"] % 2 == 0)
    One sum.
     terms sum
         2   4
    This build...
    The sum is even. (this build...)
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
        is_changed = str(self.environment["commit"]).endswith("+")
        if is_changed and getattr(self.args, "record", None) == "":
            usage_error(
                page,
                "--record: files of src, gallery or studies changed since the last commit, and a "
                "record names the commit that ran: commit them first, or keep it elsewhere with "
                "--record FOLDER",
            )
        self.output = Path(output) if output else Path("build") / page
        self.claims: list[Claim] = []
        self._tables: dict[str, pd.DataFrame] = {}
        self._parts: dict[str, str] = {}
        self._times: dict[str, list[str]] = {}
        self._figures: set[str] = set()
        self._mode = run_mode()
        self._start = time.monotonic()
        self._records = [_recorded(r) for r in sorted(read_records(page, records), key=_place)]
        use_style()

    @property
    def runs(self) -> list[Run]:
        """The recorded machines, the most telling first, then this build."""
        return [*self._records, Run(BUILD, self._tables, self.environment)]

    def table(
        self,
        name: str,
        frame: pd.DataFrame | Sequence[Mapping[str, Any]],
        caption: str,
        *,
        columns: Sequence[str] | None = None,
        rows: Mapping[str, Any] | None = None,
        part: str | None = None,
        times: Sequence[str] = (),
    ) -> Shown:
        """Show a table of this run beside the same table of the recorded machines.

        Parameters
        ----------
        name : str
            Name of the table in files, records and claims; once a page.
        frame : pandas.DataFrame or list of dict
            The numbers, tidy; the index is not kept. Of what could not run here, which gave neither
            rows nor columns, the recorded machines' are shown alone.
        caption : str
            One sentence that says what the table shows; ``code`` and **bold** may mark words.
        columns : sequence of str, optional
            The telling columns, at most seven; by default all.
        rows : mapping, optional
            Column -> value: the telling rows (:func:`roundoff.page.choose`).
        part : str, optional
            What computed it: "cpu", "gpu", or the column that says so, ``provider`` by default.
        times : sequence of str
            Columns of times, which a second run confirms: its columns follow as far as seven allow.

        Raises
        ------
        ArgumentError
            When the page already has a table of that name, or more than seven columns would be in
            sight.
        """
        self._keep(name, frame, part, times)
        own = self._tables.get(name)
        shown = []
        for run in self.runs:
            held = run.tables.get(name)
            if held is None or (held.empty and not run.is_build):
                continue
            chosen = list(columns or (held if own is None else own))
            if not run.is_build:  # an older record may lack one
                chosen = [c for c in chosen if c in held]
            # A way that this machine does not have is a column without a value.
            chosen = [c for c in chosen if held.empty or held[c].notna().any()]
            second = [c + AGAIN for c in chosen if c + AGAIN in held and held[c].dtype == float]
            chosen += second[: max(0, WIDEST - len(chosen))]  # the others behind the switch
            telling = _telling(held, rows)
            held = held if held.empty else held.dropna(axis="columns", how="all")
            address = f"../../records/{self.page}/{run.machine}/{name}.csv"
            shown.append(
                Table(held, caption, chosen, telling, run.machine, run.name(name),
                      run.source(name), address if self._mode == "rendered" else "")
            )  # fmt: skip
        if not shown:
            return self._print(Shown("", f"table {name}: no machine has rows"))
        if self._mode == "script":
            shown = shown[-1:]
        if self._mode == "notebook":
            shown = [shown[-1], *shown[:-1]]
        return self._print(tabs(name, shown, alone=self._mode == "notebook"))

    def keep(
        self,
        name: str,
        frame: pd.DataFrame | Sequence[Mapping[str, Any]],
        *,
        part: str | None = None,
        times: Sequence[str] = (),
    ) -> Shown:
        """Keep a table for claims, the record and the CSV files, without showing it.

        Parameters and errors are those of :meth:`table`.
        """
        self._keep(name, frame, part, times)
        runs = [run for run in self.runs if name in run.tables]
        if self._mode != "rendered":
            return self._print(Shown("", f"table {name}, rows: {len(self._tables.get(name, ()))}"))
        links = ", ".join(
            f'<a href="../../records/{self.page}/{run.machine}/{name}.csv">'
            f"{html.escape(run.name(name))}</a>"
            for run in runs
        )
        return Shown(f'<p class="ro-source">Table {html.escape(name)} as CSV: {links}</p>', "")

    def _keep(self, name: str, frame: Any, part: str | None, times: Sequence[str]) -> None:
        if name in self._tables and self._mode != "notebook":
            raise ArgumentError("two tables of one name", got=name, expected="a new name")
        if getattr(self.args, "record", None) is not None:
            # What took how long, for those who have to choose what a record leaves out.
            spent = time.monotonic() - self._start
            print(f"[{spent:.0f} s] table {name}, rows: {len(frame)}", file=sys.stderr, flush=True)
        frame = pd.DataFrame(frame).reset_index(drop=True)
        if part is None and "provider" not in frame:
            raise ArgumentError(f"table {name}: what computed it?", expected='part="cpu" or "gpu"')
        if not len(frame.columns):
            return  # nothing of it could run
        self._tables[name] = frame
        self._parts[name], self._times[name] = part or "provider", list(times)
        if self._mode == "script":
            frame.to_csv(self._file(f"{name}.csv"), index=False)

    def claim(
        self,
        sentence: str,
        *,
        of: str,
        where: Mapping[str, Any] | None = None,
        value: Callable[[Any], Any] | None = None,
        test: Callable[[Any], Any] | None = None,
        on: str | None = None,
        holds: Sequence[str] | None = None,
        timed: bool = False,
        name: str | None = None,
    ) -> Shown:
        """Show a sentence with what every machine says of it.

        Parameters are those of :class:`roundoff.page.Claim`; *name* is its address on the
        page, and what the answer box refers to.

        Raises
        ------
        ClaimError
            When a function of the claim fails, or when no machine has the rows.
        """
        name = name or f"{of}-{sum(c.of == of for c in self.claims) + 1}"
        if self._mode == "notebook":  # a cell may run again
            self.claims = [c for c in self.claims if c.sentence != sentence]
        elif any(c.name == name for c in self.claims):
            raise ClaimError(f"{self.page}: two claims of one name", got=name)
        claim = Claim(self.page, name, sentence, of, where or {}, value, test, on, holds, timed)
        try:
            outcomes = self.outcomes(claim)
            if all(o.state == "not tested" for o in outcomes.values()):
                raise ClaimError(
                    f"{self.page}: claim {name}", got=f"no rows of {of} on any machine",
                    expected="where= that some table has",
                )  # fmt: skip
        except ClaimError as error:
            if getattr(self.args, "record", None) is None:
                raise
            # The measurement is kept; the site's build refuses the claim.
            return self._print(Shown("", str(error)))
        self.claims.append(claim)
        said = [
            self._verdict(claim, run, outcomes[run.machine])
            for run in self.runs
            if run.is_build or outcomes[run.machine].state != "not tested"
        ]
        marks = " · ".join(html.escape(" ".join(pair).strip(), quote=False) for pair in said)
        words = inline(claim.sentence)
        words = re.sub(r"\{([^{}]*)\}", r'<b class="ro-bound">\1</b>', words)
        link = f'<a class="ro-anchor" href="#claim-{name}" aria-label="Link to this claim">#</a>'
        markup = (
            f'<p class="ro-claim" id="claim-{name}">{words} '
            f'<span class="ro-verdicts">{marks}</span> {link}</p>'
        )
        text = re.sub(r"[`*]", "", claim.plain)
        return self._print(
            Shown(markup, f"{text} ({' · '.join(' '.join(pair).strip() for pair in said)})")
        )

    def outcomes(self, claim: Claim) -> dict[str, Outcome]:
        """What each run says of a claim, by machine."""
        known = list(dict.fromkeys(c for run in self.runs for c in run.tables.get(claim.of, ())))
        found = {}
        for run in self.runs:
            # This build has no second run, and may lack nothing else.
            columns = [c for c in known if str(c).endswith(AGAIN)] if run.is_build else known
            try:
                found[run.machine] = claim.judge(run.tables, run.machine, columns)
            except ClaimError as error:
                # Where a record shows that the claim is sound, a reader changed the experiment.
                sound = any(o.state not in ("outdated", "not tested") for o in found.values())
                if not (run.is_build and sound) or os.environ.get(STRICT) == "1":
                    raise
                found[run.machine] = Outcome("not tested", detail=str(error))
        return found

    def _verdict(self, claim: Claim, run: Run, outcome: Outcome) -> tuple[str, str]:
        rows = choose(run.tables[claim.of], claim.where) if outcome.rows else None
        who = "this build" if run.is_build else run.name(claim.of, rows)
        pairs = list(zip(claim.numbers, outcome.values, strict=False))
        values = "" if run.machine == claim.on else ", ".join(n.shown(v) for n, v in pairs)
        if pairs and run.machine != claim.on and all(n.holds(v) for n, v in pairs):
            values = "the same"
        mark = _MARKS.get(outcome.state, "")
        judged = outcome.state in ("true", "false", "outdated")
        if run.is_build and judged and (outcome.state == "outdated" or not self._judges(claim)):
            mark = "not judged"
        return who, " ".join(filter(None, (values, mark)))

    def _judges(self, claim: Claim) -> bool:
        """Whether this build's own verdict counts: times and quick sizes say nothing."""
        return not (claim.timed or unit_test_going())

    def again(self, variables: Mapping[str, str], **options: Any) -> dict[str, pd.DataFrame]:
        """The tables of this page as a second process computes them, with environment variables.

        For what a library reads when a process starts. The process runs the same script, with the
        same options but for those given here, and records into a folder that is then removed.

        Parameters
        ----------
        variables : mapping of str to str
            Environment variables to add.
        **options
            Options of the page that are others there.

        Raises
        ------
        UnsupportedError
            When the page is not run as a script: there is nothing to run again.
        WorkerError
            When the process fails, whose last words are in the message, or takes too long.
        """
        if self._mode != "script":
            raise UnsupportedError(
                "a second process", got=f"a page that is {self._mode}", expected="a script"
            )
        taken = {
            k: v for k, v in vars(self.args).items() if k not in ("record", "commit", "second")
        }
        chosen = [f"--{k}={v}" for k, v in (taken | options).items() if v is not None]
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, sys.argv[0], *chosen, "--record", folder]
            command += ["--commit", str(self.environment["commit"])]
            try:
                done = subprocess.run(  # noqa: S603 - this script, no shell
                    command, env=os.environ | dict(variables), capture_output=True, text=True,
                    timeout=_SECOND_S,
                )  # fmt: skip
            except subprocess.TimeoutExpired as error:
                raise WorkerError(
                    f"{self.page}: its second process", got=f"more than {_SECOND_S:g} s",
                    hint="smaller sizes",
                ) from error  # fmt: skip
            print(done.stderr, end="", file=sys.stderr, flush=True)
            if done.returncode:
                raise WorkerError(f"{self.page}: its second process", got=done.stderr[-2000:])
            [path] = Path(folder).glob("*/*.json")
            return read_record(path).tables

    def beside(
        self, variables: Mapping[str, str], at_once: bool = True, /, **options: Any
    ) -> Callable[[], dict[str, pd.DataFrame]]:
        """As :meth:`again`, while this process goes on: a function that waits for the tables.

        For a page that takes no times: two processes share the machine.

        Parameters
        ----------
        variables : mapping of str to str
            As for :meth:`again`.
        at_once : bool
            Whether the process starts now, or when the function is called.
        **options
            As for :meth:`again`.

        Returns
        -------
        callable
            It gives the tables, and raises what :meth:`again` raises.
        """
        call = functools.partial(self.again, variables, **options)
        if not at_once:
            return call
        pool = concurrent.futures.ThreadPoolExecutor(1)
        tables = pool.submit(call)
        pool.shutdown(wait=False)
        return tables.result

    def dots(self, name: str, *, of: str, alt: str, answer: bool = False, **options: Any) -> None:
        """Dots or bars of a table, of the most telling machine: :func:`roundoff.page.dots`.

        Parameters
        ----------
        name : str
            Name of the figure; once a page.
        of : str
            Name of the table.
        alt : str
            What the figure shows, in words, for those who cannot see it.
        answer : bool
            Whether it stands in the answer box, and is the page's thumbnail.
        **options
            Of the chart, and ``where``, which chooses rows.
        """
        self._chart(charts.dots, name, of, alt, answer, options)

    def lines(self, name: str, *, of: str, alt: str, answer: bool = False, **options: Any) -> None:
        """Lines of a table, of the most telling machine: :func:`roundoff.page.lines`.

        Parameters are those of :meth:`dots`.
        """
        self._chart(charts.lines, name, of, alt, answer, options)

    def _chart(
        self, draw: Callable[..., Any], name: str, of: str, alt: str, answer: bool,
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        where = options.pop("where", {})
        for run in self.runs:
            if of not in run.tables:
                continue
            try:
                rows = choose(run.tables[of], where)
            except KeyError:  # an older record without the column
                continue
            if len(rows):
                break
        else:
            raise ArgumentError(f"figure {name}: no machine has the rows", got=repr(where))
        figure = draw(rows, small=answer, **options)
        figure.text(0.99, 0.995, run.name(of), ha="right", va="top", fontsize=9)
        self.figure(name, figure, alt=alt, answer=answer)

    def figure(self, name: str, figure: Figure, *, alt: str, answer: bool = False) -> None:
        """Show a figure: the site scrapes it, a script saves it as PNG.

        Parameters
        ----------
        name : str
            Name of the file; once a page.
        figure : matplotlib.figure.Figure
            The drawing.
        alt : str
            What the figure shows, in words, for those who cannot see it.
        answer : bool
            Whether it stands in the answer box, and is the page's thumbnail.

        Raises
        ------
        ArgumentError
            When the page already has a figure of that name.
        """
        if name in self._figures and self._mode != "notebook":
            raise ArgumentError("two figures of one name", got=name, expected="a new name")
        self._figures.add(name)
        figure.set_label(alt)
        figure.set_gid("answer" if answer else "figure")
        if self._mode == "script":
            import matplotlib.pyplot as plt

            path = self._file(f"{name}.png")
            figure.savefig(path, dpi=150, facecolor=PAPER)
            plt.close(figure)
            print(f"figure: {path}")

    def svg(self, name: str, markup: str, *, alt: str) -> Shown:
        """Show a drawing that is SVG already, such as a graph; a script saves it."""
        if self._mode == "script":
            path = self._file(f"{name}.svg")
            path.write_text(markup, "utf-8")
        label = html.escape(alt, quote=True)
        shown = (
            f'<div class="ro-svg" role="img" aria-label="{label}" tabindex="0" '
            f'style="overflow-x:auto">{markup}</div>'
        )
        return self._print(Shown(shown, f"drawing: {alt}"))

    def finish(self) -> Shown:
        """Close the page: judge its claims, write a record where one is asked for.

        Raises
        ------
        ClaimError
            In a build of the site, and with ``ROUNDOFF_STRICT=1``, where a record's verdict is not
            the expected one.
        """
        wrong = self.contradictions()
        folder = getattr(self.args, "record", None)
        if self._mode == "script" and folder is not None:
            options = {k: v for k, v in vars(self.args).items()
                       if k not in ("record", "commit", "second")}  # fmt: skip
            path = write_record(
                folder or RECORDED, self.page, self._tables, self.environment, options,
                parts=self._parts,
                times={n: t for n, t in self._times.items() if t},
                second=getattr(self.args, "second", False),
            )  # fmt: skip
            print(f"record: {path}", file=sys.stderr)
        strict = os.environ.get(STRICT) == "1"
        if wrong and (strict or self._mode == "rendered"):
            raise ClaimError("\n".join(wrong))
        env = self.environment
        rows = [
            ("Machine", summary(env).split("; ")[0]),
            ("System", env["os"]),
            ("Versions", ", ".join(f"{k} {v}" for k, v in env["versions"].items() if v)),
            ("Commit", short_commit(env["commit"])),
        ]
        shown = "".join(
            f"<dt>{name}</dt><dd>{html.escape(str(value))}</dd>" for name, value in rows if value
        )
        markup = (
            f'<details class="ro-build"><summary>This build</summary><dl>{shown}</dl></details>'
        )
        return self._print(Shown(markup, "\n".join([f"{n}: {v}" for n, v in rows] + wrong)))

    def contradictions(self) -> list[str]:
        """Every verdict that is not the expected one: page, claim, machine, rows and reason."""
        wrong = []
        for claim in self.claims:
            outcomes = self.outcomes(claim)
            on = outcomes.get(claim.on or BUILD, Outcome("not tested"))
            if claim.on and on.state in ("not tested", "outdated"):
                wrong.append(
                    f"{self.page}: claim {claim.name} prints numbers of {claim.on}, which has no "
                    f"such rows of {claim.of}: {on.detail or on.state}; record the page there: "
                    f"python gallery/…/{self.page}.py --record"
                )
            for machine, outcome in outcomes.items():
                expected = ("not tested", "outdated", claim.expected(machine))
                if machine == BUILD or outcome.state in expected:
                    continue
                detail = outcome.detail or f"{outcome.state}, expected {claim.expected(machine)}"
                wrong.append(
                    f"{self.page}: claim {claim.name} on {machine}, {outcome.rows} rows of "
                    f"{claim.of}: {detail}"
                )
        return wrong

    def verdicts(self) -> list[dict[str, Any]]:
        """The claims with what each run says of them, as ``claims.json`` carries them."""
        found = []
        for claim in self.claims:
            outcomes = self.outcomes(claim)
            machines = {
                machine: {"state": o.state, "values": o.values, "rows": o.rows, "detail": o.detail}
                for machine, o in outcomes.items()
            }
            said = {run.machine: self._verdict(claim, run, outcomes[run.machine])
                    for run in self.runs}  # fmt: skip
            numbers = [dataclasses.asdict(n) for n in claim.numbers]
            found.append(
                {"page": claim.page, "name": claim.name, "sentence": claim.plain, "of": claim.of,
                 "on": claim.on, "numbers": numbers, "machines": machines, "said": said}
            )  # fmt: skip
        return found

    def _file(self, name: str) -> Path:
        self.output.mkdir(parents=True, exist_ok=True)
        return self.output / name

    def _print(self, shown: Shown) -> Shown:
        if self._mode == "script":
            print(shown)
        return shown


def attempt(
    row: Mapping[str, Any], run: Callable[..., Any], *operands: Any
) -> list[dict[str, Any]]:
    """The rows of one experiment; in place of what this machine cannot run, the reason.

    For experiments that need what not every machine has, such as memory or another library: the
    others go on, and the table says what failed.

    Parameters
    ----------
    row : mapping
        What is the same in all of its rows.
    run : callable
        Called with *operands*; gives the rest of a row (a mapping), or of several (a list).

    Returns
    -------
    list of dict
        Rows, with ``note`` None; or one with the exception's name and first words as its ``note``,
        whose traceback is printed.

    Examples
    --------
    >>> from roundoff.page import attempt
    >>> attempt({"M": 2}, lambda m: {"twice": 2 * m}, 3)
    [{'M': 2, 'twice': 6, 'note': None}]
    """
    if not callable(run):
        raise ArgumentError("run", got=repr(run)[:80], expected="a function")
    try:
        parts = run(*operands)
    except Exception as error:
        traceback.print_exc()
        parts = {
            "note": f"{type(error).__name__}: {' '.join(str(error).split())[:100]}".strip(": ")
        }
    several = parts if isinstance(parts, list) else [parts]
    for part in (row, *several):
        if not isinstance(part, Mapping):
            raise ArgumentError("a row", got=type(part).__name__, expected="a mapping")
    return [{**row, **part, "note": part.get("note")} for part in several]


def _place(record: Record) -> tuple[int, str]:
    known = record.machine in FIRST
    return (FIRST.index(record.machine) if known else len(FIRST), record.machine)


def _recorded(record: Record) -> Run:
    """The tables of a record, each second run's times as columns of their own."""
    tables = dict(record.tables)
    for name, second in record.second.items():
        first = tables[name]
        # Text that is the first run's again says nothing.
        new = [c for c in second if second[c].dtype == float or not second[c].equals(first[c])]
        tables[name] = first.assign(**{c + AGAIN: second[c] for c in new})
    newest = max(record.provenance.values(), key=lambda run: run.date)
    return Run(record.machine, tables, newest.environment, record)


def _telling(frame: pd.DataFrame, rows: Mapping[str, Any] | None) -> list[bool]:
    """The rows in sight; the first ones of a run that has none of those."""
    try:
        found = frame.index.isin(choose(frame, rows or {}).index).tolist()
    except KeyError:  # an older record without the column
        found = []
    return found if any(found) else [i < _SOME for i in range(len(frame))]
