"""Checks of arguments that several rooms share: what fits is given back, all else is refused.

They run where something is made or measured, never inside of a loop.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Iterable, Mapping, Sequence
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
    "check_text",
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
    fits = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not fits or not _within(value, least, most):
        raise ArgumentError(
            name, got=_shown(value), expected="a whole number" + _limits(least, most)
        )
    return int(value)


def check_number(
    name: str,
    value: Any,
    least: float | None = None,
    most: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
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
    >>> check_number("level", 0.95, above=0, below=1)
    0.95
    """
    fits = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if fits:
        try:
            number = float(value)
        except OverflowError:  # of a whole number beyond the largest float
            number = math.inf if value > 0 else -math.inf
        fits = not math.isnan(number) and (math.isfinite(number) or not finite)
        fits = fits and _within(number, least, most)
        fits = fits and (above is None or number > above) and (below is None or number < below)
    if not fits:
        kind = "a finite number" if finite else "a number"
        strict = [f"above {above}"] if above is not None else []
        strict += [f"below {below}"] if below is not None else []
        expected = kind + _limits(least, most) + (", " + " and ".join(strict) if strict else "")
        raise ArgumentError(name, got=_shown(value), expected=expected)
    return number


def _within(value: Any, least: float | None, most: float | None) -> bool:
    return (least is None or value >= least) and (most is None or value <= most)


def _limits(least: float | None, most: float | None) -> str:
    if least is not None and most is not None:
        return f", {least} to {most}"
    if least is not None:
        return f", {least} or more"
    return "" if most is None else f", at most {most}"


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{type(value).__name__} {text[:70]}…"


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
    if not isinstance(value, bool) and type(value).__name__ not in ("bool_", "bool"):
        raise ArgumentError(name, got=_shown(value), expected="True or False")
    return bool(value)


def check_choice(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Refuse a *value* that is not one of those *allowed*; True is not 1.

    Raises
    ------
    ArgumentError

    Examples
    --------
    >>> from roundoff.arguments import check_choice
    >>> check_choice("padding", "left", ("left", "right"))
    """
    choices = list(allowed)
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ArgumentError(
            name, got=_shown(value), expected="one of " + ", ".join(map(repr, choices))
        )


def check_text(name: str, value: Any) -> str:
    """*value*, where it is a str that is not empty.

    Raises
    ------
    ArgumentError

    Examples
    --------
    >>> from roundoff.arguments import check_text
    >>> check_text("page", "plot_x")
    'plot_x'
    """
    if not isinstance(value, str) or not value:
        raise ArgumentError(name, got=_shown(value), expected="a text")
    return value


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
    if not isinstance(value, Mapping):
        raise ArgumentError(name, got=_shown(value), expected=f"a mapping of {of}")
    for key in value:
        if not isinstance(key, str):
            raise ArgumentError(f"a key of {name}", got=_shown(key), expected="a text")
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
        shown = ", ".join(f"{n!r}: tensor" for n in list(names)[:2])
        raise ArgumentError(
            "feeds",
            got=type(feeds).__name__,
            expected="a mapping of input names to tensors",
            hint=f"run({{{shown}}})" if shown else None,
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
    expected = "a sequence of provider names, or of pairs of a name and a mapping of options"
    if not isinstance(providers, Sequence) or isinstance(providers, (str, bytes)) or not providers:
        raise ArgumentError(
            "providers", got=_shown(providers), expected=expected, hint=f'["{_CPU}"]'
        )
    listed = []
    for item in providers:
        pair = (item, {}) if isinstance(item, str) else item
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not is_pair or not isinstance(pair[0], str) or not isinstance(pair[1], Mapping):
            raise ArgumentError("providers", got=_shown(item), expected=expected)
        options = dict(check_mapping(f"options of {pair[0]}", pair[1]))
        if options and pair[0] == _CPU:
            hint = f"{_CUDA} takes it" if "cuda" in "".join(options) else None
            raise ArgumentError(
                f"{_CPU} takes no options", got=", ".join(options), expected="none", hint=hint
            )
        listed.append((pair[0], options))
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
        if not isinstance(device, (str, torch.device)):
            raise TypeError
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(
            "device", got=_shown(device), expected="'cpu', 'cuda' or 'cuda:1'"
        ) from error
    if found.type not in ("cpu", "cuda"):
        raise UnsupportedError("device", got=str(found), expected="cpu or cuda")
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            raise UnsupportedError(
                "torch sees no such device",
                got=str(found),
                expected=f"cuda:0 to cuda:{count - 1}" if count else "cpu: there is no CUDA device",
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
