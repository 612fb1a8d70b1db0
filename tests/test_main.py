"""The report of a machine: what is there, what is missing, and how to add it."""

import sys
from pathlib import Path

import pytest

from roundoff import __main__ as room

GPU = {
    "name": "NVIDIA H200",
    "memory_gib": 139.8,
    "capability": "9.0",
    "driver": "580.65.06",
    "cuda": "12.8",
}


def items() -> dict[str, str]:
    lines = room.report()
    assert all("\n" not in line and "None" not in line for line in lines)
    return dict(line.split(": ", 1) for line in lines)


def test_a_machine_is_told_what_it_has(capsys: pytest.CaptureFixture) -> None:
    assert room.main() == 0
    assert "Pages on the CPU: yes" in capsys.readouterr().out.splitlines()


def test_a_package_that_is_absent_or_broken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = room.importlib.import_module

    def load(name: str) -> object:
        if name in ("torch", "onnxruntime"):
            raise OSError("libcudart.so.12:\n lost")
        return real(name)

    monkeypatch.setattr(room.importlib, "import_module", load)
    found = items()
    lost = "(libcudart.so.12: lost)"
    assert found["Pages on the CPU"].startswith(f"no: torch {lost}, onnxruntime {lost}; try: ")
    assert found["torch.compile on the CPU"].startswith("no: torch (")


def test_a_gpu_is_found_even_where_torch_cannot_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = room.environment()
    for gpu, seen, said in (
        (GPU, None, "NVIDIA H200, 139.8 GiB"),
        (None, "NVIDIA H200\nNVIDIA H200", "NVIDIA H200, but torch cannot use it"),
        (None, None, "none found"),
    ):
        monkeypatch.setattr(room, "environment", lambda gpu=gpu: found | {"gpu": gpu})
        monkeypatch.setattr(room, "command_output", lambda *_, seen=seen: seen)
        assert items()["GPU"].startswith(said)


def test_a_missing_compiler_comes_with_the_command_that_adds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(room.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(room.shutil, "which", lambda name: sys.executable)
    monkeypatch.delenv("CXX", raising=False)
    assert items()["torch.compile on the CPU"] == "yes"
    (tmp_path / "Python.h").unlink()
    assert "apt install python3-dev" in items()["torch.compile on the CPU"]
    monkeypatch.setattr(room.shutil, "which", lambda name: None)
    assert "no compiler g++; try: apt install g++" in items()["torch.compile on the CPU"]
    monkeypatch.setenv("CXX", "/opt/c++ -O2")
    assert "no compiler /opt/c++;" in items()["torch.compile on the CPU"]
