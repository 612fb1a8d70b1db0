"""What the site prints for a reader to run: snippets of answers, and the cells of a page."""

from __future__ import annotations

import ast
import dataclasses
import dis
import functools
import itertools
import re
import runpy
import textwrap
import types
from pathlib import Path
from typing import Any

from roundoff.record import RECORDED, Record, read_record

ROOT = Path(__file__).parents[2]
PAGES = {path.stem: path for path in sorted((ROOT / "gallery").glob("*/plot_*.py"))}
#: Texts beside the pages.
TEXTS = {
    path.relative_to(ROOT).as_posix(): path
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.rst")),
    )
}

_BLOCK = re.compile(r"^( *)\.\. code-block:: (\w+)\n((?:\1 +.*\n|\s*\n)+)", re.MULTILINE)
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def study_of(name: str) -> dict[str, Any]:
    """The names of a study, as the environment has it run."""
    return runpy.run_path(str(ROOT / "studies" / f"{name}.py"))


def record_of(page: str, machine: str) -> Record:
    """What a machine has recorded for a page."""
    return read_record(RECORDED / page / f"{machine}.json")


@dataclasses.dataclass(frozen=True)
class Snippet:
    """A block of code as printed: where it stands, its language, and its text."""

    source: Path
    line: int
    language: str
    code: str

    def run(self, **given: Any) -> dict[str, Any]:
        """Run it with these names alone; what it left, and its expressions' values as ``_``."""
        names = dict(given)
        names["_"] = run(ast.parse(self.code), names, f"{self.source}:{self.line}")
        return names

    def statements(self) -> list[Snippet]:
        """Each of its statements, with the comment beside it, as a snippet of its own."""
        lines = self.code.splitlines()
        return [
            dataclasses.replace(self, code="\n".join(lines[s.lineno - 1 : s.end_lineno]) + "\n")
            for s in ast.parse(self.code).body
        ]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of a page: its number, the title of its section, its text and its code."""

    number: int
    section: str
    text: str
    code: str
    line: int


def run(tree: ast.Module, names: dict[str, Any], where: str) -> list[Any]:
    """Run statements in a namespace; the values of those that are expressions, in order."""
    values = []
    for statement in tree.body:
        if isinstance(statement, ast.Expr):
            code = compile(ast.Expression(statement.value), where, "eval", dont_inherit=True)
            values.append(eval(code, names))
        else:
            exec(compile(ast.Module([statement], []), where, "exec", dont_inherit=True), names)
    return values


def answer(path: Path) -> str:
    """The answer's box of a page, as it stands in the docstring."""
    docstring = path.read_text(encoding="utf-8").split('"""')[1]
    _, _, box = docstring.partition("\n.. answer::")
    return re.split(r"\n(?=\S)", box, maxsplit=1)[0] + "\n"


@functools.cache
def snippets() -> dict[str, Snippet]:
    """Every block of code that an answer, the README or a text of docs/ prints, by place.

    The place is the page's or the text's name, and for a second block its number. Consoles are not
    among them: ``test_command_lines.py`` has those.
    """
    found = {}
    for name, path in (PAGES | TEXTS).items():
        text = path.read_text(encoding="utf-8")
        shown = answer(path) if path.suffix == ".py" else text
        blocks = [(m[2], textwrap.dedent(m[3]), m.start()) for m in _BLOCK.finditer(shown)]
        blocks += [(m[1], m[2], m.start()) for m in _FENCE.finditer(shown)]
        blocks = [b for b in blocks if b[0] not in ("console", "bash", "bibtex", "text")]
        for i, (language, code, _) in enumerate(blocks):
            line = text[: text.index(code.strip().splitlines()[0])].count("\n") + 1
            place = name if i == 0 else f"{name}/{i + 1}"
            found[place] = Snippet(path.relative_to(ROOT), line, language, code.strip("\n") + "\n")
    return found


def blocks(text: str) -> list[str]:
    """The code of every block in a cell's text."""
    return [textwrap.dedent(m[3]).strip("\n") + "\n" for m in _BLOCK.finditer(text + "\n")]


@functools.cache
def cells(page: str) -> list[Cell]:
    """The cells of a page, in order; the docstring is not one."""
    lines = PAGES[page].read_text(encoding="utf-8").splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("# %%")]
    found, section = [], ""
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(lines)], strict=True)):
        body = lines[start + 1 : end]
        prose = []
        while body and body[0].startswith("#"):
            prose.append(body.pop(0).removeprefix("#").removeprefix(" "))
        titles = [a for a, b in itertools.pairwise(prose) if b and set(b) == {"-"}]
        section = titles[-1] if titles else section
        line = start + 2 + len(prose)
        found.append(Cell(number, section, "\n".join(prose), "\n".join(body) + "\n", line))
    return found


def run_cell(page: str, cell: Cell, names: dict[str, Any], **changed: str) -> list[Any]:
    """Run a cell, with the values of some of its names replaced as a reader would type them.

    Raises
    ------
    LookupError
        When the cell does not set such a name: a reader could not put in something of his own.
    """
    tree = ast.parse(cell.code)
    found = set()
    for i, statement in enumerate(tree.body):
        if isinstance(statement, ast.Assign):
            found |= _put_in(statement, changed)
        if isinstance(statement, ast.FunctionDef) and statement.name in changed:
            (tree.body[i],) = ast.parse(changed[statement.name]).body
            found.add(statement.name)
    if found != set(changed):
        raise LookupError(f"{page}: no {sorted(set(changed) - found)} in cell {cell.number}")
    ast.increment_lineno(tree, cell.line - 1)
    return run(tree, names, str(PAGES[page]))  # inspect finds the source of what it defines


def _put_in(statement: ast.Assign, changed: dict[str, str]) -> set[str]:
    """Replace the value of ``name = …``, or one of ``a, b = …, …``; the names found."""
    target, found = statement.targets[0], set()
    if isinstance(target, ast.Name) and target.id in changed:
        statement.value = ast.parse(changed[target.id], mode="eval").body
        found.add(target.id)
    if isinstance(target, ast.Tuple):
        # (…) if gpu else (…): whichever it is.
        value = statement.value
        choices = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
        for i, name in enumerate(target.elts):
            if isinstance(name, ast.Name) and name.id in changed:
                for choice in choices:
                    assert isinstance(choice, ast.Tuple)
                    choice.elts[i] = ast.parse(changed[name.id], mode="eval").body
                found.add(name.id)
    return found


def own_cell(page: str) -> Cell:
    """The cell of a page that a reader puts something of his own into."""
    return next(c for c in cells(page) if c.section.startswith("Your own") and c.code.strip())


def needed_by(page: str, cell: Cell) -> ast.Module:
    """The statements of earlier cells that a cell needs: what sets its names, and so on back.

    Calls on a module, such as ``torch.set_num_threads(1)``, are kept as well.
    """
    wanted: set[str] = set()
    for statement in reversed(ast.parse(cell.code).body):
        wanted = _before(statement, wanted)
    kept = []
    for earlier in reversed(cells(page)[: cell.number]):
        tree = ast.parse(earlier.code)
        ast.increment_lineno(tree, earlier.line - 1)
        for statement in reversed(tree.body):
            if _sets(statement) & wanted or _calls_a_module(statement):
                kept.append(statement)
                wanted = _before(statement, wanted)
    return ast.Module(kept[::-1], [])


def _before(statement: ast.stmt, wanted: set[str]) -> set[str]:
    """The names that are needed before a statement, from those that are needed after it."""
    module = ast.Module([statement], [])
    if isinstance(statement, (ast.Assign, ast.FunctionDef, ast.Import, ast.ImportFrom)):
        return (wanted - _sets(statement)) | _loaded(module)
    if isinstance(statement, ast.For):  # its targets are set before its body
        own = {n.id for n in ast.walk(statement.target) if isinstance(n, ast.Name)}
        body: set[str] = set()
        for inner in reversed([*statement.body, *statement.orelse]):
            body = _before(inner, body)
        each = ast.copy_location(ast.Expr(statement.iter), statement)
        iterated = _loaded(ast.Module([each], []))
        return wanted | (body - own) | iterated
    return wanted | _loaded(module)


def _loaded(tree: ast.Module) -> set[str]:
    """The names of the module that its statements read, those in functions as well."""
    found, codes = set(), [compile(tree, "", "exec")]
    while codes:
        code = codes.pop()
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
                found.add(step.argval)
    return found


def _sets(statement: ast.stmt) -> set[str]:
    """The names that a statement sets, or whose items or attributes it sets."""
    code = compile(ast.Module([statement], []), "", "exec")
    found = {s.argval for s in dis.get_instructions(code) if s.opname == "STORE_NAME"}
    for node in ast.walk(statement):
        if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            found |= {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
    return found


def _calls_a_module(statement: ast.stmt) -> bool:
    if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
        return False
    root = statement.value.func
    while isinstance(root, ast.Attribute):
        root = root.value
    return isinstance(root, ast.Name) and root.id in ("torch", "warnings", "np")
