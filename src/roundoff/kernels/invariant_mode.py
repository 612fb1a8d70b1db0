"""torch's operators, each result of which is independent of the rest of the batch."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import Counter
from functools import cache
from typing import Any, TypeVar, overload

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ArgumentError, UnsupportedError
from .invariant_matmul import settle_mkl
from .invariant_model import put_in_place
from .invariant_operators import HANDLERS, MAY_LACK, Handler, concerns, lacks, register, sdpa

__all__ = ["Invariant", "VariantOperatorError", "invariant"]

_Module = TypeVar("_Module", bound=torch.nn.Module)


class VariantOperatorError(UnsupportedError):
    """An operator was called whose result for a row may depend on the rest of the batch.

    Examples
    --------
    >>> import torch
    >>> import roundoff
    >>> try:
    ...     with roundoff.invariant():
    ...         torch.nn.functional.conv1d(torch.ones(1, 1, 3), torch.ones(1, 1, 2))
    ... except NotImplementedError as error:
    ...     print(error.got)
    aten::convolution
    """


@overload
def invariant(model: None = None) -> Invariant: ...
@overload
def invariant(model: _Module) -> _Module: ...
def invariant(model: Any = None) -> Any:
    """Have torch compute each row with the same bits whatever else is in the batch.

    ``roundoff.invariant(model)`` changes a model, in place and for good, and gives it back: its
    products, norms and attention are ours from then on, in eager mode, under
    :func:`torch.compile`, and with gradients. A forward pass has the bits that it has without
    gradients; the backward pass takes torch's formulas at the same values. On a GPU inductor rounds
    a product and an addition together for some shapes and apart for others. The call sets
    ``torch._inductor.config.emulate_precision_casts``, for the whole process, so that they are
    rounded apart. In float32 a compiled model has the property, and other bits than the uncompiled
    one: inductor has a cosine and a sine of its own for the rotary embedding (logits of a Qwen3
    differ by up to 3e-6). A trainer and a sampler have to be compiled both, or neither.
    What no kernel of ours replaces, such as the experts of a mixture, runs within
    ``with roundoff.invariant()``, which breaks a compiled graph; ``model.invariant_places`` names
    what was done to which module. Code around the model is not changed: a loss, a sampling of
    tokens.

    ``with roundoff.invariant():`` is for functions, which have no module to change: it takes each
    operator when it is called, in Python, which costs tens of microseconds an operator. A model is
    right within it, and slow: on an H200 ``generate`` of SmolLM2-135M with a batch of 3 writes 29
    tokens a second, where torch writes 109 and ``roundoff.invariant(model)`` 123 (with a batch of
    8: 76, 239 and 220 to 300). So the first call of a module with modules in it warns.
    A context manager, for the thread that enters it; it may be nested. Within it,

    - products (``mm``, ``addmm``, ``bmm``, ``mv``, ``linear``, and what torch makes of them) go to
      :func:`roundoff.kernels.matmul`; so do the experts of a mixture (``grouped_mm``), one after
      another, which a CUDA graph cannot record,
    - ``scaled_dot_product_attention`` goes to :func:`roundoff.kernels.attention`, with masks whose
      rows are a stretch of the keys. transformers reaches it as ``"sdpa"``, its
      default, or with ``model.set_attn_implementation("roundoff")``, which computes groups of heads
      together. ``"eager"`` is made of products and a softmax over all columns: it is independent
      of the batch, not of padding or of the length of a cache,
    - sums and means of rows, softmax and a few functions whose bits depend on an element's place in
      the tensor (on a CPU silu, sigmoid, rsqrt and others) are replaced where torch's lack the
      property.

    What else a decoder does, torch computes; the tests hold it to the property. Operators that are
    known to lack it are refused: convolutions, recurrent layers, additions by index on CUDA and the
    like. Float32 products take no TF32, whatever torch is told. A function made by
    :func:`torch.compile` runs uncompiled within; the other way round, our two functions are opaque
    operators of a compiled graph.

    On a CPU the property holds for one number of threads. It does not hold, and nothing is refused,
    where the batch is the columns of a product (``weight @ x.T``), for ``torch.linalg``, and on a
    CPU for a sum, ``nansum``, ``var`` or ``std`` of a batch of one over several axes.
    ``roundoff.invariant(model)`` reads the names in each module's ``forward``:
    what a method or function computes that ``forward`` calls, it does not see.

    Parameters
    ----------
    model : torch.nn.Module, optional
        The model to change, or a part of one. Weights may be loaded, moved and cast later.

    Returns
    -------
    Invariant or torch.nn.Module
        The context manager, whose ``replaced`` counts the calls of operators, by name; of a model,
        the model.

    Raises
    ------
    ArgumentError
        Something that is no module.
    VariantOperatorError
        Within: an operator that lacks the property. Of a model: modules that do.
    UnsupportedError
        Entered in code that is being compiled; within: an attention with dropout, with a bias, or
        with a mask that has gaps.

    References
    ----------
    Batch-invariant kernels for torch by others: Thinking Machines Lab,
    https://github.com/thinking-machines-lab/batch_invariant_ops

    Examples
    --------
    >>> import torch
    >>> import roundoff
    >>> generator = torch.Generator().manual_seed(0)
    >>> x, weight = torch.randn(50, 64, generator=generator), torch.ones(3, 64)
    >>> with roundoff.invariant() as within:
    ...     same = torch.equal((x @ weight.T)[7:8], x[7:8] @ weight.T)
    >>> same, dict(within.replaced)
    (True, {'aten::mm': 2})
    >>> layer = roundoff.invariant(torch.nn.Linear(64, 3))
    >>> torch.equal(layer(x)[7:8], layer(x[7:8]))
    True
    """
    if model is None:
        return Invariant()
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError("model", got=repr(model)[:40], expected="a torch.nn.Module")
    settle_mkl()
    context = Invariant()
    context._advised = True  # it was followed
    places = put_in_place(model, context)
    if places.lacking:
        raise VariantOperatorError(
            "rows of these modules may depend on the rest of the batch",
            got=", ".join(places.lacking[:8]),
            expected="modules with the same bits in every batch",
            hint="invariant(model.part) changes a part without them",
        )
    model.invariant_places = places  # type: ignore[assignment]
    return model


class Invariant:
    """What :func:`roundoff.kernels.invariant` gives.

    Attributes
    ----------
    replaced : counts of str
        Operators that were computed by other means, and how often.

    Examples
    --------
    >>> import torch
    >>> import roundoff
    >>> with roundoff.invariant() as within:
    ...     made = torch.ones(1, 3) @ torch.ones(3, 2)
    >>> dict(within.replaced)
    {'aten::mm': 1}
    """

    def __init__(self) -> None:
        self.replaced: Counter[str] = Counter()
        self._local = threading.local()  # one object may be entered by several threads
        self._advised = False

    def __enter__(self) -> Invariant:
        if torch.compiler.is_compiling():
            raise UnsupportedError(
                "torch.compile sees through what invariant() replaces",
                hint="compile what calls roundoff.kernels.matmul and attention themselves",
            )
        register()
        settle_mkl()
        stack = contextlib.ExitStack()
        stack.enter_context(_Functions(self))
        stack.enter_context(_Operators(self))
        if not self._advised:
            stack.callback(self._watch().remove)
        self._entered().append(stack)
        return self

    def __exit__(self, *_: object) -> None:
        self._entered().pop().close()

    def _watch(self) -> Any:
        """Warn when this thread calls a model for the first time, which has a quicker way."""
        here = threading.get_ident()

        def look(module: torch.nn.Module, args: Any) -> None:
            if threading.get_ident() != here or next(module.children(), None) is None:
                return
            handle.remove()  # hooks of all modules cost each of them microseconds
            if self._advised or any("_roundoff" in vars(m) for m in module.modules()):
                return
            self._advised = True
            warnings.warn(
                f"{type(module).__name__} runs operator by operator within roundoff.invariant(): "
                "right, and at about a quarter of torch's speed on a GPU; "
                "roundoff.invariant(model) has the same property at the speed of torch",
                stacklevel=2,
            )

        handle = torch.nn.modules.module.register_module_forward_pre_hook(look)
        return handle

    def _entered(self) -> list[contextlib.ExitStack]:
        stacks: list[contextlib.ExitStack] = vars(self._local).setdefault("stacks", [])
        return stacks


class _Functions(TorchFunctionMode):
    """Attention, before torch chooses one of its kernels for it."""

    def __init__(self, owner: Invariant) -> None:
        super().__init__()
        self.owner = owner

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.owner.replaced["scaled_dot_product_attention"] += 1
            return sdpa(*args, **kwargs)
        if func is torch.nn.functional.linear and args:  # of others torch rounds before the bias
            args = (args[0].contiguous(), *args[1:])
        name = getattr(func, "__name__", "")
        # Of one sequence they round before the bias in 16 bits; multi_dot chooses by the sizes.
        if name == "linalg_multi_dot" or (name in _RECURRENT and args[0].dtype.itemsize == 2):
            raise _refusal(name)
        return func(*args, **kwargs)


_RECURRENT = ("rnn_tanh", "rnn_relu", "gru", "lstm")


def _refusal(name: str) -> VariantOperatorError:
    return VariantOperatorError(
        "a row of its result may depend on the rest of the batch",
        got=name,
        expected="an operator with the same bits in every batch",
        hint="compute it outside of roundoff.invariant()",
    )


@cache
def _look_up(func: Any) -> tuple[str, Handler | None] | None:
    """The name and the handler of one of torch's operators; None where it is always torch's."""
    packet = getattr(func, "overloadpacket", None)  # an operator of functions has none
    name = "" if packet is None else packet._qualified_op_name
    handler = HANDLERS.get(name) or HANDLERS.get(name.removesuffix("_"))
    return None if handler is None and name not in MAY_LACK else (name, handler)


class _Operators(TorchDispatchMode):
    """Everything else, where no composite operator is left."""

    def __init__(self, owner: Invariant) -> None:
        super().__init__()
        self.owner = owner

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        known = _look_up(func)
        if known is None:
            return func(*args, **kwargs)
        name, handler = known
        in_place = name not in HANDLERS  # the handler is that of the operator that makes a tensor
        if handler is not None and not in_place and kwargs.get("out") is not None:
            out = kwargs.pop("out")
            with self:
                return out.copy_(func.overloadpacket(*args, **kwargs))
        made = None
        if concerns(args):
            if handler is not None:
                made = handler(func, *args, **kwargs)
                if in_place and isinstance(made, torch.Tensor):
                    made = args[0].copy_(made)
            elif lacks(name, args, kwargs):
                made = NotImplemented
            if isinstance(made, (torch.Tensor, tuple)):
                self.owner.replaced[name] += 1
                return made
            if made is NotImplemented:
                raise _refusal(name)
        return func(*args, **kwargs)
