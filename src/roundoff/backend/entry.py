"""The entry point: what ``torch.compile(model, backend=...)`` calls."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch._dynamo.backends.common import aot_autograd

from roundoff.arguments import check_choice, check_flag, check_whole
from roundoff.errors import ArgumentError, DtypeError, RoundoffError, UnsupportedError
from roundoff.fusion import OptimizationOptions
from roundoff.ort import newest_opset

from .capture import as_constants, fixed_numbers, guard_offsets, keep_composites, tensors_of
from .compiled import Compiled, CompileSettings
from .operators import WRITTEN_IN_OTHERS


def onnx_custom_backend(
    graph_module: torch.fx.GraphModule,
    args: Sequence[Any],
    *,
    target_opset: int | None = None,
    verbose: int = 0,
    options: OptimizationOptions | None = None,
    optimize: bool = True,
    storage: dict[str, Any] | None = None,
    dump_prefix: str | os.PathLike[str] | None = None,
    cuda_graph: bool = False,
    fallback: bool = True,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a dynamo graph: convert it to ONNX, rewrite it by rules, run it in ONNX Runtime.

    Parameters
    ----------
    graph_module, args
        As dynamo hands them to a backend.
    target_opset : int, optional
        Opset of ONNX's own operators in the model: 18, or a later one that this build of ONNX
        Runtime reads. What has no form or no kernel in that opset stays with torch. By default 20,
        and 24, which has TensorScatter, on CUDA for a graph that writes one place of a static
        cache.
    verbose : int
        0 prints nothing; 1 what was converted, fused, left to torch and written, when a graph is
        compiled; 2 also each rewrite.
    options : OptimizationOptions, optional
        Which tiers rewrite the graph; ``default+onnxruntime`` by default.
    optimize : bool
        False runs the graph as it is converted, and no rule on it, whatever *options* say.
    storage : dict, optional
        Filled: ``storage["instance"]`` is a list of :class:`roundoff.backend.Compiled`, one for
        each graph, with what was exported, fused and run, the inputs of the
        first call, and their result in float64. ``storage["instance"][0]["onnx"]`` is the model
        that runs.
    dump_prefix : path, optional
        Each graph is written when it is compiled: as exported, to
        ``<dump_prefix>_<n>.exported.onnx``, and beside it as optimised, with the same inputs and
        outputs, to ``<dump_prefix>_<n>.onnx``. *n* counts from 0; files that are there are left,
        and counted. Weights are inputs and are not written. Operators of domain ``roundoff`` are
        those that torch or a kernel of ours computes.
    cuda_graph : bool
        On CUDA, record the run as a CUDA graph and replay it. Outputs are then overwritten by
        the next call: copy what must last. Inputs are copied in. A graph is recorded when a set
        of sizes comes a second time; the last eight are kept. A run that waits for the processor,
        or lets it compute, is not recorded: a warning and ``Compiled.no_cuda_graph`` say why.
    fallback : bool
        Whether an operator without an ONNX form, or without a kernel in ONNX Runtime, stays with
        torch, between partitions that ONNX Runtime runs; ``Compiled.by_torch`` says which and why.
        So do all operators on float64, on complex numbers and, on a CPU, on float16 and bfloat16.
        False raises instead.
    mode : {"default", "reduce-overhead"}, optional
        As ``torch.compile(model, backend=..., mode=...)`` passes it. "reduce-overhead" records
        CUDA graphs on CUDA and copies their outputs, which *cuda_graph* does not.

    Returns
    -------
    callable
        Takes and returns what the graph does. Outputs are new memory at each call, unless
        *cuda_graph*, and have no gaps in it.

    Raises
    ------
    UnsupportedError
        Training, inputs on several devices, another device than CPU or CUDA, or, without
        *fallback*, an operator without an ONNX form. Under ``torch.compile`` it is raised by the
        first call.
    DtypeError
        An input has a type that ONNX Runtime lacks (float8).
    ArgumentError
        An argument has another type or value than those above; *dump_prefix* cannot be written.
        ``torch.compile`` hands its own ``options={...}`` over as *options*, which is no
        ``OptimizationOptions``: arguments of this function are bound by ``functools.partial``.

    Notes
    -----
    An input that the graph writes to one place of (a static cache, by ``index_copy_``) is written
    where it lies; others are computed anew and copied.
    Weights stay where they are: changed in place, the next call sees it. What is precomputed
    (packed weights, tables) is computed again when the version counter of a weight moves.
    Inference tensors have no counter, and writes through ``.data`` do not move it: call
    :func:`roundoff.backend.reset`.
    With ``dynamic=True`` one conversion serves all sizes that dynamo lets into the graph: it makes
    another for a size of zero or one, and for another value of a float that a module holds or sizes
    decide.
    Random numbers are eager's for the same seed, but for a tensor that does not lie in the order of
    its axes.
    ``layer_norm`` and ``group_norm`` of numbers whose squares add up to more than float32 holds
    (768 numbers of 1e18) are wrong in torch and here: on a processor torch returns the bias or
    NaN, ONNX Runtime the bias.
    A zero may have the other sign than eager's where it is a maximum, a minimum or a bound
    (``clamp``, ``relu6``), which ONNX leaves open, and where it is a sum of zeros.
    So may ``gelu`` of -0, which is 0 or -0 in torch, as the size of the tensor decides.
    On a processor float16 and bfloat16 stay with torch. ONNX Runtime computes float16 in float32
    there, and what overflows between two operators would stay finite. Products in float32 are
    faster: convert such a model.
    ``silu`` of numbers below -16 has few digits on a processor, and is 0 below -18, where torch has
    up to 3e-7. Causal attention may have zeros where a key is NaN, and torch has NaN.
    On CUDA a subnormal result of ``sigmoid`` may be 0.
    A program that draws random numbers is not recorded as a CUDA graph: the runs before a recording
    would draw, too.
    TF32 follows torch's switches at each call, whichever of them is set.

    Examples
    --------
    Options are bound with a partial; the compiled graph is in the storage.

    >>> from functools import partial
    >>> from roundoff.backend import OptimizationOptions
    >>> storage = {}
    >>> backend = partial(
    ...     onnx_custom_backend, options=OptimizationOptions("default"), storage=storage
    ... )
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU()).eval()
    >>> with torch.no_grad():
    ...     y = torch.compile(model, backend=backend, fullgraph=True)(torch.ones(1, 3))
    >>> (graph,) = storage["instance"]
    >>> [node.op_type for node in graph.model.graph.node]
    ['Gemm', 'Relu']
    """
    try:
        settings = _settings(
            options,
            storage,
            cuda_graph,
            fallback,
            mode,
            target_opset,
            verbose,
            optimize,
            dump_prefix,
        )
        if not isinstance(graph_module, torch.fx.GraphModule):
            raise ArgumentError(
                "graph_module",
                got=type(graph_module).__name__,
                expected="a torch.fx.GraphModule",
                hint="torch.compile(model, backend=onnx_custom_backend)",
            )
        if not isinstance(args, (list, tuple)):
            raise ArgumentError("args", got=type(args).__name__, expected="a list of tensors")
        _refuse(args)
        fixed = fixed_numbers(graph_module)
        kept = keep_composites(graph_module, fixed)
        tensors = tensors_of(graph_module)
        places = [n for n in graph_module.graph.nodes if n.op == "placeholder"]

        def compiler(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            guard_offsets(tensors, gm)
            own = gm.graph.find_nodes(op="placeholder")
            names = [str(n.target) for n in (places if len(own) == len(places) else own)]
            context = torch._guards.TracingContext.try_get()
            metadata = getattr(context, "fw_metadata", None)
            weights = getattr(metadata, "static_input_indices", None) or ()
            return Compiled(gm, examples, names, weights, settings)

        with as_constants(fixed):
            return aot_autograd(
                fw_compiler=compiler,
                bw_compiler=_no_gradients,
                decompositions=get_decompositions(WRITTEN_IN_OTHERS),
                keep_inference_input_mutations=True,
            )(kept, args)
    except RoundoffError as e:
        if torch._guards.TracingContext.try_get() is None:
            raise
        # Dynamo would wrap it: raised from the compiled function it reaches the caller as it is.
        return _refusing(e)


def _refusing(error: RoundoffError) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise error

    return refuse


def _no_gradients(*_: Any) -> Any:
    raise UnsupportedError(
        "gradients are switched on within the graph, and an input or a parameter requires them",
        hint="leave out torch.enable_grad(), or detach() what it computes with",
    )


def _settings(
    options: Any,
    storage: Any,
    cuda_graph: Any,
    fallback: Any,
    mode: Any,
    target_opset: Any,
    verbose: Any,
    optimize: Any,
    dump_prefix: Any,
) -> CompileSettings:
    """What was asked for, where each argument is what it may be."""
    check_flag("optimize", optimize)
    check_whole("verbose", int(verbose) if isinstance(verbose, bool) else verbose, least=0)
    if target_opset is not None:
        _check_opset(target_opset)
    check_flag("cuda_graph", cuda_graph)
    check_flag("fallback", fallback)
    check_choice("mode", mode, (None, "default", "reduce-overhead"))
    if options is None:
        options = OptimizationOptions()
    if not isinstance(options, OptimizationOptions):
        raise ArgumentError(
            "options",
            got=repr(options),
            expected="an OptimizationOptions",
            hint="functools.partial(onnx_custom_backend, ...) binds arguments of the backend",
        )
    if storage is not None and not isinstance(storage, dict):
        raise ArgumentError("storage", got=repr(storage), expected="a dict, which is filled")
    if not optimize:
        options = dataclasses.replace(options, patterns=None)
    copied = mode == "reduce-overhead" and not cuda_graph
    return CompileSettings(
        options=options,
        storage=storage,
        cuda_graph=cuda_graph or copied,
        copy_outputs=copied,
        fallback=fallback,
        opset=target_opset,
        verbose=int(verbose),
        dump_prefix=None if dump_prefix is None else _prefix(dump_prefix),
    )


#: The first opset in which the operators that are written have the form in which they are written:
#: axes as inputs, BitwiseAnd.
_OLDEST_OPSET = 18


def _check_opset(opset: Any) -> None:
    """Refuse what is no opset, or none in which a graph can be written and run."""
    check_whole("target_opset", opset)
    if not _OLDEST_OPSET <= opset <= newest_opset():
        raise ArgumentError(
            "target_opset",
            got=str(opset),
            expected=f"one from {_OLDEST_OPSET} to {newest_opset()}",
            hint="leave it out: the backend chooses one",
        )


def _prefix(path: Any) -> Path:
    """How the names of files begin, in a folder that is there."""
    if isinstance(path, (str, os.PathLike)) and isinstance(os.fspath(path), str):
        prefix = Path(path)
        if prefix.name and "\0" not in prefix.name and prefix.parent.is_dir():
            return prefix
    raise ArgumentError("dump_prefix", got=repr(path), expected="a path whose folder is there")


def _refuse(args: Sequence[Any]) -> None:
    """Refuse what cannot be compiled, before anything is."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise UnsupportedError(
            "training: an input or a parameter requires grad and gradients are on",
            hint="call the compiled model under torch.no_grad() or torch.inference_mode()",
        )
    devices = {t.device for t in tensors if t.dim() or t.device.type != "cpu"}
    if len(devices) > 1:
        raise UnsupportedError(
            "inputs and weights on several devices",
            got=", ".join(sorted(map(str, devices))),
            expected="one device",
            hint="move them, or break the graph where the device changes",
        )
    other = next((d for d in devices if d.type not in ("cpu", "cuda")), None)
    if other is not None:
        raise UnsupportedError("device", got=str(other), expected="cpu or cuda")
    for t in tensors:
        if "float8" in str(t.dtype) or t.is_sparse or t.is_quantized:
            raise DtypeError(
                "an input that ONNX Runtime does not take",
                got=f"{str(t.dtype).removeprefix('torch.')}, {t.layout}",
                expected="dense numbers or bool",
            )
