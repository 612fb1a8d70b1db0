"""On a phone a row of the results becomes a card, in which each cell says whose column it is.

A cell gets its column's heading as a first line, which ``roundoff.css`` shows where the headings
are out of sight. A stylesheet alone does not know them.
"""

from docutils import nodes
from sphinx.application import Sphinx

CLASS = "ro-results"
LABEL = "ro-column"


def label_cells(app: Sphinx, tree: nodes.document) -> None:
    """Write the heading of its column into each cell but the first of a row, which is the title."""
    for table in tree.findall(nodes.table):
        if CLASS not in table["classes"]:
            continue
        head = next(table.findall(nodes.thead))
        headings = [entry.astext() for entry in head.findall(nodes.entry)]
        for row in next(table.findall(nodes.tbody)).findall(nodes.row):
            for heading, entry in list(zip(headings, row.children, strict=True))[1:]:
                entry.insert(0, nodes.paragraph("", heading, classes=[LABEL]))


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the step."""
    app.connect("doctree-read", label_cells)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
