"""Runs of a session on torch tensors: once, or bound for many times."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from roundoff.arguments import check_feeds
from roundoff.errors import ArgumentError, DtypeError, ModelError, ShapeError, UnsupportedError

from .tensors import element, from_ort, onnxruntime, to_ort

__all__ = ["CUDA", "Binding", "OrtSession", "translated"]

CUDA = "CUDAExecutionProvider"

# A message may carry a source line of the machine that built ONNX Runtime: of no use to a reader.
_NOISE = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : |/\S+?\.(?:cc|h|cu|cuh):\d+ ")


def translated(error: Exception, doing: str) -> Exception:
    """ONNX Runtime's exception as ours; its classes live in a private module, hence the names."""
    text = _NOISE.sub("", str(error)).strip()
    kind = type(error).__name__
    # "try to allocate" is the arena's wording, "out of memory" the driver's.
    if re.search(r"failed to allocate memory|out of memory|bad_alloc", text, re.IGNORECASE):
        return MemoryError(f"{doing}: {text}")
    if kind == "NotImplemented":
        return UnsupportedError(f"{doing}: {text}")
    of_file = kind in ("NoSuchFile", "InvalidProtobuf", "InvalidGraph", "NoModel", "NoSuchGraph")
    if not of_file and re.search(r"rank|dimension|shape", text, re.IGNORECASE):
        return ShapeError(f"{doing}: {text}")
    return ModelError(f"{doing}: {text}")


class OrtSession:
    """An ``onnxruntime.InferenceSession`` that takes and gives torch tensors.

    See :func:`~roundoff.ort.session`.

    Attributes
    ----------
    input_names : list of str
        In the model's order.
    output_names : list of str
        In the model's order.
    providers : list of str
        Providers in use.
    device : torch.device
        Where outputs are made.
    tf32 : bool
        Whether float32 matrix products may use TF32.
    stream : torch.cuda.Stream or None
        torch's stream, when the session computes on it.
    raw : onnxruntime.InferenceSession
        The session itself.
    run_options : object
        For every run of it.
    on_processor : frozenset of str
        Inputs that a session on a GPU reads in the processor's memory: a node without a kernel on
        the GPU takes them, or a kernel that wants a number. ONNX Runtime copies what is bound for
        them when it is bound, not when it runs.

    Examples
    --------
    >>> import onnx
    >>> from roundoff.ort import session
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["": 20]>
    ...     product (float[m,k] X, float[k,n] W) => (float[m,n] Z) { Z = Gemm(X, W) }''')
    >>> session(model)
    OrtSession(X, W -> Z; CPUExecutionProvider, tf32=False)
    >>> session(model).run({"X": torch.ones(1, 2), "W": torch.ones(2, 2)})
    [tensor([[2., 2.]])]
    """

    def __init__(self, raw: onnxruntime.InferenceSession) -> None:
        self.raw = raw
        self.input_names = [i.name for i in raw.get_inputs()]
        self.output_names = [o.name for o in raw.get_outputs()]
        self.providers = list(raw.get_providers())
        defaults = raw.get_overridable_initializers()
        self._inputs = {i.name: element(i.type) for i in [*raw.get_inputs(), *defaults]}
        self._optional = {i.name for i in defaults}
        self._plain = all(
            (e := element(v.type)) is not None and e.kind != "string"
            for v in [*raw.get_inputs(), *raw.get_outputs()]
        )
        options = raw.get_provider_options().get(CUDA)
        self.on_processor: frozenset[str] = frozenset()
        self.tf32 = options is not None and options.get("use_tf32") == "1"
        self.device = torch.device("cpu")
        self.stream: Any = None
        #: For every run of the session.
        self.run_options = onnxruntime.RunOptions()
        self.run_options.log_severity_level = 4
        # The default, written down: where the entry is absent onnxruntime 1.31 raises and catches
        # an exception at each run, which takes 80 µs against 3 µs for a small run.
        self.run_options.add_run_config_entry("gpu_graph_id", "0")
        if options is not None:
            self.device = torch.device("cuda", int(options.get("device_id", 0)))
            memory = zip(self.input_names, raw.get_input_memory_infos(), strict=True)
            self.on_processor = frozenset(n for n, m in memory if m.name.lower().startswith("cpu"))
            handle = int(options.get("user_compute_stream", "0") or 0)
            if handle:
                current = torch.cuda.current_stream(self.device)
                self.stream = (
                    current
                    if current.cuda_stream == handle
                    else torch.cuda.ExternalStream(handle, self.device)
                )
                # On torch's own stream the order of the work is enough: no need to wait.
                self.run_options.add_run_config_entry(
                    "disable_synchronize_execution_providers", "1"
                )

    def __repr__(self) -> str:
        ins, outs = ", ".join(self.input_names), ", ".join(self.output_names)
        return f"OrtSession({ins} -> {outs}; {self.providers[0]}, tf32={self.tf32})"

    def run(
        self,
        names: Sequence[str] | Mapping[str, Any] | None = None,
        feeds: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Run once; every output is new memory.

        ``run(feeds)`` is ``run(None, feeds)``, the form of ONNX Runtime's own sessions.

        Parameters
        ----------
        names : sequence of str or None
            Outputs to return; None for all.
        feeds : mapping
            Input name -> torch tensor or NumPy array, on the session's device or the CPU. Models
            with string, sequence or optional values also take what ONNX Runtime takes for those.

        Returns
        -------
        list of torch.Tensor
            In the order of *names*; a list of tensors for a sequence, an array of objects for
            strings, None for an empty optional.

        Raises
        ------
        ArgumentError, DtypeError, ShapeError
            An input is missing, unknown, or not what the model takes.
        MemoryError
            The run does not fit the device's memory.
        """
        given: Any = feeds
        if feeds is None and names is not None:
            names, given = None, names
        results = Binding(self, given).run() if self._plain else self._run_any(given)
        return results if names is None else [results[k] for k in self._places(names)]

    def _places(self, names: Any) -> list[int]:
        """Where each of these outputs stands."""
        try:
            return [self.output_names.index(name) for name in names]
        except (ValueError, TypeError) as error:
            raise ArgumentError(
                "outputs", got=repr(names)[:80], expected=str(self.output_names)
            ) from error

    def bind(self, feeds: Mapping[str, Any]) -> Binding:
        """Bind inputs once for many runs."""
        if not self._plain:
            raise UnsupportedError(
                "only tensors of numbers can be bound", hint="OrtSession.run takes the others"
            )
        return Binding(self, feeds)

    def _ort_values(self, feeds: Mapping[str, Any]) -> dict[str, onnxruntime.OrtValue]:
        check_feeds(feeds, self._inputs, self._optional)
        values = {}
        for name, value in feeds.items():
            values[name] = to_ort(value)
            dtype, expected = element(values[name].data_type()), self._inputs[name]
            if expected is not None and dtype is not expected:
                raise DtypeError(
                    f"input {name!r}", got=dtype and dtype.name, expected=expected.name
                )
        return values

    def _run_any(self, feeds: Mapping[str, Any]) -> list[Any]:
        """Through NumPy, with copies: the way for strings, sequences and optionals."""
        check_feeds(feeds, self._inputs, self._optional)
        arrays = {n: _arrays(v) for n, v in feeds.items()}
        try:
            return [_tensors(v) for v in self.raw.run(None, arrays, self.run_options)]
        except Exception as e:
            raise translated(e, "ONNX Runtime fails in the run") from e


def _arrays(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().contiguous().numpy()
    return [_arrays(v) for v in value] if isinstance(value, (list, tuple)) else value


def _tensors(value: Any) -> Any:
    if isinstance(value, list):
        return [_tensors(v) for v in value]
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OSUT":
        return from_ort(to_ort(value))
    return value


class Binding:
    """Inputs bound to a session: repeated runs copy nothing.

    The returned tensors belong to the binding: the next run writes over them, so the shapes of
    the outputs must not change between runs. Change an input by writing into its tensor.

    Parameters
    ----------
    owner : OrtSession
    feeds : mapping
        Input name -> tensor or array; a contiguous one is read where it lies, at each run.

    Examples
    --------
    >>> import onnx
    >>> from roundoff.ort import session
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["": 20]>
    ...     product (float[m,k] X, float[k,n] W) => (float[m,n] Z) { Z = Gemm(X, W) }''')
    >>> x = torch.ones(1, 2)
    >>> bound = session(model).bind({"X": x, "W": torch.ones(2, 2)})
    >>> bound.run()
    [tensor([[2., 2.]])]
    >>> _ = x.fill_(3.0)
    >>> bound.run()
    [tensor([[6., 6.]])]
    """

    def __init__(self, owner: OrtSession, feeds: Mapping[str, Any]) -> None:
        self.session = owner
        self._io = owner.raw.io_binding()
        self._outputs: list[torch.Tensor] | None = None
        # References: what is bound must outlive the binding whatever ONNX Runtime keeps.
        self._bound: list[Any] = []
        # What lies where the session does not read it: ONNX Runtime copies it when it is bound.
        self._elsewhere: list[tuple[str, Any]] = []
        for name, value in owner._ort_values(feeds).items():
            self._io.bind_ortvalue_input(name, value)
            self._bound.append(value)
            wanted = "cpu" if name in owner.on_processor else owner.device.type
            if value.device_name() != wanted:
                self._elsewhere.append((name, value))
        for name in owner.output_names:
            self._io.bind_output(name, owner.device.type, owner.device.index or 0)

    def run(self) -> list[torch.Tensor]:
        """Run once and return the outputs, in the order of the session's ``output_names``."""
        owner = self.session
        other_stream = None
        if owner.device.type == "cuda":
            current = torch.cuda.current_stream(owner.device)
            if owner.stream is None:
                current.synchronize()
            elif current != owner.stream:
                other_stream = current
                owner.stream.wait_stream(current)
            if self._elsewhere:
                current.synchronize()  # the copy is on no stream of torch's
        for name, value in self._elsewhere:
            self._io.bind_ortvalue_input(name, value)
        try:
            owner.raw.run_with_iobinding(self._io, owner.run_options)
        except Exception as e:
            raise translated(e, "ONNX Runtime fails in the run") from e
        if other_stream is not None:
            other_stream.wait_stream(owner.stream)
        if self._outputs is None:
            # ONNX Runtime keeps an output it has allocated and writes to it again.
            self._outputs = [from_ort(v) for v in self._io.get_outputs()]
        return list(self._outputs)
