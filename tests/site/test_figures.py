"""A figure's SVG: made smaller, it draws the same."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
import pytest

from roundoff.page import subplots

from .conftest import ROOT

sys.path.insert(0, str(ROOT / "conf"))
from figures import save_svg, smaller

mpl.use("agg")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@pytest.fixture
def plain(tmp_path: Path) -> str:
    figure, axes = subplots(title="Some − title")
    axes.plot([0.1, 0.2, 0.35], [1.0, 1e4, 3e-3])
    figure.savefig(tmp_path / "plain.svg", format="svg", metadata={"Date": None})
    return (tmp_path / "plain.svg").read_text("utf-8")


def drawn(element: ElementTree.Element) -> Iterator[ElementTree.Element]:
    """What is drawn: all elements but the metadata."""
    if not element.tag.endswith("metadata"):
        yield element
        for child in element:
            yield from drawn(child)


def tokens(text: str) -> str:
    """Letters, signs and numbers, with one space between."""
    return " ".join(re.findall(r"-?\d+(?:\.\d+)?|\S", text))


def styled(root: ElementTree.Element) -> Iterator[dict[str, str]]:
    """The attributes of what is drawn, with the style that its class stands for."""
    classes = dict(re.findall(r"\.(s\d+)\{([^}]*)\}", "".join(root.itertext())))
    for element in drawn(root):
        found = dict(element.attrib)
        if found.get("class") in classes:
            found["style"] = classes[found.pop("class")]
        yield found


def test_a_smaller_svg_has_the_same_elements_a_hundredth_of_a_point_apart(plain: str) -> None:
    made = smaller(plain)
    assert len(made) < 0.7 * len(plain)
    roots = [ElementTree.fromstring(text) for text in (plain, made)]
    before, after = (list(drawn(root)) for root in roots)
    assert [e.tag for e in before] == [e.tag for e in after]
    for old, new in zip(*map(styled, roots), strict=True):
        assert old.keys() == new.keys()
        letter = old.get("transform") == "scale(0.015625)"
        for name, value in old.items():
            if "DejaVuSans" in value:
                assert new[name] == value.replace("DejaVuSans", "D")
                continue
            texts = [tokens(text) for text in (value, new[name])]
            assert len({NUMBER.sub("#", text) for text in texts}) == 1
            numbers = ([float(n) for n in NUMBER.findall(text)] for text in texts)
            for x, y in zip(*numbers, strict=True):
                if letter and name in ("d", "transform") and "d" in old:
                    # In tenths of its units, drawn ten times as large; a space has nothing drawn.
                    assert y == 10 * x if name == "transform" else abs(x / 10 - y) <= 0.5
                else:
                    assert abs(x - y) <= (0.00501 if abs(x) >= 1 else 0), (name, x, y)


def test_both_files_of_a_figure_are_small(tmp_path: Path) -> None:
    figure, axes = subplots()
    axes.plot([0.1, 0.2], [1.0, 3.0])
    paths = tmp_path / "light.svg", tmp_path / "night.svg"
    save_svg(figure, *paths)
    for path in paths:
        text = path.read_text("utf-8")
        assert text == smaller(text)
