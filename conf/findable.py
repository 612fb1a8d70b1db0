"""What search engines and link previews find, and what a wrong address shows.

Ours, as the extensions do less: sphinxext-opengraph describes a page of the reference by its
headings, as it skips what autodoc writes; sphinx-notfound-page leaves the links in the text of its
page relative; sphinx-sitemap's second build lists only the pages that it wrote again. The canonical
address, Open Graph's absolute ones and ``sitemap.xml`` need to know where the site is published.
"""

from __future__ import annotations

import html
import re
import textwrap
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from docutils import nodes
from sphinx.application import Sphinx

# Made by the machine, for the machine's own use.
_ASIDE = ("genindex", "py-modindex", "search", "404")


def description(tree: nodes.Node, length: int = 200) -> str:
    """The first paragraph of a page, cut at a word."""
    words = next(
        (
            p.astext()
            for p in tree.findall(nodes.paragraph)
            if not isinstance(p.parent, (nodes.note, nodes.list_item))
        ),
        "",
    )
    return re.sub("[,;:] …$", " …", textwrap.shorten(words, length, placeholder=" …"))


def describe(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Add a description and Open Graph's tags to a page."""
    if pagename.startswith("generated/"):
        # Rooms may have a class of one name each: the title says which.
        context["title"] = Path(pagename).name
    config, picture = app.config, f"sphx_glr_{Path(pagename).name}_thumb.png"
    title = html.unescape(re.sub(r"<[^>]+>", "", context.get("title", ""))) or config.html_title
    words = description(doctree) if doctree is not None else ""
    words = words or f"{title}: {config.html_title}, same maths, different bits."
    tags = {
        "og:title": title,
        "og:description": words,
        "og:type": "article",
        "og:site_name": config.html_title,
    }
    if config.html_baseurl:
        tags["og:url"] = config.html_baseurl + app.builder.get_target_uri(pagename)
        if Path(app.srcdir, pagename).parent.joinpath("images", "thumb", picture).exists():
            tags["og:image"] = f"{config.html_baseurl}_images/{picture}"
    shown = [f'<meta name="description" content="{html.escape(words)}">']
    shown += [f'<meta property="{k}" content="{html.escape(v)}">' for k, v in tags.items()]
    if pagename == "404":  # it is shown at any depth
        shown.insert(0, f'<base href="{urlsplit(config.html_baseurl).path or "/"}">')
    if pagename in _ASIDE:
        shown.append('<meta name="robots" content="noindex">')
    context["metatags"] = context.get("metatags", "") + "\n".join(shown) + "\n"


def list_pages(app: Sphinx, exception: Exception | None) -> None:
    """Write the addresses of all pages for search engines."""
    site = app.config.html_baseurl
    if exception or app.builder.format != "html" or not site:
        return
    names = sorted(app.env.found_docs - set(_ASIDE))
    pages = [f"<url><loc>{site}{app.builder.get_target_uri(name)}</loc></url>" for name in names]
    lines = ['<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">', *pages, "</urlset>"]
    Path(app.outdir, "sitemap.xml").write_text("\n".join(lines) + "\n", "utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the steps."""
    app.connect("html-page-context", describe)
    app.connect("build-finished", list_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
