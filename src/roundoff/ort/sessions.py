"""Sessions: providers, precision, threads and optimisation, chosen in one place."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx
import torch
from onnx import helper

from roundoff.arguments import check_choice, check_providers, check_whole
from roundoff.errors import ArgumentError, RoundoffError, UnsupportedError
from roundoff.precision import torch_tf32

from .binding import CUDA, OrtSession, translated
from .tensors import onnxruntime

__all__ = ["available", "newest_opset", "session"]

#: ``optimization=`` of :func:`session` -> attribute of ``GraphOptimizationLevel``.
_LEVELS = {
    "none": "ORT_DISABLE_ALL",
    "all": "ORT_ENABLE_ALL",
}


def session(
    model: Any,
    providers: Sequence[str | tuple[str, Mapping[str, Any]]] = ("CPUExecutionProvider",),
    *,
    tf32: bool | None = None,
    threads: int | None = None,
    optimization: str = "all",
    session_options: Mapping[str, Any] | None = None,
) -> OrtSession:
    """Make a session that computes in torch's precision, with as many threads as torch.

    Parameters
    ----------
    model : onnx.ModelProto, bytes or path
        Give a path for a model of 2 GB or more.
    providers : sequence
        In order of preference, as ONNX Runtime takes them: names, or pairs of a name and options
        such as ``{"enable_cuda_graph": True}`` of CUDA's. Unlike there, a provider that this
        build lacks is an error: falling back to the CPU would time another machine.
    tf32 : bool, optional
        Whether the CUDA provider may use TF32 for float32 matrix products. By default what torch
        may do (:func:`roundoff.ort.torch_tf32`); ONNX Runtime's own default is to use it.
    threads : int, optional
        Threads within an operator; by default as many as torch uses. They never spin: a spinning
        pool slows everything else in the process.
    optimization : {"all", "none"}
        Level of ONNX Runtime's graph optimisation.
    session_options : mapping, optional
        Configuration entries (``{"session.disable_prepacking": "1"}``) and attributes
        (``{"use_deterministic_compute": True}``).

    Raises
    ------
    ArgumentError
        An option is none, or has a value that it cannot have.
    UnsupportedError
        A provider is missing, or has no kernel for an operator and type of the model.
    ModelError
        The model is not valid.

    Examples
    --------
    >>> import numpy as np
    >>> from onnx import helper, TensorProto
    >>> info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None]) for n in "XYZ"]
    >>> graph = helper.make_graph([helper.make_node("Add", ["X", "Y"], ["Z"])], "add",
    ...                           info[:2], info[2:])
    >>> model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)],
    ...                           ir_version=10)
    >>> session(model).run({"X": torch.ones(2), "Y": np.array([1, 2], dtype=np.float32)})
    [tensor([2., 3.])]
    """
    listed = _providers(providers, tf32)
    options = _options(session_options, threads, optimization)
    if hasattr(model, "SerializeToString"):
        model = model.SerializeToString()
    elif isinstance(model, os.PathLike):
        model = os.fspath(model)
    elif not isinstance(model, (str, bytes)):
        raise ArgumentError(
            "cannot make a session of this",
            got=type(model).__name__,
            expected="an onnx.ModelProto, its bytes, or a path",
        )
    try:
        raw = onnxruntime.InferenceSession(model, options, providers=listed)
    except Exception as e:
        raise translated(e, "ONNX Runtime refuses the model") from e
    # ONNX Runtime falls back to the CPU when a provider does not start, with a warning at most.
    absent = [name for name, _ in listed if name not in raw.get_providers()]
    if absent:
        raise UnsupportedError("a provider does not start on this machine", got=absent[0])
    return OrtSession(raw)


def _providers(
    providers: Sequence[str | tuple[str, Mapping[str, Any]]],
    tf32: bool | None,
) -> list[tuple[str, dict[str, str]]]:
    available = onnxruntime.get_available_providers()
    listed = []
    for name, options in check_providers(providers):
        if name not in available:
            raise UnsupportedError(
                "this build of ONNX Runtime lacks a provider",
                got=name,
                expected=f"one of {', '.join(available)}",
                hint="pip install onnxruntime-gpu" if name == CUDA else None,
            )
        if name == CUDA:
            if not torch.cuda.is_available():
                raise UnsupportedError("torch sees no GPU", got=name, hint="the CPU's provider")
            options = _cuda_defaults(options, tf32) | options
        listed.append((name, {k: _text(v) for k, v in options.items()}))
    return listed


def _cuda_defaults(options: Mapping[str, Any], tf32: bool | None) -> dict[str, Any]:
    index = int(options.get("device_id", torch.cuda.current_device()))
    defaults = {
        "device_id": index,
        "use_tf32": torch_tf32() if tf32 is None else tf32,
        # The default doubles the arena, which leaves too little to torch in the same process.
        "arena_extend_strategy": "kSameAsRequested",
    }
    handle = torch.cuda.current_stream(index).cuda_stream
    if handle:
        defaults["user_compute_stream"] = handle
    return defaults


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _options(requested: Any, threads: int | None, optimization: str) -> onnxruntime.SessionOptions:
    check_choice("optimization", optimization, _LEVELS)
    if threads is not None:
        check_whole("threads", threads, 1)
    options = onnxruntime.SessionOptions()
    # What fails is raised; the C++ log would print it a second time, past any capture.
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(
        onnxruntime.GraphOptimizationLevel, _LEVELS[optimization]
    )
    options.intra_op_num_threads = threads or torch.get_num_threads()
    entries = {"session.intra_op.allow_spinning": "0", "session.inter_op.allow_spinning": "0"}
    for key, value in (entries | dict(requested or {})).items():
        if "." in key:
            options.add_session_config_entry(key, _text(value))
            continue
        try:
            setattr(options, key, value)
        except (TypeError, AttributeError) as error:  # another type, or no attribute of it
            raise ArgumentError(
                f"session option {key}",
                got=repr(value)[:80],
                expected="an attribute of onnxruntime.SessionOptions, or a key with a dot",
            ) from error
    return options


def available(names: Iterable[str]) -> list[str]:
    """Those of the provider *names* that this build of ONNX Runtime has, in the order given.

    Raises
    ------
    ArgumentError
        When *names* is no list of texts.

    Examples
    --------
    >>> available(["NoSuchExecutionProvider", "CPUExecutionProvider"])
    ['CPUExecutionProvider']
    """
    have = onnxruntime.get_available_providers()
    return [name for name, _ in check_providers(names) if name in have]


@functools.cache
def newest_opset() -> int:
    """The newest opset of ONNX's own operators that this build of ONNX Runtime reads.

    It is found by loading a model of one node, because no interface of ONNX Runtime tells it.

    Examples
    --------
    >>> newest_opset() >= 24
    True
    """
    info = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [1]) for n in "XY"]
    graph = helper.make_graph(
        [helper.make_node("Identity", ["X"], ["Y"])], "one", info[:1], info[1:]
    )
    for opset in range(onnx.defs.onnx_opset_version(), 0, -1):
        opsets = [helper.make_opsetid("", opset)]
        try:
            session(helper.make_model(graph, opset_imports=opsets, ir_version=10))
        except RoundoffError:
            continue
        return opset
    raise AssertionError("ONNX Runtime reads no opset")
