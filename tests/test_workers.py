"""Workers run what they are sent, and none outlives its page, whatever fails."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist

from roundoff.errors import ArgumentError, WorkerError
from roundoff.workers import Workers

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="workers fork")
FACTOR = 3
# As in a notebook: no worker can import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def scaled(x):
    return x * FACTOR


def reduced(x):
    total = torch.tensor(scaled(x))
    dist.all_reduce(total)
    return dist.get_world_size(), float(total)


def process(_):
    return os.getpid()


def raises_in_rank_1(_):
    if dist.get_rank() == 1:
        raise ValueError("no such size")
    dist.barrier()


def dies_in_rank_1(_):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleeps(_):
    time.sleep(60)


def running(process: int) -> bool:
    """Whether a process runs; one that ended and that nobody has reaped does not."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"
    return False


def end(processes: list[int], within_s: float = 10.0) -> bool:
    until = time.monotonic() + within_s
    while any(map(running, processes)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(running, processes))


@pytest.fixture(scope="module")
def workers():
    """Workers that the tests share: new ones start after each that fails."""
    with Workers(4, limit_s=60) as some:
        yield some


def started(workers: Workers) -> list[int]:
    return workers.map(process, [0, 0])


def test_each_rank_gets_its_item_and_functions_of_a_script_come_along(workers) -> None:
    assert workers.map(reduced, [1.0, 2.0]) == [(2, 9.0)] * 2
    assert workers.map(reduced, [1.0, 2.0, 3.0, 4.0]) == [(4, 30.0)] * 4
    first = workers.map(process, [0] * 4)
    assert workers.map(process, [0] * 4) == first  # they wait, and are not started again
    assert len({*first, os.getpid()}) == 5
    assert workers.map(reduced, [1.0]) == [(1, 3.0)]
    assert end(first)


def test_code_that_has_no_module_is_sent(workers) -> None:
    page = {}
    text = "import numpy as np\nK = 2\ndef f(x, y=5):\n  return y + sum(K for _ in x) + np.sum(x)"
    exec(text, page)
    assert workers.map(page["f"], [np.arange(3)] * 2) == [14, 14]


@pytest.mark.parametrize("items", [[], [threading.Lock()]])
def test_what_cannot_be_sent_is_refused(workers, items) -> None:
    with pytest.raises(ArgumentError, match=r"got 0, expected 1 to 4|got cannot pickle"):
        workers.map(process, items)


@pytest.mark.parametrize(
    ("function", "limit_s", "words"),
    [
        (raises_in_rank_1, 60, "the worker of rank 1 failed: got ValueError: no such size"),
        (dies_in_rank_1, 60, "the worker of rank 1 died"),
        (sleeps, 1.5, "took too long: got more than 1.5 s"),
    ],
)
def test_a_failure_is_named_and_ends_them_all(
    workers, function, limit_s, words: str, monkeypatch
) -> None:
    those = started(workers)
    monkeypatch.setattr(workers, "limit_s", limit_s)
    with pytest.raises(WorkerError, match=words):
        workers.map(function, [0, 0])
    assert end(those)


def test_workers_that_nobody_holds_end() -> None:
    workers = Workers(2)
    those = started(workers)
    names = {"workers": workers}  # as a page's names: in a circle
    names["self"] = names
    del workers, names
    gc.collect()
    assert end(those)


def test_an_interrupt_ends_them(workers) -> None:
    those = started(workers)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    main = threading.main_thread().ident
    threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        workers.map(sleeps, [0, 0])
    assert end(those)


PAGE = """
import os, time
from roundoff.workers import Workers
def process(_):
    return os.getpid()
def sleeps(_):
    time.sleep(60)
workers = Workers(2)
print(*workers.map(process, [0, 0]), flush=True)
"""


@pytest.mark.parametrize("last", ["1 / 0", "workers.map(sleeps, [0, 0])"])
def test_the_end_of_a_page_is_the_end_of_its_workers(last: str) -> None:
    command = [sys.executable, "-c", PAGE + last]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, **pipes) as page:
        those = list(map(int, page.stdout.readline().split()))
        time.sleep(0.3)
        page.kill()
    assert end(those)


def added_on_a_gpu(x):
    total = torch.full((1000,), x, device="cuda")
    dist.all_reduce(total)
    return total.unique().tolist(), torch.cuda.current_device()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU")
def test_more_ranks_than_gpus_are_hosts_of_their_own():
    gpus = torch.cuda.device_count()
    count = gpus + 1
    variables = {"NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    with Workers(count, "nccl", limit_s=60, environment=variables) as workers:
        results = workers.map(added_on_a_gpu, [float(2**i) for i in range(count)])
    assert results == [([2.0**count - 1], rank % gpus) for rank in range(count)]


def reduced_in_workers(x):
    with Workers(2, limit_s=60) as workers:
        return workers.map(reduced, [x, 2 * x])


def test_a_parallel_build_runs_them_in_a_process_of_joblib() -> None:
    joblib = pytest.importorskip("joblib")
    made = joblib.Parallel(n_jobs=2)(joblib.delayed(reduced_in_workers)(x) for x in (1.0, 2.0))
    assert made == [[(2, 9.0)] * 2, [(2, 18.0)] * 2]
