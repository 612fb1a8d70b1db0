"""Tables with one change each: what a value of a study must notice."""

import itertools
from collections.abc import Iterator

import pandas as pd

_FACTORS = (0.5, 0.7, 1.4, 2.0)


def mutants(frame: pd.DataFrame, read: list[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    """Tables with one change: two labels exchanged, or a measured column scaled by at most 2.

    Labels are the values of a column of text or of booleans, and the headings of two columns of
    numbers that differ in one word (``from torch``, ``from ORT``).
    """
    texts = [c for c in frame if _is_text(frame[c])]
    values = {
        c: list(dict.fromkeys(v for v in frame[c] if isinstance(v, (str, bool)))) for c in texts
    }
    for column in texts:
        for a, b in itertools.combinations(values[column], 2):
            swap = {a: b, b: a}
            exchanged = [swap.get(v, v) if isinstance(v, (str, bool)) else v for v in frame[column]]
            yield f"{column}: {a} and {b} exchanged", frame.assign(**{column: exchanged})
    numbers = [
        c
        for c in frame
        if c in read and pd.api.types.is_numeric_dtype(frame[c]) and frame[c].dtype != bool
    ]
    for a, b in itertools.combinations(numbers, 2):
        if _differ_in_a_word(str(a).split(), str(b).split()):
            yield f"columns {a} and {b} exchanged", frame.assign(**{a: frame[b], b: frame[a]})
    for column, factor in itertools.product(numbers, _FACTORS):
        scaled = frame[column] * factor
        yield f"{column} × {factor}", frame.assign(**{column: scaled})
        for text in texts:
            for value in values[text]:
                rows = frame[text] == value
                yield (
                    f"{column} × {factor} where {text} is {value}",
                    frame.assign(**{column: frame[column].where(~rows, scaled)}),
                )


def _differ_in_a_word(a: list[str], b: list[str]) -> bool:
    return len(a) == len(b) > 1 and sum(x != y for x, y in zip(a, b, strict=True)) == 1


def _is_text(series: pd.Series) -> bool:
    return any(isinstance(v, (str, bool)) for v in series.tolist())
