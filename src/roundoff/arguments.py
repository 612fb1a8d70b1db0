"""Checks of arguments that several rooms share: what fits is given back, all else is refused.

They run where something is made or measured, never inside of a loop.
"""

from __future__ import annotations

import math
import numbers
import textwrap
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    import torch

__all__ = [
    "check_choice",
    "check_device",
    "check_feeds",
    "check_flag",
    "check_float_dtype",
    "check_mapping",
    "check_number",
    "check_providers",
    "check_whole",
]

_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def check_whole(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """*value* as an int, where it is a whole number within the limits; True is none.

    Raises
    ------
    ArgumentError
        When it is not.

    Examples
    --------
    >>> from roundoff.arguments import check_whole
    >>> check_whole("rows", 3, least=1)
    3
    """
    if not isinstance(value, numbers.Integral):
        raise ArgumentError(name, got=_shown(value), expected="a whole number")
    check_number(name, value, least, most)
    return int(value)


def check_number(
    name: str,
    value: Any,
    least: float | None = None,
    most: float | None = None,
    *,
    above: float | None = None,
    finite: bool = True,
) -> float:
    """*value*, where it is a real number within the limits; NaN is none, True neither.

    Raises
    ------
    ArgumentError
        When it is not.

    Examples
    --------
    >>> from roundoff.arguments import check_number
    >>> check_number("limit", 0.95, above=0)
    0.95
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    fits = (
        is_number
        and not math.isnan(value)
        and (not finite or math.isfinite(value))
        and (least is None or value >= least)
        and (most is None or value <= most)
        and (above is None or value > above)
    )
    if not fits:
        limits = {"at least": least, "at most": most, "above": above}
        words = ["a finite number" if finite else "a number"]
        words += [f"{word} {limit}" for word, limit in limits.items() if limit is not None]
        raise ArgumentError(name, got=_shown(value), expected=", ".join(words))
    return float(value)


def _shown(value: Any) -> str:
    return textwrap.shorten(repr(value), 80)


def check_flag(name: str, value: Any) -> bool:
    """*value*, where it is True or False: of a text such as "no" Python would make True.

    Raises
    ------
    ArgumentError
        When it is neither.

    Examples
    --------
    >>> from roundoff.arguments import check_flag
    >>> check_flag("truth", False)
    False
    """
    # The first question is one that torch.compile traces; NumPy's bool has this name, too.
    if not isinstance(value, bool) and type(value).__name__ != "bool":
        raise ArgumentError(name, got=_shown(value), expected="True or False")
    return bool(value)


def check_choice(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Refuse a *value* that is not one of those *allowed*.

    Raises
    ------
    ArgumentError

    Examples
    --------
    >>> from roundoff.arguments import check_choice
    >>> check_choice("padding", "left", ("left", "right"))
    """
    choices = list(allowed)
    if value not in choices:
        raise ArgumentError(
            name, got=_shown(value), expected="one of " + ", ".join(map(repr, choices))
        )


def check_mapping(name: str, value: Any, of: str = "names to values") -> Mapping[Any, Any]:
    """*value*, where it is a mapping whose keys are texts.

    Raises
    ------
    ArgumentError

    Examples
    --------
    >>> from roundoff.arguments import check_mapping
    >>> check_mapping("options", {"a": 1})
    {'a': 1}
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ArgumentError(name, got=_shown(value), expected=f"a mapping of {of}")
    return value


def check_feeds(feeds: Any, names: Collection[str], optional: Collection[str] = ()) -> None:
    """Refuse feeds that are no mapping, lack one of *names* that has no default, or have another.

    Raises
    ------
    ArgumentError

    Examples
    --------
    >>> from roundoff.arguments import check_feeds
    >>> check_feeds({"X": 1.0}, ["X", "Y"], optional=["Y"])
    """
    if not isinstance(feeds, Mapping):
        raise ArgumentError(
            "feeds", got=type(feeds).__name__, expected="a mapping of input names to tensors"
        )
    unknown = [n for n in feeds if n not in names]
    missing = [n for n in names if n not in feeds and n not in optional]
    if unknown or missing:
        what = f"unknown {unknown}" if unknown else f"missing {missing}"
        raise ArgumentError("feeds of the model", got=what, expected=str(list(names)))


def check_providers(providers: Any) -> list[tuple[str, dict[str, Any]]]:
    """Each provider of ONNX Runtime with its options; their form, not whether they are there.

    The processor's provider takes no options, and ONNX Runtime drops what it is given.

    Raises
    ------
    ArgumentError
        When it is no sequence of names or of pairs of a name and a mapping.

    Examples
    --------
    >>> from roundoff.arguments import check_providers
    >>> check_providers(["CPUExecutionProvider"])
    [('CPUExecutionProvider', {})]
    """
    refusal = ArgumentError(
        "providers",
        got=_shown(providers),
        expected="a list of provider names, or of pairs of a name and its options",
        hint=f'["{_CPU}"]',
    )
    if not isinstance(providers, (list, tuple)) or not providers:
        raise refusal
    listed: list[tuple[str, dict[str, Any]]] = []
    for item in providers:
        match item:
            case str(name):
                options: dict[str, Any] = {}
            case [str(name), Mapping() as given]:
                options = dict(given)
            case _:
                raise refusal
        if options and name == _CPU:
            hint = f"{_CUDA} takes it" if "cuda" in "".join(options) else None
            raise ArgumentError(
                f"{_CPU} takes no options", got=", ".join(options), expected="none", hint=hint
            )
        listed.append((name, options))
    return listed


def check_device(device: Any) -> torch.device:
    """The device, where torch has it here: a CPU or one of this machine's CUDA devices.

    Raises
    ------
    ArgumentError
        When it names no device of torch's.
    UnsupportedError
        When this machine has none of that kind, or not so many.

    Examples
    --------
    >>> from roundoff.arguments import check_device
    >>> check_device("cpu")
    device(type='cpu')
    """
    import torch

    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(
            "device", got=_shown(device), expected="'cpu', 'cuda' or 'cuda:1'"
        ) from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = {"cpu": 1, "cuda": count}
    if (found.index or 0) >= here.get(found.type, 0):
        raise UnsupportedError(
            "torch sees no such device", got=str(found), expected=f"cpu, or one of {count} GPUs"
        )
    return found


def check_float_dtype(name: str, value: Any) -> torch.dtype:
    """*value*, where it is a floating type of torch.

    Raises
    ------
    ArgumentError

    Examples
    --------
    >>> import torch
    >>> from roundoff.arguments import check_float_dtype
    >>> check_float_dtype("dtype", torch.float16)
    torch.float16
    """
    import torch

    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise ArgumentError(
            name, got=_shown(value), expected="a floating type of torch", hint="torch.float32"
        )
    return value
