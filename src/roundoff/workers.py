"""Processes that run collectives of ``torch.distributed`` on one machine, and end with their page.

Multiprocessing's fork server imports torch once and forks a worker for each rank, so that eight
workers start as fast as one. There is no port to agree on: ranks find each other through a store
of this process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from .arguments import check_mapping, check_number, check_text, check_whole
from .errors import ArgumentError, UnsupportedError, WorkerError

__all__ = ["Workers"]

#: What the fork server imports before it forks.
_PRELOADED = ["numpy", "torch", "torch.distributed", "roundoff.reductions"]
#: Its environment. What is imported may ask for GPUs: asked through the driver, no fork could use
#: one.
_VARIABLES = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_IDLE_S = 20.0  # that workers wait for work before they end
_GRACE_S = 0.5  # after an error of one rank, for the death of another that caused it


class Workers:
    """Up to *count* ranks of ``torch.distributed``, a process each.

    They start with the first :meth:`map` and wait for the next. They end with :meth:`close`, when
    this process ends or drops the object, after 20 s without work, after any failure, and where a
    :meth:`map` has another number of ranks. The next :meth:`map` starts new ones.

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
    environment : mapping of str to str, optional
        Environment variables of the workers, such as ``NCCL_ALGO``, set once torch is imported.

    Raises
    ------
    ArgumentError
        When *count* or *limit_s* is out of range, or another argument is not as above.
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
        environment: Mapping[str, str] | None = None,
    ) -> None:
        import torch.distributed as dist

        check_whole("count", count, 1)
        check_number("limit_s", limit_s, above=0, finite=False)
        check_text("backend", backend)
        for name, value in check_mapping("environment", environment or {}).items():
            if not isinstance(value, str):
                raise ArgumentError(f"variable {name}", got=repr(value), expected="a text")
        if not hasattr(os, "fork") or not dist.is_available():
            raise UnsupportedError("workers need fork and torch.distributed", got=sys.platform)
        if not dist.is_backend_available(backend):
            raise UnsupportedError("this build of torch lacks a backend", got=backend)
        self.count, self.backend = count, backend
        self.limit_s = limit_s
        self.environment = dict(environment or {})
        self._group: _Group | None = None

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Call *function* once in each of ``len(items)`` ranks, each with its item.

        Parameters
        ----------
        function : callable
            Of a module, or of a script or notebook: then cloudpickle sends it with what it names.
        items : sequence
            One for each rank: anything that pickles.

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
        deadline = time.monotonic() + self.limit_s
        try:
            if self._group is None or not self._group.fits(len(tasks)):
                self.close()
                self._group = _Group(self, len(tasks))
            results = self._group.call(tasks, self.limit_s, deadline)
        except BaseException:  # an interrupt, too
            self.close()
            raise
        self._group.end_after(_IDLE_S)
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
    """Workers that run: a process and a pipe for each, and a clock."""

    def __init__(self, workers: Workers, ranks: int) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.end = weakref.finalize(self, _end, self.processes, self.pipes)
        self.timer: threading.Timer | None = None
        try:
            self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(_PRELOADED)
            options = {
                "backend": workers.backend,
                "count": workers.count,
                "environment": workers.environment,
                "limit_s": workers.limit_s,
                "port": self.store.port,
            }
            with _starting():
                for rank in range(ranks):
                    ours, theirs = context.Pipe()
                    arguments = (rank, ranks, theirs, options)
                    process = context.Process(target=_work, args=arguments, daemon=True)
                    process.start()
                    theirs.close()
                    self.processes.append(process)
                    self.pipes.append(ours)
        except (OSError, RuntimeError, EOFError) as error:
            raise WorkerError("the workers cannot start", got=str(error)) from error

    def fits(self, ranks: int) -> bool:
        """Whether so many workers run."""
        return len(self.processes) == ranks and all(p.is_alive() for p in self.processes)

    def end_after(self, seconds: float) -> None:
        """End the workers later, unless something else is to happen before."""
        self._after(seconds, self.end)

    def call(self, tasks: Sequence[bytes], limit_s: float, deadline: float) -> list[Any]:
        """Send each rank its task, and collect the results."""
        # Pipes that break wake the thread that waits.
        processes = self.processes
        self._after(max(deadline - time.monotonic(), 0), lambda: _kill(processes))
        results: dict[int, Any] = {}
        failed: dict[int, str | None] = {}
        for rank, task in enumerate(tasks):
            with contextlib.suppress(OSError):  # it ended: seen below
                self.pipes[rank].send_bytes(task)
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        until = None
        while waiting and (until is None or time.monotonic() < until):
            grace = None if until is None else max(until - time.monotonic(), 0)
            for end in multiprocessing.connection.wait(list(waiting), grace):
                rank = waiting.pop(end)  # type: ignore[call-overload]
                try:
                    right, result = pickle.loads(self.pipes[rank].recv_bytes())  # noqa: S301
                except (EOFError, OSError):
                    right, result = False, None
                (results if right else failed)[rank] = result
            if failed and until is None:
                until = time.monotonic() + _GRACE_S
        if not failed:
            return [results[rank] for rank in range(len(tasks))]
        if time.monotonic() >= deadline:
            raise WorkerError(
                "the workers took too long",
                got=f"more than {limit_s:g} s",
                hint="a larger limit_s, where no rank waits for one that has left",
            )
        raise _failure(failed)

    def _after(self, seconds: float, then: Callable[[], object]) -> None:
        if self.timer is not None:
            self.timer.cancel()
        # The clock may not keep these workers alive: neither function holds them.
        self.timer = threading.Timer(seconds, then)
        self.timer.daemon = True
        self.timer.start()


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """While processes start: with our variables, and without the page.

    Multiprocessing would run the page again in each. It also tells each the method by which this
    process was started, which a build by joblib makes one that no other process knows.
    """
    before = {name: os.environ.get(name) for name in _VARIABLES}
    page, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    method = multiprocessing.get_start_method(allow_none=True)
    os.environ.update(_VARIABLES)
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(method, force=True)
        sys.modules["__main__"] = page
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _failure(failed: Mapping[int, str | None]) -> WorkerError:
    """What went wrong; *failed* has what a rank said, or None where it died."""
    # A rank that died is why the others complain; an error that is not of the network, too.
    died = [rank for rank, words in failed.items() if words is None]
    if died:
        return WorkerError(f"the worker of rank {died[0]} died", got="no result")
    rank, words = min(
        failed.items(), key=lambda pair: ("Connection closed" in str(pair[1]), pair[0])
    )
    error = WorkerError(f"the worker of rank {rank} failed", got=str(words).splitlines()[-1])
    error.add_note(str(words))
    return error


def _kill(processes: Sequence[Any]) -> None:
    for process in processes:
        process.kill()


def _end(processes: Sequence[Any], pipes: Sequence[Connection]) -> None:
    _kill(processes)
    for process in processes:
        process.join()
    for pipe in pipes:
        pipe.close()


# --- the other side


def _work(rank: int, ranks: int, pipe: Connection, options: Mapping[str, Any]) -> None:
    """One worker: calls what it is sent until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the page's to answer
    threading.Thread(target=_end_with_parent, daemon=True).start()
    joined = False
    while True:
        try:
            task = pipe.recv_bytes()
        except EOFError:
            return
        try:
            if not joined:
                _join(rank, ranks, options)
                joined = True
            function, item = pickle.loads(task)  # noqa: S301  from the process that started this
            reply = pickle.dumps((True, function(item)))
        except BaseException:
            reply = pickle.dumps((False, traceback.format_exc().strip()))
        pipe.send_bytes(reply)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _join(rank: int, ranks: int, options: Mapping[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    os.environ.update(options["environment"])
    torch.set_num_threads(1)
    more: dict[str, Any] = {}
    if options["backend"] == "gloo" and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if options["backend"] == "nccl":
        host, gpu = divmod(rank, torch.cuda.device_count())
        if options["count"] > torch.cuda.device_count():
            os.environ["NCCL_HOSTID"] = f"roundoff-{os.getppid()}-{host}"
        torch.cuda.set_device(gpu)
        more["device_id"] = torch.device("cuda", gpu)
    dist.init_process_group(
        options["backend"],
        store=TCPStore("127.0.0.1", options["port"], is_master=False),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=options["limit_s"]),
        **more,
    )
