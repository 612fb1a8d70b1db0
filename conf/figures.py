"""How a page's figures reach the site: each drawn twice, for a light page and for a dark one."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from roundoff.page import dark

_SVG = {"format": "svg", "transparent": True, "metadata": {"Date": None}}
_RST = """
.. container:: ro-drawing

   .. image:: /{light}
      :alt: {alt}
      :class: only-light ro-figure
      :loading: lazy

   .. image:: /{dark}
      :alt: {alt}
      :class: only-dark ro-figure
      :loading: lazy

"""


def scraper(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Save every open figure as two SVG files, and an opaque PNG for the thumbnail.

    The alternative text is the figure's label, which ``Study.figure`` sets.

    Returns
    -------
    str
        What the page shows, as reStructuredText.

    Raises
    ------
    ValueError
        When a figure has no alternative text: call ``Study.figure`` for each.
    """
    shown = []
    for number in plt.get_fignums():
        figure = plt.figure(number)
        alt = " ".join(str(figure.get_label()).split())
        if not alt:
            raise ValueError("a figure without a text: pass it to study.figure(name, fig, alt=…)")
        path = Path(next(block_vars["image_path_iterator"]))
        light, night = path.with_suffix(".svg"), path.with_name(f"{path.stem}_dark.svg")
        figure.savefig(path, dpi=110, facecolor="white", transparent=False)
        figure.savefig(light, **_SVG)
        with dark(figure):
            figure.savefig(night, **_SVG)
        root = Path(gallery_conf["src_dir"])
        names = {"light": light, "dark": night}
        relative = {k: Path(p).relative_to(root).as_posix() for k, p in names.items()}
        shown.append(_RST.format(alt=alt, **relative))
    plt.close("all")
    return "".join(shown)
