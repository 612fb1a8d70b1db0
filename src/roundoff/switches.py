"""What each precision switch of PyTorch and ONNX Runtime does to a result.

Every setting runs the same model on the same inputs. A row says how far the setting moves its own
runtime, how far it leaves it from the other runtime's defaults, how far from float64, and what it
costs. Settings that a device or a type does not have are not in the table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .compare import max_diff
from .dtypes import dtype_info, onnx_dtype_to_torch_dtype
from .errors import UnsupportedError
from .evaluator import TorchOnnxEvaluator
from .models import layer_norm_matmul, skip_layer_norm
from .ort import session
from .timing import measure, torch_precision

if TYPE_CHECKING:
    import pandas

__all__ = ["COLUMNS", "CPU", "CUDA", "pointwise_study", "skip_study", "switch_study"]

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

#: Columns of every table made here.
COLUMNS = (
    "model", "provider", "dtype", "runtime", "switch",
    "moves ulp", "gap ulp", "gap share", "error ulp", "error abs", "bias", "cost",
)  # fmt: skip

Call = Callable[[], torch.Tensor]


@dataclasses.dataclass
class _Setting:
    runtime: str
    switch: str  # and its value
    call: Call
    timed: bool = True


def switch_study(
    itype: int, feeds: Mapping[str, torch.Tensor], provider: str = CPU, *, budget_s: float = 1.0
) -> pandas.DataFrame:
    """Settings of both runtimes on :func:`roundoff.models.layer_norm_matmul`.

    Parameters
    ----------
    itype : int
        ONNX element type of the model.
    feeds : mapping
        Inputs; converted to the type, moved to the device.
    provider : str
        ONNX Runtime's provider; torch computes on the same device.
    budget_s : float
        Seconds for the times of each runtime.

    Returns
    -------
    pandas.DataFrame
        With the columns of ``COLUMNS``: ``moves ulp`` is the distance to the runtime's own
        default, ``gap`` to the other runtime's default (``gap share``: the part of the elements
        that differ at all), ``error`` and ``bias`` are against
        float64, ``cost`` is the time over the own default's. Defaults are what each runtime does
        when it is told nothing.

    Raises
    ------
    UnsupportedError
        ONNX Runtime cannot run the model in this type, or has no such provider.

    Examples
    --------
    >>> from roundoff.models import layer_norm_feeds
    >>> frame = switch_study(1, layer_norm_feeds(4, 8), budget_s=0.02)
    >>> frame[["runtime", "switch"]].values.tolist()[:2]
    [['ORT', 'default'], ['ORT', 'graph optimisation = none']]
    """
    model, where = layer_norm_matmul(itype), _device(provider)
    dtype = onnx_dtype_to_torch_dtype(itype)
    given = {k: v.to(dtype).to(where) for k, v in feeds.items()}
    truth = TorchOnnxEvaluator(model, [provider], truth=True).run(None, given)[0]
    settings = [*_ort_settings(itype, model, given, provider),
                *_torch_settings(itype, model, given, provider)]  # fmt: skip
    rows = _rows(settings, truth, where, budget_s)
    name = dtype_info(itype).name
    return _frame(rows, model="LN-MatMul-Add", provider=_short(provider), dtype=name)


def _device(provider: str) -> torch.device:
    return torch.device("cuda" if provider == CUDA else "cpu")


def _same(result: torch.Tensor) -> torch.Tensor:
    return result


def _short(provider: str) -> str:
    return provider.removesuffix("ExecutionProvider")


def _ort_settings(
    itype: int, model: Any, feeds: Mapping[str, torch.Tensor], provider: str
) -> Iterator[_Setting]:
    cuda, name = provider == CUDA, dtype_info(itype).name

    def run(**options: Any) -> Call:
        binding = session(model, [provider], **({"tf32": True} if cuda else {}) | options).bind(
            feeds
        )
        return lambda: binding.run()[0]

    yield _Setting("ORT", "default", run())
    if cuda and name == "float32":
        yield _Setting("ORT", "use_tf32 = 0", run(tf32=False))
    yield _Setting("ORT", "graph optimisation = none", run(optimization="none"))
    if name != "float32":
        apart = TorchOnnxEvaluator(model, [provider], kernels="ort")
        yield _Setting("ORT", "rounding after each node", lambda: apart.run(None, feeds)[0])
    if cuda and name == "float16":
        for value, label in ((1, "1: sums in float16"), (2, "2: no reduced reduction"),
                             (4, "4: pedantic")):  # fmt: skip
            result = _in_a_child(model, feeds, {"ORT_CUDA_GEMM_OPTIONS": str(value)})
            call = functools.partial(_same, result)
            yield _Setting("ORT", f"ORT_CUDA_GEMM_OPTIONS = {label}", call, timed=False)


def _torch_settings(
    itype: int, model: Any, feeds: Mapping[str, torch.Tensor], provider: str
) -> Iterator[_Setting]:
    name = dtype_info(itype).name
    evaluator = TorchOnnxEvaluator(model, [provider])

    def run(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Call:
        def call() -> torch.Tensor:
            with context():
                return evaluator.run(None, feeds)[0]

        return call

    yield _Setting("torch", "default", run(contextlib.nullcontext))
    if provider != CUDA:
        return
    if name == "float32":
        yield _Setting("torch", "allow_tf32 = True", run(lambda: torch_precision(True)))
    short = {"float16": "fp16", "bfloat16": "bf16"}.get(name)
    if short:
        switch = f"allow_{short}_reduced_precision_reduction"
        yield _Setting("torch", f"{switch} = False", run(lambda: _flag(switch, False)))


@contextlib.contextmanager
def _flag(name: str, value: bool) -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before = getattr(matmul, name)
    setattr(matmul, name, value)
    try:
        yield
    finally:
        setattr(matmul, name, before)


#: What a child process runs: some switches are read once, when ONNX Runtime starts.
_CHILD = """
import sys, torch
from roundoff.ort import session
feeds = torch.load(sys.argv[1] + "/feeds.pt")
feeds = {k: v.cuda() for k, v in feeds.items()}
made = session(sys.argv[1] + "/model.onnx", ["CUDAExecutionProvider"], tf32=True).run(feeds)
torch.save(made[0].cpu(), sys.argv[1] + "/result.pt")
"""


def _in_a_child(
    model: Any, feeds: Mapping[str, torch.Tensor], variables: Mapping[str, str]
) -> torch.Tensor:
    """The result of a session made in a process of its own, under environment variables."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "model.onnx").write_bytes(model.SerializeToString())
        torch.save({k: v.cpu() for k, v in feeds.items()}, Path(folder, "feeds.pt"))
        environment = os.environ | variables | {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(  # noqa: S603  our own interpreter and text
            [sys.executable, "-c", _CHILD, folder], env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise UnsupportedError(
                "a session in a process of its own failed", got=done.stderr.strip()[-300:]
            )
        return torch.load(Path(folder, "result.pt")).to(next(iter(feeds.values())).device)


def _rows(
    settings: Sequence[_Setting], truth: torch.Tensor, device: torch.device, budget_s: float
) -> list[dict[str, Any]]:
    results = [s.call().clone() for s in settings]
    default = {
        s.runtime: r for s, r in zip(settings, results, strict=True) if s.switch == "default"
    }
    costs = _costs(settings, device, budget_s)
    rows = []
    for setting, result, cost in zip(settings, results, costs, strict=True):
        others = [r for name, r in default.items() if name != setting.runtime]
        moved = max_diff(default[setting.runtime], result)
        gap = max_diff(others[0], result, hist=[0]) if others else None
        error = max_diff(truth, result)
        rows.append(
            {
                "runtime": setting.runtime, "switch": setting.switch,
                "moves ulp": moved["ulp"],
                "gap ulp": gap["ulp"] if gap else math.nan,
                "gap share": gap["rep"][">0.0"] / max(gap["n"], 1) if gap else math.nan,
                "error ulp": error["err_ulp"], "error abs": error["abs"], "bias": error["bias"],
                "cost": cost,
            }
        )  # fmt: skip
    return rows


def _costs(settings: Sequence[_Setting], device: torch.device, budget_s: float) -> list[float]:
    """Median time of each setting over that of its runtime's default, measured in turns."""
    found: dict[int, float] = {}
    for runtime in dict.fromkeys(s.runtime for s in settings):
        rivals = {
            str(i): s.call for i, s in enumerate(settings) if s.runtime == runtime and s.timed
        }
        if len(rivals) < 2:
            found.update((int(i), 1.0) for i in rivals)
            continue
        times = measure(rivals, budget_s=budget_s, min_rounds=5, warmup=1, device=device.type)
        medians = times.frame.set_index("label")["median"]
        first = next(iter(rivals))
        found.update((int(i), float(medians[i] / medians[first])) for i in rivals)
    return [found.get(i, math.nan) for i in range(len(settings))]


def _frame(rows: list[dict[str, Any]], **same: Any) -> pandas.DataFrame:
    import pandas

    return pandas.DataFrame([same | row for row in rows], columns=list(COLUMNS))


def skip_study(feeds: Mapping[str, torch.Tensor], *, budget_s: float = 1.0) -> pandas.DataFrame:
    """``SkipLayerNormalization`` in float16 on CUDA, its sums in float16 and in float32.

    The CUDA provider's ``enable_skip_layer_norm_strict_mode`` chooses; torch adds, rounds, and
    normalises. The residual is the input itself. Columns as in :func:`switch_study`.

    Examples
    --------
    >>> from roundoff.models import layer_norm_feeds
    >>> if torch.cuda.is_available():
    ...     frame = skip_study(layer_norm_feeds(4, 8), budget_s=0.02)
    ...     assert frame["runtime"].tolist() == ["ORT", "ORT", "torch"]
    """
    model = skip_layer_norm(10)
    x, scale, bias = (feeds[n].half().cuda() for n in ("X", "scale", "bias"))
    given = {"X": x, "skip": x.flip(0), "scale": scale, "bias": bias}

    def eager(dtype: torch.dtype) -> torch.Tensor:
        total = x.to(dtype) + given["skip"].to(dtype)
        width = (x.shape[-1],)
        return torch.nn.functional.layer_norm(total, width, scale.to(dtype), bias.to(dtype))

    def fused(strict: bool) -> Call:
        options = {"enable_skip_layer_norm_strict_mode": strict}
        binding = session(model, [CUDA], tf32=True, provider_options=options).bind(given)
        return lambda: binding.run()[0]

    settings = [
        _Setting("ORT", "default", fused(False)),
        _Setting("ORT", "skip_layer_norm_strict_mode = 1", fused(True)),
        _Setting("torch", "default", lambda: eager(torch.float16)),
    ]
    rows = _rows(settings, eager(torch.float64), torch.device("cuda"), budget_s)
    return _frame(rows, model="SkipLN", provider="CUDA", dtype="float16")


def _chain(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A chain of pointwise operations: eager torch rounds after each, a fused kernel need not.

    None that eager torch leaves to another library: GELU in float16 is oneDNN's on some CPUs.
    """
    return torch.nn.functional.silu((x * scale + bias) * scale + x) * bias


def pointwise_study(
    feeds: Mapping[str, torch.Tensor], device: str = "cpu", *, budget_s: float = 1.0
) -> pandas.DataFrame:
    """Inductor on a pointwise chain in float16, with and without ``emulate_precision_casts``.

    ``gap`` is the distance to eager torch, ``cost`` the time over eager's; the other columns as in
    :func:`switch_study`.

    Raises
    ------
    UnsupportedError
        Inductor cannot compile here: on a CPU it needs a C++ compiler.

    Examples
    --------
    >>> from roundoff.models import layer_norm_feeds
    >>> frame = pointwise_study(layer_norm_feeds(4, 8))  # doctest: +SKIP
    >>> frame["runtime"].tolist()  # doctest: +SKIP
    ['eager', 'inductor', 'inductor']
    """
    from torch._inductor import config

    given = [feeds[n].half().to(device) for n in ("X", "scale", "bias")]
    truth = _chain(*(t.double() for t in given))

    def compiled(emulate: bool) -> Call:
        function = torch.compile(
            _chain, dynamic=False, options={"emulate_precision_casts": emulate}
        )
        with config.patch(emulate_precision_casts=emulate), torch.no_grad():
            try:
                function(*given)
            except RuntimeError as error:
                raise UnsupportedError(
                    "inductor cannot compile here",
                    got=type(error).__name__,
                    hint="install a C++ compiler" if device == "cpu" else None,
                ) from error
        return lambda: function(*given)

    settings = [
        _Setting("eager", "default", lambda: _chain(*given)),
        _Setting("inductor", "default", compiled(False)),
        _Setting("inductor", "emulate_precision_casts = True", compiled(True)),
    ]
    rows = _rows(settings, truth, torch.device(device), 0.0)
    times = measure(
        {s.runtime + s.switch: s.call for s in settings},
        budget_s=budget_s, min_rounds=5, warmup=1, device=torch.device(device).type,
    ).frame["median"].tolist()  # fmt: skip
    for row, time in zip(rows, times, strict=True):
        row["cost"] = time / times[0]
        if row["runtime"] == "eager":
            row["gap ulp"], row["gap share"] = 0, 0.0
    name = "CUDA" if device != "cpu" else "CPU"
    return _frame(rows, model="pointwise", provider=name, dtype="float16")
