r"""
.. _reduction-order:

Reproducible parallel reduction is difficult
============================================

Placeholder while the page is written. Math :math:`\sqrt{n} u` and :func:`numpy.sum`.

.. math:: \lceil \log_2 n \rceil u \sum |x_i|
"""

import numpy as np
import pandas as pd

from roundoff.dtypes import ulp
from roundoff.page import Study, subplots
from roundoff.script import get_parsed_args

args = get_parsed_args("plot_reduction_order", __doc__, seed=(0, "seed"))
study = Study("plot_reduction_order", args)

# %%
# A table
# -------
df = pd.DataFrame({f"column {i}": np.arange(5) * 0.1 * i for i in range(12)})
study.table(
    "t",
    df,
    caption="Largest minus smallest `mean`.",
    emphasize={"column 3": "max"},
    units={"column 3": "ULP"},
)

# %%
study.recorded("t")

# %%
# A figure
fig, ax = subplots(1, 2)
ax[0].semilogy(
    np.arange(1, 10), np.sum(df.to_numpy()) * np.arange(1, 10) * float(ulp(1.0, "float32"))
)
ax[0].set_title("Spread over size")
ax[0].set_xlabel("n")
for i in range(5):
    ax[1].plot([0, 1], [i, i], marker="o", label=f"line {i}")
ax[1].legend()
study.figure("f", fig, alt="Two panels of lines.")

# %%
study.conclude(lambda run: f"The maximum is **{run.tables['t'].max().max():.3g}**.", "t")

# %%
print("printed output")
study.finish()
