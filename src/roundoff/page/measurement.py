"""A study: the measurements behind a page, its record, and the numbers that pages may print.

A study is a script, ``studies/<name>.py``. A table is a function that yields rows; a value says
which number of which rows a page may print, and what would make its sentence false.
"""

from __future__ import annotations

import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ..environment import environment, machine_name
from ..errors import ArgumentError
from ..record import RECORDED, Record, read_record, write_record, write_values
from ..script import get_parsed_args
from .values import Value

__all__ = ["Study"]

#: A table: its rows from the options.
Rows = Callable[[Namespace], Any]


class Study:
    """The tables of one question and the values defined on them.

    Parameters
    ----------
    page : str
        Name of the page and of its records, such as ``plot_reduction_order``.
    about : str, optional
        What is measured; ``--help`` shows it.
    on : str
        The machine whose numbers pages print.
    part : str
        What computes the rows of its tables: "cpu", "gpu", or the column that says so.
    **options
        As :func:`roundoff.script.get_parsed_args` takes them.

    Examples
    --------
    >>> study = Study("plot_x", on="nvidia-h200", part="cpu")
    >>> @study.table()
    ... def sums(args):
    ...     return [{"terms": 2, "sum": 4}]
    >>> study.value("even", "sum of two terms", "sums", "sum", test=lambda v: v.value % 2 == 0)
    >>> study.values[0].judge([{"sums": pd.DataFrame(sums(None))}])
    {'value': 4.0, 'test': True}
    """

    def __init__(
        self, page: str, about: str | None = None, *, on: str, part: str, **options: Any
    ) -> None:
        self.page, self.about, self.on, self.part, self.options = page, about, on, part, options
        self.values: list[Value] = []
        self.tables: dict[str, Rows] = {}
        self.times: dict[str, list[str]] = {}

    def table(self, name: str = "", *, times: Sequence[str] = ()) -> Callable[[Rows], Rows]:
        """Add the decorated function, which takes the options and gives the rows.

        Parameters
        ----------
        name : str
            Name of the table; by default the function's.
        times : sequence of str
            Columns that a second run keeps beside the first's: times, and what changes with them.
        """

        def add(rows: Rows) -> Rows:
            table = name or rows.__name__
            self.tables[table] = rows
            if times:
                self.times[table] = list(times)
            return rows

        return add

    def value(
        self, name: str, about: str, of: str, statistic: Any, *, on: str = "", **options: Any
    ) -> None:
        """Define a number that pages may print.

        The parameters are those of :class:`~roundoff.page.values.Value`.
        """
        if name in [value.name for value in self.values]:
            raise ArgumentError(f"two values of one name: {name}")
        self.values.append(Value(name, about, of, statistic, on=on or self.on, **options))

    def evaluate(self, record: Record) -> dict[str, dict[str, Any]]:
        """Every value that the record has rows for, by name."""
        entries = {value.name: value.entry(record) for value in self.values}
        return {name: entry for name, entry in entries.items() if entry is not None}

    def main(self, argv: Sequence[str] | None = None) -> None:
        """Measure, print and save the tables; with ``--record`` keep them with their values.

        Folder, commit and first run are checked before anything is measured. ``--values``
        evaluates the values of the records again and measures nothing.
        """
        args = get_parsed_args(
            self.page,
            self.about,
            argv=argv,
            only=("", f"tables to measure, of {', '.join(self.tables)}; by default all"),
            values=(False, "evaluate the values of the records again, and measure nothing"),
            **self.options,
        )
        names = args.only.split(",") if args.only else self.tables
        if unknown := {*names} - {*self.tables}:
            raise SystemExit(f"--only: got {unknown}, expected some of {[*self.tables]}")
        chosen = {name: self.tables[name] for name in names}
        folder = Path(args.record or RECORDED) / self.page
        if args.values:
            for path in sorted(folder.glob("*.json")):
                print(f"values: {write_values(path, self.evaluate(read_record(path)))}")
            return
        env = environment(args.commit)
        if args.record is None:
            self._show(self._measure(args, chosen))
            print(f"\nThis machine's name in a record is {machine_name(env)}.")
            return
        self._check(args, folder, env, list(chosen))
        path = write_record(
            folder.parent,
            self.page,
            self._measure(args, chosen),
            env,
            {name: getattr(args, name) for name in self.options},
            parts=dict.fromkeys(chosen, self.part),
            times=self.times,
            second=args.second,
        )
        print(f"record: {path}", file=sys.stderr)
        write_values(path, self.evaluate(read_record(path)))

    def _check(
        self, args: Namespace, folder: Path, env: dict[str, Any], names: Sequence[str]
    ) -> None:
        """What would refuse the record, before hours are spent on it."""
        commit = env["commit"]
        if args.record == "" and str(commit).endswith("+"):
            raise SystemExit(
                "--record: files of src, gallery or studies changed since the last commit, and a "
                "record names the commit that ran: commit them first, or keep it elsewhere with "
                "--record FOLDER"
            )
        if args.second:
            path = folder / f"{machine_name(env)}.json"
            runs = read_record(path).provenance if path.exists() else {}
            first = {runs[name].commit for name in names if name in self.times and name in runs}
            if first != {commit}:
                raise SystemExit(
                    f"--second: got commit {commit}, expected that of the first run of a table "
                    f"with times: {first or 'there is none'}"
                )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise SystemExit(f"--record: expected a folder to write: {error}") from error

    def _measure(self, args: Namespace, chosen: Mapping[str, Rows]) -> dict[str, pd.DataFrame]:
        start, tables = time.monotonic(), {}
        for name, rows in chosen.items():
            frame = pd.DataFrame(rows(args)).reset_index(drop=True)
            if len(frame.columns):  # nothing of it could run
                tables[name] = frame
            spent = time.monotonic() - start
            print(f"[{spent:.0f} s] table {name}, rows: {len(frame)}", file=sys.stderr, flush=True)
        return tables

    def _show(self, tables: Mapping[str, pd.DataFrame]) -> None:
        """Print the tables and save them as CSV; print the values."""
        folder = Path("build") / self.page
        folder.mkdir(parents=True, exist_ok=True)
        for name, frame in tables.items():
            print(f"{name}\n{frame.to_string(index=False)}\n")
            frame.to_csv(folder / f"{name}.csv", index=False)
        for value in self.values:
            if found := value.judge([tables]):
                print(f"{value.name} = {found['value']:.6g}, {value.about}")
