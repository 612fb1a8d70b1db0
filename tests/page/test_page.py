"""The site's colours, and figures in them."""

import matplotlib as mpl
import pytest

from roundoff.page import DARK, PALETTE, dark, subplots

mpl.use("agg")


def luminance(colour: str) -> float:
    channels = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
                for c in mpl.colors.to_rgb(colour)]  # fmt: skip
    return 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colour", PALETTE)
@pytest.mark.parametrize("background", ["#ffffff", "#131416"])
def test_a_line_is_seen_on_a_light_and_on_a_dark_page(colour: str, background: str) -> None:
    assert contrast(colour, background) >= 3.0


def test_text_is_read_on_a_light_and_on_a_dark_page() -> None:
    (ink, dark_ink), _, (paper, dark_paper) = DARK.items()
    assert contrast(ink, paper) >= 7
    assert contrast(dark_ink, dark_paper) >= 7


def test_a_figure_turns_dark_and_back() -> None:
    figure, axes = subplots()
    axes.bar([0, 1], [1, 2], edgecolor="#24292f")
    axes.plot([0, 1], [1, 2], color=PALETTE[0])
    axes.set_title("a title")
    figure.canvas.draw()

    def colours() -> list[str]:
        found = []
        for artist in figure.findobj():
            for name in ("get_color", "get_edgecolor", "get_facecolor"):
                if hasattr(artist, name):
                    found += [mpl.colors.to_hex(c) for c in mpl.colors.to_rgba_array(
                        getattr(artist, name)())]  # fmt: skip
        return found

    before = colours()
    assert "#24292f" in before
    with dark(figure):
        during = colours()
        assert "#24292f" not in during
        assert "#d9dee4" in during
        assert PALETTE[0] in during
    assert colours() == before
