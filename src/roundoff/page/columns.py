"""One label, unit and format for each column of the site's tables, by name.

A column that is not listed is shown under its own name, with three digits.
"""

from __future__ import annotations

import dataclasses

__all__ = ["COLUMNS", "Column", "column"]


@dataclasses.dataclass(frozen=True)
class Column:
    """How a column is shown.

    Attributes
    ----------
    label : str
        Its heading.
    unit : str
        What stands below the heading.
    format : str
        Format specification of a number, or "share" for per cent; empty: three digits.
    about : str
        What it means, shown as the heading's tool tip.
    """

    label: str
    unit: str = ""
    format: str = ""
    about: str = ""


_EPS = "ε × RMS"
_SCALED = "absolute error over the type's ε times the root mean square of the truth"

COLUMNS: dict[str, Column] = {
    "dtype": Column("type"),
    "share": Column("elements that differ", "", "share"),
    "case": Column("case"),
    "what": Column("product"),
    "tolerance": Column("tolerance", "of |x||w| + |b|", "up"),
    "used": Column("used of it", "", "share"),
    "error": Column("largest error", _EPS, ".3g", _SCALED),
    "rms error": Column("typical error", _EPS, ".3g", f"root mean square: {_SCALED}"),
    "mean error": Column("mean error", _EPS, "+.2g", f"signed: {_SCALED}"),
    "error abs": Column("largest error", "", ".3g"),
    "cost": Column("time", "× default", ".2f"),
    "median": Column("median", "ms", ".3g"),
    "speedup": Column("speed-up", "×", ".2f"),
    "size": Column("size", "", "d"),
    "N": Column("N", "columns", "d"),
    "M": Column("M", "rows", "d"),
    "optimization": Column("way"),
    "× inductor": Column("time", "× inductor", ".2f", "ratio of medians to the fastest inductor"),
    "avg_time": Column("mean time", "ms", ".3g"),
    "N calls": Column("N", "calls", ",d"),
    "memory": Column("memory", "MiB", ",.0f", "beside the model and its inputs"),
    "keys error": Column("error of keys, values", _EPS, ".3g", f"root mean square: {_SCALED}"),
    "first length": Column("first length", "s", ".2f"),
    "second length": Column("second length", "s", ".2f"),
    "known length": Column("known length", "s", ".2g"),
    "distinct": Column("different results", "of 128", "d"),
    "condition": Column("κ", "", ".4g", "condition number of the sum"),
    "d": Column("d", "", ",.0f"),
    "moved": Column("moved by", "ε × RMS", ".2g", "root mean square of the difference"),
    "not fused error": Column("not fused, largest", _EPS, ".3g", _SCALED),
    "fused error": Column("fused, largest", _EPS, ".3g", _SCALED),
    "not fused rms": Column("not fused, typical", _EPS, ".3g", f"root mean square: {_SCALED}"),
    "fused rms": Column("fused, typical", _EPS, ".3g", f"root mean square: {_SCALED}"),
    "of ceiling": Column("share of ceiling", "", ".0%", "of a stream with the same bytes"),
    "lead": Column("over the best", "×", ".2f", "rate over that of the best baseline"),
    "lead low": Column("from", "×", ".2f"),
    "lead high": Column("to", "×", ".2f"),
    "× torch": Column("time", "× torch's", ".2f", "launches included"),
    "step": Column("step"),
    "GB/s": Column("rate", "GB/s", ",.0f"),
    "registers": Column("registers", "a thread", ",d"),
    "spilled": Column("spilled", "words a thread", ",d", "32-bit words, kept in memory"),
    "fit": Column("programs", "fit", "d", "that a multiprocessor holds at a time"),
    "shared": Column("shared memory", "KiB a program", ",.0f"),
    "one block": Column("one block", "words", ",d"),
    "not packed": Column("pieces, not packed", "words", ",d"),
    "packed": Column("pieces, packed", "words", ",d"),
    "dx error": Column("error of dx", _EPS, ".2g", f"root mean square: {_SCALED}"),
    "dw error": Column("error of dw", _EPS, ".2g", f"root mean square: {_SCALED}"),
    "backend": Column("library"),
    "way": Column("way"),
    "ranks": Column("ranks", "", ",d"),
    "orders": Column("orders", "in a message", "d"),
    "first order": Column("order", "first chunk"),
    "last order": Column("order", "last chunk"),
    "explained": Column("explained", "of random data", "share"),
    "differ": Column("elements that differ", "", "share"),
    "cap": Column("bucket", "MiB", "g", "DDP's bucket_cap_mb"),
    "first step": Column("first step", "that differs", ".0f"),
    "loss": Column("loss changes", "of itself", ".1g"),
    "cost 2": Column("time, 2 ranks", "× all-reduce", ".2g"),
    "cost 4": Column("time, 4 ranks", "× all-reduce", ".2g"),
    "cost 8": Column("time, 8 ranks", "× all-reduce", ".2g"),
    "bits": Column("other bits", "of the logits", "share"),
    "flips": Column("other token", "", "share", "steps at which another logit is the largest"),
    "texts": Column("other text", "prompts", ".0f", "texts with at least one other token"),
    "of": Column("of", "prompts", ".0f"),
    "first": Column("first other", "token, median", ".0f"),
    "gap": Column("error of the gap", "logits", ".2g", "of the two largest; root mean square"),
    "predicted": Column("expected", "other token", "share"),
    "texts predicted": Column("expected", "other text", ".1f"),
    "batch": Column("batch", "prompts", ".0f"),
    "KL": Column("KL", "nats a token", ".2g", "divergence from float64's probabilities"),
    "perplexity": Column("perplexity", "", ".4g"),
    "change": Column("change of it", "", "share", "mean difference of the logarithm"),
    "change low": Column("from", "", "share", "95 % interval"),
    "change high": Column("to", "", "share", "95 % interval"),
    "computed": Column("weights, products"),
    "× bfloat16": Column("time", "× bfloat16", ".2f"),
    "MiB": Column("weights", "MiB", ",.0f"),
    "weights": Column("weights"),
    "token": Column("from token", "", ".0f"),
    "largest": Column("largest input", "", ",.3g"),
    "weight": Column("weight", "K → N"),
    "other": Column("M with other bits", "", "share", "of the larger M that were tried"),
    "other M": Column("which M"),
    "results": Column("different results", "", "d"),
    "text": Column("computed"),
    "other tokens": Column("tokens with other bits", "", "share"),
    "served": Column("served"),
    "completions": Column("completions", "", ",.0f"),
    "different": Column("different texts", "", ",.0f"),
    "other texts": Column("other texts", "than alone", "share"),
    "first other": Column("first other", "token", ".0f"),
    "checksum": Column("checksum", "of the bits", ",.0f", "equal where all bits are"),
    "one from": Column("one result", "from M", ",.0f"),
    "batch_invariant_ops": Column("batch_invariant_ops", "× torch", ".2f"),
    "vLLM's tile": Column("vLLM's tile", "× torch", ".2f", "in our kernel"),
    "FlexDecoding": Column("FlexDecoding", "× torch", ".2f"),
    "FlexDecoding, fixed": Column("FlexDecoding, fixed", "× torch", ".2f", "16 parts of the keys"),
    "FlexDecoding, 256 keys": Column("FlexDecoding, 256 keys", "× torch", ".2f", "in each part"),
    "FlashInfer, 256 keys": Column("FlashInfer, 256 keys", "× torch", ".2f", "in each part"),
    "other bits": Column("other bits than alone"),
    "splits": Column("parts", "of K", ".0f"),
    "mma": Column("mma", "tiles", ".0f"),
    "wgmma": Column("wgmma", "tiles", ".0f"),
    "before": Column("typical error, float32", _EPS, ".3g", "before the result is rounded"),
    "rounded": Column("typical error, rounded", _EPS, ".3g"),
    "cases": Column("cases", "", ",.0f"),
    "one tile": Column("one tile", "× torch", ".2f"),
    "two variables": Column("two variables", "× torch", ".2f"),
    "tokens/s": Column("tokens", "a second", ",.0f"),
    "first call": Column("first call", "s", ".1f", "with nothing compiled before"),
    "nodes": Column("nodes", "a call", ",.0f", "operators of ONNX"),
    "sessions": Column("sessions", "", ".0f", "of ONNX Runtime"),
    "tokens": Column("tokens", "", ",.0f"),
    "other words": Column("other tokens", "than eager's", ",.0f"),
    "conversions": Column("conversions", "", ".0f", "graphs that were converted for this text"),
    "asked": Column("prompts"),
    "first run": Column("first time", "s", ".3g"),
    "known run": Column("second time", "s", ".2g"),
    "borders": Column("borders", "", ".0f", "between sessions and operators of torch"),
    "by torch": Column("stays with torch"),
    "from eager": Column("from eager", "ε × RMS", ".3g", "root mean square of the difference"),
    "low": Column("from", "", "", "95 % interval"),
    "high": Column("to", "", "", "95 % interval"),
    "µs": Column("torch", "µs", ",.3g"),
    "note": Column("note"),
    "dx": Column("dx", "results", "d"),
    "dw": Column("dw", "results", "d"),
    "db": Column("db", "results", "d"),
}


def column(name: str) -> Column:
    """How the column *name* is shown.

    Examples
    --------
    >>> column("dtype").label, column("n").label
    ('type', 'n')
    """
    return COLUMNS.get(name) or Column(name)
