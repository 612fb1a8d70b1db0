"""Tables and the environment they were measured in, as JSON that a later reader can trust.

A record is one file a page and machine, ``<folder>/<page>/<machine>.json``:

* ``schema``: version of this layout, 1;
* ``page``, ``machine``: what the file's place says, repeated;
* ``runs``: a list of runs, each with ``date`` (ISO 8601, UTC), ``commit``, ``options`` and
  ``environment`` (:func:`roundoff.environment.environment`);
* ``tables``: name -> ``run`` (index of the run that measured it), ``columns`` (``name`` and
  ``type``: number, integer, string or boolean) and ``rows``. Numbers that JSON lacks are strings,
  ``"nan"``, ``"inf"`` and ``"-inf"``; a missing value is null.

A later run of part of a page replaces the tables it measured and leaves the others with the run
that made them. A run that no table refers to is dropped.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .environment import machine_name
from .errors import RecordError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["RECORDED", "Provenance", "Record", "read_record", "read_records", "write_record"]

SCHEMA = 1

#: Folder of the records that ship with the package.
RECORDED = Path(__file__).parent / "recorded"

_TYPES: dict[str, tuple[type, ...]] = {
    "number": (int, float),
    "integer": (int,),
    "string": (str,),
    "boolean": (bool,),
}
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclasses.dataclass(frozen=True)
class Provenance:
    """One run of a page: when, with which code and options, on what.

    Examples
    --------
    >>> run = Provenance("2026-01-31T12:00:00+00:00", "4f2a1c", {"repeat": 5}, {"gpu": None})
    >>> run.date[:10], run.options["repeat"]
    ('2026-01-31', 5)
    """

    date: str
    commit: str | None
    options: dict[str, Any]
    environment: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Record:
    """What was measured for one page on one machine.

    Attributes
    ----------
    page : str
        Name of the page.
    machine : str
        Name of the machine.
    tables : dict
        The tables (:class:`pandas.DataFrame`), by name.
    provenance : dict
        The run (:class:`Provenance`) that measured each table, by the table's name.

    Examples
    --------
    >>> import pandas as pd
    >>> record = Record("plot_x", "a-machine", {"t": pd.DataFrame({"n": [1, 2]})}, {})
    >>> record.tables["t"]["n"].sum()
    np.int64(3)
    """

    page: str
    machine: str
    tables: dict[str, pd.DataFrame]
    provenance: dict[str, Provenance]

    @property
    def commits(self) -> list[str]:
        """Commits of the code that ran, ten digits each, the newest run's first."""
        runs = sorted(self.provenance.values(), key=lambda run: run.date, reverse=True)
        return list(dict.fromkeys((run.commit or "unknown")[:10] for run in runs))


def write_record(
    folder: str | Path,
    page: str,
    tables: dict[str, pd.DataFrame],
    environment: dict[str, Any],
    options: dict[str, Any] | None = None,
) -> Path:
    """Write, or merge into, ``<folder>/<page>/<machine>.json``.

    The file is replaced in one step: whoever reads it sees the old record or the new one.

    Parameters
    ----------
    folder : path
        Where records live; made when missing.
    page : str
        Name of the page.
    tables : dict of str to pandas.DataFrame
        Tables of numbers, strings, booleans and None; the index is not kept.
    environment : dict
        As :func:`roundoff.environment.environment` gives it.
    options : dict, optional
        The options the page ran with.

    Raises
    ------
    RecordError
        When a table holds something else, or the existing file is not a record.

    Examples
    --------
    >>> import tempfile
    >>> import pandas as pd
    >>> from roundoff.environment import environment
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = write_record(folder, "plot_x", {"t": pd.DataFrame({"n": [1]})}, environment())
    ...     read_record(path).tables["t"].columns.tolist()
    ['n']
    """
    machine = machine_name(environment)
    path = Path(folder) / page / f"{machine}.json"
    encoded = {name: _encode(path, name, frame) for name, frame in tables.items()}
    data = _load(path) if path.exists() else {"runs": [], "tables": {}}
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    run = {
        "date": date,
        "commit": environment.get("commit"),
        "options": options or {},
        "environment": environment,
    }
    runs = [*data["runs"], run]
    merged = data["tables"] | {name: {"run": len(runs) - 1, **t} for name, t in encoded.items()}
    used = sorted({table["run"] for table in merged.values()})
    data = {
        "schema": SCHEMA,
        "page": page,
        "machine": machine,
        "runs": [runs[i] for i in used],
        "tables": {n: t | {"run": used.index(t["run"])} for n, t in merged.items()},
    }
    _validate(path, data)
    _replace(path, _dumps(data))
    return path


def read_record(path: str | Path) -> Record:
    """Read and check one record.

    Raises
    ------
    RecordError
        When the file is no JSON or breaks the schema: names the file and the field.

    Examples
    --------
    >>> path = sorted(RECORDED.glob("plot_gemm_fusion/*.json"))[0]
    >>> record = read_record(path)
    >>> record.machine == path.stem, "ratios" in record.tables
    (True, True)
    """
    import pandas as pd

    path = Path(path)
    data = _load(path)
    runs = [
        Provenance(**{f.name: run[f.name] for f in dataclasses.fields(Provenance)})
        for run in data["runs"]
    ]
    tables = {}
    for name, table in data["tables"].items():
        columns = {
            column["name"]: pd.Series(
                [_decode(row[i], column["type"]) for row in table["rows"]],
                dtype=object if column["type"] in ("string", "boolean") else None,
            )
            for i, column in enumerate(table["columns"])
        }
        tables[name] = pd.DataFrame(columns)
    return Record(
        data["page"],
        data["machine"],
        tables,
        {name: runs[table["run"]] for name, table in data["tables"].items()},
    )


def read_records(page: str, folder: str | Path = RECORDED) -> list[Record]:
    """The records of *page*, in the order of the machines' names; none is an empty list.

    Examples
    --------
    >>> {record.page for record in read_records("plot_gemm_fusion")}, read_records("no_such_page")
    ({'plot_gemm_fusion'}, [])
    """
    return [read_record(path) for path in sorted((Path(folder) / page).glob("*.json"))]


def _decode(value: Any, kind: str) -> Any:
    if kind == "number":
        if value is None:
            return math.nan
        return _NON_FINITE[value] if isinstance(value, str) else float(value)
    return value


def _encode(path: Path, name: str, frame: pd.DataFrame) -> dict[str, Any]:
    columns, cells = [], []
    for label, series in frame.items():
        values = [v.item() if hasattr(v, "item") else v for v in series.tolist()]
        is_text = any(isinstance(v, str) for v in values)
        values = [None if _is_missing(v, is_text) else v for v in values]
        kind = _kind_of(values)
        if kind is None:
            odd = next(v for v in values if not isinstance(v, (str, int, float, bool, type(None))))
            raise RecordError(
                f"{path}: tables.{name}: column {label!r} cannot be recorded",
                got=type(odd).__name__,
                expected="numbers, strings, booleans or None",
            )
        columns.append({"name": str(label), "type": kind})
        if kind == "string":
            values = [None if v is None else str(v) for v in values]
        cells.append([_finite(v) if kind == "number" else v for v in values])
    return {"columns": columns, "rows": [list(row) for row in zip(*cells, strict=True)]}


def _is_missing(value: Any, is_text: bool) -> bool:
    """pandas' NA and NaT are missing; NaN is a result among numbers, missing among strings."""
    if type(value).__name__ in ("NAType", "NaTType"):
        return True
    return is_text and isinstance(value, float) and math.isnan(value)


def _kind_of(values: list[Any]) -> str | None:
    kinds = {type(v) for v in values if v is not None}
    if kinds <= {bool} and kinds:
        return "boolean"
    if kinds <= {int} and kinds and None not in values:
        return "integer"
    if kinds <= {int, float}:
        return "number"
    return "string" if kinds <= {str, int, float, bool} else None


def _finite(value: Any) -> Any:
    if value is None or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def _dumps(data: dict[str, Any]) -> str:
    """JSON with one row of a table a line, so that a change of a record can be read."""
    rows: list[str] = []

    def fold(node: Any) -> Any:
        if isinstance(node, dict):
            return {k: fold(v) for k, v in node.items()}
        if isinstance(node, list) and node and not any(isinstance(v, (dict, list)) for v in node):
            rows.append(json.dumps(node, ensure_ascii=False, allow_nan=False))
            return f"@row {len(rows) - 1}@"
        return [fold(v) for v in node] if isinstance(node, list) else node

    text = json.dumps(fold(data), indent=1, ensure_ascii=False, allow_nan=False)
    return re.sub(r'"@row (\d+)@"', lambda m: rows[int(m[1])], text) + "\n"


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _load(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: not a readable JSON file", got=str(error)) from error
    _validate(path, data)
    return data


def _field(path: Path, parent: Any, where: str, name: str, kind: type | tuple[type, ...]) -> Any:
    full = f"{where}.{name}".removeprefix(".")
    wanted = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
    if not isinstance(parent, dict) or name not in parent:
        raise RecordError(f"{path}: field {full} is missing", expected=wanted)
    value = parent[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise RecordError(f"{path}: field {full} has a wrong type", got=value, expected=wanted)
    return value


def _validate(path: Path, data: Any) -> None:
    schema = _field(path, data, "", "schema", int)
    if schema != SCHEMA:
        raise RecordError(
            f"{path}: field schema is not known here",
            got=schema,
            expected=str(SCHEMA),
            hint="a newer roundoff",
        )
    for name, owner in (("page", path.parent.name), ("machine", path.stem)):
        value = _field(path, data, "", name, str)
        if value != owner:
            raise RecordError(
                f"{path}: field {name} contradicts the file's place", got=value, expected=owner
            )
    runs = _field(path, data, "", "runs", list)
    for i, run in enumerate(runs):
        where = f"runs[{i}]"
        date = _field(path, run, where, "date", str)
        try:
            datetime.datetime.fromisoformat(date)
        except ValueError as error:
            raise RecordError(f"{path}: field {where}.date is no date", got=date) from error
        _field(path, run, where, "commit", (str, type(None)))
        _field(path, run, where, "options", dict)
        env = _field(path, run, where, "environment", dict)
        for name, kind in (("processor", str), ("python", str), ("versions", dict)):
            _field(path, env, f"{where}.environment", name, kind)
        _field(path, env, f"{where}.environment", "gpu", (dict, type(None)))
    for name, table in _field(path, data, "", "tables", dict).items():
        _validate_table(path, f"tables.{name}", table, len(runs))


def _validate_table(path: Path, where: str, table: Any, n_runs: int) -> None:
    run = _field(path, table, where, "run", int)
    if not 0 <= run < n_runs:
        raise RecordError(f"{path}: field {where}.run refers to no run", got=run)
    columns = _field(path, table, where, "columns", list)
    for i, column in enumerate(columns):
        _field(path, column, f"{where}.columns[{i}]", "name", str)
        kind = _field(path, column, f"{where}.columns[{i}]", "type", str)
        if kind not in _TYPES:
            raise RecordError(
                f"{path}: field {where}.columns[{i}].type is not known",
                got=kind,
                expected=", ".join(_TYPES),
            )
    for j, row in enumerate(_field(path, table, where, "rows", list)):
        if not isinstance(row, list) or len(row) != len(columns):
            raise RecordError(
                f"{path}: field {where}.rows[{j}] does not fit the columns",
                got=row,
                expected=f"{len(columns)} values",
            )
        for column, value in zip(columns, row, strict=True):
            if not _fits(value, column["type"]):
                raise RecordError(
                    f"{path}: field {where}.rows[{j}].{column['name']} has a wrong type",
                    got=value,
                    expected=column["type"],
                )


def _fits(value: Any, kind: str) -> bool:
    if value is None:
        return kind != "integer"
    if kind == "number" and isinstance(value, str):
        return value in _NON_FINITE
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind])
