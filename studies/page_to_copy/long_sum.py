"""The study behind "Why is a long sum in float32 wrong?": the one to copy.

The page runs one experiment that a reader can change. This file measures all cases, writes the
record, and defines each number that the page prints in bold.

    python studies/long_sum.py --record
"""

import numpy as np

from roundoff.page.measurement import Study

study = Study(
    "plot_long_sum",  # the page
    "Sums of one number, added one after another in float32.",
    on="MACHINE",  # whose numbers the page prints: the name of the record's file
    part="cpu",  # what computes them
    count=(1_000_000, "numbers in the longest sum", 1),  # an option of the command line
)


@study.table()  # a table is a function that gives rows; times=[...] for a second run
def sums(args):
    """The error of the sum for several numbers."""
    rows = []
    for number in 0.1, 0.125, 0.3:
        total = np.cumsum(np.full(args.count, number, np.float32))[-1]
        exact = args.count * number
        rows.append({"number": number, "sum": float(total), "error": total / exact - 1})
    return rows


# The name that the page binds, datum and statistic in words, table, column, rows, and a test that
# fails where the page's sentence, "is too large", is false. A share is printed as a percentage.
study.value(
    "drift",
    "error of the sum of a million times 0.1",
    "sums",
    "error",
    where={"number": 0.1},
    test=lambda found: found.value > 0,
)

if __name__ == "__main__":
    study.main()
