"""Small local inventories, so that names link to their documentation and no build needs a network.

``conf/inventories/<project>.txt`` begins with the address of the project's documentation; then each
line is a name, its role and its page. ``$`` in a page stands for the name.
"""

import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILT = HERE.parent / "build" / "inventories"


def mapping() -> dict[str, tuple[str, str]]:
    """Write each inventory in Sphinx's format, version 2, and say where it is.

    Returns
    -------
    dict
        What ``intersphinx_mapping`` takes: project -> (address, file).
    """
    BUILT.mkdir(parents=True, exist_ok=True)
    found = {}
    for source in sorted((HERE / "inventories").glob("*.txt")):
        address, *lines = [
            line
            for line in source.read_text("utf-8").splitlines()
            if line and not line.startswith("#")
        ]
        body = "".join(_entry(line) for line in lines)
        head = f"# Sphinx inventory version 2\n# Project: {source.stem}\n# Version: \n"
        head += "# The remainder of this file is compressed using zlib.\n"
        target = BUILT / f"{source.stem}.inv"
        new = head.encode() + zlib.compress(body.encode())
        if not target.exists() or target.read_bytes() != new:
            target.write_bytes(new)
        found[source.stem] = (address, str(target))
    return found


def _entry(line: str) -> str:
    name, role, page = line.split()
    return f"{name} {role} 1 {page} -\n"
