"""What search engines and link previews find, and what a wrong address shows.

Ours, as the extensions do less: sphinxext-opengraph describes a page of the reference by its
headings, as it skips what autodoc writes; sphinx-sitemap's second build lists only the pages that
it wrote again; sphinx-notfound-page leaves the links in the text of its page relative. The
canonical address, Open Graph's absolute ones, ``sitemap.xml`` and ``robots.txt`` need to know where
the site is published.
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
_MAP = '<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">'


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
    if pagename in _ASIDE:
        shown.append('<meta name="robots" content="noindex">')
    context["metatags"] = context.get("metatags", "") + "\n".join(shown) + "\n"


def finish(app: Sphinx, exception: Exception | None) -> None:
    """Write the files beside the pages."""
    if exception is not None or app.builder.format != "html":
        return
    out, site = Path(app.outdir), app.config.html_baseurl
    names = [name for name in sorted(app.env.found_docs) if name not in _ASIDE]
    if (out / "404.html").exists():
        rooted(out / "404.html", urlsplit(site).path or "/")
    for name in ("sitemap.xml", "robots.txt"):
        (out / name).unlink(missing_ok=True)
    if site:
        pages = "".join(
            f"<url><loc>{site}{app.builder.get_target_uri(n)}</loc></url>\n" for n in names
        )
        (out / "sitemap.xml").write_text(f"{_MAP}\n{pages}</urlset>\n", "utf-8")
        (out / "robots.txt").write_text(f"Sitemap: {site}sitemap.xml\n", "utf-8")


def rooted(page: Path, root: str) -> None:
    """Make the links of a page absolute: the page for a wrong address is shown at any depth."""
    text = page.read_text("utf-8")
    text = re.sub(r'\b(href|src|action)="(?!https?:|data:|[#/])(?:\./)?', rf'\1="{root}', text)
    page.write_text(text.replace('data-content_root="./"', f'data-content_root="{root}"'), "utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the steps."""
    app.connect("html-page-context", describe)
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
