"""The process of a replayed job: it lasts as long as training, on a faster clock.

It trains nothing.

It is run by path as ``python -S -E -s replay_job.py`` and reads its specification as JSON from
standard input. An empty specification means that the agent died before it had recorded this
process's id. Nothing has happened yet then, and the process does nothing.

The process writes ``running`` to standard output when the restart is over. It writes two files to
the gang's directory: ``progress.json`` about once a second and ``exit.json`` at the end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

if __name__ == "__main__":  # without site, the checkout or site-packages must be named
    here = os.path.abspath(__file__)  # ROOT/tessera/service/agent/runtimes
    sys.path[0] = here.rsplit(os.sep, 5)[0]

from tessera.service.agent import checkpoint
from tessera.service.agent.files import write_json
from tessera.service.agent.lease import LeaseWatch

TYPE_CHECKING = False  # importing typing would be a sixth of a job's start
if TYPE_CHECKING:
    from typing import Any

STOP_SIGNALS = (signal.SIGTERM,)
"""Signals that the spawner blocks from the first instruction on, and that the process waits for."""

PROGRESS_S = 1.0
"""Real seconds between two writes of the progress."""


def iterations_at(spec: dict[str, Any], resumed: int, elapsed_s: float) -> int:
    """Return the iterations done ``elapsed_s`` real seconds after the start at ``resumed``."""
    trained_s = elapsed_s * spec["clock_factor"] - spec["restart_s"]
    return resumed + max(0, int(trained_s / spec["iter_time_s"]))


def elapsed_s_at(spec: dict[str, Any], resumed: int, iterations: int) -> float:
    """Return the real seconds after which ``iterations`` are done. Inverts ``iterations_at``."""
    simulated_s = spec["restart_s"] + max(0, iterations - resumed) * spec["iter_time_s"]
    return float(simulated_s / spec["clock_factor"])


def write_outcome(spec: dict[str, Any], outcome: str, error: str = "") -> int:
    """Write the outcome for the agent; return the exit status."""
    path = os.path.join(spec["directory"], "exit.json")
    write_json(path, {"outcome": outcome, "error": error})
    return {"succeeded": 0, "stopped": 128 + signal.SIGTERM, "failed": 1}[outcome]


def write_progress(spec: dict[str, Any], resumed: int, done: int) -> None:
    """Write the progress.

    The iteration time is the one that the process was given, so it says that it was replayed.
    """
    replayed_s = spec["iter_time_s"] if done > resumed else 0.0
    path = os.path.join(spec["directory"], "progress.json")
    progress = {"iterations_done": done, "iter_time_s": replayed_s, "runtime": spec["runtime"]}
    write_json(path, progress)


def announce_running() -> None:
    """Report that the job runs now, to an agent that may have died since."""
    try:
        os.write(1, b"running\n")
    except BrokenPipeError:
        sys.stderr.write("no agent is listening any more; continuing\n")


def replay_job(spec: dict[str, Any]) -> int:
    """Advance until the end, a requested failure, SIGTERM or the lease's end; return the exit status.

    Raises:
        StaleGeneration: a newer generation has taken the checkpoint over.
    """
    store, generation, job = spec["checkpoints"], spec["generation"], spec["job_number"]
    total = int(spec["iterations_total"])
    target = min(total, spec["fail_at"]) if spec["fail_at"] is not None else total
    saved = checkpoint.open_generation(store, generation, job)
    if saved > total:
        raise ValueError(
            f"the checkpoint in {store} has {saved} iterations, but the job has only {total}: it belongs to"
            " another job; remove it, or submit the job under another name"
        )
    resumed = max(int(spec["iterations_done"]), saved)
    checkpoint_s = max(1.0, spec["checkpoint_s"] / spec["clock_factor"])
    # Times from here on are real seconds after the start; training begins after the restart.
    begins_s, ends_s = (elapsed_s_at(spec, resumed, n) for n in (resumed, target))
    next_progress_s, next_checkpoint_s, running, stopped = begins_s, checkpoint_s, False, False
    start_s, lease = time.monotonic(), LeaseWatch(spec["lease"])
    while True:
        now_s = time.monotonic() - start_s
        done = min(max(resumed, target), iterations_at(spec, resumed, now_s))
        ended = now_s >= begins_s and done >= target
        if now_s >= next_progress_s or ended or (stopped and running):
            write_progress(spec, resumed, done)
            next_progress_s = now_s + PROGRESS_S
        if now_s >= begins_s and not running:
            announce_running()
            running = True
        if now_s >= next_checkpoint_s or ended or stopped:
            checkpoint.save_checkpoint(store, generation, done, job)
            next_checkpoint_s = now_s + checkpoint_s
        if ended and target == spec["fail_at"]:
            return write_outcome(spec, "failed", f"failed at iteration {target}, as requested")
        if ended or stopped:
            return write_outcome(spec, "succeeded" if ended else "stopped")
        # Sleep until something is due, unless SIGTERM comes first.
        wake_s = min(next_progress_s, next_checkpoint_s, ends_s, now_s + PROGRESS_S) - now_s
        asked = signal.sigtimedwait(STOP_SIGNALS, max(0.001, wake_s)) is not None
        stopped = asked or lease.left_s() <= 0


def main() -> int:
    """Read the specification and replay it; return the exit status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    text = sys.stdin.read()
    if not text:
        return 0
    spec = json.loads(text)
    try:
        return replay_job(spec)
    except (checkpoint.StaleGeneration, OSError, ValueError) as error:
        return write_outcome(spec, "failed", str(error))


if __name__ == "__main__":
    sys.exit(main())
