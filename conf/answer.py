"""The form of a page: its answer box, the numbers bound to claims, and the machines' tabs.

Ours, as it checks what a page says against what the page measured. ``.. answer:: nvidia-h200``
makes the box: its bullets, the page's answer figure, the machine that the numbers are of, the code,
and what can be taken along. ``:bound:`0.0186 <tf32>``` prints a number that the claim of that name
gives (``<tf32/2>``: its second number; ``<page#tf32>``: of another page; ``<tf32@machine>``: as
another machine has it); the build fails where it is another one. A build of one page judges that
page's numbers alone: of the others nothing has run. Of a page whose study defines values it is one
of these (``evidence.py``).
"""

from __future__ import annotations

import json
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
from roundoff.environment import summary
from roundoff.page.study import FIRST
from roundoff.record import RECORDED, read_record

CLAIMS = "claims.json"


def claims_of(srcdir: Path, page: str) -> list[dict[str, Any]]:
    """The claims of a page, as its last run in this build left them."""
    for path in srcdir.glob(f"gallery/*/tables/{page}/{CLAIMS}"):
        return json.loads(path.read_text("utf-8"))
    return []


def document(env: BuildEnvironment, page: str) -> str | None:
    """Name of the document of a page of the gallery; None where this site has no such page."""
    return next((n for n in env.found_docs if re.fullmatch(f"gallery/\\w+/{page}", n)), None)


def left_out(config: Any, page: str) -> bool:
    """Whether ``make page`` leaves this page out: nothing that it measures is there to look at."""
    pattern = config.sphinx_gallery_conf.get("filename_pattern")
    return pattern is not None and not re.search(pattern, f"/{page}.py")


def wrong(text: str, target: str, claims: list[dict[str, Any]]) -> str:
    """Why a printed number is not the one of the claim; empty where it is.

    Examples
    --------
    >>> claim = {"name": "gap", "on": "nvidia-h200", "numbers": [{"kind": "", "text": "0.0186"}],
    ...          "machines": {"nvidia-h200": {"values": [0.01861], "state": "true"}}}
    >>> wrong("0.019", "gap", [claim]), wrong("0.018", "gap", [claim])
    ('', 'claim gap on nvidia-h200: 0.018 is printed and 0.01861 measured')
    >>> claim["machines"]["intel-xeon"] = {"values": [0.5], "state": "value"}
    >>> wrong("0.5", "gap@intel-xeon", [claim]), wrong("0.0186", "gap@intel-xeon", [claim])
    ('', 'claim gap on intel-xeon: 0.0186 is printed and 0.5 measured')
    """
    target, _, machine = target.partition("@")
    name, _, place = target.partition("/")
    claim = next((c for c in claims if c["name"] == name), None)
    if claim is None:
        return f"no claim {name}: " + (", ".join(c["name"] for c in claims) or "the page has none")
    machine = machine or claim["on"]
    values = claim["machines"].get(machine or "", {}).get("values", [])
    index = int(place or 1) - 1 if (place or "1").isdigit() else -1
    if not 0 <= index < len(values):
        return f"claim {name} on {machine} has {len(values)} values, no number {place or 1}"
    try:
        held = evidence.number_of(text).holds(values[index])
    except ValueError:
        return f"claim {name}: {text!r} is no number"
    if held:
        return ""
    return f"claim {name} on {machine}: {text} is printed and {values[index]:.6g} measured"


class Bound(SphinxRole):
    """A number of a claim, checked, with a link to the sentence that states it."""

    inliner: Inliner

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Check the number against ``claims.json``."""
        match = re.fullmatch(r"(?s)(.+?)\s*<(?:(\w+)#)?([^>]+)>", self.text)
        if match is None:
            return self._fail(f"{self.text!r}: expected a number and <claim>")
        text, elsewhere, name = match.groups()
        page = elsewhere or Path(self.env.docname).name
        if evidence.records_of(page):
            target = f"{page}#{name}"  # checked with its sentence
            return [self._link(text, elsewhere, f"evidence-{name.split('@')[0]}", target)], []
        srcdir = Path(self.env.srcdir)
        for path in srcdir.glob(f"gallery/*/tables/{page}/{CLAIMS}"):
            self.env.note_dependency(str(path))
        claims = claims_of(srcdir, page)
        if not claims and left_out(self.env.config, page):
            self.env.note_reread()  # the next build judges it
        elif why := wrong(text, name, claims):
            return self._fail(f"{page}: {why}")
        return [self._link(text, elsewhere, f"claim-{re.split('[/@]', name)[0]}")], []

    def _link(self, text: str, page: str | None, place: str, target: str = "") -> nodes.reference:
        address = f"#{place}"
        if page:
            up = "../" * self.env.docname.count("/")
            address = f"{up}{document(self.env, page)}.html{address}"
        link = nodes.reference("", "", nodes.strong(text, text), refuri=address, internal=True)
        link["classes"].append("ro-quoted")
        if target:
            link["bound"] = (" ".join(text.split()), target)
        return link

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
            raise self.error(f"{page} drew no figure with answer=True")
        (text,) = texts
        self.env.note_dependency(str(text))
        where = "/" + text.parent.relative_to(self.env.srcdir).as_posix()
        lines = [".. container:: ro-picture", ""]
        for scheme, ending in (("light", ""), ("dark", "_dark")):
            lines += [f"   .. image:: {where}/{page}_answer{ending}.svg",
                      f"      :alt: {text.read_text('utf-8')}",
                      f"      :class: only-{scheme} ro-figure", ""]  # fmt: skip
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
        if not path.exists():
            raise self.error(f"no record of {page} on {machine}")
        self.env.note_dependency(str(path))
        if bound:
            return evidence.where(page, machine, bound)
        run = max(read_record(path).provenance.values(), key=lambda run: run.date)
        versions = run.environment["versions"]
        kernels = "/kernels/" in self.env.docname
        packages = ("torch", *(("triton",) if kernels else ("onnxruntime-gpu", "onnxruntime")))
        named = [f"{n} {v.partition('+')[0]}" for n in packages if (v := versions.get(n))]
        name = summary(run.environment).partition(";")[0]
        return f"Measured on {name}, {', '.join(named)}, {run.date[:10]}."

    def _take(self, page: str) -> list[nodes.Node]:
        numbers = self.arguments[0] if evidence.records_of(page) else "this-build"
        document = f"/{self.env.docname}"
        return self.parse_text_to_nodes(
            ".. container:: ro-take\n\n"
            f"   :download:`Notebook <{document}.ipynb>` :download:`Script <{document}.py>` "
            f":download:`Both (zip) <{document}.zip>` "
            f"`All numbers (CSV) <../../records/{page}/{numbers}.zip>`__ "
            "`Run it on your own <#ro-own>`__"
        )


def finish_tree(app: Sphinx, tree: nodes.document) -> None:
    """Lead to the reader's own cell, and drop Sphinx-Gallery's downloads at the foot."""
    boxes = [n for n in tree.findall(nodes.container) if "ro-answer" in n["classes"]]
    if not boxes:
        return
    for node in list(tree.findall(nodes.Element)):
        classes = " ".join(node.get("classes", ()))
        if "sphx-glr-footer" in classes or "sphx-glr-download-link-note" in classes:
            node.parent.remove(node)
    own = next((s for s in tree.findall(nodes.section)
                if s[0].astext().lower().startswith("your own")), None)  # fmt: skip
    for link in [n for n in boxes[0].findall(nodes.reference) if n.get("refuri") == "#ro-own"]:
        if own is None:
            link.parent.remove(link)
        else:
            link["refuri"] = f"#{own['ids'][0]}"
            link.children = [nodes.Text(own[0].astext())]


_LABEL = re.compile(r'<label for="ro-m-([\w-]+)">([^<]+)</label>')
_INPUT = '<input type="radio" name="ro-machine" id="ro-m-{machine}" aria-label="{name}"{checked}>'
# The last rule: of a table that the machine has not, the first pane.
_RULES = (
    'body:has(#ro-m-{m}:checked) .ro-tabs:has([data-m~="{m}"])>.ro-pane:not([data-m~="{m}"])'
    "{{display:none}}"
    'body:has(#ro-m-{m}:checked) label[for="ro-m-{m}"]'
    "{{color:inherit;font-weight:600;border-color:currentColor}}"
    'body:has(#ro-m-{m}:focus-visible) label[for="ro-m-{m}"]{{outline:2px solid}}'
    'body:has(#ro-m-{m}:checked) .ro-tabs:not(:has([data-m~="{m}"]))>.ro-pane~.ro-pane'
    "{{display:none}}"
)


def machine_buttons(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Put the page's one set of radio buttons below the answer: every tab's label belongs to it.

    Without ``:has`` and in print the rules do not apply, and all machines are shown.
    """
    body = context.get("body") or ""
    names: dict[str, str] = {}
    for machine, name in _LABEL.findall(body):
        names[machine] = min(names.get(machine, name), name, key=len)  # not "H200's host"
    if not names:
        return
    names = {m: names[m] for m in (*[m for m in FIRST if m in names], *names)}
    first = next(iter(names))
    inputs = "".join(
        _INPUT.format(machine=m, name=name, checked=" checked" if m == first else "")
        for m, name in names.items()
    )
    labels = "".join(f'<label for="ro-m-{m}">{name}</label>' for m, name in names.items())
    rules = "".join(_RULES.format(m=m) for m in names)
    # Before the first section after the title: below the answer.
    at = body.find("<section ", body.find("<section ") + 1)
    context["body"] = (
        f"{body[:at]}<style>@supports selector(:has(a)){{@media screen{{{rules}}}}}</style>"
        f'<fieldset class="ro-machines"><legend>Tables from</legend>{inputs}'
        f'<div class="ro-bar">{labels}</div></fieldset>{body[at:]}'
    )


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive and the role."""
    app.add_directive("answer", Answer)
    app.add_directive("answer-figure", AnswerFigure)
    app.add_role("bound", Bound())
    app.connect("doctree-read", finish_tree)
    app.connect("html-page-context", machine_buttons, priority=800)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
