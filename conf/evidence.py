"""Numbers in the prose of a page: each is a value of a record, checked, and links to its evidence.

Ours, as they are checked against our records. ``:bound:`27 <orders>``` in a page whose study has
defined values prints the number and links to the end of the page: there each number has its value
on every machine, with interval, second run, date, commit and CSV. ``<plot_x#orders>`` is a number
of another page, ``<orders@machine>`` that of another machine than the value's own. In place of a
number the word of a comparison may stand, ``:bound:`faster <time>```: its interval says which.

A sentence fails the build, every time, where its number rounds to something else, where its test
is false, where its machine is neither the one under the answer nor named in it, and where it says
faster, slower, ahead or nearer beside a number without a word that an interval gave.
"""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

from roundoff.environment import short_commit, short_name, summary
from roundoff.page.numbers import Number
from roundoff.record import RECORDED, Provenance, Record, read_records

logger = logging.getLogger(__name__)

COMPARES = re.compile(r"\b(faster|slower|ahead|nearer)\b", re.IGNORECASE)
# Where a sentence ends; a bound number is one character, so that a new one may begin with it.
_BOUND = "\ue000"
_END = re.compile(rf"(?<=[.!?;])\s+(?=[A-Z{_BOUND}])")


@functools.cache
def records_of(page: str) -> dict[str, Record]:
    """The records of a page that hold values, by machine, those with a GPU first."""
    found = [record for record in read_records(page, RECORDED) if record.values]
    found.sort(key=lambda record: ("nvidia" in record.machine, record.machine), reverse=True)
    return {record.machine: record for record in found}


def newest(record: Record) -> Provenance:
    """The last of the runs that a record is made of."""
    return max(record.provenance.values(), key=lambda run: run.date)


def split(target: str, page: str) -> tuple[str, str, str]:
    """Page, name and machine of a target; without one, the machine is empty."""
    name, _, machine = target.partition("@")
    elsewhere, _, name = name.rpartition("#")
    return elsewhere or page, name, machine


def wrong(text: str, target: str, page: str, where: str, sentence: str) -> str:
    """Why a bound number or word must not stand in its sentence; empty where it may.

    Parameters
    ----------
    text, target : str
        ``27`` and ``orders`` of ``:bound:`27 <orders>```.
    page : str
        Where it stands.
    where : str
        The machine under the answer of the page; empty where there is none.
    sentence : str
        What is printed around it.
    """
    source, name, machine = split(target, page)
    records = records_of(source)
    machine = machine or next(
        (r.values[name]["on"] for r in records.values() if name in r.values), ""
    )
    said = f"value {name} of {source} on {machine}"
    if machine not in records or name not in records[machine].values:
        return f"{said}: no record has it"
    entry = records[machine].values[name]
    if any(letter.isdigit() for letter in text):
        holds, measured = (
            Number(text).holds(entry["value"]),
            f"{entry['value']:.6g} was measured",
        )
    else:
        holds = text == entry.get("word")
        measured = f"its interval says {entry.get('word', 'nothing')}"
    if not holds:
        return f"{said}: {text} is printed, {measured}"
    if not entry["test"]:
        return f"{said}: its test is false"
    called = short_name(_run(records[machine], entry).environment)
    if machine != where and called not in sentence:
        return (
            f"{said}: the sentence does not name {called}, and the answer is of {where or 'none'}"
        )
    return ""


def where(page: str, machine: str, targets: Iterable[str]) -> str:
    """What the numbers of an answer were measured on, when, and with which versions.

    A number of another machine names that machine in its sentence.
    """
    record = records_of(page)[machine]
    parts = []
    for target in targets:
        _, name, said = split(target, page)
        entry = record.values.get(name)
        if entry and (said or entry["on"]) == machine:
            part = summary(_run(record, entry).environment, entry.get("part"))
            parts.append(part.partition("; ")[0])
    run = newest(record)
    versions = summary(run.environment).partition("; ")[2].partition(", ")[2]  # Python's aside
    return f"Measured on {', '.join(dict.fromkeys(parts))}; {versions}, {run.date[:10]}."


def _run(record: Record, entry: Mapping[str, Any]) -> Provenance:
    return record.provenance[entry["of"]]


def sentences(
    text: str, bound: Sequence[tuple[str, str]]
) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """Each sentence that has bound numbers: with marks in their place, as printed, and these."""
    rest = iter(bound)
    for sentence in _END.split(" ".join(text.split())):
        own = [next(rest) for _ in range(sentence.count(_BOUND))]
        printed = sentence
        for number, _ in own:
            printed = printed.replace(_BOUND, number, 1)
        if own:
            yield sentence, printed, own


def problems(tree: nodes.document, page: str) -> Iterator[tuple[nodes.Element, str]]:
    """Every sentence of a page that its numbers do not carry: where it stands, and why."""
    where = next((n["machine"] for n in tree.findall(nodes.container) if "machine" in n), "")
    for block in tree.findall(nodes.TextElement):
        bound = [n for n in block.children if isinstance(n, nodes.reference) and "bound" in n]
        text = "".join(_BOUND if child in bound else child.astext() for child in block.children)
        for sentence, printed, own in sentences(text, [link["bound"] for link in bound]):
            found = [wrong(*one, page, where, printed) for one in own]
            bare = COMPARES.search(sentence)
            if bare and all(any(c.isdigit() for c in number) for number, _ in own):
                names = ", ".join(target for _, target in own)
                found.append(
                    f"{bare[0]} stands beside {names} without an interval: write it as "
                    f":bound:`{bare[0]} <value>`, with a value that compares"
                )
            yield from ((block, f"{page}: {why}; in: {printed}") for why in found if why)


def check(app: Sphinx, tree: nodes.document) -> None:
    """Warn of every sentence of a page that its numbers do not carry; add the evidence."""
    page = Path(app.env.docname).name
    for block, why in problems(tree, page):
        logger.warning("%s", why, location=block, type="bound")
    shown: dict[str, list[str]] = {}
    for link in (n for n in tree.findall(nodes.reference) if "bound" in n):
        text, target = link["bound"]
        source, name, _ = split(target, page)
        if source == page:
            shown.setdefault(name, []).append(text)
    if shown:
        top = next(iter(tree.findall(nodes.section)), tree)
        top += nodes.raw("", evidence(page, shown), format="html")


def answer(docstring: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Each sentence of an answer that has bound numbers, with these and their targets."""
    _, _, box = docstring.partition("\n.. answer::")
    words = " ".join(re.split(r"\n\S|\.\. code-block::", box)[0].split("\n", 1)[-1].split())
    role = re.compile(r":bound:`([^`<]+?)\s*<([^`>]+)>`")
    plain = role.sub(_BOUND, re.sub(r"\*\*|``", "", words))
    for _, printed, own in sentences(plain, role.findall(words)):
        yield printed, own


def said(record: Record, page: str, text: str, target: str) -> str:
    """A value as a record has it, printed like *text*, and whether its sentence is true there."""
    entry = record.values.get(split(target, page)[1])
    if entry is None:
        return ""
    return f"{Number(text).shown(entry['value'])} {'✓' if entry['test'] else '✗'}"


def evidence(page: str, shown: Mapping[str, list[str]]) -> str:
    """Every number of a page with what each machine says of it, folded."""
    records, items = records_of(page), []
    for name, texts in shown.items():
        entries = {m: r.values[name] for m, r in records.items() if name in r.values}
        if not entries:
            continue
        own = next(iter(entries.values()))
        number = next((t for t in texts if any(c.isdigit() for c in t)), "0.00")
        lines = "".join(
            f"<dd>{_line(page, records[machine], entry, number, entries.get(own['on'], own))}</dd>"
            for machine, entry in entries.items()
        )
        said = html.escape(", ".join(dict.fromkeys(texts)))
        items.append(
            f'<dt id="evidence-{html.escape(name)}"><b>{said}</b> {html.escape(own["about"])}</dt>'
            f"{lines}"
        )
    study = f"{page.removeprefix('plot_')}.py"
    about = (
        f'<p>Measured and defined by <a href="../../records/{page}/{study}"><code>studies/{study}'
        "</code></a>. A mark says whether what is claimed is true on that machine, too; its number "
        "may differ.</p>"
    )
    return (
        '<details class="ro-evidence" id="evidence"><summary>Evidence: '
        f"{len(items)} numbers, on each machine</summary>{about}<dl>{''.join(items)}</dl></details>"
    )


def _line(
    page: str, record: Record, entry: Mapping[str, Any], text: str, own: Mapping[str, Any]
) -> str:
    run, digits = _run(record, entry), re.sub(r"\D", "", text)
    # Three digits: a reader of the evidence compares an interval with 1.
    precise = text if len(digits.lstrip("0")) > 2 else "1.00" + "%" * text.endswith("%")
    number = Number(precise)

    def shown(found: Mapping[str, float]) -> str:
        ends = [number.shown(found[end]) for end in ("low", "high") if end in found]
        return number.shown(found["value"]) + f" [{', '.join(ends)}]" * bool(ends)

    true = entry["test"] and entry.get("word") == own.get("word")
    parts = [
        f"{'✓' if true else '✗'} {short_name(run.environment, entry.get('part'))}: {shown(entry)}",
        f"second run {shown(entry['second'])}" if "second" in entry else "",
        entry.get("word", ""),
        f"{run.date[:10]}, commit {short_commit(run.commit)}",
    ]
    words = html.escape("; ".join(filter(None, parts)), quote=False)
    csv = f"../../records/{page}/{record.machine}/{entry['of']}.csv"
    return f'{words} <a href="{csv}">CSV</a>'


def setup(app: Sphinx) -> dict[str, bool]:
    """Check a page when it has been read."""
    app.connect("doctree-read", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
