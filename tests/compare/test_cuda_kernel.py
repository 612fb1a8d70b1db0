"""The GPU's kernel gives what the CPU gives: under Triton's interpreter, and on a GPU if any."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("kernel_agreement.py")


@pytest.mark.slow(reason="only a change of the kernel or of the statistics can break it")
def test_agreement_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), "cpu"],
        capture_output=True, text=True, env=environment, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "0 of 32 pairs disagree"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_agreement_on_the_gpu() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "cuda"], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 of 32 pairs disagree", done.stdout + done.stderr
