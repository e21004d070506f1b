"""Rounds that are decided in separate processes, so that a long solve does not delay other calls.

A solver holds the interpreter's lock while it builds its arrays and models. With 100,000 jobs,
every stream of the same process notices that. A setting (``solve_process_from_jobs``) says which
rounds go to a process.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final, Self

from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.errors import DeadlineTooShort, TesseraError, Unavailable
from tessera.formulation.base.logs import begin_ids, current_ids, log_as_parent, settings_in_use
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.server.rounds.deciding import plan_here
from tessera.service.server.rounds.phase_times import Phases
from tessera.solvers.base import Budget
from tessera.solvers.plugins import load_named
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.options import RoundOptions, make_budget
from tessera.solvers.rounds.plan import RoundOutcome
from tessera.solvers.warm import run_every_loop

log = logging.getLogger(__name__)

POLL_S: Final = 0.05
"""Seconds between checks of a waiting call whether it was cancelled or its deadline is over."""

IDLE_S: Final = 5.0
"""Seconds for which a process started on demand is kept after its round. It holds 280 MiB."""

_CLOCK: Final = SystemClock()

_SPAWN: Final = multiprocessing.get_context("spawn")  # a fork would copy other threads' locks


@dataclass(frozen=True, slots=True, kw_only=True)
class _RoundOrder:
    """A round to decide.

    ``end_s`` is a time of the machine's monotonic clock, which all its processes share.
    """

    snapshot: Snapshot
    options: RoundOptions
    end_s: float
    ids: dict[str, Any]  # of the records that it logs


@dataclass(frozen=True, slots=True, kw_only=True)
class _RoundAnswer:
    """The outcome of a round, and the seconds of each phase in order."""

    outcome: RoundOutcome
    seconds: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedError:
    """An error in parts. Unpickling an error itself would call its class with other arguments."""

    kind: type[Exception]
    args: tuple[Any, ...]
    facts: dict[str, Any]
    where: str

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Return the parts of an error."""
        return cls(
            kind=type(error),
            args=error.args,
            facts=dict(vars(error)),
            where="".join(traceback.format_exception(error)),
        )

    def error(self) -> Exception:
        """Return the error as it was raised, with a note that says where."""
        found = self.kind.__new__(self.kind)
        found.args = self.args
        found.__dict__.update(self.facts)
        found.add_note(self.where)
        return found


class SolveProcesses:
    """A pool of processes, one for each round that is decided at the same time.

    Processes are kept, with their compiled loops loaded.
    """

    def __init__(self, *, on_demand: bool = False, idle_s: float = IDLE_S) -> None:
        """Start the first process, unless ``on_demand`` is set.

        If it is set, a process is started only when a round needs one. At most one is then kept,
        for at most ``idle_s``.
        """
        self._lock = threading.Lock()
        self._free: list[_SolveProcess] = []
        self._all: set[_SolveProcess] = set()
        self._closed, self._on_demand, self._idle_s = False, on_demand, idle_s
        if not on_demand:
            first = self._take()
            first.await_ready(lambda: None)
            self._give(first)

    def plan(
        self,
        snapshot: Snapshot,
        options: RoundOptions,
        budget: Budget,
        mark: Callable[[str, float], None],
        remaining_s: Callable[[], float],
    ) -> RoundOutcome:
        """Return the result of ``plan_round``, which runs in a process. Blocks.

        ``mark`` is called with each phase and its seconds. ``remaining_s`` returns what is left of
        the caller's deadline. ``budget`` must be that of the options. Its time and cancellation
        apply.

        Raises:
            DeadlineTooShort: the call was cancelled or its deadline ended; the process was ended.
            Unavailable: the process died, or the server is shutting down.
            TesseraError: what ``plan_round`` raised.
        """

        def check() -> None:
            if budget.cancelled():
                raise DeadlineTooShort("the call was cancelled before the round was committed")
            if remaining_s() <= 0:
                raise DeadlineTooShort(
                    "the deadline ended while the round was decided; no round was committed: call again"
                    " with a longer one"
                )

        worker = self._take()
        try:
            worker.await_ready(check)
            left_s = budget.remaining_s()
            end_s = _CLOCK.monotonic_s() + left_s if math.isfinite(left_s) else left_s
            worker.send(
                _RoundOrder(snapshot=snapshot, options=options, end_s=end_s, ids=current_ids())
            )
            answer = worker.receive(check)
        except BaseException:
            self._end(worker)
            raise
        self._give(worker)
        if isinstance(answer, RaisedError):
            raise answer.error()
        for phase, seconds in answer.seconds:
            mark(phase, seconds)
        outcome: RoundOutcome = answer.outcome
        return outcome

    def close(self) -> None:
        """End every process. Rounds that are running fail."""
        with self._lock:
            self._closed = True
            workers = list(self._all)
            self._all.clear()
            self._free.clear()
        for worker in workers:
            worker.kill()

    def pids(self) -> list[int]:
        """Return the ids of the processes."""
        with self._lock:
            return [worker.pid for worker in self._all]

    def _take(self) -> _SolveProcess:
        with self._lock:
            if self._closed:
                raise Unavailable(
                    "this server is shutting down; call again to reach another replica"
                )
            while self._free:
                worker = self._free.pop()
                if worker.alive():
                    return worker
                self._all.discard(worker)
                log.error(
                    "an idle solve process died", extra={"event": "worker_died", "pid": worker.pid}
                )
            return self._started()

    def _give(self, worker: _SolveProcess) -> None:
        with self._lock:
            surplus = self._on_demand and bool(self._free)
            if not self._closed and not surplus:
                self._free.append(worker)
            elif surplus:
                self._all.discard(worker)
        if surplus:
            worker.kill()
        elif self._on_demand:
            timer = threading.Timer(self._idle_s, self._end_idle, [worker, worker.rounds])
            timer.daemon = True
            timer.start()

    def _end_idle(self, worker: _SolveProcess, rounds: int) -> None:
        """End an idle process that has had no further round since its count was ``rounds``."""
        with self._lock:
            if worker not in self._free or worker.rounds != rounds:
                return
            self._free.remove(worker)
            self._all.discard(worker)
        worker.kill()

    def _end(self, worker: _SolveProcess) -> None:
        """End a process whose state is unknown.

        Unless on demand, start another one for the next round.
        """
        worker.kill()
        with self._lock:
            self._all.discard(worker)
            if not self._closed and not self._on_demand:
                self._free.append(self._started())

    def _started(self) -> _SolveProcess:
        worker = _SolveProcess()
        self._all.add(worker)
        return worker


class _SolveProcess:
    """A process and the pipe to it."""

    def __init__(self) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        self._process: BaseProcess = _SPAWN.Process(
            target=_serve, args=(theirs, settings_in_use()), name="tessera-solve", daemon=True
        )
        self._process.start()
        theirs.close()  # so that the pipe ends with the process
        self._ready = False
        self.rounds = 0
        """Number of rounds that were sent to the process."""

    @property
    def pid(self) -> int:
        """Return the process's id."""
        return self._process.pid or 0

    def alive(self) -> bool:
        """Return whether the process runs."""
        return self._process.is_alive()

    def await_ready(self, check: Callable[[], None]) -> None:
        """Wait until the process has loaded what it needs."""
        if not self._ready:
            self.receive(check)
            self._ready = True

    def send(self, order: _RoundOrder) -> None:
        """Send a round to decide.

        Raises:
            Unavailable: the process has ended.
        """
        self.rounds += 1
        try:
            self._pipe.send(order)
        except OSError:
            raise self._died() from None

    def receive(self, check: Callable[[], None]) -> Any:
        """Return the next message of the process. ``check`` may end the wait by raising.

        Raises:
            Unavailable: the process has ended.
        """
        try:
            while not self._pipe.poll(POLL_S):
                check()
            return self._pipe.recv()
        except (EOFError, OSError):
            raise self._died() from None

    def kill(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _died(self) -> Unavailable:
        self._process.join(1.0)
        code = self._process.exitcode
        log.error(
            "a solve process died",
            extra={"event": "worker_died", "pid": self.pid, "exit_code": code},
        )
        return Unavailable(
            f"the process that decides the round ended with exit code {code} (-9: killed, often because"
            " memory ran out); nothing was committed: call again"
        )


def _serve(pipe: Connection, log_settings: tuple[int, str]) -> None:
    """Decide the rounds that arrive through ``pipe`` until it is closed.

    Runs in the separate process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends its processes itself
    log_as_parent(log_settings)
    make_solver()
    run_every_loop()
    pipe.send("ready")
    while True:
        try:
            order: _RoundOrder = pipe.recv()
        except EOFError:
            return
        pipe.send(_answer(order))


def _answer(order: _RoundOrder) -> _RoundAnswer | RaisedError:
    def left_s() -> float:
        return order.end_s - _CLOCK.monotonic_s()

    begin_ids(**order.ids)
    options, phases = order.options, Phases(_CLOCK)
    try:
        load_named(options.scheduler, options.objective)  # the server allowed them
        outcome = plan_here(order.snapshot, options, make_budget(options, left_s), phases, left_s)
    except (
        TesseraError,
        ArithmeticError,
        AssertionError,
        LookupError,
        MemoryError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        return RaisedError.of(error)
    return _RoundAnswer(outcome=outcome, seconds=tuple(phases.seconds.items()))
