"""What the tests of the backend share: a function compiled by it, and two close results."""

from __future__ import annotations

import functools
from typing import Any

import torch

import roundoff.backend as rb
from roundoff.fusion import OptimizationOptions


def through(
    f: Any,
    patterns: str | None = "default+onnxruntime",
    dynamic: bool | None = False,
    fullgraph: bool = True,
    **more: Any,
) -> Any:
    options = more.pop("options", None) or OptimizationOptions(patterns)
    backend = functools.partial(rb.onnx_custom_backend, options=options, **more)
    return torch.compile(f, backend=backend, fullgraph=fullgraph, dynamic=dynamic)


def compiled(f: Any, *args: Any, **more: Any) -> tuple[Any, list[rb.Compiled]]:
    """The same, and the graphs that it takes, with their first inputs."""
    storage: dict[str, Any] = {"instance": []}
    return through(f, *args, storage=storage, **more), storage["instance"]


def close(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in a tree of results or arguments."""
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]
