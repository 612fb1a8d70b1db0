"""What the site prints for a reader to run: snippets of answers, and the cells of a page."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import re
import runpy
import textwrap
from pathlib import Path
from typing import Any

import torch
import transformers

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

_BLOCK = re.compile(r"^( *)\.\. code-block:: python\n((?:\1 +.*\n|\s*\n)+)", re.MULTILINE)
_FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def study_of(name: str) -> dict[str, Any]:
    """The names of a study, as the environment has it run."""
    return runpy.run_path(str(ROOT / "studies" / f"{name}.py"))


def record_of(page: str, machine: str) -> Record:
    """What a machine has recorded for a page."""
    return read_record(RECORDED / page / f"{machine}.json")


@dataclasses.dataclass(frozen=True)
class Snippet:
    """A block of code as printed: where it stands, and its text."""

    place: str
    code: str

    def run(self, **given: Any) -> dict[str, Any]:
        """Run it with these names alone; what it left, and its expressions' values as ``_``."""
        names = dict(given)
        names["_"] = run(ast.parse(self.code), names, self.place)
        return names

    def statements(self) -> list[Snippet]:
        """Each of its statements, as a snippet of its own."""
        return [Snippet(self.place, ast.unparse(s)) for s in ast.parse(self.code).body]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of a page: the title of its section, its text, its code and where that begins."""

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


@functools.cache
def snippets() -> dict[str, Snippet]:
    """Every block of Python that an answer, the README or a text of docs/ prints, by place.

    The place is the page's or the text's name, and for a second block its number.
    """
    found = {}
    for name, path in (PAGES | TEXTS).items():
        text = path.read_text(encoding="utf-8")
        shown = text.split('"""')[1] if path.suffix == ".py" else text
        codes = [textwrap.dedent(code) for _, code in _BLOCK.findall(shown)]
        for i, code in enumerate([*codes, *_FENCE.findall(shown)]):
            place = f"{name}/{i + 1}" if i else name
            found[place] = Snippet(place, code)
    return found


@functools.cache
def cells(page: str) -> list[Cell]:
    """The cells of a page, in order; the docstring is not one."""
    lines = PAGES[page].read_text(encoding="utf-8").splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("# %%")]
    found, section = [], ""
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        body = lines[start + 1 : end]
        prose = []
        while body and body[0].startswith("#"):
            prose.append(body.pop(0).removeprefix("#").removeprefix(" "))
        titles = [a for a, b in itertools.pairwise(prose) if b and set(b) == {"-"}]
        section = titles[-1] if titles else section
        line = start + 2 + len(prose)
        found.append(Cell(section, "\n".join(prose), "\n".join(body) + "\n", line))
    return found


def assigned(statement: ast.stmt) -> set[str]:
    """The names that an assignment or a definition sets."""
    if isinstance(statement, ast.FunctionDef):
        return {statement.name}
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}


def run_cell(page: str, cell: Cell, names: dict[str, Any], **changed: str) -> list[Any]:
    """Run a cell, with the values of some of its names replaced as a reader would type them."""
    tree = ast.parse(cell.code)
    ast.increment_lineno(tree, cell.line - 1)  # inspect finds the source of what it defines
    values, missing = [], set(changed)
    for statement in tree.body:
        given = assigned(statement)
        if not given or given - changed.keys():
            values += run(ast.Module([statement], []), names, str(PAGES[page]))
        for name in given & missing:
            typed = changed[name]
            exec(typed if typed.startswith("def ") else f"{name} = {typed}", names)
            missing.remove(name)
    assert not missing, "a reader could not put in something of his own"
    return values


def imported(page: str) -> set[str]:
    """What a page imports from the library, as ``roundoff.compare.max_diff``."""
    return {
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(PAGES[page].read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("roundoff")
        for alias in node.names
    }


def small_decoder(kind: str, **sizes: Any) -> Any:
    """A random decoder of transformers, whose texts change from token to token."""
    base = {
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 1,
        "vocab_size": 211,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(kind.lower(), **base | sizes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def prompts_of(lengths: list[int]) -> dict[str, torch.Tensor]:
    """Prompts of these lengths as a tokenizer pads them for a decoder, on the left."""
    generator, longest = torch.Generator().manual_seed(sum(lengths)), max(lengths)
    ids = torch.randint(2, 211, (len(lengths), longest), generator=generator)
    mask = torch.tensor([[0] * (longest - n) + [1] * n for n in lengths])
    return {"input_ids": ids * mask, "attention_mask": mask}


def own_cell(page: str) -> Cell:
    """The cell of a page that a reader puts something of his own into."""
    return next(c for c in cells(page) if c.section.startswith("Your own") and c.code.strip())


def run_imports(page: str, names: dict[str, Any]) -> None:
    """Run the cells of a page that import, and nothing else of it."""
    for cell in cells(page):
        body = ast.parse(cell.code).body
        if body and all(isinstance(s, (ast.Import, ast.ImportFrom)) for s in body):
            run(ast.Module(body, []), names, str(PAGES[page]))
