"""Any pytree of tensors in one line (:func:`string_type`), and what it is made of."""

from __future__ import annotations

from .line import string_type
from .tensors import (
    TypedTensor,
    as_tensor,
    from_numpy,
    is_text,
    lacking,
    no_bottomless,
    parts,
    tree_leaves,
)

__all__ = [
    "TypedTensor",
    "as_tensor",
    "from_numpy",
    "is_text",
    "lacking",
    "no_bottomless",
    "parts",
    "string_type",
    "tree_leaves",
]
