"""A module imports only from floors below its own, and no module imports one that imports it.

``python tests/test_floors.py`` prints the graph of the library's modules, floor by floor, and its
circle, and ends with status 1 where an import goes up or a circle is there.
"""

import ast
import graphlib
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "roundoff"
#: The rooms of each floor. The package itself imports each of them by name, where it is needed.
FLOORS = (
    ("errors", "dtypes", "arguments"),
    ("environment", "script", "describe", "graph", "workers"),
    ("compare", "timing", "reductions", "ort", "models", "kernels"),
    ("evaluator", "fusion", "record"),
    ("localization", "page"),
    ("backend", "runtimes"),
    ("__main__",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
#: On the ground floor the types and the checks of arguments raise the errors.
PEERS = {("dtypes", "errors"), ("arguments", "errors")}

#: Module -> module that it imports -> the line.
Graph = dict[str, dict[str, int]]


def graph(source: Path = SOURCE) -> Graph:
    """The imports of each module below *source*, wherever in it they stand."""
    files = {
        path.relative_to(source).with_suffix("").as_posix(): path
        for path in sorted(source.rglob("*.py"))
    }
    return {module: imports(module, path, set(files)) for module, path in files.items()}


def imports(module: str, path: Path, modules: set[str]) -> dict[str, int]:
    package = ("roundoff", *module.split("/")[:-1])
    lines: dict[str, int] = {}
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            origin = (*base, *(node.module.split(".") if node.module else ()))
            names = [(*origin, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        else:
            continue
        for name in names:
            imported = module_of(name, modules)
            if imported and imported != module:
                lines.setdefault(imported, node.lineno)
    return lines


def module_of(name: tuple[str, ...], modules: set[str]) -> str | None:
    """The module that has a dotted name, or that is the longest part of it."""
    if name[0] != "roundoff":
        return None
    for end in range(len(name), 1, -1):
        path = "/".join(name[1:end])
        for module in (path, f"{path}/__init__"):
            if module in modules:
                return module
    return None


def room_of(module: str) -> str:
    return module.split("/")[0]


def upward(modules: Graph) -> list[str]:
    """Imports of another room that is not on a lower floor."""
    return [
        f"{module}:{line} imports {imported} (floor {FLOOR[room_of(imported)]}) "
        f"from floor {FLOOR[room_of(module)]}"
        for module, others in modules.items()
        for imported, line in others.items()
        if (pair := (room_of(module), room_of(imported))) not in PEERS
        and pair[0] != pair[1]
        and FLOOR[pair[0]] <= FLOOR[pair[1]]
    ]


def circle(modules: Graph) -> list[str]:
    """Modules that import each other, over however many others; empty where none do."""
    try:
        graphlib.TopologicalSorter(modules).prepare()
    except graphlib.CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def library() -> Graph:
    """The graph of the library, without the package that loads its rooms by name."""
    return {module: others for module, others in graph().items() if module != "__init__"}


def test_each_room_has_a_floor() -> None:
    assert {room_of(module) for module in library()} == set(FLOOR)


def test_imports_go_down() -> None:
    assert upward(library()) == []


def test_no_module_imports_one_that_imports_it() -> None:
    assert circle(library()) == []


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/', 1)}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n", "utf-8")
    return folder


def test_an_upward_import_and_a_circle_are_seen(tmp_path: Path) -> None:
    modules = graph(
        write(
            tmp_path,
            dtypes="def f():\n    from .page.study import Study",
            page__study="",
            page__a="from .b import f\nfrom ..localization import localize",
            localization="",
            page__b="def f():\n    import roundoff.page.a",
        )
    )
    assert upward(modules) == [
        "dtypes:2 imports page/study (floor 4) from floor 0",
        "page/a:2 imports localization (floor 4) from floor 4",
    ]
    assert set(circle(modules)) == {"page/a", "page/b"}


def main() -> int:
    modules = library()
    for floor, rooms in enumerate(FLOORS):
        print(f"{floor}  {', '.join(rooms)}")
        for module, others in modules.items():
            if room_of(module) in rooms:
                print(f"     {module} -> {', '.join(sorted(others)) or '(none)'}")
    faults = {"imports that go up": upward(modules), "a circle": circle(modules)}
    edges = sum(map(len, modules.values()))
    print(f"{len(modules)} modules, {edges} imports")
    for what, lines in faults.items():
        print(f"{what}: {'; '.join(lines) or 'none'}")
    return int(any(faults.values()))


if __name__ == "__main__":
    sys.exit(main())
