"""The claims of a page, taken from its source and judged on records alone: nothing is measured.

A claim is worth printing where it can be refuted. ``refuted`` looks for a change of its table that
turns the verdict: two labels that change places, or a measured column scaled by at most 2.
"""

import ast
import dataclasses
import dis
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from roundoff.page import Claim, ClaimError, Study
from roundoff.page.study import BUILD, Run
from roundoff.record import RECORDED

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "conf"))
from answer import wrong  # noqa: E402

_FACTORS = (0.5, 0.7, 1.4, 2.0)
_DECIDED = ("true", "false")
_BOUND = re.compile(r":bound:`([^`<]+?)\s*<([^`>]+)>`")
_UNITS = r"×|%|times\b|percent\b|ULP\b|[mµun]?s\b|seconds?\b|[KMGT]i?B\b|[GT]FLOP|ε"
_NUMERAL = re.compile(
    rf"(?<![\w.,−-])[−-]?\d[\d,]*(?:\.\d+(?:e[−-]?\d+)?(?![\w.]*\.\d)|\s*(?:{_UNITS}))"
)


class _RecordsOnly(Study):
    """A study that shows nothing."""

    def _print(self, shown: Any) -> Any:
        return shown


@dataclasses.dataclass
class Page:
    """The source of a page, and where its records are."""

    path: Path
    records: Path = RECORDED

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.path.read_text("utf-8"), str(self.path))
        self.docstring = ast.get_docstring(self.tree) or ""

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def variable(self) -> str:
        """What the page calls its study."""
        for node in self.tree.body:
            called = getattr(getattr(node, "value", None), "func", None)
            if isinstance(node, ast.Assign) and getattr(called, "id", "") == "Study":
                return node.targets[0].id
        raise ClaimError(f"{self.name}: no study at the top level")

    def calls(self) -> list[ast.Call]:
        """Every call of ``study.claim``, wherever it stands."""
        return [n for n in ast.walk(self.tree) if isinstance(n, ast.Call)
                and isinstance(n.func, ast.Attribute) and n.func.attr == "claim"
                and getattr(n.func.value, "id", "") == self.variable]  # fmt: skip

    def claims(self) -> list[ast.Call]:
        """The calls that are statements of the top level."""
        calls = self.calls()
        return [n.value for n in self.tree.body if isinstance(n, ast.Expr) and n.value in calls]

    def names(self) -> list[str]:
        """Names of the claims, without running anything."""
        found: list[str] = []
        tables: list[str] = []
        for call in self.claims():
            given = {k.arg: getattr(k.value, "value", "") for k in call.keywords}
            table = given.get("of", "")
            tables.append(table)
            found.append(given.get("name") or f"{table}-{tables.count(table)}")
        return found


def pages(gallery: Path = ROOT / "gallery") -> list[Page]:
    """The pages with claims; of a page without them a study defines the numbers."""
    found = sorted(gallery.glob("*/plot_*.py"))
    return [Page(path) for path in found if ".claim(" in path.read_text("utf-8")]


def misplaced(page: Page) -> list[str]:
    """Claims that are not static: in a loop or condition, or of a sentence that is assembled."""
    found = []
    statements = page.claims()
    for call in page.calls():
        where = f"{page.path.name}:{call.lineno}"
        if call not in statements:
            found.append(f"{where}: a claim that is no statement of its own at the top level")
        sentence = call.args[0] if call.args else None
        if not (isinstance(sentence, ast.Constant) and isinstance(sentence.value, str)):
            found.append(f"{where}: a claim whose sentence is no plain string")
        found += [f"{where}: {k.arg}= is no plain string" for k in call.keywords
                  if k.arg in ("of", "name") and not isinstance(k.value, ast.Constant)]  # fmt: skip
    return found


# --- what the claims need of their page


def _names(node: ast.stmt, verbs: tuple[str, ...], code: Any = None) -> set[str]:
    """Names of the top level that a statement loads, or stores: what the compiler makes of it."""
    code = code or compile(ast.Module([node], []), "page", "exec")
    found = {i.argval for i in dis.get_instructions(code) if i.opname in verbs}
    if "STORE_NAME" in verbs:  # inside a function or a class they are of its own
        return found
    return found.union(*(_names(node, verbs, c) for c in code.co_consts if hasattr(c, "co_code")))


def _defined(page: Page) -> dict[str, ast.stmt]:
    """Names of the top level -> the last statement that defines them."""
    return {name: node for node in page.tree.body for name in _names(node, ("STORE_NAME",))}


def _is_plain(node: ast.expr) -> bool:
    """Whether it is written down: constants, lambdas, names, and containers of these."""
    if isinstance(node, ast.Dict):
        return all(v is None or _is_plain(v) for v in (*node.keys, *node.values))
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return all(map(_is_plain, node.elts))
    if isinstance(node, ast.UnaryOp):
        return _is_plain(node.operand)
    if isinstance(node, ast.BinOp):
        return _is_plain(node.left) and _is_plain(node.right)
    return isinstance(node, (ast.Constant, ast.Lambda, ast.Name, ast.Attribute, ast.Starred))


def needed(page: Page) -> list[ast.stmt]:
    """Imports, functions and constants that the claims use, in the page's order."""
    defined = _defined(page)
    todo: list[ast.stmt] = [ast.Expr(call, lineno=1, col_offset=0) for call in page.claims()]
    taken: list[ast.stmt] = []
    while todo:
        for name in sorted(_names(todo.pop(), ("LOAD_NAME", "LOAD_GLOBAL"))):
            statement = defined.get(name)
            if statement is None or statement in taken or name == page.variable:
                continue
            if not _is_static(statement):
                raise ClaimError(
                    f"{page.name}: claims use {name}, which comes from this build's run",
                    got=f"line {statement.lineno}", expected="rows of the table, or a constant",
                )  # fmt: skip
            taken.append(statement)
            todo.append(statement)
    return [node for node in page.tree.body if node in taken]


def _is_static(node: ast.stmt) -> bool:
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return node.value is not None and _is_plain(node.value)
    return isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef))


def study_of(page: Page) -> Study:
    """A study with the page's claims and its records, and without tables of this build."""
    study = _RecordsOnly(page.name, records=page.records)
    names: dict[str, Any] = {page.variable: study, "__name__": page.name}
    body = [
        *needed(page),
        *(n for n in page.tree.body if getattr(n, "value", None) in page.claims()),
    ]
    exec(compile(ast.Module(body, []), str(page.path), "exec"), names)
    return study


def claim_of(study: Study, name: str) -> Claim:
    return next(c for c in study.claims if c.name == name)


# --- what refutes a claim


def _changed(text: str) -> list[str]:
    """A printed number with its last digit one more, and one less."""
    mantissa = re.match(r"[^eE%]*", text)[0].rstrip()
    at = len(mantissa) - 1
    digit = int(mantissa[at])
    return [f"{text[:at]}{d}{text[at + 1 :]}" for d in (digit + 1, digit - 1) if 0 <= d <= 9]


def _times_half_more(text: str) -> list[str]:
    plain = text.replace(",", "").replace("−", "-").rstrip("% ")
    return [repr(1.5 * float(plain)) + ("%" if text.endswith("%") else "")]


def other_numbers(claim: Claim) -> Iterator[tuple[str, Claim]]:
    """The claim with one of its numbers printed otherwise."""
    braces = list(re.finditer(r"\{([^{}]*)\}", claim.sentence))
    for number, place in zip(claim.numbers, braces, strict=True):
        change = _times_half_more if number.kind == "about" else _changed
        for text in change(number.text):
            sentence = claim.sentence[: place.start(1)] + text + claim.sentence[place.end(1) :]
            yield f"{number.text} as {text}", dataclasses.replace(claim, sentence=sentence)


def unbound_numbers(study: Study, claim: Claim) -> list[str]:
    """Changes of a printed number that the end of the build would not notice."""
    kept, found = study.claims, []
    for what, changed in other_numbers(claim):
        study.claims = [changed]
        try:
            if not any(f"claim {claim.name} on" in line for line in study.contradictions()):
                found.append(f"{claim.page}: claim {claim.name} prints {what} unnoticed")
        finally:
            study.claims = kept
    return found


def _state(study: Study, claim: Claim, run: Run, frame: pd.DataFrame) -> str:
    known = [c for r in study.runs for c in r.tables.get(claim.of, ())]
    try:
        return claim.judge({claim.of: frame}, run.machine, known).state
    except ClaimError:
        return "error"


def mutants(frame: pd.DataFrame, read: list[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    """Tables with one change: two labels exchanged, or a measured column scaled by at most 2.

    Labels are the values of a column of text or of booleans, and the headings of two columns of
    numbers that differ in one word (``from torch``, ``from ORT``) where the claim reads both.
    """
    texts = [c for c in frame if _is_text(frame[c])]
    values = {
        c: list(dict.fromkeys(v for v in frame[c] if isinstance(v, (str, bool)))) for c in texts
    }
    for column in texts:
        for a, b in itertools.combinations(values[column], 2):
            swap = {a: b, b: a}
            exchanged = [swap.get(v, v) if isinstance(v, (str, bool)) else v for v in frame[column]]
            yield f"{column}: {a} and {b} exchanged", frame.assign(**{column: exchanged})
    numbers = [c for c in frame if c in read and pd.api.types.is_numeric_dtype(frame[c])
               and frame[c].dtype != bool]  # fmt: skip
    for a, b in itertools.combinations(numbers, 2):
        if _differ_in_a_word(str(a).split(), str(b).split()):
            yield f"columns {a} and {b} exchanged", frame.assign(**{a: frame[b], b: frame[a]})
    for column, factor in itertools.product(numbers, _FACTORS):
        scaled = frame[column] * factor
        yield f"{column} × {factor}", frame.assign(**{column: scaled})
        for text in texts:
            for value in values[text]:
                rows = frame[text] == value
                yield (f"{column} × {factor} where {text} is {value}",
                       frame.assign(**{column: frame[column].where(~rows, scaled)}))  # fmt: skip


def _differ_in_a_word(a: list[str], b: list[str]) -> bool:
    return len(a) == len(b) > 1 and sum(x != y for x, y in zip(a, b, strict=True)) == 1


def _is_text(series: pd.Series) -> bool:
    return any(isinstance(v, (str, bool)) for v in series.tolist())


def refuted(study: Study, claim: Claim) -> str:
    """A change that turns the claim; empty where none does."""
    for run in study.runs:
        frame = run.tables.get(claim.of)
        if frame is None or run.machine == BUILD:
            continue
        before = _state(study, claim, run, frame)
        if before not in _DECIDED:
            continue
        # What the claim reads is what it cannot do without.
        read = [
            c for c in frame if _state(study, claim, run, frame.drop(columns=c)) not in _DECIDED
        ]
        for what, mutant in mutants(frame, read):
            after = _state(study, claim, run, mutant)
            if after in _DECIDED and after != before:
                return f"{run.machine}: {what}"
    if claim.numbers and not unbound_numbers(study, claim):
        return "its number, the last digit changed"
    return ""


# --- the answer box


def quoted(page: Page) -> list[tuple[str, str]]:
    """Number and target of each bound number of the page's docstring."""
    return [(" ".join(text.split()), target) for text, target in _BOUND.findall(page.docstring)]


def misquoted(page: Page, study: Study) -> list[str]:
    """Bound numbers that no claim gives, or that could be changed unnoticed."""
    found = []
    for text, target in quoted(page):
        other, _, name = target.rpartition("#")
        if other and other != page.name:
            source = next((p for p in pages() if p.name == other), None)
            if source is None:
                found.append(f"{page.name}: {text} <{target}>: no such page with claims")
                continue
            verdicts = study_of(source).verdicts()
        else:
            verdicts = study.verdicts()
        why = wrong(text, name, verdicts)
        if why:
            found.append(f"{page.name}: {text} <{target}>: {why}")
            continue
        words = re.match(r"(about|at least|up to|at most) |", text)[0]
        change = _times_half_more if words == "about " else _changed
        found += [f"{page.name}: {text} <{target}> could be {changed} unnoticed"
                  for changed in change(text[len(words):])
                  if not wrong(words + changed, name, verdicts)]  # fmt: skip
    return found


def answer(page: Page) -> str:
    """The words of the answer box, without its code."""
    found = re.search(r"(?m)^( *)\.\. answer::.*\n((?:\1 +.*\n?| *\n)*)", page.docstring)
    if found is None:
        return ""
    lines: list[str] = []
    code: int | None = None
    for line in found[2].splitlines():
        indent = len(line) - len(line.lstrip())
        if code is not None and line.strip() and indent <= code:
            code = None
        if code is None and re.match(r"\s*\.\. (code-block|code|literalinclude)::", line):
            code = indent
        if code is None:
            lines.append(line)
    return "\n".join(lines)


def free_numbers(page: Page) -> list[str]:
    """Measured numbers in the answer's words that are bound to no claim."""
    text = _BOUND.sub(" ", answer(page))
    text = re.sub(r"``.+?``|:[\w:]+:`[^`]*`|`[^`]*`_*", " ", text, flags=re.DOTALL)
    return [f"{page.name}: {' '.join(found[0].split())} in the answer is bound to no claim"
            for found in _NUMERAL.finditer(text)]  # fmt: skip
