"""What the build takes from a page that runs: its figures, each for a light page and a dark one."""

import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from roundoff.page import DARK

_SVG = {"format": "svg", "transparent": True, "metadata": {"Date": None}}
#: Points up to which the text of a figure can be read where the figure is as wide as a phone.
_NARROW = 72 * 5.5
#: Two images, of which a scheme shows one; of a known size, so that a page keeps its place.
RST = """
.. container:: {box}

   .. image:: /{drawn}.svg
      :alt: {alt}
      :width: {width}
      :height: {height}
      :class: only-light ro-figure {narrow}

   .. image:: /{drawn}_dark.svg
      :alt: {alt}
      :width: {width}
      :height: {height}
      :class: only-dark ro-figure {narrow}

"""


def scraper(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Save every open figure as two SVG files, and an opaque PNG for the thumbnail.

    The alternative text is the figure's label: ``figure.set_label("…")``.

    Returns
    -------
    str
        What the page shows, as reStructuredText.

    Raises
    ------
    ValueError
        When a figure has no alternative text.
    """
    shown = []
    for number in plt.get_fignums():
        figure = plt.figure(number)
        alt = " ".join(str(figure.get_label()).split())
        if not alt:
            raise ValueError('a figure without a text: figure.set_label("what it shows")')
        path = Path(next(block_vars["image_path_iterator"]))
        drawn = path.with_suffix("")
        if is_answer := figure.get_gid() == "answer":
            # The box finds it by name, and the first picture is the thumbnail.
            drawn = path.with_name(f"{Path(block_vars['target_file']).stem}_answer")
            path.touch()  # Sphinx-Gallery looks for a file of each number
            path = path.with_name(re.sub(r"_\d+\.png$", "_001.png", path.name))
        figure.savefig(path, dpi=110, facecolor="white", transparent=False)
        save_svg(figure, drawn)
        width, height = (round(72 * inches) for inches in figure.get_size_inches())
        images = RST.format(
            box="ro-picture" if is_answer else "ro-drawing",
            alt=alt,
            width=width,
            height=height,
            # On a phone a narrow figure shrinks, and a wide one scrolls.
            narrow="ro-narrow" if width <= _NARROW and not is_answer else "",
            drawn=drawn.relative_to(gallery_conf["src_dir"]).as_posix(),
        )
        if is_answer:
            drawn.with_suffix(".txt").write_text(images, "utf-8")
        else:
            shown.append(images)
    plt.close("all")
    return "".join(shown)


def save_svg(figure: Figure, drawn: Path) -> None:
    """Draw a figure for a light page and, in the colours that turn, for a dark one."""
    light = drawn.with_suffix(".svg")
    figure.savefig(light, **_SVG)
    markup = light.read_text("utf-8")
    for colour, turned in DARK.items():
        markup = markup.replace(colour, turned)
    drawn.with_name(f"{drawn.name}_dark.svg").write_text(markup, "utf-8")
