"""What a claim means: which rows, which number, which verdict, and what is an error."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from roundoff.page import Claim, ClaimError
from roundoff.page.claims import Number, choose, prints

H200, H100 = "nvidia-h200", "nvidia-h100-80gb-hbm3"
ROWS = pd.DataFrame({
    "tf32": ["on", "on", "off", None], "N": [64, 128, 64, 128], "ratio": [121.6, 98.4, 1.0, 0.0],
    "finite": [True, True, True, False],
})  # fmt: skip


def claim(sentence: str = "TF32 moves Z.", **options) -> Claim:
    options = {"of": "t"} | options
    if "value" in options:
        options = {"on": H200} | options
    return Claim("plot_x", "c", sentence, **options)


def judged(made: Claim, machine: str = H200, rows: pd.DataFrame = ROWS, **options):
    return made.judge({"t": rows}, machine, **options)


# --- a number, as it is printed


def one_more(text: str, step: int) -> str:
    """*text*, its last digit changed by *step*, carried where needed."""
    mantissa, e, exponent = text.partition("e")
    decimals = len(mantissa.partition(".")[2])
    digits = int(mantissa.replace(".", "")) + step
    return f"{digits / 10**decimals:.{decimals}f}{e}{exponent}"


@given(st.floats(-1e6, 1e6), st.integers(0, 8))
def test_a_correctly_printed_number_holds_and_its_neighbours_do_not(
    value: float, digits: int
) -> None:
    scaled = value * 10**digits
    # Halfway, as far as a float64 can tell, two texts are right.
    assume(abs(abs(scaled % 1) - 0.5) > max(1e-6, 2 * math.ulp(scaled)))
    text = f"{value:.{digits}f}"
    assert prints(text, value)
    assert prints(f"{value:,.{digits}f}".replace("-", "−"), value)
    for step in (-1, 1):
        changed = f"{float(text) + step * 10.0**-digits:.{digits}f}"
        assert not prints(changed, value), changed


@given(st.floats(1e-12, 1e12), st.integers(0, 6))
def test_the_same_with_an_exponent(value: float, digits: int) -> None:
    text = f"{value:.{digits}e}"
    exponent = int(text.partition("e")[2])
    assume(abs(abs(value * 10.0 ** (digits - exponent) % 1) - 0.5) > 1e-6)
    assert prints(text, value)
    assert not prints(one_more(text, 1), value)
    assert not prints(one_more(text, -1), value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("122", 121.6), ("0.0186", 0.01863), ("2.4e-5", 2.44e-5), ("2.4e−5", 2.44e-5),
        ("1,536", 1536.4), ("−0.50", -0.503), ("-3", -3.2), ("18.3%", 0.18349), ("18.3 %", 0.18251),
        ("100%", 0.9951), ("0", 0.4), ("0", 0.0), ("1.20", 1.2), ("1,000,000", 1_000_000.4),
    ],
)  # fmt: skip
def test_a_number_is_read_as_it_is_printed(text: str, value: float) -> None:
    assert Number("", text).holds(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("122", 121.4), ("2.4e-5", 2.51e-5), ("1,536", 1535.4), ("0.50", -0.503), ("18.3%", 18.3),
        ("18.3%", 0.1826 + 0.001), ("1.20", 1.21), ("122", math.inf), ("122", math.nan),
    ],
)  # fmt: skip
def test_another_number_does_not_hold(text: str, value: float) -> None:
    assert not Number("", text).holds(value)


@given(st.floats(0.01, 1e5), st.booleans())
def test_about_allows_a_fifth(number: float, negative: bool) -> None:
    number = -number if negative else number
    bound = Number("about", repr(number))
    printed = abs(number)
    for factor in (0.8001, 1.0, 1.1999):
        assert bound.holds(math.copysign(factor * printed, number))
    for factor in (0.7999, 1.2001, -1.0):
        assert not bound.holds(math.copysign(printed, number) * factor)


@pytest.mark.parametrize(
    ("text", "value", "shown"),
    [
        ("122", 98.44, "98.4"), ("20", 3.14159, "3.1"), ("0.0186", 0.020449, "0.0204"),
        ("1,536", 1542.3, "1,542"), ("20", 1234.0, "1,200"), ("2.4e-5", 3.16e-5, "0.000032"),
        ("2.4e-9", 3.16e-9, "3.2e−09"), ("−0.5", -0.23, "−0.2"), ("18.3%", 0.20044, "20%"),
        ("18.3%", 0.20144, "20.1%"), ("0", 3.0, "3"), ("3.1", 0.0, "0"),
    ],
)  # fmt: skip
def test_another_machine_shows_as_many_digits(text: str, value: float, shown: str) -> None:
    assert Number("", text).shown(value) == shown


# --- which value a number speaks of


@pytest.mark.parametrize(
    ("sentence", "worst"),
    [("At least {1.0} times.", 1.0), ("It is up to {122} times.", 121.6),
     ("It is at most {122} times.", 121.6), ("Up to {122}.", 121.6), ("at least {1.0}.", 1.0)],
)  # fmt: skip
def test_at_least_and_up_to_speak_of_the_worst_row(sentence: str, worst: float) -> None:
    made = claim(sentence, where={"ratio": lambda s: s > 0}, value=lambda t: t["ratio"])
    outcome = judged(made)
    assert (outcome.state, outcome.values, outcome.rows) == ("true", [worst], 3)


@pytest.mark.parametrize("sentence", ["TF32 moves Z {122} times.", "It moves about {100} times.",
                                      "An atlas {122} thick."])  # fmt: skip
def test_several_values_of_one_number_are_an_error(sentence: str) -> None:
    made = claim(sentence, where={"tf32": "on"}, value=lambda t: t["ratio"])
    with pytest.raises(
        ClaimError, match=r"plot_x: claim c on nvidia-h200.*several values: got 122, 98.4"
    ):
        judged(made)


def test_several_equal_values_are_one() -> None:
    made = claim("It is {1.0}.", value=lambda t: t["ratio"] * 0 + 1)
    assert judged(made).state == "true"


def test_numbers_are_bound_in_their_order() -> None:
    made = claim("From {1.0} to {122}.", where={"N": [64]}, on=H200,
                 value=lambda t: (t["ratio"].min(), t["ratio"].max()))  # fmt: skip
    assert judged(made).values == [1.0, 121.6]
    assert [n.text for n in made.numbers] == ["1.0", "122"]
    assert made.plain == "From 1.0 to 122."
    turned = claim("From {122} to {1.0}.", where={"N": [64]}, value=made.value)
    outcome = judged(turned)
    assert outcome.state == "false"
    assert outcome.detail == "122 is printed and 1 measured; 1.0 is printed and 121.6 measured"


# --- which rows


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ({}, [0, 1, 2, 3]), ({"tf32": "on"}, [0, 1]), ({"tf32": ["on", "off"]}, [0, 1, 2]),
        ({"tf32": None}, [3]), ({"ratio": lambda s: s > 50}, [0, 1]), ({"finite": False}, [3]),
        ({"tf32": "on", "N": 128}, [1]), ({"N": (64,)}, [0, 2]), ({"tf32": "maybe"}, []),
    ],
)  # fmt: skip
def test_rows_are_chosen_by_data(where, rows: list[int]) -> None:
    assert choose(ROWS, where).index.tolist() == rows


def test_a_column_that_is_not_there_cannot_choose() -> None:
    with pytest.raises(KeyError, match="flush"):
        choose(ROWS, {"flush": "on"})


def test_the_functions_see_the_chosen_rows_alone() -> None:
    made = claim(where={"tf32": "on"}, test=lambda t: len(t) == 2 and set(t["tf32"]) == {"on"})
    assert judged(made).state == "true"


def test_a_claim_about_several_values_needs_each_of_them() -> None:
    made = claim(where={"tf32": ["on", "off", "both"]}, test=lambda t: t["ratio"] > 1e9)
    assert judged(made).state == "not tested"
    assert judged(made, rows=ROWS.assign(tf32=["on", "off", "both", "both"])).state == "false"


# --- verdicts


@pytest.mark.parametrize(
    ("test", "state"),
    [
        (lambda t: True, "true"), (lambda t: False, "false"), (lambda t: t["ratio"] >= 0, "true"),
        (lambda t: t["ratio"] > 0, "false"), (lambda t: np.bool_(True), "true"),
        (lambda t: t["ratio"].max() > 100, "true"), (lambda t: t["finite"], "false"),
        (lambda t: t["finite"].astype(object), "false"), (lambda t: [True, False], "false"),
    ],
)  # fmt: skip
def test_a_test_is_true_of_every_row(test, state: str) -> None:
    assert judged(claim(test=test)).state == state


def test_no_rows_are_no_verdict() -> None:
    boom = claim(where={"tf32": "maybe"}, test=lambda t: t["ratio"].iloc[0] > 1)
    assert judged(boom).state == "not tested"
    assert claim(test=lambda t: True).judge({}, H200).state == "not tested"
    assert judged(claim(test=lambda t: True), rows=ROWS[:0]).state == "not tested"


def test_a_number_is_compared_on_its_own_machine_alone() -> None:
    made = claim("It is {122}.", where={"tf32": "on", "N": 64}, value=lambda t: t["ratio"])
    other = ROWS.assign(ratio=33.0)
    assert judged(made).state == "true"
    assert judged(made, H200, other).state == "false"
    shown = judged(made, H100, other)
    assert (shown.state, shown.values) == ("value", [33.0])
    assert (made.expected(H200), made.expected(H100)) == ("true", "value")


def test_a_test_beside_a_number_is_judged_on_every_machine() -> None:
    made = claim("It is {122}.", where={"tf32": "on", "N": 64}, value=lambda t: t["ratio"],
                 test=lambda t: t["ratio"] > 50)  # fmt: skip
    assert judged(made, H100, ROWS.assign(ratio=33.0)).state == "false"
    assert judged(made, H100, ROWS.assign(ratio=66.0)).state == "true"
    assert made.expected(H100) == "true"


def test_holds_names_the_only_machines() -> None:
    made = claim(test=lambda t: True, holds=[H100])
    assert (made.expected(H100), made.expected(H200)) == ("true", "false")
    assert claim(test=lambda t: True).expected(H200) == "true"


# --- a column that is missing


@pytest.mark.parametrize(
    "options",
    [
        {"where": {"flush": "on"}, "test": lambda t: True},
        {"test": lambda t: t["flush"] == "on"},
        {"test": lambda t: (t[["flush", "ratio"]] != 0).all()},
        {"test": lambda t: t.groupby("flush").size() > 1},
        {"test": lambda t: t.set_index("flush").index.size > 1},
        {"sentence": "It is {1}.", "value": lambda t: t["flush"].max()},
    ],
)
def test_a_record_without_a_column_is_outdated_where_another_run_has_it(options) -> None:
    made = claim(**options)
    outcome = judged(made, known=[*ROWS, "flush"])
    assert (outcome.state, outcome.detail) == ("outdated", "no column flush")
    with pytest.raises(ClaimError, match=r"(?s)plot_x: claim c on nvidia-h200.*flush"):
        judged(made, known=[*ROWS])


def test_a_missing_label_is_not_a_missing_column() -> None:
    made = claim(test=lambda t: t.set_index("N")["ratio"]["MatMul"] > 1)
    with pytest.raises(ClaimError, match="cannot be evaluated: got KeyError"):
        judged(made, known=[*ROWS])


# --- what is no claim


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"test": lambda t: 1 / 0}, "ZeroDivisionError"),
        ({"test": lambda t: t.ratios}, "AttributeError"),
        ({"where": {"ratio": lambda s: s.no_such()}, "test": lambda t: True}, "AttributeError"),
        ({"sentence": "{1}", "value": lambda t: t["tf32"]}, "ValueError"),
        ({"sentence": "{1}", "value": lambda t: t["ratio"].iloc[99]}, "IndexError"),
        ({"sentence": "{1}", "value": lambda t: math.nan}, "nan"),
        ({"sentence": "{1}", "value": lambda t: []}, "0"),
        ({"sentence": "{1}", "value": lambda t: t["ratio"][:0]}, r"\[\]"),
        ({"sentence": "{1}", "value": lambda t: (1, 2)}, "another number of values: got 2"),
        ({"sentence": "{1} {2}", "value": lambda t: 1}, "another number of values: got 1"),
        ({"test": lambda t: t["ratio"].max()}, "its test gives no verdict: got .121"),
        ({"test": lambda t: "yes"}, "no verdict: got .'yes'"),
        ({"test": lambda t: None}, "no verdict"),
        ({"test": lambda t: 1}, "no verdict"),
        ({"test": lambda t: []}, "no verdict"),
    ],
)
def test_an_exception_is_never_a_verdict(options, got: str) -> None:
    with pytest.raises(ClaimError, match=rf"(?s)plot_x: claim c on {H200}.*{got}"):
        judged(claim(**options))


@pytest.mark.parametrize(
    ("sentence", "options", "expected"),
    [
        ("Nothing can refute it.", {}, "value= or test="),
        ("A value without a number.", {"value": lambda t: 1}, "numbers in braces"),
        ("A {1} without a value.", {"test": lambda t: True}, "numbers in braces"),
        ("A {1} of no machine.", {"value": lambda t: 1, "on": None}, "on="),
        ("A machine without numbers.", {"test": lambda t: True, "on": H200}, "on="),
        ("A {word}.", {"value": lambda t: 1}, "numbers in braces, such as"),
        ("An empty {}.", {"value": lambda t: 1}, "numbers in braces, such as"),
        ("A {1} that holds nowhere.", {"value": lambda t: 1, "holds": [H100]}, "test="),
        ("A {1}.", {"value": lambda t: 1, "test": lambda t: True, "holds": [H100]},
         "holds= with nvidia-h200"),
    ],
)  # fmt: skip
def test_a_claim_can_be_refuted_and_its_numbers_are_bound(sentence, options, expected) -> None:
    with pytest.raises(ClaimError, match=rf"plot_x: claim c: got {sentence[:5]}.*{expected}"):
        claim(sentence, **options)
