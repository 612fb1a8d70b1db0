"""Typed exceptions: every user error says what was got, what was expected, and what to try.

Each class also derives from the built-in exception a reader would expect
(:class:`ValueError`, :class:`TypeError`, …), so that existing ``except`` clauses keep working.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "DtypeError",
    "MissingDependencyError",
    "ModelError",
    "ModelSizeError",
    "RecordError",
    "RoundoffError",
    "ShapeError",
    "UnsupportedError",
    "WorkerError",
]


class RoundoffError(Exception):
    """Base class of every error that roundoff raises on purpose.

    Parameters
    ----------
    message : str
        What went wrong, in one sentence, naming the argument, node or file.
    got : object, optional
        What was found; shown with ``repr`` unless it is a string.
    expected : str, optional
        What would have been right.
    hint : str, optional
        What to try next.

    Examples
    --------
    >>> print(RoundoffError("size out of range", got=0, expected="at least 1", hint="use 2"))
    size out of range: got 0, expected at least 1; try: use 2
    """

    def __init__(
        self,
        message: str,
        *,
        got: object = None,
        expected: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.message = message
        self.got = got
        self.expected = expected
        self.hint = hint
        super().__init__(message)

    def __str__(self) -> str:
        found = []
        if self.got is not None:
            found.append(f"got {self.got if isinstance(self.got, str) else repr(self.got)}")
        if self.expected is not None:
            found.append(f"expected {self.expected}")
        text = self.message + (": " + ", ".join(found) if found else "")
        return text + (f"; try: {self.hint}" if self.hint else "")


class ArgumentError(RoundoffError, ValueError):
    """An argument or option has a value that is not allowed.

    Examples
    --------
    >>> print(ArgumentError("variant", got="fussed", expected="fused or not fused"))
    variant: got fussed, expected fused or not fused
    """


class DtypeError(RoundoffError, TypeError):
    """An element type is unknown, or not one the operation takes.

    Examples
    --------
    >>> from roundoff.dtypes import ulp
    >>> try:
    ...     ulp(1.0, "int32")
    ... except TypeError as error:
    ...     print(error)
    no unit in the last place: got int32, expected a floating type
    """


class ShapeError(RoundoffError, ValueError):
    """A tensor has a rank or shape the operation does not take.

    Examples
    --------
    >>> print(ShapeError("cannot be added", got=(2, 3), expected="a contiguous vector"))
    cannot be added: got (2, 3), expected a contiguous vector
    """


class ModelError(RoundoffError, ValueError):
    """An ONNX model is broken, cyclic, or refers to something that is not there.

    Examples
    --------
    >>> from roundoff.evaluator import TorchOnnxEvaluator
    >>> try:
    ...     TorchOnnxEvaluator(b"no model")
    ... except ValueError as error:
    ...     print(type(error).__name__)
    ModelError
    """


class ModelSizeError(RoundoffError, MemoryError):
    """A run of the model would not fit in memory; raised before anything large is allocated.

    Examples
    --------
    >>> print(ModelSizeError("the model does not fit", got="12.0 GiB", expected="at most 8.0 GiB"))
    the model does not fit: got 12.0 GiB, expected at most 8.0 GiB
    """


class UnsupportedError(RoundoffError, NotImplementedError):
    """A valid request that this version, provider or machine does not support.

    Examples
    --------
    >>> from roundoff.models import layer_norm_matmul
    >>> from roundoff.ort import session
    >>> try:
    ...     session(layer_norm_matmul(), ["NoSuchExecutionProvider"])
    ... except NotImplementedError as error:
    ...     print(error.message)
    this build of ONNX Runtime lacks a provider
    """


class MissingDependencyError(RoundoffError, ImportError):
    """An optional package is needed here and is not installed.

    Examples
    --------
    >>> print(MissingDependencyError("no spreadsheet", expected="openpyxl", hint="pip install it"))
    no spreadsheet: expected openpyxl; try: pip install it
    """


class RecordError(RoundoffError, ValueError):
    """A recorded file is no record, lacks what is asked for, or cannot hold what is measured.

    Examples
    --------
    >>> from roundoff.record import read_table
    >>> try:
    ...     read_table("plot_gemm_fusion", "nvidia-h200", "prices", ["case"])
    ... except ValueError as error:
    ...     print(error.message)
    plot_gemm_fusion on nvidia-h200 has no such table or column
    """


class WorkerError(RoundoffError, RuntimeError):
    """A worker process raised, died, could not reach the others or took too long.

    The note of the exception has the traceback of the worker that raised.

    Examples
    --------
    >>> print(WorkerError("the worker of rank 1 failed", got="ValueError: no such size"))
    the worker of rank 1 failed: got ValueError: no such size
    """
