"""Whether weights are what they were when something was computed from them."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

__all__ = ["Unwritten"]


class Unwritten:
    """Says whether tensors are those that they were, and none was written through its counter.

    The tensors are kept: their memory cannot be reused for others meanwhile.

    Examples
    --------
    >>> x, y = torch.ones(2), torch.ones(3)
    >>> known = Unwritten([x, y])
    >>> known.holds([x, y])
    True
    >>> _ = y.add_(1)
    >>> known.holds([x, y])
    False
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._counted = [t for t in self._tensors if not t.is_inference()]  # those have a counter
        self._versions = list(map(_version, self._counted))

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the tensors, unwritten."""
        same = all(map(operator.is_, tensors, self._tensors))
        return same and list(map(_version, self._counted)) == self._versions


_version = operator.attrgetter("_version")
