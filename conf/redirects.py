"""Old addresses lead to where their text is now: pages that moved, and headings that were renamed.

Two tables, both in ``old_addresses.json``:

- ``pages``: old document -> new document. The old address becomes a small page that sends its
  readers on, without JavaScript.
- ``anchors``: document -> {old anchor: new anchor}. An anchor that the page has no more is put
  beside the new one; an empty new anchor means the top of the page. All headings that have been
  published are there: when one is renamed, what is left to say is where its text went.
"""

import html
import json
import posixpath
from pathlib import Path
from urllib.parse import urljoin

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)

FILE = "old_addresses.json"
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Moved: {title}</title>
<meta name="description" content="This page has moved: {title}">
<meta name="robots" content="noindex">
<meta http-equiv="refresh" content="0; url={address}">
<link rel="canonical" href="{canonical}">
</head>
<body><p>This page is now <a href="{address}">{title}</a>.</p></body>
</html>
"""


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


def send_on(app: Sphinx, exception: Exception | None) -> None:
    """Write a page at each old address."""
    if exception is not None or app.builder.format != "html":
        return
    for old, new in tables(app)["pages"].items():
        if old in app.env.found_docs or new not in app.env.found_docs:
            wrong = "is still there" if old in app.env.found_docs else "leads nowhere"
            logger.warning("%s: %s -> %s: %s", FILE, old, new, wrong, type="redirects")
            continue
        path = Path(app.outdir, app.builder.get_target_uri(old))
        target = app.builder.get_target_uri(new)
        address = posixpath.relpath(
            target, posixpath.dirname(app.builder.get_target_uri(old)) or "."
        )
        site = app.config.html_baseurl
        canonical = urljoin(site.rstrip("/") + "/", target) if site else address
        values = {"title": app.env.titles[new].astext(), "address": address, "canonical": canonical}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_PAGE.format(**{k: html.escape(v) for k, v in values.items()}), "utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the two steps."""
    app.connect("doctree-read", keep_anchors)
    app.connect("build-finished", send_on)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
