"""Whether float32 products on CUDA may round to TF32: torch's switches read, set and put back.

Torch has two families of switches for one thing. The older ones are
``torch.backends.cuda.matmul.allow_tf32``, ``torch.backends.cudnn.allow_tf32`` and
``torch.set_float32_matmul_precision``. The newer ones are the attributes ``fp32_precision`` of
``torch.backends``, of ``torch.backends.cudnn`` (all that runs on CUDA), of
``torch.backends.cuda.matmul`` and of ``torch.backends.cudnn.conv``: one that is ``"none"`` takes
the value of the one above it. Torch computes by the newer ones, which the older ones set, too.
Where a program set a newer one, the older ones raise RuntimeError when they are read. So the newer
ones are read here, whichever the program uses. See
https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .arguments import check_flag

__all__ = ["switches", "torch_precision", "torch_tf32"]


def torch_tf32() -> bool:
    """Whether torch may use TF32 in float32 matrix products on CUDA.

    It is right for each of torch's switches, whichever was set, and never raises.

    Examples
    --------
    >>> from roundoff.precision import torch_precision, torch_tf32
    >>> with torch_precision(True):
    ...     torch_tf32()
    True
    """
    matmul: Any = torch.backends.cuda.matmul
    return bool(matmul.fp32_precision == "tf32")


def switches() -> dict[str, Any]:
    """What torch's switches of TF32 say.

    Returns
    -------
    dict
        ``allow_tf32`` and ``cudnn_allow_tf32``: whether matrix products, and convolutions, in
        float32 may use TF32 on CUDA. ``float32_matmul_precision``: what
        ``torch.get_float32_matmul_precision()`` gives, or None where it raises because the program
        set a newer switch, too.

    Examples
    --------
    >>> from roundoff.precision import switches
    >>> switches()["allow_tf32"]
    False
    """
    cudnn: Any = torch.backends.cudnn
    try:
        named: str | None = torch.get_float32_matmul_precision()
    except RuntimeError:
        named = None
    return {
        "allow_tf32": torch_tf32(),
        "cudnn_allow_tf32": bool(cudnn.conv.fp32_precision == "tf32"),
        "float32_matmul_precision": named,
    }


@contextlib.contextmanager
def torch_precision(tf32: bool) -> Iterator[None]:
    """Let torch use TF32 in float32 matrix products on CUDA, or not, within a block.

    At its end all switches of matrix products are what they were at its beginning, whichever of
    torch's switches the program and the block set. The switches are the process's: other threads
    see them change.

    Parameters
    ----------
    tf32 : bool
        Whether it may.

    Raises
    ------
    ArgumentError
        *tf32* is neither True nor False.

    Examples
    --------
    >>> import torch
    >>> from roundoff.timing import torch_precision
    >>> with torch_precision(True):
    ...     torch.backends.cuda.matmul.allow_tf32
    True
    >>> torch.backends.cuda.matmul.allow_tf32
    False
    """
    matmul: Any = torch.backends.cuda.matmul
    restore = _snapshot()
    if check_flag("tf32", tf32) != torch_tf32():
        # The older switch sets the newer one, too, so that both may be read within the block.
        matmul.allow_tf32 = tf32
    try:
        yield
    finally:
        restore()


def _snapshot() -> Callable[[], None]:
    """A function that puts the switches of matrix products back to what they are now."""
    backends: Any = torch.backends
    # On a processor oneDNN has a switch of its own, which set_float32_matmul_precision sets, too.
    # The one above it can only be read: torch sets its own upper one, backends, in its place.
    places = [
        (backends.cuda.matmul, [backends.cudnn, backends]),
        (backends.mkldnn.matmul, [backends]),
    ]
    values = [(switch, _own(switch, above)) for switch, above in places]

    def put_back() -> None:
        for switch, value in values:
            switch.fp32_precision = value

    try:
        named = torch.get_float32_matmul_precision()
    except RuntimeError:  # it does not answer while a newer switch says something else
        for switch, _ in values:
            switch.fp32_precision = "ieee"
        named = torch.get_float32_matmul_precision()
        put_back()

    def restore() -> None:
        torch.set_float32_matmul_precision(named)
        put_back()

    return restore


def _own(switch: Any, above: list[Any]) -> str:
    """The value of a switch itself: "none" where it takes that of the first of *above*.

    Torch tells the value that counts. Where both have the same one, the upper is changed for a
    moment, to see whether the lower one follows.
    """
    value = str(switch.fp32_precision)
    if not above or value == "none" or above[0].fp32_precision != value:
        return value
    upper, kept = above[0], _own(above[0], above[1:])
    try:
        upper.fp32_precision = "tf32" if value == "ieee" else "ieee"
    except RuntimeError:  # torch.backends.disable_global_flags() lets nobody set it
        return value
    own = value if switch.fp32_precision == value else "none"
    upper.fp32_precision = kept
    return own
