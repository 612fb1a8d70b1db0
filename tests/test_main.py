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


CPU_BUILD = runtime_with("CPUExecutionProvider")
CUDA_BUILD = runtime_with("CUDAExecutionProvider", "CPUExecutionProvider")
WITHOUT_GPU = {"onnxruntime": CPU_BUILD, "torch": torch_for(None)}
WHOLE = {"gpu": GPU, "driver": H200, "onnxruntime": CUDA_BUILD, "torch": torch_for("12.8")}
UNSEEN = WHOLE | {"gpu": None}


@pytest.mark.parametrize(
    ("given", "line", "said"),
    [
        (WITHOUT_GPU, "GPU", "none found$"),
        (WITHOUT_GPU, "Driver and CUDA", "no driver found, no CUDA in torch$"),
        (WITHOUT_GPU, "Packages", r".*\(CPU build\)"),
        (WITHOUT_GPU, "Pages on the CPU", "yes$"),
        (WITHOUT_GPU, "ONNX Runtime on CUDA", "no, there is no NVIDIA GPU; "),
        (WITHOUT_GPU, "Triton kernels", r"in the interpreter \(TRITON_INTERPRET=1\), "),
        (WITHOUT_GPU, "torch.compile on the CPU", r"yes, with g\+\+$"),
        (WHOLE, "GPU", "NVIDIA H200, 139.8 GiB, compute capability 9.0$"),
        (WHOLE, "Driver and CUDA", "driver 580.65.06, CUDA 12.8 in torch$"),
        (WHOLE, "ONNX Runtime on CUDA", "yes$"),
        (WHOLE, "Triton kernels", "on the GPU$"),
        (
            WHOLE | {"onnxruntime": CPU_BUILD},
            "ONNX Runtime on CUDA",
            "no, this is the CPU build; .*uninstall onnxruntime",
        ),
        (
            WHOLE | {"onnxruntime": None},
            "ONNX Runtime on CUDA",
            "no, ONNX Runtime is missing; to add it: pip install 'roundoff.gpu.'",
        ),
        (
            WHOLE | {"onnxruntime": OSError("x")},
            "ONNX Runtime on CUDA",
            "no, ONNX Runtime cannot be loaded; ",
        ),
        (
            WHOLE | {"onnxruntime": runtime_with("CUDAExecutionProvider", loads=False)},
            "ONNX Runtime on CUDA",
            "no, its CUDA libraries cannot be loaded; ",
        ),
        (UNSEEN, "GPU", "NVIDIA H200, but torch cannot use it; to add a build for CUDA: see http"),
        (UNSEEN, "ONNX Runtime on CUDA", r"no, torch cannot use the GPU \(see above\)$"),
        (
            UNSEEN | {"torch": None},
            "GPU",
            "NVIDIA H200, but torch is not installed; to add a build",
        ),
        (
            {"transformers": None},
            "Pages on the CPU",
            "yes, but for the Llama layer; to add it: pip install transf",
        ),
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
