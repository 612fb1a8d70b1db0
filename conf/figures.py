"""What the build takes from a page that runs: its figures, each for a light page and a dark one."""

import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from roundoff.page import DARK

_SVG = {"format": "svg", "transparent": True, "metadata": {"Date": None}}
_RST = """
.. container:: ro-drawing

   .. image:: /{light}
      :alt: {alt}
      :class: only-light {classes}
      :loading: lazy

   .. image:: /{dark}
      :alt: {alt}
      :class: only-dark {classes}
      :loading: lazy

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
        light, night = path.with_suffix(".svg"), path.with_name(f"{path.stem}_dark.svg")
        page = Path(block_vars["target_file"]).stem
        if is_answer := figure.get_gid() == "answer":
            # The box finds it by name, and the first picture is the thumbnail.
            light = path.with_name(f"{page}_answer.svg")
            night = path.with_name(f"{page}_answer_dark.svg")
            light.with_suffix(".txt").write_text(alt, "utf-8")
            path.touch()  # Sphinx-Gallery looks for a file of each number
            path = path.with_name(re.sub(r"_\d+\.png$", "_001.png", path.name))
        figure.savefig(path, dpi=110, facecolor="white", transparent=False)
        save_svg(figure, light, night)
        if is_answer:
            continue
        root = Path(gallery_conf["src_dir"])
        names = {"light": light, "dark": night}
        relative = {k: Path(p).relative_to(root).as_posix() for k, p in names.items()}
        shown.append(_RST.format(alt=alt, classes=classes(figure), **relative))
    plt.close("all")
    return "".join(shown)


#: Inches up to which the text of a figure can be read where the figure is as wide as a phone.
_NARROW = 5.5


def classes(figure: Figure) -> str:
    """The style classes of a figure: on a phone a narrow one shrinks, and a wide one scrolls."""
    return "ro-figure ro-narrow" if figure.get_size_inches()[0] <= _NARROW else "ro-figure"


def save_svg(figure: Figure, light: Path, night: Path) -> None:
    """Draw a figure for a light page and, in the colours that turn, for a dark one."""
    figure.savefig(light, **_SVG)
    markup = light.read_text("utf-8")
    for colour, turned in DARK.items():
        markup = markup.replace(colour, turned)
    night.write_text(markup, "utf-8")
