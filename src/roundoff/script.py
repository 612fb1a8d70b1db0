"""What a page or a study needs at its top: its options, and whether to be quick."""

from __future__ import annotations

import argparse
import builtins
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .arguments import check_text
from .errors import ArgumentError

__all__ = ["get_parsed_args", "unit_test_going", "usage_error"]

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}


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
    value = os.environ.get("UNITTEST_GOING", "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ArgumentError("UNITTEST_GOING is not understood", got=value, expected="1 or 0")


def get_parsed_args(
    name: str,
    description: str | None = None,
    argv: Sequence[str] | None = None,
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
    **options
        ``name=default``, ``name=(default, help)`` or ``name=(default, help, allowed)``. A value
        keeps the type of the default (a bool reads 1, 0, true, false …; ``None`` stands for an
        optional string). *allowed* is for a number its least value, or a pair of its least and its
        largest value; for a string the list of its values. The default is always allowed.

    Returns
    -------
    argparse.Namespace
        One attribute an option, plus ``record`` (folder or None), ``second`` (whether this is the
        second run, whose times a record keeps beside the first's) and ``commit`` (hash or None).

    Raises
    ------
    ArgumentError
        When *allowed* does not fit the type of an option, or another argument is not as above. A
        bad command line is not an exception: it prints a message and ends the process with status
        2, as every command does. A value that is not allowed, ``--second`` without ``--record`` and
        a ``--record`` whose folder cannot be written are bad command lines.

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
    check_text("name", name)
    if not isinstance(description, (str, type(None))):
        raise ArgumentError("description", got=repr(description), expected="a text")
    parser = argparse.ArgumentParser(prog=name, description=description)
    readers = {}
    for option, value in options.items():
        default, text, *allowed = _parts_of(option, value)
        wanted = _wanted(option, default, allowed[0]) if allowed else ""
        readers[option] = _reader(default, allowed[0], wanted) if allowed else _type_of(default)
        shown = f"{wanted}; default: {default}" if wanted else f"default: {default}"
        parser.add_argument(
            f"--{option}",
            default=default,
            type=readers[option],
            help=f"{text} ({shown})".strip().replace("%", "%%"),
            metavar=option.upper(),
        )
    parser.add_argument(
        "--record",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="keep the tables as FOLDER/<page>/<machine>.json (default folder: the package's own)",
    )
    parser.add_argument(
        "--second",
        action="store_true",
        help="this is the second run: keep its times beside the recorded ones (with --record)",
    )
    parser.add_argument(
        "--commit", metavar="HASH", help="commit of this code, where git cannot tell"
    )
    if argv is None:
        argv = [] if _is_notebook() else sys.argv[1:]
    if isinstance(argv, str) or not all(isinstance(word, str) for word in _listed(argv)):
        raise ArgumentError("argv", got=repr(argv)[:80], expected="a list of words")
    args = parser.parse_args(list(argv))
    for option in options:
        if getattr(args, option) == []:  # argparse before Python 3.13: --name=-- loses its value
            if readers[option] is not str:
                parser.error(f"argument --{option}: got '--', expected a value")
            setattr(args, option, "--")
    if args.second and args.record is None:
        parser.error("--second keeps times in a record: expected --record beside it")
    if args.record is not None:
        # A run may take hours: what cannot be kept is not measured.
        folder = Path(args.record) if args.record else Path(__file__).parent / "recorded"
        reason = _why_not_writable(folder / name)
        if reason:
            parser.error(f"argument --record: got {folder}, expected a folder to write: {reason}")
    return args


def _listed(argv: Any) -> list[Any]:
    return list(argv) if isinstance(argv, Sequence) else [None]


def _parts_of(option: str, value: Any) -> tuple[Any, ...]:
    """Default, help and perhaps what is allowed."""
    parts = value if isinstance(value, tuple) else (value, "")
    if option in ("record", "second", "commit", "help"):
        raise ArgumentError(
            "an option that every page has", got=f"--{option}", expected="another name"
        )
    kinds = (str, Path, bool, int, float, type(None))
    if len(parts) not in (2, 3) or not isinstance(parts[0], kinds) or not isinstance(parts[1], str):
        raise ArgumentError(
            f"option {option}",
            got=repr(value)[:80],
            expected="a default (text, number, bool or None), (default, help) or "
            "(default, help, allowed)",
        )
    return parts


def usage_error(name: str, message: str) -> NoReturn:
    """End a script with a clear message and status 2; raise where there is no command line.

    Parameters
    ----------
    name : str
        Name of the page.
    message : str
        What is wrong with which option, and what would be right.

    Raises
    ------
    ArgumentError
        In a notebook.
    SystemExit
        With status 2, in a script.

    Examples
    --------
    >>> from roundoff.script import usage_error
    >>> try:
    ...     usage_error("plot_x", "--config tiny: expected small or large")
    ... except SystemExit as end:
    ...     print(end)
    2
    """
    if _is_notebook():
        raise ArgumentError(message)
    print(f"{name}: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def _is_notebook() -> bool:
    return hasattr(builtins, "__IPYTHON__")  # the mark of IPython and Jupyter


def _boolean(text: str) -> bool:
    value = text.strip().lower()
    if value not in _TRUE | _FALSE:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false (1 or 0)")
    return value in _TRUE


def _type_of(default: Any) -> Any:
    if default is None or isinstance(default, (str, Path)):
        return str
    return _boolean if isinstance(default, bool) else type(default)


def _wanted(option: str, default: Any, allowed: Any) -> str:
    """What an option takes, in words; an error where that does not fit the type of its default."""
    is_number = isinstance(default, (int, float)) and not isinstance(default, bool)
    if is_number and isinstance(allowed, (int, float)):
        return f"at least {allowed}"
    is_pair = isinstance(allowed, tuple) and len(allowed) == 2
    is_pair = is_pair and all(isinstance(limit, (int, float)) for limit in allowed)
    if is_number and is_pair and allowed[0] <= allowed[1]:
        return f"{allowed[0]} to {allowed[1]}"
    texts = isinstance(allowed, Collection) and all(isinstance(text, str) for text in allowed)
    if isinstance(default, str) and texts and not isinstance(allowed, str):
        return f"one of {', '.join(allowed)}"
    raise ArgumentError(
        f"what --{option} takes does not fit its default {default!r}",
        got=allowed,
        expected="a least number or a pair of numbers for a number, a list for a string",
    )


def _reader(default: Any, allowed: Any, wanted: str) -> Callable[[str], Any]:
    """What reads a value and refuses one that is not allowed."""
    kind = _type_of(default)

    def read(text: str) -> Any:
        value = kind(text)
        if isinstance(value, str):
            fits = value in allowed
        else:
            least, most = allowed if isinstance(allowed, tuple) else (allowed, float("inf"))
            fits = least <= value <= most  # nan is nowhere
        if not fits and value != default:
            raise argparse.ArgumentTypeError(f"got {text}, expected {wanted}")
        return value

    read.__name__ = kind.__name__  # argparse names it where a value has another type
    return read


def _why_not_writable(folder: Path) -> str | None:
    """Why no file can be made in a folder, which need not exist yet; None where one can."""
    if "\0" in str(folder):
        return "a path has no NUL"
    place = folder.absolute()
    while not os.path.lexists(place):
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return f"{place}: {error.strerror}"
