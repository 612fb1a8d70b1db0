"""What the build takes from a page that runs: its figures, each for a light page and a dark one."""

import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from roundoff.page import DARK

_SVG = {"format": "svg", "transparent": True, "metadata": {"Date": None}}
#: Inches up to which the text of a figure can be read where the figure is as wide as a phone.
_NARROW = 5.5
#: Two images, of which a scheme shows one.
RST = """
.. container:: {box}

   .. image:: /{drawn}.svg
      :alt: {alt}
      :class: only-light ro-figure {width}

   .. image:: /{drawn}_dark.svg
      :alt: {alt}
      :class: only-dark ro-figure {width}

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
            drawn.with_suffix(".txt").write_text(alt, "utf-8")
            path.touch()  # Sphinx-Gallery looks for a file of each number
            path = path.with_name(re.sub(r"_\d+\.png$", "_001.png", path.name))
        figure.savefig(path, dpi=110, facecolor="white", transparent=False)
        save_svg(figure, drawn)
        if is_answer:
            continue
        # On a phone a narrow figure shrinks, and a wide one scrolls.
        width = "ro-narrow" if figure.get_size_inches()[0] <= _NARROW else ""
        relative = drawn.relative_to(gallery_conf["src_dir"]).as_posix()
        shown.append(RST.format(box="ro-drawing", alt=alt, width=width, drawn=relative))
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
