"""A module imports only from rooms on floors below its own."""

import re
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "roundoff"
#: The rooms of each floor. The package itself imports each of them by name, where it is needed.
FLOORS = (
    ("errors", "dtypes", "arguments"),
    ("precision",),
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


#: "from roundoff.room", "from ..room": how the import begins, and the room.
IMPORT = re.compile(r"^ *(?:from|import) (roundoff\.|\.+)(\w+)", re.MULTILINE)


def imports() -> dict[str, set[str]]:
    """The other rooms that each room imports, wherever in it that stands."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        room, *inner = path.relative_to(SOURCE).with_suffix("").parts
        starts = ("roundoff.", "." * (1 + len(inner)))
        names = {name for start, name in IMPORT.findall(path.read_text()) if start in starts}
        found.setdefault(room, set()).update((names & FLOOR.keys()) - {room})
    del found["__init__"]
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
