"""For the tests and for the examples in docstrings alike: each leaves nothing behind."""

import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

# As many workers as cores with as many threads each wait for each other more than they compute.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor compiles six programs to see whether this compiler knows this processor's vectors.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

#: Modules whose examples are about a trained model.
TRAINED = {"trained.py", "decoding.py"}


def pytest_runtest_setup() -> None:
    """What is compiled a ninth time runs eager, with a line in a log: here it fails.

    Inductor rounds as it comes: ``roundoff.invariant(model)`` sets it for the whole process. Dynamo
    flushes the caches after each compilation, to time its guards for a log that nobody reads here.
    """
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.config.fail_on_recompile_limit_hit = True
    if inductor := sys.modules.get("torch._inductor.config"):
        inductor.emulate_precision_casts = False
    if guards := sys.modules.get("torch._dynamo.guards"):
        guards.profile_guard_manager = lambda *given: 0.0


@pytest.fixture(autouse=True)
def _globals_of_an_example_outlive_its_compiled_code(
    request: pytest.FixtureRequest,
) -> Iterator[None]:
    """Clear the globals of a doctest after dynamo has let go of them, not before.

    Dynamo adds names to the globals of the code that it compiles and deletes them when that code
    goes. doctest clears its globals first: the deletion then raises in whatever test runs next.
    """
    item = request.node
    if not isinstance(item, pytest.DoctestItem):
        yield
        return
    run = item.runner.run
    item.runner.run = functools.partial(run, clear_globs=False)
    yield
    item.runner.run = run
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
    item.dtest.globs.clear()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A slow test says why; the built site comes first.

    While one worker builds the site the other runs what does not need it. On a GPU host the slow
    tests that run there are those of a kernel, or of a user's path.
    """
    for item in items:
        if isinstance(item, pytest.DoctestItem) and item.path.name in TRAINED:
            item.add_marker(pytest.mark.slow(reason="each reads a model of 135 million parameters"))
        for mark in item.iter_markers("slow"):
            if not mark.kwargs.get("reason"):
                raise pytest.UsageError(f"{item.nodeid}: slow without a reason=")
    items.sort(key=lambda item: item.get_closest_marker("site") is None)
    if os.environ.get("ROUNDOFF_GPU_HOST"):
        import onnxruntime
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError("test-gpu: torch sees no GPU")
        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            raise pytest.UsageError(
                "test-gpu: ONNX Runtime has no CUDA: pip install onnxruntime-gpu"
            )
        from torch._dynamo import list_backends, register_backend

        if "roundoff" not in list_backends():  # a host where the package is not installed
            from roundoff.backend import onnx_custom_backend

            register_backend(onnx_custom_backend, name="roundoff")
        left = [item for item in items if _is_left_out(item)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


def _is_left_out(item: pytest.Item) -> bool:
    """Whether a slow test says nothing of a GPU."""
    slow = item.get_closest_marker("slow") is not None
    return slow and item.get_closest_marker("gpu") is None and item.path.parent.name != "kernels"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """End a worker whose GPU no longer answers: all tests after the one that broke it would fail.

    pytest-xdist names that test and starts another worker.
    """
    report = yield
    if call.excinfo and os.environ.get("ROUNDOFF_GPU_HOST") and "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        try:
            torch.cuda.synchronize()
        except RuntimeError:
            sys.stderr.write(f"\n{item.nodeid} broke the GPU's context: {call.excinfo.value}\n")
            os._exit(3)
    return report
