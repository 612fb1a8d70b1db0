"""Whether weights are what they were when something was computed from them."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Unwritten"]


class _Saved(torch.autograd.Function):
    """Tensors that autograd keeps, and looks in C++ whether they were written since."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return one.clone()


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
        counted = [t for t in self._tensors if not t.is_inference()]  # those have no counter
        self._counted, self._versions = counted, list(map(_version, counted))
        self._saved: Any = None  # alive, else autograd makes its node anew at each look
        # Refused where hooks would pack what is saved: they look at no counter.
        hooks = torch.autograd.graph.disable_saved_tensors_hooks("weights are no activations")
        graph = torch.enable_grad()
        with contextlib.suppress(RuntimeError), hooks, torch.inference_mode(False), graph:
            self._saved = _Saved.apply(torch.ones((), requires_grad=True), counted)
            self._node = self._saved.grad_fn

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the tensors, unwritten."""
        if not all(map(operator.is_, tensors, self._tensors)):
            return False
        if self._saved is None:
            return list(map(_version, self._counted)) == self._versions
        try:
            _ = self._node.saved_tensors  # a third of the time of asking each
        except RuntimeError:
            return False
        return True


_version = operator.attrgetter("_version")
