"""Processes that run collectives of ``torch.distributed`` on one machine, and end with their page.

A child process of this one imports torch once and forks a worker for each rank, so that eight
workers start as fast as one. It is their guardian: it ends them all, and itself, when this process
ends in whatever way. There is no port to agree on: ranks find each other through a file.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import multiprocessing.connection
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle

from .arguments import check_mapping, check_number, check_text, check_whole
from .errors import ArgumentError, UnsupportedError, WorkerError

__all__ = ["Workers"]

#: What the guardian imports before it forks.
_PRELOADED = ("numpy", "torch", "torch.distributed", "roundoff.reductions")
_CHILD = "import sys; from roundoff.workers import _guard; _guard(sys.argv[1])"
_GRACE_S = 0.5  # after an error of one rank, for the death of another that caused it


class Workers:
    """Up to *count* ranks of ``torch.distributed``, a process each.

    They start with the first :meth:`map`, wait for the next, and end with :meth:`close`, when this
    process ends or drops the object, after *idle_s* without work, and after any failure. The next
    :meth:`map` starts new ones.

    Parameters
    ----------
    count : int
        Most ranks that a :meth:`map` may have.
    backend : str
        ``"gloo"``, or ``"nccl"``: in rank r ``"cuda"`` is GPU r modulo their number. With more
        ranks than GPUs each round of GPUs is a host of its own to NCCL (``NCCL_HOSTID``): its
        ranks send over sockets, and processes take turns on a GPU, so that times mean nothing.
    limit_s : float
        Seconds that one :meth:`map` may take, start included.
    idle_s : float
        Seconds that workers wait for work before they end.
    environment : mapping of str to str, optional
        Environment variables of the workers, such as ``NCCL_ALGO``, beside this process's own.
    imports : sequence of str
        Modules that they need beside torch and numpy: imported once, not once a worker.

    Raises
    ------
    ArgumentError
        When *count*, *limit_s* or *idle_s* is out of range, or another argument is not as above.
    UnsupportedError
        When processes cannot fork here, or torch lacks the backend.

    Examples
    --------
    >>> import torch
    >>> import torch.distributed as dist
    >>> def add(x):
    ...     total = torch.tensor(x)
    ...     dist.all_reduce(total)
    ...     return float(total)
    >>> with Workers(2, limit_s=60) as workers:
    ...     workers.map(add, [1.0, 2.0])
    [3.0, 3.0]
    """

    def __init__(
        self,
        count: int,
        backend: str = "gloo",
        *,
        limit_s: float = 60.0,
        idle_s: float = 20.0,
        environment: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        import torch.distributed as dist

        check_whole("count", count, 1)
        check_number("limit_s", limit_s, above=0, finite=False)
        check_number("idle_s", idle_s, above=0, finite=False)
        check_text("backend", backend)
        for name, value in check_mapping("environment", environment or {}).items():
            if not isinstance(value, str):
                raise ArgumentError(f"variable {name}", got=repr(value), expected="a text")
        listed = isinstance(imports, Sequence) and not isinstance(imports, str)
        if not listed or not all(isinstance(name, str) for name in imports):
            raise ArgumentError("imports", got=repr(imports), expected="a list of modules' names")
        if not hasattr(os, "fork") or not dist.is_available():
            raise UnsupportedError("workers need fork and torch.distributed", got=sys.platform)
        if not dist.is_backend_available(backend):
            raise UnsupportedError("this build of torch lacks a backend", got=backend)
        self.count, self.backend = count, backend
        self.limit_s, self.idle_s = limit_s, idle_s
        self.environment, self.imports = dict(environment or {}), list(imports)
        self._group: _Group | None = None

    def map(
        self, function: Callable[[Any], Any], items: Sequence[Any], limit_s: float | None = None
    ) -> list[Any]:
        """Call *function* once in each of ``len(items)`` ranks, each with its item.

        Parameters
        ----------
        function : callable
            Of a module, or of a script or notebook: then cloudpickle sends it with what it names.
        items : sequence
            One for each rank: anything that pickles.
        limit_s : float, optional
            Instead of the workers' own limit.

        Returns
        -------
        list
            What the function returned, by rank.

        Raises
        ------
        ArgumentError
            More items than workers, none, or a function or an item that cannot be sent.
        WorkerError
            A worker raised, died, could not reach the others, or the time was up. All workers have
            ended then.
        """
        if isinstance(items, str) or not isinstance(items, Sequence):
            raise ArgumentError("items", got=repr(items)[:80], expected="a list, an item a rank")
        if not 1 <= len(items) <= self.count:
            raise ArgumentError("items", got=len(items), expected=f"1 to {self.count}, one a rank")
        if not isinstance(function, types.FunctionType):
            raise ArgumentError(
                "function", got=type(function).__name__, expected="a plain function"
            )
        try:
            tasks = [cloudpickle.dumps((function, item)) for item in items]
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ArgumentError(
                f"{function.__name__} or an item cannot be sent",
                got=str(error),
                expected="what cloudpickle sends",
            ) from error
        if limit_s is not None:
            check_number("limit_s", limit_s, above=0, finite=False)
        limit = self.limit_s if limit_s is None else limit_s
        try:
            if self._group is None or not self._group.alive():
                self.close()
                self._group = _Group(self)
            results = self._group.call(tasks, limit)
        except BaseException:  # an interrupt, too
            self.close()
            raise
        self._group.wait_for_work(self.idle_s)
        return results

    def close(self) -> None:
        """End the workers; nothing happens where there are none."""
        group, self._group = self._group, None
        if group is not None:
            group.end()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Group:
    """Workers that run: their guardian, a pair of pipes for each, and a clock."""

    def __init__(self, workers: Workers) -> None:
        self.joined = 0  # ranks of the process group that the workers are in
        self.meetings = 0
        self.timer: threading.Timer | None = None
        self.deadline = 0.0
        pipes = [(os.pipe(), os.pipe()) for _ in range(workers.count)]
        theirs = [(task[0], result[1]) for task, result in pipes]
        self.tasks = [Connection(task[1], readable=False) for task, _ in pipes]
        self.results = [Connection(result[0], writable=False) for _, result in pipes]
        folder = tempfile.TemporaryDirectory(prefix="roundoff-workers-")
        self.said = Path(folder.name, "stderr")
        options = {
            "pipes": theirs,
            "backend": workers.backend,
            "folder": folder.name,
            "imports": workers.imports,
        }
        variables = os.environ | {"OMP_NUM_THREADS": "1"} | workers.environment
        # What is imported may ask for GPUs: asked through the driver, no fork could use one.
        variables["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        try:
            with self.said.open("wb") as said:
                self.guardian = subprocess.Popen(  # noqa: S603  our own interpreter and text
                    [sys.executable, "-c", _CHILD, json.dumps(options)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    env=variables,
                    start_new_session=True,
                    pass_fds=[fd for pair in theirs for fd in pair],
                )
        except OSError as error:
            for connection in (*self.tasks, *self.results):
                connection.close()
            folder.cleanup()
            raise WorkerError("the workers cannot start", got=str(error)) from error
        finally:
            for fd in (fd for pair in theirs for fd in pair):
                os.close(fd)
        ends = (*self.tasks, *self.results)
        self.end = weakref.finalize(self, _end, self.guardian, ends, folder)

    def alive(self) -> bool:
        """Whether the guardian still runs."""
        return self.guardian.poll() is None

    def wait_for_work(self, idle_s: float) -> None:
        """End the workers later, unless there is something to do before."""
        self._after(idle_s, self.end)

    def call(self, tasks: Sequence[bytes], limit_s: float) -> list[Any]:
        """Send each rank its task, and collect the results."""
        # Pipes that break wake the thread that waits.
        self._after(limit_s, functools.partial(_kill, self.guardian))
        self.deadline = time.monotonic() + limit_s
        ranks = len(tasks)
        if self.joined != ranks:
            if self.joined:  # all of them: NCCL waits for the others
                self._exchange([pickle.dumps((None, b""))] * self.joined, limit_s)
            self.joined, self.meetings = ranks, self.meetings + 1
        meeting = (ranks, self.meetings, limit_s)
        return self._exchange([pickle.dumps((meeting, task)) for task in tasks], limit_s)

    def _exchange(self, messages: Sequence[bytes], limit_s: float) -> list[Any]:
        waiting = {}
        for rank, message in enumerate(messages):
            try:
                self.tasks[rank].send_bytes(message)
            except OSError:
                raise self._failure({rank: None}, limit_s) from None
            waiting[self.results[rank]] = rank
        results: dict[int, Any] = {}
        failed: dict[int, str | None] = {}
        until = None
        while waiting and (until is None or time.monotonic() < until):
            grace = None if until is None else max(until - time.monotonic(), 0)
            for end in multiprocessing.connection.wait(list(waiting), grace):
                rank = waiting.pop(end)  # type: ignore[call-overload]
                try:
                    right, result = pickle.loads(self.results[rank].recv_bytes())  # noqa: S301
                except (EOFError, OSError):
                    right, result = False, None
                (results if right else failed)[rank] = result
            if failed and until is None:
                until = time.monotonic() + _GRACE_S
        if failed:
            raise self._failure(failed, limit_s)
        return [results[rank] for rank in range(len(messages))]

    def _failure(self, failed: Mapping[int, str | None], limit_s: float) -> WorkerError:
        """What went wrong; *failed* has what a rank said, or None where it died."""
        if time.monotonic() >= self.deadline:
            return WorkerError(
                "the workers took too long",
                got=f"more than {limit_s:g} s",
                hint="a larger limit_s, where no rank waits for one that has left",
            )
        # A rank that died is why the others complain; an error that is not of the network, too.
        died = [rank for rank, words in failed.items() if words is None]
        if died:  # of a guardian that ended the pipes break a moment before it is gone
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.guardian.wait(_GRACE_S)
        if died and self.alive():
            return WorkerError(f"the worker of rank {died[0]} died", got="no result")
        if died:
            said = self.said.read_text("utf-8", "replace").strip().splitlines()
            return WorkerError("the workers ended", got=said[-1] if said else "no result")
        rank, words = min(
            failed.items(), key=lambda pair: ("Connection closed" in str(pair[1]), pair[0])
        )
        error = WorkerError(f"the worker of rank {rank} failed", got=str(words).splitlines()[-1])
        error.add_note(str(words))
        return error

    def _after(self, seconds: float, then: Callable[[], object]) -> None:
        if self.timer is not None:
            self.timer.cancel()
        # The clock may not keep these workers alive: neither function holds them.
        self.timer = threading.Timer(seconds, then)
        self.timer.daemon = True
        self.timer.start()


def _kill(guardian: subprocess.Popen[bytes]) -> None:
    """End the guardian and the workers: they are one process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(guardian.pid, signal.SIGKILL)


def _end(
    guardian: subprocess.Popen[bytes],
    ends: Sequence[Connection],
    folder: tempfile.TemporaryDirectory[str],
) -> None:
    _kill(guardian)
    guardian.wait()
    assert guardian.stdin is not None
    guardian.stdin.close()
    for end in ends:
        end.close()
    folder.cleanup()


# --- the other side


def _guard(text: str) -> None:
    """Fork the workers, and end them with the process that asked for them."""
    options = json.loads(text)
    parent = os.getppid()
    for name in (*_PRELOADED, *options["imports"]):
        importlib.import_module(name)
    children = []
    for rank, pipe in enumerate(options["pipes"]):
        child = os.fork()
        if child == 0:
            try:
                _work(rank, pipe, options)
            finally:
                os._exit(1)
        children.append(child)
    for fd in (fd for pipe in options["pipes"] for fd in pipe):
        os.close(fd)
    while os.getppid() == parent:
        if select.select([sys.stdin], [], [], 0.2)[0]:
            break  # nothing is ever written: the other end is closed
        for child in list(children):
            if os.waitpid(child, os.WNOHANG)[0]:
                children.remove(child)
    shutil.rmtree(options["folder"], ignore_errors=True)  # nobody else is left to do it
    os.killpg(0, signal.SIGKILL)


def _work(rank: int, pipe: Sequence[int], options: Mapping[str, Any]) -> None:
    """One worker: calls what it is sent until the pipe is closed."""
    import torch
    import torch.distributed as dist

    _die_with_parent()
    for fd in {fd for other in options["pipes"] for fd in other} - set(pipe):
        os.close(fd)
    torch.set_num_threads(1)
    if options["backend"] == "gloo" and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    tasks, results = Connection(pipe[0], writable=False), Connection(pipe[1], readable=False)
    met = 0
    while True:
        try:
            message = tasks.recv_bytes()
        except EOFError:
            return
        try:
            result = None
            meeting, task = pickle.loads(message)  # noqa: S301  from the process that started this
            if meeting is None:  # the others wait for nobody who leaves
                dist.destroy_process_group()
            else:
                ranks, meeting_number, limit_s = meeting
                if met != meeting_number:
                    _join(rank, ranks, meeting_number, limit_s, options)
                    met = meeting_number
                function, item = pickle.loads(task)  # noqa: S301
                result = function(item)
            reply = pickle.dumps((True, result))
        except BaseException:
            reply = pickle.dumps((False, traceback.format_exc().strip()))
        results.send_bytes(reply)


def _join(rank: int, ranks: int, number: int, limit_s: float, options: Mapping[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    store = FileStore(str(Path(options["folder"], f"ranks-{number}")), ranks)
    more: dict[str, Any] = {}
    if options["backend"] == "nccl":
        host, gpu = divmod(rank, torch.cuda.device_count())
        if len(options["pipes"]) > torch.cuda.device_count():
            os.environ["NCCL_HOSTID"] = f"roundoff-{os.getppid()}-{host}"
        torch.cuda.set_device(gpu)
        more["device_id"] = torch.device("cuda", gpu)
    dist.init_process_group(
        options["backend"],
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=limit_s),
        **more,
    )


def _die_with_parent() -> None:
    """Where Linux offers it: the guardian's end, whatever ended it, ends this process."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
