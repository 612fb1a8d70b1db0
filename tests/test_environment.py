import builtins
import json
import subprocess

import pytest

from roundoff import environment as room
from roundoff.environment import environment, machine_name, short_name, summary


def test_it_is_plain_data_and_complete() -> None:
    env = environment()
    assert json.loads(json.dumps(env, allow_nan=False)) == env
    assert {"processor", "cores", "os", "python", "versions", "blas", "threads", "gpu"} <= set(env)
    assert env["versions"]["numpy"] is not None
    assert env["precision"]["allow_tf32"] in (True, False)


def test_it_works_without_torch_ort_and_git(monkeypatch) -> None:
    real = builtins.__import__

    def absent(name: str, *args, **kwargs):
        if name.split(".")[0] in ("torch", "onnxruntime"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    def no_git(*args, **kwargs):
        raise FileNotFoundError("git")

    monkeypatch.setattr(builtins, "__import__", absent)
    monkeypatch.setattr(subprocess, "run", no_git)
    env = environment()
    assert (env["threads"], env["gpu"], env["precision"], env["commit"]) == (None,) * 4
    assert summary(env)
    assert machine_name(env)
    assert short_name(env)


def test_a_given_commit_wins(monkeypatch) -> None:
    monkeypatch.setattr(room, "command_output", lambda *_: "abc")
    assert environment("feed")["commit"] == "feed"
    assert environment()["commit"].startswith("abc")


@pytest.mark.parametrize(
    ("gpu", "processor", "name"),
    [
        ("NVIDIA H100 PCIe", "", "H100"),
        ("NVIDIA A100-SXM4-80GB", "", "A100"),
        ("NVIDIA GeForce RTX 4090", "", "RTX 4090"),
        ("NVIDIA", "", "NVIDIA"),
        (None, "AMD EPYC 9654 96-Core Processor", "AMD EPYC 9654"),
        (None, "AMD Ryzen 7 7840U w/ Radeon  780M Graphics", "AMD Ryzen 7 7840U"),
        (None, "Processor", "Processor"),
    ],
)
def test_a_machine_has_a_short_name(gpu: str | None, processor: str, name: str) -> None:
    env = {"gpu": gpu and {"name": gpu}, "processor": processor, "cores": 8}
    assert short_name(env) == short_name(env, "gpu") == name
    assert short_name(env, "cpu") == (f"{name}'s host" if gpu else name)


def test_a_summary_counts_the_gpus() -> None:
    gpu = {"name": "NVIDIA H200", "count": 2}
    env = {"processor": "Some CPU", "cores": 16, "python": "3.12.3", "versions": {}, "gpu": gpu}
    assert (summary(env), short_name(env)) == ("2 × NVIDIA H200; Python 3.12.3", "2 × H200")
