"""One engine and the calls that share it: a stream may stay open while another call generates."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sparse_compile.config import SparseConfig
from sparse_compile.errors import ArgumentError
from sparse_compile.progress import ProgressCallback, WorkProgress
from sparse_compile.runtime.interrupts import held_back
from sparse_compile.speculation import Speculation, SpeculationConfig, chosen

if TYPE_CHECKING:
    from sparse_compile.runtime.engine import Engine
    from sparse_compile.runtime.plan import ProgramKind
    from sparse_compile.runtime.request import SamplingParams, StepOutput

MakeEngine = Callable[..., "Engine"]  # (rows, context, pool_tokens=None, speculation=None)

# When a call needs more rows or more context than the engine has, both grow, unless that would reserve more
# than this times the memory that the larger of the two calls needs by itself.
_SPARE_MEMORY = 2


@dataclass(frozen=True)
class EngineRequest:
    """One row of a call."""

    prompt: list[int]
    params: SamplingParams


class Session:
    """An engine with the size and speculation it was made for, and a mailbox of outputs for each live request.

    lock: of all sessions of a model, one of which works at a time, whatever threads call.
    """

    def __init__(
        self,
        engine: Engine,
        rows: int,
        context: int,
        speculation: SpeculationConfig | None,
        lock: threading.RLock,
    ) -> None:
        self.engine, self.rows, self.context, self.speculation = engine, rows, context, speculation
        self._mail: dict[str, deque[StepOutput]] = {}
        self._lock = lock
        self._stepping = False
        self._dropped: list[str] = []  # requests that nobody waits for any more, to be aborted after the step

    def run(self, requests: Sequence[EngineRequest]) -> Iterator[tuple[int, StepOutput]]:
        """Yield (row, output) of all requests as they come, until each has finished.

        Raises the error of the first request that fails. However this ends (an error, KeyboardInterrupt,
        closing the generator), no request of this call stays in the engine.
        """
        rows: dict[str, int] = {}
        open_ids: set[str] = set()
        try:
            with self._lock, held_back():
                for row, request in enumerate(requests):
                    name = self._submit(request)
                    rows[name] = row
                    open_ids.add(name)
            while open_ids:
                for output in self._next(open_ids):
                    if output.finished:
                        open_ids.discard(output.request_id)
                    if output.error is not None:
                        output.error.add_note(f"in row {rows[output.request_id]} of the call")
                        raise output.error
                    yield rows[output.request_id], output
        finally:
            self._forget(rows, open_ids)

    def warm_up(self, progress: bool | ProgressCallback | None) -> None:
        """Run whatever compiles or captures, for every number of rows that the engine takes."""
        options, seats = self.engine.options, self.engine.plans.seats
        kinds: list[ProgramKind] = ["dense"]
        if options.retention is not None:
            kinds += ["sparse", "mixed"] if options.dense_below else ["sparse"]
        with self._lock, _plain_tensors():
            rows = range(1, self.rows + 1)
            steps = self.engine.executor.warm_up(rows, seats, kinds, options.loops_per_step, options.drafting)
            with WorkProgress(len(steps), progress, verb="warming up", unit="steps") as bar:
                for step in steps:
                    step()
                    bar.advance()

    def _submit(self, request: EngineRequest) -> str:
        name = self.engine.add_request(request.prompt, request.params)
        self._mail[name] = deque()
        return name

    def _next(self, ids: set[str]) -> list[StepOutput]:
        """The outputs that wait for `ids`, after as many engine steps as it takes to have one."""
        with self._lock, _plain_tensors():
            while True:
                found = [output for name in sorted(ids) for output in self._take(name)]
                if found:
                    return found
                if not self.engine.has_unfinished():
                    raise RuntimeError(f"the engine is idle, but {len(ids)} requests have not finished")
                self._step()

    def _step(self) -> None:
        with held_back():  # what has been returned is in its mailbox before anything is interrupted
            self._stepping = True
            try:
                outputs = self.engine.step()
            finally:
                self._stepping = False
                while self._dropped:
                    self.engine.abort(self._dropped.pop())
            for output in outputs:
                if output.request_id in self._mail:
                    self._mail[output.request_id].append(output)

    def _take(self, name: str) -> list[StepOutput]:
        mail = self._mail[name]
        found = list(mail)
        mail.clear()
        return found

    def _forget(self, names: Iterable[str], unfinished: set[str]) -> None:
        """Ends what a call has left. In the middle of a step, where Python may collect a stream that was dropped, at
        any line of it, that waits for the end of the step.
        """
        with held_back(), self._lock:
            for name in names:
                self._mail.pop(name, None)
                if name not in unfinished:
                    continue
                if self._stepping:
                    self._dropped.append(name)
                else:
                    with _plain_tensors():
                        self.engine.abort(name)


@contextlib.contextmanager
def _plain_tensors() -> Iterator[None]:
    """No gradients, and no inference mode either: pools made inside it could not be written outside of it later."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class SessionKeeper:
    """Holds the present session and makes a larger one when a call needs it."""

    def __init__(
        self, make_engine: MakeEngine, config: SparseConfig, weights: Callable[[], Hashable] | None = None
    ) -> None:
        """weights: as `Engine.weights`, for every engine."""
        self.make_engine, self._config, self._weights = make_engine, config, weights
        self._session: Session | None = None
        self._lock, self._work = threading.Lock(), threading.RLock()

    @property
    def present(self) -> Session | None:
        return self._session

    def check(self, rows: int, context: int) -> None:
        """Raise ArgumentError when a call is larger than the limits that the user fixed."""
        if self._config.max_batch is not None and rows > self._config.max_batch:
            raise ArgumentError(
                "max_batch",
                self._config.max_batch,
                f"the call has {rows} sequences, more than this limit",
                f"compile with max_batch={rows} or more, or split the call",
            )
        if self._config.max_context is not None and context > self._config.max_context:
            raise ArgumentError(
                "max_context",
                self._config.max_context,
                f"the call needs {context} tokens (prompt + new), more than this limit",
                f"compile with max_context={context} or more, or shorten the prompt or max_new_tokens",
            )

    def engine(self, *sizes: int | None, **options: Any) -> Engine:
        """A new engine that looks after the weights of its model."""
        made = self.make_engine(*sizes, **options)
        made.weights = self._weights
        return made

    def session(self, rows: int, context: int, speculation: Speculation = None) -> Session:
        """A session with room for `rows` sequences of `context` tokens (ValueError beyond a fixed limit).

        With another speculation than the present one's a new session takes its place.
        """
        self.check(rows, context)
        asked = chosen(speculation, self._config.speculation)
        with self._lock:
            present = self._session
            fits = present is not None and rows <= present.rows and context <= present.context
            if present is not None and fits and present.speculation == asked:
                return present
            sizes = self._sizes(rows, context)
            # An idle engine gives its memory back first; one with an open stream lives on with that stream.
            present, self._session = None, None
            with _plain_tensors():
                self._session = self._make(sizes, asked)
            return self._session

    def _make(self, sizes: list[tuple[int, int]], asked: SpeculationConfig | None) -> Session:
        """A session of the first size; of the next one if the first does not fit into memory."""
        *larger, least = sizes
        options = {} if asked == self._config.speculation else {"speculation": asked or False}
        for size in larger:
            with contextlib.suppress(ValueError):
                return Session(self.engine(*size, **options), *size, asked, self._work)
        return Session(self.engine(*least, **options), *least, asked, self._work)

    def _sizes(self, rows: int, context: int) -> list[tuple[int, int]]:
        """(rows, context) of a new session, best first: with room for earlier calls, then without."""
        page = self._config.page_size
        sizes = [(rows, -(-context // page) * page)]
        if self._session is not None:
            grown = max(rows, self._session.rows), max(sizes[0][1], self._session.context)
            alone = max(rows * sizes[0][1], self._session.rows * self._session.context)
            if grown[0] * grown[1] <= _SPARE_MEMORY * alone:
                sizes.insert(0, grown)
        fixed = self._config.max_batch, self._config.max_context
        sizes = [(fixed[0] or one[0], fixed[1] or one[1]) for one in sizes]
        return list(dict.fromkeys(sizes))
