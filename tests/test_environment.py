import builtins
import json
import subprocess

import pytest

from roundoff import environment as room
from roundoff.environment import environment, machine_name, summary


def test_it_is_plain_data_and_complete() -> None:
    env = environment()
    assert json.loads(json.dumps(env, allow_nan=False)) == env
    assert {"processor", "cores", "os", "python", "versions", "blas", "threads", "gpu"} <= set(env)
    assert env["versions"]["numpy"] is not None
    assert env["precision"]["allow_tf32"] in (True, False)


def test_a_switch_is_read_not_remembered() -> None:
    import torch

    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for value in (True, False):
            torch.backends.cuda.matmul.allow_tf32 = value
            assert environment()["precision"]["allow_tf32"] is value
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


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


def test_a_given_commit_wins(monkeypatch) -> None:
    monkeypatch.setattr(room, "_output", lambda *_: "abc")
    assert environment("feed")["commit"] == "feed"
    assert environment()["commit"].startswith("abc")


@pytest.mark.parametrize(
    ("processor", "name"),
    [
        ("AMD EPYC 9654 96-Core Processor", "amd-epyc-9654-8-cores"),
        ("Intel(R) Xeon(R) Platinum 8480C CPU @ 2.00GHz", "intel-xeon-platinum-8480c-8-cores"),
        ("Apple M3", "apple-m3-8-cores"),
    ],
)
def test_a_machine_has_a_name_for_a_file(processor: str, name: str) -> None:
    assert machine_name({"gpu": None, "processor": processor, "cores": 8}) == name
