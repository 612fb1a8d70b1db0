"""Tables with one change each: what a value of a study must notice."""

import itertools
from collections.abc import Iterator

import pandas as pd

_FACTORS = (0.5, 0.7, 1.4, 2.0)


def mutants(frame: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Tables with one change: two labels exchanged, or a column of numbers scaled by at most 2.

    Labels are the values of a column of text or of booleans, and the headings of two columns of
    numbers that differ in one word (``from torch``, ``from ORT``).
    """
    labels = {c: list(dict.fromkeys(filter(_is_label, frame[c]))) for c in frame}
    numbers = [
        c for c in frame if pd.api.types.is_numeric_dtype(frame[c]) and frame[c].dtype != bool
    ]
    scaled = {(c, factor): frame[c] * factor for c in numbers for factor in _FACTORS}
    for (column, _), changed in scaled.items():  # most values need no other
        yield frame.assign(**{column: changed})
    for column, found in labels.items():
        for a, b in itertools.combinations(found, 2):
            swap = {a: b, b: a}
            exchanged = [swap.get(v, v) if _is_label(v) else v for v in frame[column]]
            yield frame.assign(**{column: exchanged})
    for a, b in itertools.combinations(numbers, 2):
        if _differ_in_a_word(str(a).split(), str(b).split()):
            yield frame.assign(**{a: frame[b], b: frame[a]})
    for (column, _), changed in scaled.items():
        for text, found in labels.items():
            for label in found:
                yield frame.assign(**{column: frame[column].where(frame[text] != label, changed)})


def _is_label(value: object) -> bool:
    return isinstance(value, (str, bool))


def _differ_in_a_word(a: list[str], b: list[str]) -> bool:
    return len(a) == len(b) > 1 and sum(x != y for x, y in zip(a, b, strict=True)) == 1
