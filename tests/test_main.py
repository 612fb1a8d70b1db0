import builtins
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import roundoff
from roundoff import __main__ as room
from roundoff.__main__ import report

GPU = {
    "name": "NVIDIA H200",
    "memory_gib": 139.8,
    "capability": "9.0",
    "driver": "580.65.06",
    "cuda": "12.8",
}


def items() -> dict[str, str]:
    lines = report()
    assert len(lines) <= 12
    assert all("\n" not in line and "None" not in line for line in lines)
    return dict(line.split(": ", 1) for line in lines)


def runtime_with(*providers: str, loads: bool = True) -> SimpleNamespace:
    """A stand-in for ONNX Runtime, whose sessions keep their provider or fall back."""
    kept = providers if loads else ("CPUExecutionProvider",)
    return SimpleNamespace(
        get_available_providers=lambda: list(providers),
        InferenceSession=lambda model, providers: SimpleNamespace(get_providers=lambda: list(kept)),
        __version__="1.30.0",
    )


@pytest.fixture
def machine(monkeypatch, tmp_path: Path):
    """Makes this process believe in a machine."""

    def make(gpu=None, seen=None, **modules) -> None:
        real, found = room._load, room.environment()
        monkeypatch.setattr(room, "environment", lambda: found | {"gpu": gpu})
        monkeypatch.setattr(room, "command_output", lambda *_: seen)
        monkeypatch.setattr(room, "_load", lambda n: modules[n] if n in modules else real(n))
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(sys, "platform", "linux")
        monkeypatch.setattr(room, "_has", lambda name: modules.get(name, True) is not None)
        monkeypatch.setattr(room.shutil, "which", lambda name: f"/bin/{name}")
        monkeypatch.setattr(room.sysconfig, "get_path", lambda name: str(tmp_path))

    (tmp_path / "Python.h").touch()
    return make


def test_a_process_prints_at_most_twelve_lines_and_ends_with_0() -> None:
    source = str(Path(__file__).parents[1] / "src")
    done = subprocess.run(
        [sys.executable, "-m", "roundoff"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": source},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert 8 <= len(lines) <= 12
    assert lines[0].startswith(f"roundoff: {roundoff.__version__}, on Python ")
    assert all(": " in line for line in lines)


@pytest.mark.parametrize(
    "absent", [["onnxruntime"], ["torch", "onnxruntime", "triton", "transformers"]]
)
def test_absent_packages_are_said_to_be_absent(monkeypatch, absent: list[str]) -> None:
    for name in absent:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(room, "command_output", lambda *_: None)
    found = items()
    for name in absent:
        assert f"{name} not installed" in found["Packages"]
    assert found["Pages on the CPU"].startswith("no, ")
    assert "missing; to add" in found["Pages on the CPU"]
    assert "pip install 'roundoff[cpu]'" in found["Pages on the CPU"]


def test_a_package_that_cannot_be_loaded_is_said_to_be_broken(monkeypatch) -> None:
    real = builtins.__import__
    found = room.importlib.import_module

    def load(name: str, *args, **kwargs):
        if name.partition(".")[0] in ("torch", "onnxruntime"):
            raise OSError(f"{name}: libcudart.so.12:\n cannot open shared object file")
        return (real if args or kwargs else found)(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", load)
    monkeypatch.setattr(room.importlib, "import_module", load)
    lines = items()
    assert "cannot be loaded (torch: libcudart.so.12: cannot open" in lines["Packages"]
    assert lines["Pages on the CPU"].startswith("no, torch cannot be loaded; to repair: ")
    assert lines["torch.compile on the CPU"].startswith(
        "no, torch is missing or cannot be loaded; "
    )


CPU_BUILD = runtime_with("CPUExecutionProvider")
CUDA_BUILD = runtime_with("CUDAExecutionProvider", "CPUExecutionProvider")
WITHOUT_GPU = {"onnxruntime": CPU_BUILD}
WHOLE = {"gpu": GPU, "onnxruntime": CUDA_BUILD}
UNSEEN = WHOLE | {"gpu": None, "seen": "NVIDIA H200\nNVIDIA H200"}


@pytest.mark.parametrize(
    ("given", "line", "said"),
    [
        (WITHOUT_GPU, "GPU", "none found$"),
        (WITHOUT_GPU, "Packages", r".*\(CPU build\)"),
        (WITHOUT_GPU, "Pages on the CPU", "yes$"),
        (WITHOUT_GPU, "ONNX Runtime on CUDA", "no, torch has no GPU"),
        (WITHOUT_GPU, "Triton kernels", r"in the interpreter \(TRITON_INTERPRET=1\), "),
        (WITHOUT_GPU, "torch.compile on the CPU", "yes$"),
        (WHOLE, "GPU", "NVIDIA H200, 139.8 GiB, .* 9.0, driver 580.65.06, CUDA 12.8$"),
        (WHOLE, "ONNX Runtime on CUDA", "yes$"),
        (WHOLE, "Triton kernels", "on the GPU$"),
        (
            WHOLE | {"onnxruntime": CPU_BUILD},
            "ONNX Runtime on CUDA",
            "no, this is the CPU build; .*uninstall onnxruntime",
        ),
        *(
            (
                WHOLE | {"onnxruntime": lacking},
                "ONNX Runtime on CUDA",
                "no, ONNX Runtime is missing or .* to add it: pip install 'roundoff.gpu.'",
            )
            for lacking in (None, OSError("x"))
        ),
        (
            WHOLE | {"onnxruntime": runtime_with("CUDAExecutionProvider", loads=False)},
            "ONNX Runtime on CUDA",
            "no, its CUDA libraries cannot be loaded; ",
        ),
        (UNSEEN, "GPU", "NVIDIA H200, but torch cannot use it; to add a build for CUDA: see http"),
        (
            {"onnx": None, "pandas": None},
            "Pages on the CPU",
            "no, onnx, pandas missing; to add: pip install",
        ),
    ],
)
def test_a_machine_is_told_what_it_has(machine, given: dict, line: str, said: str) -> None:
    machine(**given)
    assert re.match(said, items()[line])


def test_triton_does_as_the_environment_says(machine, monkeypatch) -> None:
    machine(GPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    said = "in the interpreter, since TRITON_INTERPRET is set"
    assert items()["Triton kernels"] == said
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert items()["Triton kernels"] == "on the GPU"


def test_a_missing_compiler_comes_with_the_command_that_adds_it(
    machine, monkeypatch, tmp_path: Path
) -> None:
    machine(GPU)
    monkeypatch.setattr(room.shutil, "which", lambda name: None)
    assert items()["Triton kernels"].endswith("no compiler gcc; to add it: apt install gcc")
    compiles = "torch.compile on the CPU"
    assert items()[compiles] == "no, there is no compiler g++; to add it: apt install g++"
    monkeypatch.setenv("CXX", "/opt/c++ -O2")
    assert items()[compiles] == "no, there is no compiler /opt/c++; to use g++: unset CXX"
    monkeypatch.setattr(room.shutil, "which", lambda name: name)
    (tmp_path / "Python.h").unlink()
    assert items()[compiles].startswith("no, Python's headers are missing; to add them: apt")


def test_the_model_that_tries_the_cuda_provider_is_sound() -> None:
    import onnxruntime

    def on_the_cpu(model: bytes, providers: list[str]):
        onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        return SimpleNamespace(get_providers=lambda: providers)

    assert room._computes_on_cuda(SimpleNamespace(InferenceSession=on_the_cpu))
