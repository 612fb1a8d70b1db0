"""The form of a page: its answer box, and the numbers bound to values of a record.

Ours, as it checks what a page says against what was measured. ``.. answer:: nvidia-h200`` makes the
box: its words, the page's answer figure, the machine that the numbers are of, the code, and what
can be taken along. ``:bound:`0.0186 <tf32>``` prints a number, which ``evidence.py`` checks with
its sentence (``<page#tf32>``: of another page; ``<tf32@machine>``: as another machine has it).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst.states import Inliner
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective, SphinxRole

import evidence
from roundoff.record import RECORDED


def document(env: BuildEnvironment, page: str) -> str | None:
    """Name of the document of a page of the gallery; None where this site has no such page."""
    return next((n for n in env.found_docs if re.fullmatch(f"gallery/\\w+/{page}", n)), None)


def left_out(config: Any, page: str) -> bool:
    """Whether ``make page`` leaves this page out: nothing that it measures is there to look at."""
    pattern = config.sphinx_gallery_conf.get("filename_pattern")
    return pattern is not None and not re.search(pattern, f"/{page}.py")


class Bound(SphinxRole):
    """A number of a record, with a link to its evidence; it is checked with its sentence."""

    inliner: Inliner

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Make the link."""
        match = re.fullmatch(r"(?s)(.+?)\s*<(?:(\w+)#)?([^>]+)>", self.text)
        if match is None:
            return self._fail(f"{self.text!r}: expected a number and <value>")
        text, elsewhere, name = match.groups()
        page = elsewhere or Path(self.env.docname).name
        if not evidence.records_of(page):
            return self._fail(f"{page}: no record of it has values")
        address = f"#evidence-{name.split('@')[0]}"
        if elsewhere:
            up = "../" * self.env.docname.count("/")
            address = f"{up}{document(self.env, elsewhere)}.html{address}"
        link = nodes.reference("", "", nodes.strong(text, text), refuri=address, internal=True)
        link["classes"].append("ro-quoted")
        link["bound"] = (" ".join(text.split()), f"{page}#{name}")
        return [link], []

    def _fail(self, why: str) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        message = self.inliner.reporter.error(f"a bound number: {why}", line=self.lineno)
        return [self.inliner.problematic(self.rawtext, self.rawtext, message)], [message]


class AnswerFigure(SphinxDirective):
    """The figure of a page's answer, for a light page and for a dark one."""

    required_arguments = 1  # the page

    def run(self) -> list[nodes.Node]:
        """Show it, where this build or an earlier one has drawn it."""
        return self.figure(self.arguments[0])

    def figure(self, page: str) -> list[nodes.Node]:
        """Two images, of which a scheme shows one."""
        texts = list(Path(self.env.srcdir).glob(f"gallery/*/images/{page}_answer.txt"))
        if not texts:
            elsewhere = Path(self.env.docname).name != page
            if left_out(self.config, page):
                self.env.note_reread()
                return []
            if elsewhere or self.config.plot_gallery in (False, "False", "0", 0):
                return []
            raise self.error(f'{page} drew no figure: figure.set_gid("answer")')
        (text,) = texts
        self.env.note_dependency(str(text))
        where = "/" + text.parent.relative_to(self.env.srcdir).as_posix()
        lines = [".. container:: ro-picture", ""]
        for scheme, ending in (("light", ""), ("dark", "_dark")):
            lines += [
                f"   .. image:: {where}/{page}_answer{ending}.svg",
                f"      :alt: {text.read_text('utf-8')}",
                f"      :class: only-{scheme} ro-figure",
                "",
            ]
        return self.parse_text_to_nodes("\n".join(lines))


class Answer(AnswerFigure):
    """The answer of a page, in a box that ends within the first screen."""

    has_content = True
    required_arguments = 1  # the machine that its numbers are of
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Lay out bullets, figure, machine, code and downloads."""
        page = Path(self.env.docname).name
        parsed = self.parse_content_to_nodes()
        code = [n for n in parsed if isinstance(n, nodes.literal_block)]
        words = nodes.container("", *[n for n in parsed if n not in code], classes=["ro-words"])
        bound = [n["bound"] for n in words.findall(nodes.reference) if "bound" in n]
        where = self._where(page, self.arguments[0], bound)
        words += nodes.paragraph("", where, classes=["ro-where"])
        box = nodes.container("", words, classes=["ro-answer"], machine=self.arguments[0])
        box += self.figure(page)
        box += nodes.container("", *code, *self._take(page), classes=["ro-foot"])
        return [box]

    def _where(self, page: str, machine: str, bound: Sequence[tuple[str, str]]) -> str:
        path = RECORDED / page / f"{machine}.json"
        if machine not in evidence.records_of(page):
            raise self.error(f"no record with values of {page} on {machine}")
        self.env.note_dependency(str(path))
        return evidence.where(page, machine, bound, Path(self.env.docname).parent.name)

    def _take(self, page: str) -> list[nodes.Node]:
        document = f"/{self.env.docname}"
        script = Path(self.env.srcdir, f"{self.env.docname}.py").read_text("utf-8")
        own = re.search(r"^# (Your own .+)$", script, re.MULTILINE)
        return self.parse_text_to_nodes(
            ".. container:: ro-take\n\n"
            f"   :download:`Notebook <{document}.ipynb>` :download:`Script <{document}.py>` "
            f":download:`Both (zip) <{document}.zip>` "
            f"`All numbers (CSV) <../../records/{page}/{self.arguments[0]}.zip>`__ "
            + (f"`{own[1]} <#{nodes.make_id(own[1])}>`__" if own else "")
        )


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive and the role."""
    app.add_directive("answer", Answer)
    app.add_directive("answer-figure", AnswerFigure)
    app.add_role("bound", Bound())
    return {"parallel_read_safe": True, "parallel_write_safe": True}
