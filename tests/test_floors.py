"""A module imports only from rooms on floors below its own."""

import ast
from importlib.util import resolve_name
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


def imports() -> dict[str, set[str]]:
    """The other rooms that each room imports, wherever in it that stands."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        package = ".".join(("roundoff", *parts[:-1]))
        names = found.setdefault(parts[0], set())
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                origin = resolve_name("." * node.level + (node.module or ""), package)
                names |= {f"{origin.rstrip('.')}.{alias.name}" for alias in node.names}
    del found["__init__"]
    for room, names in found.items():
        ours = {name.split(".")[1] for name in names if name.startswith("roundoff.")}
        found[room] = (ours & FLOOR.keys()) - {room}
    return found


def upward() -> list[str]:
    return [
        f"{room} imports {other}"
        for room, others in imports().items()
        for other in others
        if FLOOR[room] <= FLOOR[other] and (room, other) not in PEERS
    ]


def test_each_room_has_a_floor() -> None:
    assert imports().keys() == FLOOR.keys()


def test_imports_go_down() -> None:
    assert upward() == []
    assert {"environment", "errors"} <= imports()["record"], "imports are seen"
