"""Processes that run collectives of ``torch.distributed`` on one machine, and end with their page.

Multiprocessing's fork server imports torch once and forks a worker for each rank, so that eight
workers start as fast as one. There is no port to agree on: ranks find each other through a store
of this process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import cloudpickle

from .arguments import check_choice, check_number, check_whole
from .errors import ArgumentError, UnsupportedError, WorkerError

__all__ = ["Workers"]

#: What the fork server imports before it forks.
_PRELOADED = ["numpy", "torch", "torch.distributed", "roundoff.reductions"]
#: Its environment. What is imported may ask for GPUs: asked through the driver, no fork could use
#: one.
_VARIABLES = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_GRACE_S = 0.5  # after an error of one rank, for the death of another that caused it


class Workers:
    """Up to *count* ranks of ``torch.distributed``, a process each.

    They start with the first :meth:`map` and wait for the next. They end with :meth:`close`, when
    this process ends or drops the object, after any failure, and where a :meth:`map` has another
    number of ranks. The next :meth:`map` starts new ones.

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
        When *count* or *limit_s* is out of range.
    UnsupportedError
        When torch lacks the backend.

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

        self.count = check_whole("count", count, 1)
        self.limit_s = check_number("limit_s", limit_s, above=0)
        self.environment = dict(environment or {})
        check_choice("backend", backend, ("gloo", "nccl"))
        if not dist.is_backend_available(backend):
            raise UnsupportedError("this build of torch lacks a backend", got=backend)
        self.backend = backend
        self._ranks: list[tuple[Any, Connection]] = []

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
        deadline = time.monotonic() + self.limit_s
        if not 1 <= len(items) <= self.count:
            raise ArgumentError("items", got=len(items), expected=f"1 to {self.count}, one a rank")
        try:
            tasks = [cloudpickle.dumps((function, item)) for item in items]
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ArgumentError(
                "the function or an item cannot be sent",
                got=str(error),
                expected="what cloudpickle sends",
            ) from error
        try:
            if len(self._ranks) != len(tasks):
                self.close()
                self._start(len(tasks))
            for (_, pipe), task in zip(self._ranks, tasks, strict=True):
                with contextlib.suppress(OSError):  # it died: its pipe says so below
                    pipe.send_bytes(task)
            return self._results(deadline)
        except BaseException:  # an interrupt, too
            self.close()
            raise

    def close(self) -> None:
        """End the workers; nothing happens where there are none."""
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, ranks: int) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        options = {
            "backend": self.backend,
            "count": self.count,
            "environment": self.environment,
            "limit_s": self.limit_s,
            "port": self._store.port,
        }
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        with _without_page():
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_work, args=(rank, ranks, theirs, options), daemon=True
                )
                process.start()
                theirs.close()  # so that ours says when the process has ended
                self._ranks.append((process, ours))

    def _results(self, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        failed: dict[int, str] = {}
        waiting: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        while waiting:
            # A rank that died is why others fail: they may say so first.
            left = deadline - time.monotonic()
            limit = min(left, _GRACE_S) if failed else left
            answered: list[Any] = connection.wait(list(waiting), limit)
            if not answered and failed:
                break
            if not answered:
                raise WorkerError(
                    "the workers took too long",
                    got=f"more than {self.limit_s:g} s",
                    hint="a larger limit_s, where no rank waits for one that has left",
                )
            for pipe in answered:
                rank = waiting.pop(pipe)
                try:
                    results[rank], words = pickle.loads(pipe.recv_bytes())  # noqa: S301
                except (EOFError, OSError) as error:
                    raise WorkerError(f"the worker of rank {rank} died", got="no result") from error
                if words:
                    failed[rank] = words
        if failed:
            # Of two errors the one that is not of the network is the other's cause.
            rank = min(failed, key=lambda rank: ("Connection closed" in failed[rank], rank))
            failure = WorkerError(
                f"the worker of rank {rank} failed", got=failed[rank].splitlines()[-1]
            )
            failure.add_note(failed[rank])
            raise failure
        return [results[rank] for rank in range(len(results))]


@contextlib.contextmanager
def _without_page() -> Iterator[None]:
    """While processes start: with our variables, and without the page.

    Multiprocessing would run the page again in each. It also tells each the method by which this
    process was started, which a build by joblib makes one that no other process knows.
    """
    page, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        with mock.patch.dict(os.environ, _VARIABLES):
            yield
    finally:
        multiprocessing.set_start_method(method, force=True)
        sys.modules["__main__"] = page


# --- the other side


def _work(rank: int, ranks: int, pipe: Connection, options: Mapping[str, Any]) -> None:
    """One worker: joins the others, and calls what it is sent until the pipe is closed."""
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
            reply = pickle.dumps((function(item), ""))
        except BaseException:
            reply = pickle.dumps((None, traceback.format_exc().strip()))
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
    device = None
    if options["backend"] == "gloo" and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if options["backend"] == "nccl":
        host, gpu = divmod(rank, torch.cuda.device_count())
        if options["count"] > torch.cuda.device_count():
            os.environ["NCCL_HOSTID"] = f"roundoff-{os.getppid()}-{host}"
        device = torch.device("cuda", gpu)
        torch.cuda.set_device(device)
    dist.init_process_group(
        options["backend"],
        store=TCPStore("127.0.0.1", options["port"], is_master=False),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=options["limit_s"]),
        device_id=device,
    )
