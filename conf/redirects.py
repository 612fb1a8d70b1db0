"""Old addresses lead to where their text is now: pages that moved, and headings that were renamed.

Pages are sphinx-reredirects'; ours are the anchors, which it has no notion of, and the check that a
page leads somewhere. Two tables, both in ``old_addresses.json``:

- ``pages``: old document -> new document. The old address becomes a small page that sends its
  readers on, with or without JavaScript.
- ``anchors``: document -> {old anchor: new anchor}. An anchor that the page has no more is put
  beside the new one; an empty new anchor means the top of the page. All headings that have been
  published are there: when one is renamed, what is left to say is where its text went.
"""

import json
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.util import logging

logger = logging.getLogger(__name__)

FILE = "old_addresses.json"


def tables(app: Sphinx) -> dict[str, dict]:
    """The two tables; empty ones for a site without the file."""
    path = Path(app.confdir, FILE)
    return json.loads(path.read_text("utf-8")) if path.exists() else {"pages": {}, "anchors": {}}


def keep_anchors(app: Sphinx, tree: nodes.document) -> None:
    """Give a page the anchors that it has had."""
    name = app.env.docname
    old = tables(app)["anchors"].get(name)
    if not old:
        return
    app.env.note_dependency(str(Path(app.confdir, FILE)))
    places = {place: node for node in tree.findall(nodes.Element) for place in node["ids"]}
    top = next(iter(tree.findall(nodes.section)), tree)
    for anchor, new in old.items():
        if anchor in places:
            continue
        if new and new not in places:
            logger.warning("%s: #%s leads to #%s, which is not there", FILE, anchor, new,
                           location=name, type="redirects")  # fmt: skip
            continue
        # Every place of an element beside its first becomes an empty span.
        (places[new] if new else top)["ids"].append(anchor)


def send_on(app: Sphinx, config: Config) -> None:
    """Tell the extension which pages moved."""
    config.redirects = {old: f"/{new}.html" for old, new in tables(app)["pages"].items()}


def check(app: Sphinx) -> list:
    """An old page is gone, and a new one is there."""
    for old, new in tables(app)["pages"].items():
        if old in app.env.found_docs or new not in app.env.found_docs:
            wrong = "is still there" if old in app.env.found_docs else "leads nowhere"
            logger.warning("%s: %s -> %s: %s", FILE, old, new, wrong, type="redirects")
    return []  # no pages to add


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the steps."""
    app.setup_extension("sphinx_reredirects")
    app.connect("config-inited", send_on)
    app.connect("doctree-read", keep_anchors)
    app.connect("html-collect-pages", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
