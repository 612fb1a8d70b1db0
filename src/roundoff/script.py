"""What a page or a study needs at its top: its options, and whether to be quick."""

from __future__ import annotations

import argparse
import builtins
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from configparser import ConfigParser
from typing import Any

from .errors import ArgumentError

__all__ = ["get_parsed_args", "unit_test_going"]


def unit_test_going() -> bool:
    """Whether to be quick: the environment variable ``UNITTEST_GOING`` is set.

    Raises
    ------
    ArgumentError
        When the variable is neither 1, true, yes, on nor 0, false, no, off or empty.

    Examples
    --------
    >>> from roundoff.script import unit_test_going
    >>> from unittest import mock
    >>> with mock.patch.dict("os.environ", UNITTEST_GOING="1"):
    ...     unit_test_going()
    True
    """
    value = os.environ.get("UNITTEST_GOING") or "0"
    try:
        return ConfigParser.BOOLEAN_STATES[value.lower()]
    except KeyError as error:
        raise ArgumentError("UNITTEST_GOING", got=value, expected="1 or 0") from error


def get_parsed_args(
    name: str,
    description: str | None = None,
    argv: Sequence[str] | None = None,
    expose: str | None = None,
    **options: Any,
) -> argparse.Namespace:
    """The options of a page: its defaults, or what the command line says.

    Parameters
    ----------
    name : str
        Name of the page, such as ``"plot_gemm_fusion"``.
    description : str, optional
        What it does; ``--help`` shows it.
    argv : sequence of str, optional
        The command line without the program's name. By default ``sys.argv[1:]``, and nothing in a
        notebook, where it belongs to somebody else.
    expose : str, optional
        Names of the options that the command line offers, with commas between them; the others
        keep their defaults. By default, and where it is empty, it offers all.
    **options
        ``name=default``, ``name=(default, help)`` or ``name=(default, help, allowed)``. A value
        keeps the type of the default; ``None`` stands for an optional string, and a bool is set by
        ``--name`` or ``--no-name``. *allowed* is for a number its least value, or a pair of its
        least and its largest value; for a string the list of its values. Further texts are joined
        to the help.

    Returns
    -------
    argparse.Namespace
        One attribute an option, plus ``record`` (folder or None), ``second`` (whether this is the
        second run, whose times a record keeps beside the first's) and ``commit`` (hash or None).

    Raises
    ------
    SystemExit
        With status 2, after a message: on a bad command line.
    ArgumentError
        *expose* is no text, or names an option that is not there.

    Examples
    --------
    >>> from roundoff.script import get_parsed_args
    >>> options = {"config": ("small", "size", ["small", "large"]), "repeat": (5, "rounds", 1)}
    >>> args = get_parsed_args("plot_x", argv=["--repeat", "7"], **options)
    >>> args.config, args.repeat, args.record, args.second
    ('small', 7, None, False)
    >>> get_parsed_args("plot_x", argv=["--record", "--second"], **options).second
    True
    """
    offered = _exposed(expose, options)
    parser = argparse.ArgumentParser(
        prog=name,
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for option, value in options.items():
        default, *more = value if isinstance(value, tuple) else (value,)
        text = " ".join(words.strip() for words in more if isinstance(words, str))
        allowed = [limit for limit in more if not isinstance(limit, str)]
        if option not in offered:
            parser.set_defaults(**{option: default})
            continue
        kind: Any = str if default is None else type(default)
        if kind is bool:
            how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        elif allowed and kind in (int, float):
            limits = allowed[0] if isinstance(allowed[0], tuple) else allowed
            how = {"type": _within(kind, *limits)}
        else:
            how = {"type": kind, "choices": allowed[0] if allowed else None}
        parser.add_argument(f"--{option}", default=default, help=text.replace("%", "%%"), **how)
    parser.add_argument(
        "--record",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="keep the tables as FOLDER/<page>/<machine>.json (without FOLDER: in the package)",
    )
    parser.add_argument(
        "--second",
        action="store_true",
        help="this is the second run: keep its times beside the recorded ones (with --record)",
    )
    parser.add_argument(
        "--commit", metavar="HASH", help="commit of this code, where git cannot tell"
    )
    if argv is None and hasattr(builtins, "__IPYTHON__"):  # the mark of IPython and Jupyter
        argv = []
    args = parser.parse_args(argv)
    if args.second and args.record is None:
        parser.error("--second keeps times in a record: expected --record beside it")
    return args


def _exposed(expose: Any, options: Mapping[str, Any]) -> Collection[str]:
    """The options that the command line offers."""
    if not isinstance(expose, str | None):
        raise ArgumentError("expose", got=repr(expose), expected="names, with commas between them")
    names = [name.strip() for name in (expose or "").split(",") if name.strip()]
    unknown = [name for name in names if name not in options]
    if unknown:
        raise ArgumentError(
            "expose names an option that is not there",
            got=", ".join(unknown),
            expected="some of " + ", ".join(options),
        )
    return names or options


def _within(kind: type, least: float, most: float = math.inf) -> Callable[[str], Any]:
    """What reads a number, and refuses one that is out of its range."""

    def read(text: str) -> Any:
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"got {text}, expected {least} to {most}")
        return value

    read.__name__ = kind.__name__  # argparse names it where a value has another type
    return read
