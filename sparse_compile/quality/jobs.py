"""Points of a sweep, measured by several processes at once.

Small models leave a GPU waiting for the host. Each process loads a model of its own onto the same device, and takes the
next group of points when it is done with one.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from torch import Tensor

from sparse_compile.errors import SparseCompileError
from sparse_compile.quality.measure import Dense, Done, Meter, Settings
from sparse_compile.quality.sweep import Point, Rows, measure_points

Load = Callable[[], tuple[Any, Tensor, bool]]
"""The model, the token ids of the text, and whether the tasks are measured; it is sent to the processes."""


class JobError(SparseCompileError, RuntimeError):
    """A process could not measure what it was given. The message names the points."""


class Jobs:
    """`count` processes that load a model at once, and wait for points. Within `with`: they end with the block."""

    def __init__(self, count: int, load: Load, settings: Settings) -> None:
        import torch

        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        threads = max(1, torch.get_num_threads() // count)
        self._processes: dict[Connection, Any] = {}
        for _ in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, load, settings, threads), daemon=True)
            process.start()
            theirs.close()  # so that a process that is gone is an end of file here
            self._processes[mine] = process

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *_: object) -> None:
        for connection, process in self._processes.items():
            process.terminate()
            process.join()
            connection.close()

    def measure(self, groups: Sequence[Sequence[Point]], dense: Dense, done: Done) -> Iterator[Rows]:
        """Rows of the groups, as they come. Raises JobError."""
        waiting = deque(groups)
        busy: dict[Connection, Sequence[Point]] = {}

        def give(connection: Connection, message: Any) -> None:
            busy[connection] = waiting.popleft()
            self._send(connection, (message, busy[connection]), busy[connection])

        known = pickle.dumps(dense)  # as bytes: tensors would be sent as handles of shared memory
        for connection in list(self._processes)[: len(waiting)]:
            give(connection, known)
        while busy:
            ready = wait(list(busy))
            for connection in [one for one in busy if one in ready]:
                message = self._receive(connection, busy[connection])
                if isinstance(message, int):
                    done(message)
                    continue
                del busy[connection]
                if waiting:
                    give(connection, None)
                yield message

    def _send(self, connection: Connection, message: Any, points: Sequence[Point]) -> None:
        try:
            connection.send(message)
        except OSError:
            self._receive(connection, points)  # says why it is gone, if it could

    def _receive(self, connection: Connection, points: Sequence[Point]) -> Any:
        """Units that are done, or rows. Raises JobError for a process that failed, or that is gone."""
        try:
            message = connection.recv()
        except (EOFError, OSError):
            process = self._processes[connection]
            process.join()
            named = "; ".join(map(str, points))
            raise JobError(
                f"the process that measured {named} ended with exit code {process.exitcode}"
            ) from None
        if isinstance(message, str):
            raise JobError(message)
        return message


def _work(connection: Connection, load: Load, settings: Settings, threads: int) -> None:
    """What a process does: it sends numbers of units, rows, or the text of an error, which is the last thing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    try:
        import torch

        torch.set_num_threads(threads)
        model, text, tasks = load()
        meter = Meter(text, settings, tasks, connection.send)
        dense: Any = None
        while True:
            known, points = connection.recv()
            dense = dense if known is None else pickle.loads(known)
            connection.send(measure_points(model, meter, points, dense))
    except EOFError:
        return  # nobody asks any more
    except Exception as error:
        connection.send(
            str(error) if isinstance(error, SparseCompileError) else f"{type(error).__name__}: {error}"
        )
