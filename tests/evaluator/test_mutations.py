"""Mutated models: each is refused with a typed error, or gives a right result.

They run in a process of their own: one that dies or hangs is seen, and names its case.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("mutate.py")


def verdicts(seed: int, count: int) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(seed), str(count)],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ},
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, f"died at {lines[-1]}: {done.stderr[-500:]}"
    ended = {line["end"]: line for line in lines if "end" in line}
    return [{**line, **ended[line["start"]]} for line in lines if "start" in line]


def judge(seed: int, count: int) -> None:
    found = verdicts(seed, count)
    assert len(found) == count
    counts = collections.Counter(v["verdict"] for v in found)
    bad = [v for v in found if v["verdict"] in ("differs", "untyped", "alone")]
    assert not bad, bad[:3]
    assert counts["agrees"] > 0.1 * count, "hardly any mutant still runs: the test sees nothing"
    assert max(v["seconds"] for v in found) < 20
    kinds = {v["kind"] for v in found}
    assert len(kinds) >= 10


def test_a_hundred_mutated_models() -> None:
    judge(4, 100)


@pytest.mark.slow(reason="a hundred stand for them until the evaluator itself changes")
def test_a_thousand_mutated_models() -> None:
    judge(7, 1000)
