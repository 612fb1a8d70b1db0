"""Print what a notebook needs, one requirement a line: the library's, its runtime's, Jupyter's."""

import tomllib
from pathlib import Path

project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
print("\n".join([*project["dependencies"], *extras["cpu"], *extras["notebook"]]))
