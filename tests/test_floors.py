"""A module of the library imports only from floors below its own."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "roundoff"
FLOORS = {
    "errors": 0, "dtypes": 0,
    "describe": 1, "compare": 1, "environment": 1, "script": 1,
    "models": 2, "reductions": 2, "timing": 2, "ort": 2, "kernels": 2,
    "evaluator": 3, "fusion": 3,
    "localization": 4, "record": 4,
    "backend": 5, "page": 5, "graph": 5, "runtimes": 5,
    "__main__": 6,
}  # fmt: skip
# Peers on the two ground floors: dtypes raises the errors, compare describes what differs.
SAME_FLOOR = {("dtypes", "errors"), ("compare", "describe")}


def imported(path: Path) -> set[tuple[int, str]]:
    """(line, room) of every import of this package in the file, wherever in it they stand."""
    return {(line, target[1]) for line, target in targets_of(path) if len(target) > 1}


def targets_of(path: Path) -> set[tuple[int, tuple[str, ...]]]:
    """(line, dotted name) of every import of this package."""
    package = ("roundoff", *path.relative_to(SOURCE).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            full = (*base, *(node.module.split(".") if node.module else ()))
            targets = [(*full, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            targets = [tuple(alias.name.split(".")) for alias in node.names]
        else:
            continue
        found |= {(node.lineno, t) for t in targets if t[0] == "roundoff"}
    return found


def rooms() -> list[Path]:
    return [p for p in sorted(SOURCE.rglob("*.py")) if p != SOURCE / "__init__.py"]


@pytest.mark.parametrize("path", rooms(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_down(path: Path) -> None:
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    assert room in FLOORS, f"{room} has no floor: add it to the house first"
    for line, target in imported(path):
        if target == room or target not in FLOORS:
            continue
        assert FLOORS[target] < FLOORS[room] or (room, target) in SAME_FLOOR, (
            f"{path.name}:{line} imports {target} (floor {FLOORS[target]}) "
            f"from {room} (floor {FLOORS[room]})"
        )


def test_an_upward_import_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dtypes.py").write_text("def f():\n    from .page import Study\n", "utf-8")
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    with pytest.raises(AssertionError, match=r"imports page \(floor 5\) from dtypes \(floor 0\)"):
        test_imports_go_down(tmp_path / "dtypes.py")


def neighbours() -> dict[str, set[str]]:
    """Module -> modules of its own room that it imports, by their paths."""
    found = {}
    for path in rooms():
        room = path.relative_to(SOURCE).parts[0]
        found[str(path.relative_to(SOURCE))] = {
            str(other.relative_to(SOURCE))
            for _, target in targets_of(path)
            for other in (SOURCE.joinpath(*target[1:]).with_suffix(".py"),
                          SOURCE.joinpath(*target[1:-1]).with_suffix(".py"))
            if other.exists() and other != path and other.relative_to(SOURCE).parts[0] == room
        }  # fmt: skip
    return found


def circles() -> list[str]:
    """Modules of one room that import each other, over however many others."""
    reached = neighbours()
    for _ in reached:
        further = {m: n.union(*(reached[o] for o in n)) for m, n in reached.items()}
        if further == reached:
            break
        reached = further
    return sorted(module for module, others in reached.items() if module in others)


# Rooms with modules that import each other where a function needs them.
CIRCLES = {"compare"}


def test_no_module_imports_one_that_imports_it() -> None:
    assert {module.split("/")[0] for module in circles()} <= CIRCLES


def test_a_circle_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page").mkdir()
    for name, text in {"a": "from .b import f", "b": "from . import c", "d": "from . import a",
                       "c": "def f():\n    import roundoff.page.a"}.items():  # fmt: skip
        (tmp_path / "page" / f"{name}.py").write_text(text + "\n", "utf-8")
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    assert circles() == ["page/a.py", "page/b.py", "page/c.py"]
