"""A number as it is printed, and rows that are chosen by data."""

import math

import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from roundoff.page import choose
from roundoff.page.numbers import Number

ROWS = pd.DataFrame(
    {
        "tf32": ["on", "on", "off", None],
        "N": [64, 128, 64, 128],
        "ratio": [121.6, 98.4, 1.0, 0.0],
        "finite": [True, True, True, False],
    }
)


# --- a number, as it is printed


@given(st.floats(-1e6, 1e6), st.integers(0, 8))
def test_a_correctly_printed_number_holds_and_its_neighbours_do_not(
    value: float, digits: int
) -> None:
    scaled = value * 10**digits
    # Halfway, as far as a float64 can tell, two texts are right.
    assume(abs(abs(scaled % 1) - 0.5) > max(1e-6, 2 * math.ulp(scaled)))
    text = f"{value:.{digits}f}"
    assert Number(text).holds(value)
    assert Number(f"{value:,.{digits}f}".replace("-", "−")).holds(value)
    for step in (-1, 1):
        changed = f"{float(text) + step * 10.0**-digits:.{digits}f}"
        assert not Number(changed).holds(value), changed


@pytest.mark.parametrize(
    ("text", "value", "holds"),
    [
        ("0.0186", 0.01863, True),
        ("2.4e−5", 2.44e-5, True),
        ("1,536", 1536.4, True),
        ("−0.50", -0.503, True),
        ("18.3 %", 0.18251, True),
        ("122", 121.4, False),
        ("18.3%", 18.3, False),
        ("122", math.nan, False),
    ],
)
def test_a_number_is_read_as_it_is_printed(text: str, value: float, holds: bool) -> None:
    assert Number(text).holds(value) == holds


def test_about_allows_a_fifth() -> None:
    for number in (20.0, -0.3):
        about = Number(f"about {number!r}")
        assert all(about.holds(factor * number) for factor in (0.8001, 1, 1.1999))
        assert not any(about.holds(factor * number) for factor in (0.7999, 1.2001, -1))


@pytest.mark.parametrize(
    ("text", "value", "shown"),
    [
        ("122", 98.44, "98.4"),
        ("1,536", 1542.3, "1,542"),
        ("20", 1234.0, "1,200"),
        ("2.4e-5", 3.16e-5, "0.000032"),
        ("2.4e-9", 3.16e-9, "3.2e−09"),
        ("18.3%", 0.20144, "20.1%"),
        ("faster", 1.234, "1"),
    ],
)
def test_another_machine_shows_as_many_digits(text: str, value: float, shown: str) -> None:
    assert Number(text).shown(value) == shown


# --- which rows


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ({}, [0, 1, 2, 3]),
        ({"tf32": "on"}, [0, 1]),
        ({"tf32": ["on", "off"]}, [0, 1, 2]),
        ({"ratio": lambda s: s > 50, "finite": True}, [0, 1]),
        ({"tf32": "on", "N": 128}, [1]),
        ({"N": (64,)}, [0, 2]),
        ({"tf32": "maybe"}, []),
    ],
)
def test_rows_are_chosen_by_data(where, rows: list[int]) -> None:
    assert choose(ROWS, where).index.tolist() == rows


def test_a_column_that_is_not_there_cannot_choose() -> None:
    with pytest.raises(KeyError, match="flush"):
        choose(ROWS, {"flush": "on"})
