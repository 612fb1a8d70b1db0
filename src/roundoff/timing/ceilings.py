"""What the machine can do at most, measured by the harness itself."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

import pandas as pd
import torch

from roundoff.arguments import check_device, check_number, check_whole
from roundoff.dtypes import DType, dtype_info, onnx_dtype_to_torch_dtype
from roundoff.errors import ArgumentError

from .harness import measure
from .machine import last_level_cache, torch_precision

__all__ = ["Ceilings", "measure_ceilings"]


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Measured ceilings of a machine.

    Attributes
    ----------
    frame : pandas.DataFrame
        Columns: ceiling (``"copy"``, ``"two reads, one write"``, ``"float32"``,
        ``"float32 tf32"``, ``"float16"`` …), rate and its interval low and high (bytes or
        operations per second), unit (``"B/s"`` or ``"FLOP/s"``), size (bytes of a buffer, or the
        side of the square matrices), note.

    Examples
    --------
    >>> import pandas as pd
    >>> from roundoff.timing import Ceilings
    >>> ceilings = Ceilings(pd.DataFrame({"ceiling": ["copy"], "rate": [2e11]}))
    >>> ceilings["copy"]
    200000000000.0
    """

    frame: pd.DataFrame

    def __getitem__(self, name: str) -> float:
        """Rate of a ceiling, in bytes or operations per second."""
        rates = self.frame.loc[self.frame["ceiling"] == name, "rate"]
        if rates.empty:
            raise ArgumentError(
                "no such ceiling", got=name, expected=f"one of {list(self.frame['ceiling'])}"
            )
        return float(rates.iloc[0])


def measure_ceilings(
    device: str = "cpu",
    *,
    dtypes: Iterable[object] = ("float32", "float16", "bfloat16"),
    side: int | None = None,
    nbytes: int | None = None,
    budget_s: float = 0.5,
    seed: int = 0,
) -> Ceilings:
    """Measure a copy, two reads with one write, and a matrix product for each type.

    Parameters
    ----------
    device : str
        As in :func:`measure`.
    dtypes : iterable
        Types of the matrix products; float32 is measured without and, on CUDA, with TF32.
    side : int, optional
        Side of the square matrices: by default 8192 on CUDA, 512 on a CPU.
    nbytes : int, optional
        Bytes of a buffer: by default eight times the last cache, at most 1 GiB.
    budget_s : float
        Seconds for each ceiling.

    Returns
    -------
    Ceilings

    Raises
    ------
    ArgumentError, DtypeError
        An option is out of range, or a type is unknown.
    UnsupportedError
        This machine has no such device.

    Notes
    -----
    The matrices hold random numbers: on zeros a GPU draws less power and runs faster than on any
    real data.

    Examples
    --------
    >>> from roundoff.timing import measure_ceilings
    >>> ceilings = measure_ceilings(dtypes=["float32"], side=64, nbytes=2**16, budget_s=0.02)
    >>> ceilings.frame["ceiling"].tolist(), ceilings["copy"] > 0
    (['copy', 'two reads, one write', 'float32'], True)
    """
    kind = check_device(device).type
    infos = _types(dtypes)
    check_number("budget_s", budget_s, 0)
    default = 8192 if kind == "cuda" else 512
    side = default if side is None else check_whole("side", side, 1)
    most = min(2**30, 8 * last_level_cache(device))
    nbytes = most if nbytes is None else check_whole("nbytes", nbytes, 4)
    rate = functools.partial(_rate, device, budget_s, seed)
    rows = _memory(rate, device, nbytes)
    for info in infos:
        rows += _products(rate, device, info, side, seed)
    return Ceilings(
        pd.DataFrame(rows, columns=["ceiling", "rate", "low", "high", "unit", "size", "note"])
    )


def _types(dtypes: Iterable[object]) -> list[DType]:
    if isinstance(dtypes, str) or not isinstance(dtypes, Iterable):
        raise ArgumentError("dtypes", got=repr(dtypes), expected="a list of types")
    return [dtype_info(dtype) for dtype in dtypes]


def _memory(rate: Callable[..., dict], device: str, nbytes: int) -> list[dict]:
    n = nbytes // 4
    x, y, out = (torch.ones(n, device=device) for _ in range(3))
    return [
        rate("copy", "B/s", nbytes, 8 * n, lambda: out.copy_(x)),
        rate("two reads, one write", "B/s", nbytes, 12 * n, lambda: torch.add(x, y, out=out)),
    ]


def _products(
    rate: Callable[..., dict], device: str, info: DType, side: int, seed: int
) -> list[dict]:
    dtype = onnx_dtype_to_torch_dtype(info.onnx)
    generator = torch.Generator(device).manual_seed(seed)
    a, b = (torch.randn(side, side, device=device, generator=generator).to(dtype) for _ in "ab")
    out = torch.empty_like(a)
    has_tf32 = info.name == "float32" and torch.device(device).type == "cuda"
    rows = []
    for tf32 in (False, True) if has_tf32 else (False,):
        with torch_precision(tf32):
            name = info.name + (" tf32" if tf32 else "")
            rows.append(rate(name, "FLOP/s", side, 2.0 * side**3, lambda: torch.mm(a, b, out=out)))
    return rows


def _rate(
    device: str, budget_s: float, seed: int,
    name: str, unit: str, size: int, work: float, call: Callable[[], object],
) -> dict:  # fmt: skip
    """A row of the table; a rate of NaN, and why, where the device cannot do it."""
    row: dict[str, object] = {"ceiling": name, "unit": unit, "size": size}
    try:
        timing = measure(
            {name: call}, device=device, budget_s=budget_s, min_rounds=5, warmup=1, seed=seed
        ).frame.iloc[0]
    except (RuntimeError, NotImplementedError) as e:  # a type the device lacks, or no memory
        return row | {"rate": float("nan"), "note": str(e).splitlines()[0]}
    # The ends change sides: a short time is a high rate.
    rates = {"rate": "median", "low": "high", "high": "low"}
    return row | {k: work / timing[v] for k, v in rates.items()} | {"note": timing["warnings"]}
