"""What rounding can do to a LayerNorm, element by element, for the inputs at hand.

A row of n numbers x, added in chains of at most n additions, has the mean m, the variance v,
A = mean \\|x\\| and R² = mean x². With s = √(v + ε) its result is y = (x − m) / s, then
y scale + bias. u is the unit roundoff of the type that accumulates, w that of the result.

Mean: \\|δm\\| ≤ (n + 1) u A, in any order of the sum (see :mod:`roundoff.compare.bounds`). It moves
all of a row by δm / s, which is n u \\|m\\| / std where \\|m\\| is far above std: this is the
term that a tolerance for the product after a LayerNorm leaves out.

Variance, in two passes, Σ(x − m)² / n, or by updating (Welford; Chan and others in pieces):
\\|δv\\| is at most 2 (n + 4) u R √v + (2 (n + 4) u R)². A kernel of one pass, Σx² / n − m², is not
covered: where \\|m\\| / std is large, its difference of two large numbers may be negative.

The first order is in T. F. Chan, G. H. Golub, R. J. LeVeque, *Algorithms for computing the
sample variance: analysis and recommendations*, The American Statistician 37, 1983; for updating the
constant 2 is taken on top of theirs. Then with ρ = s / √(v + ε − \\|δv\\|) − 1 and eight roundings
for the square root, its inverse and the product,

    \\|δy\\| ≤ (ρ + 8u (1 + ρ)) \\|y\\| + (1 + ρ) (1 + 8u) (\\|δm\\| + 4u (\\|x\\| + \\|m\\|)) / s,

where the last term is for kernels that compute x / s − m / s. Two more roundings to the result's
type, of y and of y scale, and one of the sum follow.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from roundoff.arguments import check_number
from roundoff.errors import ArgumentError, DtypeError, ShapeError

from .pieces import typed_tensor
from .scaled import real_type

__all__ = ["layer_norm_bound"]


def layer_norm_bound(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    epsilon: float = 1e-5,
    dtype: Any = None,
    accumulate: Any = "float32",
) -> torch.Tensor:
    """Largest error that rounding explains in each element of a LayerNorm over the last axis.

    Unlike a fixed tolerance it counts the conditioning of each row, \\|mean\\| / std. Two results
    are within twice the bound of each other. For what comes after, such as ``Z = LN(X) @ W + b``
    with a tolerance t of the product (:func:`~roundoff.compare.tolerance`), each result keeps
    within ``E @ |W| + t * ((|LN(X)| + E) @ |W| + |b|)``, E being this bound.

    Parameters
    ----------
    x : tensor or array
        The input, of shape (..., n), as the kernel gets it; finite.
    scale, bias : tensor or array, optional
        Of shape (n,).
    epsilon : float
        What the kernel adds to the variance; 0 or more.
    dtype : any, optional
        Type of the result; by default that of *x*.
    accumulate : any
        Type in which the kernel computes mean and variance; float32 as a rule.

    Returns
    -------
    torch.Tensor
        Absolute bounds in float64, of the shape of *x*. Infinite where no number can be defended:
        rounding alone may make the variance zero or negative. Overflow is not covered.

    Raises
    ------
    ArgumentError
        *x* is no tensor or not finite, or *epsilon* is negative.
    DtypeError
        A type is not a floating one.
    ShapeError
        *x* has no last axis of at least 1, or *scale* or *bias* is not of its length.

    Examples
    --------
    >>> import torch
    >>> x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    >>> error = torch.nn.functional.layer_norm(x, (256,)).double()
    >>> error -= torch.nn.functional.layer_norm(x.double(), (256,))
    >>> bool((error.abs() <= layer_norm_bound(x)).all())
    True
    """
    check_number("epsilon", epsilon, 0, finite=False)
    given, info = _real(x, "x")
    if given.dim() == 0 or given.shape[-1] == 0:
        raise ShapeError("x", got=tuple(given.shape), expected="a last axis of at least 1")
    if not bool(given.isfinite().all()):
        raise ArgumentError("x", got="NaN or infinity", expected="finite numbers")
    result = info if dtype is None else real_type(dtype)
    u, w = real_type(accumulate).unit_roundoff, result.unit_roundoff
    n = given.shape[-1]
    size, shift = (
        _vector(value, name, n, given) for value, name in ((scale, "scale"), (bias, "bias"))
    )
    one = given.new_ones(())

    mean = given.mean(-1, keepdim=True)
    true = (given - mean).square().mean(-1, keepdim=True)
    magnitude = given.abs().mean(-1, keepdim=True)
    root = given.square().mean(-1, keepdim=True).sqrt()
    off_mean = (n + 1) * u * magnitude
    step = 2 * (n + 4) * u * root
    off_variance = step * true.sqrt() + step * step
    low = true + epsilon - off_variance
    s = (true + epsilon).sqrt()
    y = torch.where(s > 0, (given - mean) / s, 0.0)
    rho = s / low.clamp_min(0.0).sqrt() - 1
    moved = (off_mean + 4 * u * (given.abs() + mean.abs())) / s
    error = (rho + 8 * u * (1 + rho)) * y.abs() + (1 + rho) * (1 + 8 * u) * moved
    gain = one if size is None else size.abs()
    scaled = gain * (error + 2 * w * (y.abs() + error)) * (1 + w)
    exact = y if size is None else y * size
    exact = exact if shift is None else exact + shift
    bound = scaled + w * (exact.abs() + scaled) + result.tiny * result.eps
    return torch.where((low > 0) & bound.isfinite(), bound, math.inf)


def _real(value: Any, name: str) -> tuple[torch.Tensor, Any]:
    typed = typed_tensor(value, name)
    if not typed.info.is_float:
        raise DtypeError(f"{name} must be floating", got=typed.info.name)
    return typed.tensor.to(torch.float64), typed.info


def _vector(value: Any, name: str, n: int, like: torch.Tensor) -> torch.Tensor | None:
    if value is None:
        return None
    vector, _ = _real(value, name)
    if tuple(vector.shape) != (n,):
        raise ShapeError(name, got=tuple(vector.shape), expected=f"({n},)")
    return vector.to(like.device)
