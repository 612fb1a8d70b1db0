"""The form of a page: its answer box, and the numbers bound to values of a record.

Ours, as it checks what a page says against what was measured. ``.. answer:: nvidia-h200`` makes the
box: its words, the page's answer figure, the machine that the numbers are of, the code, and what
can be taken along. ``:bound:`0.0186 <tf32>``` prints a number, which ``evidence.py`` checks with
its sentence (``<page#tf32>``: of another page; ``<tf32@machine>``: as another machine has it).
"""

from __future__ import annotations

import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import ReferenceRole, SphinxDirective

import evidence


def document(env: BuildEnvironment, page: str) -> str:
    """Name of the document of a page of the gallery."""
    return next(n for n in env.found_docs if re.fullmatch(f"gallery/\\w+/{page}", n))


class Bound(ReferenceRole):
    """A number of a record, with a link to its evidence; it is checked with its sentence."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Make the link."""
        here = self.env.docname
        page, name, _ = evidence.split(self.target, Path(here).name)
        address = f"#evidence-{name}"
        if page != Path(here).name:
            address = "../" * here.count("/") + f"{document(self.env, page)}.html{address}"
        text = " ".join(self.title.split())
        link = nodes.reference("", "", nodes.strong(text, text), refuri=address, internal=True)
        link["classes"].append("ro-quoted")
        link["bound"] = (text, self.target)
        return [link], []


class AnswerFigure(SphinxDirective):
    """The figure of a page's answer, for a light page and for a dark one."""

    required_arguments = 1  # the page

    def run(self) -> list[nodes.Node]:
        """Show it, where this build or an earlier one has drawn it."""
        return self.figure(self.arguments[0])

    def figure(self, page: str) -> list[nodes.Node]:
        """Its two images."""
        texts = list(Path(self.env.srcdir).glob(f"gallery/*/images/{page}_answer.txt"))
        if not texts:  # as where `make page` builds another page alone
            self.env.note_reread()
            return []
        self.env.note_dependency(str(texts[0]))
        return self.parse_text_to_nodes(texts[0].read_text("utf-8"))


class Answer(AnswerFigure):
    """The answer of a page, in a box that ends within the first screen."""

    has_content = True
    required_arguments = 1  # the machine that its numbers are of

    def run(self) -> list[nodes.Node]:
        """Lay out bullets, figure, machine, code and downloads."""
        page, machine = Path(self.env.docname).name, self.arguments[0]
        parsed = self.parse_content_to_nodes()
        code = [n for n in parsed if isinstance(n, nodes.literal_block)]
        words = nodes.container("", *[n for n in parsed if n not in code], classes=["ro-words"])
        targets = [n["bound"][1] for n in words.findall(nodes.reference) if "bound" in n]
        where = evidence.where(page, machine, targets)
        words += nodes.paragraph("", where, classes=["ro-where"])
        box = nodes.container("", words, classes=["ro-answer"], machine=machine)
        box += self.figure(page)
        box += nodes.container("", *code, *self._take(page), classes=["ro-foot"])
        return [box]

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
