"""Processes that call functions together as ranks of a process group, started once for all tests."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

SIZE = 4
PATIENCE = 120.0  # seconds until ranks that do not come to an end are given up
PRELOAD = [
    __name__,
    "torchace.lab.training.loop",
    "torchace.metrics",
    "torchace.lab.sweeps.executor",
]  # imported once for all ranks


class Team:
    """Up to four ranks on this machine, with one thread each."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.folder = tempfile.TemporaryDirectory()
        self.calls = 0
        pairs = [context.Pipe() for _ in range(SIZE)]
        self.pipes = [mine for mine, _ in pairs]
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # before the server starts: it has no other thread to fork
        self.processes = [
            context.Process(target=_serve, args=(rank, theirs), daemon=True) for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()

    def run(self, size: int, function: Callable[..., Any], *args: Any, backend: str = "gloo") -> list[Any]:
        """Run `function(*args)` on the first `size` ranks in a new process group; return the results.

        Tensors travel by value. An error of any rank fails the test, with its traceback.
        """
        self.calls += 1
        store = os.path.join(self.folder.name, str(self.calls))
        for pipe in self.pipes[:size]:
            pipe.send_bytes(pickle.dumps((function, args, size, backend, store)))
        results = []
        for rank, pipe in enumerate(self.pipes[:size]):
            if not pipe.poll(PATIENCE):
                self.end()
                raise AssertionError(f"rank {rank} of {size} does not come to an end")
            results.append(pickle.loads(pipe.recv_bytes()))
        problems = [f"rank {rank}:\n{text}" for rank, (fine, text) in enumerate(results) if not fine]
        assert not problems, "\n".join(problems)
        return [value for _, value in results]

    def end(self) -> None:
        team.cache_clear()
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


@cache
def team() -> Team:
    """The processes, started when first asked for."""
    started = Team()
    atexit.register(started.end)
    return started


def _serve(rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.Backend.register_backend("counting", Counting, devices=["cpu"])
    warnings.simplefilter("error")
    while True:
        function, args, size, backend, store = pickle.loads(pipe.recv_bytes())
        try:
            dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
            answer = (True, function(*args))
            dist.barrier()
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send_bytes(pickle.dumps(answer))


class Counting(dist.ProcessGroup):
    """gloo, with a list of what each rank sent: the operation and the bytes it gave.

    It knows the operations below and no other: whatever else is called is an error, so that nothing goes uncounted.
    """

    sent: list[tuple[str, int]] = []  # by all groups of this process  # noqa: RUF012

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._inner = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._name = ""

    def getBackendName(self) -> str:
        return "counting"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def allreduce(self, tensors: Any, options: Any) -> Any:
        return self._counted("allreduce", tensors).allreduce(tensors, options)

    def broadcast(self, tensors: Any, options: Any) -> Any:
        return self._counted("broadcast", tensors).broadcast(tensors, options)

    def allgather(self, found: Any, tensors: Any, options: Any) -> Any:
        return self._counted("allgather", tensors).allgather(found, tensors, options)

    def send(self, tensors: Any, to: int, tag: int) -> Any:
        return self._counted("send", tensors).send(tensors, to, tag)

    def recv(self, tensors: Any, source: int, tag: int) -> Any:
        return self._inner.recv(tensors, source, tag)

    def barrier(self, opts: Any) -> Any:
        return self._inner.barrier(opts)

    def _counted(self, operation: str, tensors: list[torch.Tensor]) -> Any:
        self.sent.append((operation, sum(t.numel() * t.element_size() for t in tensors)))
        return self._inner


@contextmanager
def counting() -> Iterator[list[tuple[str, int]]]:
    """Count the communication of this rank; needs `backend="counting"`."""
    Counting.sent.clear()
    found: list[tuple[str, int]] = []
    yield found
    found.extend(Counting.sent)
