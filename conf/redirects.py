"""Old anchors lead to where their text is now.

Ours, as Sphinx has no notion of them. ``old_addresses.json`` has, for each document, {old anchor:
new anchor}. An anchor that the page has no more is put beside the new one; an empty new anchor
means the top of the page. All headings that have been published are there: when one is renamed,
what is left to say is where its text went.
"""

import json
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)

FILE = "old_addresses.json"


def keep_anchors(app: Sphinx, tree: nodes.document) -> None:
    """Give a page the anchors that it has had."""
    path = Path(app.confdir, FILE)
    old = json.loads(path.read_text("utf-8")).get(app.env.docname, {}) if path.exists() else {}
    if not old:
        return
    app.env.note_dependency(str(path))
    places = {place: node for node in tree.findall(nodes.Element) for place in node["ids"]}
    top = next(iter(tree.findall(nodes.section)), tree)
    for anchor, new in old.items():
        if anchor in places:
            continue
        if new and new not in places:
            logger.warning(
                "%s: #%s leads to #%s, which is not there",
                FILE,
                anchor,
                new,
                location=app.env.docname,
                type="redirects",
            )
            continue
        # Every place of an element beside its first becomes an empty span.
        (places[new] if new else top)["ids"].append(anchor)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the step."""
    app.connect("doctree-read", keep_anchors)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
