"""The site's colours."""

import matplotlib as mpl
import pytest

from roundoff.page import DARK, PALETTE


def luminance(colour: str) -> float:
    channels = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in mpl.colors.to_rgb(colour)
    ]
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
