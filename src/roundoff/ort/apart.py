"""A run in a process of its own: for what ONNX Runtime reads once, when it starts."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from roundoff.errors import UnsupportedError

__all__ = ["run_apart"]

_CHILD = """
import sys, torch
from roundoff.ort import session
feeds, providers, tf32 = torch.load(sys.argv[1] + "/feeds.pt")
where = "cuda" if providers[0].startswith("CUDA") else "cpu"
feeds = {name: value.to(where) for name, value in feeds.items()}
outputs = session(sys.argv[1] + "/model.onnx", providers, tf32=tf32).run(feeds)
torch.save([z.cpu() for z in outputs], sys.argv[1] + "/outputs.pt")
"""


def run_apart(
    model: Any,
    feeds: Mapping[str, torch.Tensor],
    variables: Mapping[str, str],
    providers: Sequence[str] = ("CPUExecutionProvider",),
    *,
    tf32: bool | None = None,
) -> list[torch.Tensor]:
    """Run a session in a child process, under environment variables.

    Variables such as ``ORT_CUDA_GEMM_OPTIONS`` are read once in a process.

    Parameters
    ----------
    model : onnx.ModelProto
    feeds : mapping of str to tensor
        Inputs, on any device.
    variables : mapping of str to str
        Environment variables of the child, beside this process's own.
    providers, tf32
        As :func:`roundoff.ort.session` takes them.

    Returns
    -------
    list of tensor
        The outputs, on the CPU.

    Raises
    ------
    UnsupportedError
        When the child fails; it says with what.

    Examples
    --------
    >>> from roundoff.models import layer_norm_feeds, layer_norm_matmul
    >>> z = run_apart(layer_norm_matmul(), layer_norm_feeds(2, 4), {"ORT_X": "1"})  # doctest: +SKIP
    >>> z[0].shape  # doctest: +SKIP
    torch.Size([2, 2, 4])
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "model.onnx").write_bytes(model.SerializeToString())
        on_cpu = {name: value.cpu() for name, value in feeds.items()}
        torch.save((on_cpu, list(providers), tf32), Path(folder, "feeds.pt"))
        environment = os.environ | variables | {"PYTHONPATH": os.pathsep.join(sys.path)}
        child = subprocess.run(  # noqa: S603  our own interpreter and text
            [sys.executable, "-c", _CHILD, folder], env=environment, capture_output=True, text=True
        )
        if child.returncode:
            raise UnsupportedError(
                "a session in a process of its own failed",
                got=(child.stderr.strip().splitlines() or ["no message"])[-1][:300],
            )
        return torch.load(Path(folder, "outputs.pt"))
