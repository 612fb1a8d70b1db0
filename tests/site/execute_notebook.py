"""Run a notebook as Jupyter does, in an environment that knows nothing of the project.

``python execute_notebook.py NOTEBOOK FOLDER`` writes the notebook with its outputs into FOLDER.
"""

import sys
from pathlib import Path


def main(source: str, folder: str) -> None:
    import nbclient
    import nbformat

    notebook = nbformat.read(source, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    nbformat.write(notebook, Path(folder, "executed.ipynb"))


if __name__ == "__main__":
    main(*sys.argv[1:])
