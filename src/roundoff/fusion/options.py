"""What a caller may choose about fusion, and the tiers by name."""

from __future__ import annotations

import dataclasses

from roundoff.arguments import check_choice, check_flag, check_number
from roundoff.errors import ArgumentError

#: Every tier includes the ones before it.
TIERS = ("default", "onnxruntime", "experimental")


@dataclasses.dataclass(frozen=True)
class OptimizationOptions:
    """Which rules rewrite the exported graph.

    Attributes
    ----------
    patterns : str or None
        ``"default"``, ``"default+onnxruntime"`` or ``"default+onnxruntime+experimental"``; None
        leaves the converted graph as it is. The last puts kernels in Triton between partitions that
        ONNX Runtime runs, on CUDA.
    constant_folding : bool
        Whether values that depend on constants alone are precomputed and stored.
    verbose : int
        1 prints a line a rewrite.
    processor : {"CPU", "CUDA", None}
        Where the model is to run: a rule emits what has a kernel there. None follows the inputs.
    packed : float
        Memory that packed weights may take on CUDA beside the weights, as a share of theirs: the
        narrowest products are packed first, all that are as wide or none. A session takes some
        100 MiB more, whatever its model. 1: all of them, which the kernels of the last tier gain
        by.
    interpret : bool
        On the CPU, also use the experimental tier's Triton kernels, in Triton's interpreter: slow,
        and right.

    Raises
    ------
    ArgumentError
        For an unknown tier or processor, a share below zero, or what is no flag.

    Examples
    --------
    >>> OptimizationOptions("default+onnxruntime").tiers
    ('default', 'onnxruntime')
    """

    patterns: str | None = "default+onnxruntime"
    constant_folding: bool = True
    verbose: int = 0
    processor: str | None = None
    interpret: bool = False
    packed: float = 0.2

    def __post_init__(self) -> None:
        known = ["+".join(TIERS[: i + 1]) for i in range(len(TIERS))]
        check_choice("patterns", self.patterns, (None, *known))
        check_choice("processor", self.processor, (None, "CPU", "CUDA"))
        check_number("packed", self.packed, 0, finite=False)
        check_flag("constant_folding", self.constant_folding)
        check_flag("interpret", self.interpret)
        if not isinstance(self.verbose, int):
            raise ArgumentError("verbose", got=repr(self.verbose), expected="0, 1 or 2")

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers asked for, in order."""
        return tuple(self.patterns.split("+")) if self.patterns else ()
