"""The entry point: what ``torch.compile(model, backend=...)`` calls."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
from torch._dynamo.backends.common import aot_autograd

from roundoff.arguments import check_choice, check_flag, check_providers, check_whole
from roundoff.errors import ArgumentError, DtypeError, RoundoffError, UnsupportedError
from roundoff.fusion import OptimizationOptions

from .capture import (
    as_constants,
    fixed_numbers,
    is_number,
    keep_composites,
)
from .compiled import ByNumbers, Compiled, readable
from .variant import CompileSettings

__all__ = ["onnx_custom_backend"]


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
    providers: Sequence[Any] | None = None,
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
        ONNX opset, 18 or later. From 24 on one place of a static cache is written by
        `TensorScatter <https://onnx.ai/onnx/operators/onnx__TensorScatter.html>`_: by default 24
        on CUDA for a graph that does so, else 20.
    verbose : int
        1 prints a line a graph, 2 also a line a rewrite.
    options : OptimizationOptions, optional
        Which tiers rewrite the graph; ``default+onnxruntime`` by default.
    optimize : bool
        False runs the graph as converted.
    storage : dict, optional
        Filled: ``storage["instance"]`` is a list of :class:`roundoff.backend.Compiled`, one for
        each graph, with what was exported, fused and run, the inputs of the
        first call, and their result in float64.
    dump_prefix : path, optional
        Writes each model to ``<dump_prefix>_<n>.onnx``.
    providers : sequence, optional
        Execution providers; by default CUDA where the inputs are on a GPU, else CPU. In a CUDA
        graph a decode step of few sequences in float16 has unfused attention by default:
        ``[("CUDAExecutionProvider", {"sdpa_kernel": "8"})]`` asks for cuDNN's.
    cuda_graph : bool
        On CUDA, record the run as a CUDA graph and replay it. Outputs are then overwritten by
        the next call: copy what must last. Inputs are copied in. A graph is recorded when a set
        of sizes comes a second time; the last eight are kept. A run that waits for the processor,
        or lets it compute, is not recorded: a warning and ``Compiled.no_cuda_graph`` say why.
    fallback : bool
        Whether an operator without an ONNX form, or without a kernel in ONNX Runtime, stays with
        torch, between partitions that ONNX Runtime runs; ``Compiled.by_torch`` says which and why.
        False raises instead.
    mode : {"default", "reduce-overhead"}, optional
        As ``torch.compile(model, backend=..., mode=...)`` passes it. "reduce-overhead" records
        CUDA graphs on CUDA and copies their outputs, which *cuda_graph* does not.

    Returns
    -------
    callable
        Takes and returns what the graph does. Outputs are new memory at each call, unless
        *cuda_graph*.

    Raises
    ------
    UnsupportedError
        Training, inputs on several devices, another device than CPU or CUDA, or, without
        *fallback*, an operator without an ONNX form. Under ``torch.compile`` it is raised by the
        first call.
    DtypeError
        An input has a type that ONNX Runtime lacks (float8; complex without *fallback*).
    ArgumentError
        An argument has another type or value than those above. ``torch.compile`` hands its own
        ``options={...}`` over as *options*, which is no ``OptimizationOptions``: arguments of
        this function are bound by ``functools.partial``.

    Notes
    -----
    An input that the graph writes to one place of (a static cache, by ``index_copy_``) is written
    where it lies; others are computed anew and copied.
    Weights stay where they are: changed in place, the next call sees it. What is precomputed
    (packed weights, tables) is computed again when the version counter of a weight moves.
    Inference tensors have no counter, and writes through ``.data`` do not move it: call
    :func:`roundoff.backend.reset`.
    With ``dynamic=True`` one conversion serves all sizes that dynamo lets into the graph: it makes
    another for a size of zero or one.
    ``layer_norm`` and ``group_norm`` of numbers whose squares add up to more than float32 holds
    (768 numbers of 1e18) are wrong in torch and here: on a processor torch returns the bias or
    NaN, ONNX Runtime the bias.
    A zero may have the other sign than eager's where it is a maximum, a minimum or a bound
    (``clamp``, ``relu6``), which ONNX leaves open, and where it is a sum of zeros.
    A program that draws random numbers is not recorded as a CUDA graph: the runs before a recording
    would draw, too.
    TF32 follows ``torch.backends.cuda.matmul.allow_tf32``, call by call.

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
            target_opset=target_opset,
            verbose=verbose,
            options=options,
            optimize=optimize,
            storage=storage,
            dump_prefix=dump_prefix,
            providers=providers,
            cuda_graph=cuda_graph,
            fallback=fallback,
            mode=mode,
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
        _refuse(args, fallback)
        _refuse_gradients(graph_module, args)
        _refuse_interpreter(args, settings.options)
        fixed = fixed_numbers(graph_module)
        kept = keep_composites(graph_module, fixed)
        places = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
        known = {i: fixed[p] for i, p in enumerate(places) if p in fixed}

        def compiler(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            own = gm.graph.find_nodes(op="placeholder")
            same = len(own) == len(places)
            names = readable([str(n.target) for n in (places if same else own)])
            numbers = [i for i, p in enumerate(places) if same and is_number(p) and i not in known]
            context = torch._guards.TracingContext.try_get()
            metadata = getattr(context, "fw_metadata", None)
            static = set(getattr(metadata, "static_input_indices", None) or ())
            weights = [i in static for i in range(len(own))]
            make = functools.partial(Compiled, gm, examples, names, weights, settings)
            constants = known if same else {}
            return ByNumbers(numbers, constants, make) if numbers else make(constants)

        with as_constants(fixed):
            return aot_autograd(fw_compiler=compiler, keep_inference_input_mutations=True)(
                kept, args
            )
    except RoundoffError as e:
        if torch._guards.TracingContext.try_get() is None:
            raise
        # Dynamo would wrap it: raised from the compiled function it reaches the caller as it is.
        return _refusing(e)


def _refusing(error: RoundoffError) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise error

    return refuse


def _settings(
    *,
    target_opset: Any,
    verbose: Any,
    options: Any,
    optimize: Any,
    storage: Any,
    dump_prefix: Any,
    providers: Any,
    mode: Any,
    cuda_graph: Any,
    **flags: Any,
) -> CompileSettings:
    """What was asked for, where each argument is what it may be."""
    for name, flag in (flags | {"optimize": optimize, "cuda_graph": cuda_graph}).items():
        check_flag(name, flag)
    check_choice("mode", mode, (None, "default", "reduce-overhead"))
    check_whole("verbose", verbose, least=0)
    if target_opset is not None:
        check_whole("target_opset", target_opset, least=18, most=onnx.defs.onnx_opset_version())
    if options is None:
        options = OptimizationOptions(verbose=max(verbose - 1, 0))
    if not isinstance(options, OptimizationOptions):
        raise ArgumentError(
            "options",
            got=repr(options),
            expected="an OptimizationOptions",
            hint="functools.partial(onnx_custom_backend, ...) binds arguments of the backend",
        )
    if storage is not None and not isinstance(storage, dict):
        raise ArgumentError("storage", got=repr(storage), expected="a dict, which is filled")
    if dump_prefix is not None:
        dump_prefix = _prefix(dump_prefix)
    copied = mode == "reduce-overhead" and not cuda_graph
    return CompileSettings(
        opset=target_opset,
        verbose=verbose,
        options=options if optimize else OptimizationOptions(None),
        storage=storage,
        dump_prefix=dump_prefix,
        providers=None if providers is None else list(check_providers(providers)),
        cuda_graph=cuda_graph or copied,
        copy_outputs=copied,
        **flags,
    )


def _prefix(path: Any) -> Path:
    """Where models are written, in a folder that is there."""
    if isinstance(path, (str, os.PathLike)):
        prefix = Path(path)
        if prefix.name and "\0" not in prefix.name and prefix.parent.is_dir():
            return prefix
    raise ArgumentError("dump_prefix", got=repr(path), expected="a path whose folder exists")


def _refuse_interpreter(args: Sequence[Any], options: OptimizationOptions) -> None:
    """Beside a GPU kernels are compiled for it, and would be handed tensors of the processor."""
    on_cpu = all(t.device.type == "cpu" for t in args if isinstance(t, torch.Tensor))
    if options.interpret and on_cpu and importlib.util.find_spec("triton"):
        from roundoff.kernels import interpreting

        if not interpreting():
            raise UnsupportedError(
                "kernels of this process are compiled for a GPU, and not interpreted",
                got="OptimizationOptions(interpret=True), tensors on the CPU",
                hint="set TRITON_INTERPRET=1 before Python starts, or move the model to the GPU",
            )


def _refuse_gradients(gm: torch.fx.GraphModule, args: Sequence[Any]) -> None:
    """Under no_grad a part of the graph may switch gradients on, and torch then records them."""
    switches = gm.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
    on = any(node.args[0] is True for node in switches) and not torch.is_inference_mode_enabled()
    if on and any(isinstance(t, torch.Tensor) and t.requires_grad for t in args):
        raise UnsupportedError(
            "gradients are switched on within the graph, and an input or a parameter requires them",
            hint="leave out torch.enable_grad(), or detach() what it computes with",
        )


def _refuse(args: Sequence[Any], fallback: bool) -> None:
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
        complex_refused = t.dtype.is_complex and not fallback  # what takes them stays with torch
        if complex_refused or "float8" in str(t.dtype) or t.is_sparse or t.is_quantized:
            raise DtypeError(
                "an input that ONNX Runtime does not take",
                got=f"{str(t.dtype).removeprefix('torch.')}, {t.layout}",
                expected="dense numbers or bool",
            )
