"""Run a notebook as Jupyter does, in an environment that knows nothing of the project.

``python execute_notebook.py NOTEBOOK FOLDER`` writes the notebook with its outputs, and the tables
of its study (CSV), into FOLDER.
"""

import sys
from pathlib import Path

KEEP = """
from pathlib import Path
for name, frame in study.runs[-1].tables.items() if "study" in globals() else ():
    frame.to_csv(Path({folder!r}) / f"{{name}}.csv", index=False)
"""


def main(source: str, folder: str) -> None:
    import nbclient
    import nbformat

    notebook = nbformat.read(source, as_version=4)
    nbformat.validate(notebook)
    notebook.cells.append(nbformat.v4.new_code_cell(KEEP.format(folder=folder)))
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    nbformat.write(notebook, Path(folder, "executed.ipynb"))


if __name__ == "__main__":
    main(*sys.argv[1:])
