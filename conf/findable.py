"""What search engines, language models and link previews find, and what a wrong address shows.

``llms.txt`` and a description on every page are always there; the canonical address, Open Graph's
absolute addresses, ``sitemap.xml`` and ``robots.txt`` need to know where the site is published:
``ROUNDOFF_SITE`` (``html_baseurl``).
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

from docutils import nodes
from sphinx.application import Sphinx

from hooks import page_order

_LENGTH = 200
# Made by the machine, for the machine's own use.
_ASIDE = ("genindex", "py-modindex", "search", "404")


def description(tree: nodes.Node, length: int = _LENGTH) -> str:
    """The first paragraph of a page, cut at a word."""
    for paragraph in tree.findall(nodes.paragraph):
        if isinstance(paragraph.parent, (nodes.note, nodes.list_item)):
            continue
        words = " ".join(paragraph.astext().split())
        if len(words) <= length:
            return words
        return words[:length].rsplit(" ", 1)[0].rstrip(",;:") + " …"
    return ""


def describe(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Add a description and Open Graph's tags to a page."""
    if pagename.startswith("generated/"):
        # Two rooms may have a Step each: the title says which.
        context["title"] = Path(pagename).name
    title = html.unescape(re.sub(r"<[^>]+>", "", context.get("title", ""))) or app.config.html_title
    words = description(doctree) if doctree is not None else ""
    words = words or f"{title}: {app.config.html_title}, same maths, different bits."
    tags = {"og:title": title, "og:description": words, "og:type": "article",
            "og:site_name": app.config.html_title}  # fmt: skip
    if app.config.html_baseurl:
        site = app.config.html_baseurl.rstrip("/") + "/"
        tags["og:url"] = urljoin(site, app.builder.get_target_uri(pagename))
        picture = thumbnail(app, pagename)
        if picture:
            tags["og:image"] = urljoin(site, picture)
    shown = [f'<meta name="description" content="{html.escape(words, quote=True)}">']
    shown += [
        f'<meta property="{name}" content="{html.escape(text, quote=True)}">'
        for name, text in tags.items()
    ]
    if pagename in _ASIDE:
        shown.append('<meta name="robots" content="noindex">')
    context["metatags"] = context.get("metatags", "") + "\n".join(shown) + "\n"


def thumbnail(app: Sphinx, pagename: str) -> str | None:
    """Address of a gallery page's picture inside the site."""
    name = f"sphx_glr_{Path(pagename).name}_thumb.png"
    there = Path(app.srcdir, pagename).parent / "images" / "thumb" / name
    return f"_images/{name}" if pagename.startswith("gallery/") and there.exists() else None


def finish(app: Sphinx, exception: Exception | None) -> None:
    """Write the files beside the pages."""
    if exception is not None or app.builder.format != "html":
        return
    out, site = Path(app.outdir), app.config.html_baseurl
    names = [n for n in sorted(app.env.found_docs) if n not in _ASIDE]
    (out / "llms.txt").write_text(llms(app, names), "utf-8")
    if (out / "404.html").exists():
        rooted(out / "404.html", urlsplit(site).path.rstrip("/") + "/" if site else "/")
    for name in ("sitemap.xml", "robots.txt"):
        (out / name).unlink(missing_ok=True)
    if site:
        site = site.rstrip("/") + "/"
        entries = "".join(
            f"<url><loc>{html.escape(urljoin(site, app.builder.get_target_uri(n)))}</loc></url>\n"
            for n in names
        )
        (out / "sitemap.xml").write_text(
            '<?xml version="1.0" encoding="utf-8"?>\n'
            f'<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n{entries}</urlset>\n',
            "utf-8",
        )
        (out / "robots.txt").write_text(f"Sitemap: {site}sitemap.xml\n", "utf-8")


def rooted(page: Path, root: str) -> None:
    """Make the links of a page absolute: the page for a wrong address is shown at any depth."""
    text = page.read_text("utf-8")
    text = re.sub(r'\b(href|src|action)="(?!https?:|data:|[#/])(?:\./)?', rf'\1="{root}', text)
    page.write_text(text.replace('data-content_root="./"', f'data-content_root="{root}"'), "utf-8")


def resolved(app: Sphinx, name: str) -> nodes.document:
    """The beginning of a page, its references as readers see them."""
    tree = app.env.get_doctree(name)
    if name.startswith("generated/"):
        return tree  # there are none
    for section in list(tree.findall(nodes.section))[1:]:
        if section.parent is not None:
            section.parent.remove(section)
    return app.env.get_and_resolve_doctree(name, app.builder, doctree=tree, tags=app.tags)


def llms(app: Sphinx, names: list[str]) -> str:
    """The site for a language model: what it is, and one line a page."""
    site = app.config.html_baseurl.rstrip("/") + "/" if app.config.html_baseurl else ""
    parts = {"The studies": [], "Reading and running them": [], "The library": []}
    for name in sorted(names, key=lambda n: (page_order(f"{n}.py"), n)):
        base = name.rsplit("/", 1)[-1]
        if name.startswith("gallery/"):
            part = "The studies" if base.startswith("plot_") else None
        elif name == "index":
            part = None
        elif name.startswith("generated/") or name == "api":
            part = "The library"
        else:
            part = "Reading and running them"
        if part:
            title = app.env.titles[name].astext()
            words = description(resolved(app, name))
            address = site + app.builder.get_target_uri(name)
            parts[part].append(f"- [{title}]({address}): {words}".rstrip(": "))
    head = description(resolved(app, "index"), 2 * _LENGTH)
    lines = [f"# {app.config.html_title}", "", f"> {head}"]
    for part, entries in parts.items():
        if entries:
            lines += ["", f"## {part}", "", *entries]
    lines += ["", "Every study can be downloaded as a notebook and as a script from its page.", ""]
    return "\n".join(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the steps."""
    app.connect("html-page-context", describe)
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
