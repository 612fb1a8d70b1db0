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

GPU = {"name": "NVIDIA H200", "memory_gib": 139.8, "capability": "9.0"}
H200 = ("NVIDIA H200", "580.65.06")


def items() -> dict[str, str]:
    lines = report()
    assert len(lines) <= 12
    assert all("\n" not in line and "None" not in line for line in lines)
    return dict(line.split(": ", 1) for line in lines)


def torch_for(cuda: str | None) -> SimpleNamespace:
    return SimpleNamespace(version=SimpleNamespace(cuda=cuda), __version__="2.11.0")


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

    def make(gpu=None, driver=None, **modules) -> None:
        real, found = room._load, room.environment()
        monkeypatch.setattr(room, "environment", lambda: found | {"gpu": gpu})
        monkeypatch.setattr(room, "_nvidia_smi", lambda: driver)
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
    monkeypatch.setattr(room, "_nvidia_smi", lambda: None)
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
    assert lines["torch.compile on the CPU"].startswith("no, torch cannot be loaded; ")


def test_a_machine_without_gpu(machine) -> None:
    machine(onnxruntime=runtime_with("CPUExecutionProvider"), torch=torch_for(None))
    found = items()
    assert found["GPU"] == "none found"
    assert found["Driver and CUDA"] == "no driver found, no CUDA in torch"
    assert "(CPU build)" in found["Packages"]
    assert found["Pages on the CPU"] == "yes"
    assert found["ONNX Runtime on CUDA"].startswith("no, there is no NVIDIA GPU; ")
    assert found["Triton kernels"].startswith("in the interpreter (TRITON_INTERPRET=1), ")
    assert found["torch.compile on the CPU"] == "yes, with g++"


def test_a_machine_with_everything(machine) -> None:
    both = runtime_with("CUDAExecutionProvider", "CPUExecutionProvider")
    machine(GPU, H200, onnxruntime=both, torch=torch_for("12.8"))
    found = items()
    assert found["GPU"] == "NVIDIA H200, 139.8 GiB, compute capability 9.0"
    assert found["Driver and CUDA"] == "driver 580.65.06, CUDA 12.8 in torch"
    assert found["ONNX Runtime on CUDA"] == "yes"
    assert found["Triton kernels"] == "on the GPU"


@pytest.mark.parametrize(
    ("runtime", "said"),
    [
        (
            runtime_with("CPUExecutionProvider"),
            "no, this is the CPU build; .*uninstall onnxruntime",
        ),
        (None, "no, ONNX Runtime is missing; to add it: pip install 'roundoff.gpu.'"),
        (OSError("x"), "no, ONNX Runtime cannot be loaded; "),
        (runtime_with("CUDAExecutionProvider", loads=False), "no, its CUDA libraries cannot be lo"),
    ],
)
def test_why_onnx_runtime_has_no_rows_on_cuda(machine, runtime: object, said: str) -> None:
    machine(GPU, H200, onnxruntime=runtime, torch=torch_for("12.8"))
    line = next(line for line in report() if line.startswith("ONNX Runtime on CUDA: "))
    assert re.search(said, line), line


@pytest.mark.parametrize(
    ("torch", "why"),
    [
        (None, "torch is not installed"),
        (torch_for("12.8"), "torch cannot use it"),
    ],
)
def test_a_gpu_that_torch_does_not_see(machine, torch: object, why: str) -> None:
    machine(None, H200, torch=torch)
    found = items()
    assert found["GPU"].startswith(f"NVIDIA H200, but {why}; to add a build for CUDA: see https://")
    assert found["ONNX Runtime on CUDA"] == "no, torch cannot use the GPU (see above)"


@pytest.mark.parametrize(
    ("gpu", "wish", "said"),
    [
        (GPU, "1", "in the interpreter, since TRITON_INTERPRET is set; to use the GPU: unset it"),
        (GPU, "0", "on the GPU"),
        (None, "1", "in the interpreter, since TRITON_INTERPRET is set"),
        (None, "0", "not at all, there is no GPU; for the interpreter: TRITON_INTERPRET=1, not 0"),
    ],
)
def test_triton_does_as_the_environment_says(machine, monkeypatch, gpu, wish, said) -> None:
    machine(gpu, torch=torch_for("12.8"))
    monkeypatch.setenv("TRITON_INTERPRET", wish)
    assert items()["Triton kernels"] == said


def test_a_missing_compiler_comes_with_the_command_that_adds_it(
    machine, monkeypatch, tmp_path: Path
) -> None:
    machine(GPU, H200, torch=torch_for("12.8"))
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


def test_the_drivers_tool_may_be_absent_or_silent(monkeypatch) -> None:
    def smi(out: str):
        return lambda *_, **__: SimpleNamespace(stdout=out)

    def absent(*_, **__):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(room.subprocess, "run", smi("NVIDIA H200, 580.65.06\nNVIDIA H200, 580\n"))
    assert room._nvidia_smi() == H200
    monkeypatch.setattr(room.subprocess, "run", absent)
    assert room._nvidia_smi() is None
    monkeypatch.setattr(room.subprocess, "run", smi(""))
    assert room._nvidia_smi() is None


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ({"transformers": None}, "yes, but for the Llama layer; to add it: pip install transf"),
        ({"onnx": None, "pandas": None}, "no, onnx, pandas missing; to add: pip install"),
    ],
)
def test_what_keeps_the_pages_from_running(machine, modules: dict, said: str) -> None:
    machine(**modules)
    assert items()["Pages on the CPU"].startswith(said)
