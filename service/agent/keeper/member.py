"""The run of a member's program: its start, its progress, its requests and its end."""

from __future__ import annotations

import math
import os
import signal
import time

from tessera.service.agent.checkpoint import StaleGeneration
from tessera.service.agent.files import read_json, write_json
from tessera.service.agent.keeper import children, failures
from tessera.service.agent.keeper.gathering import gather
from tessera.service.agent.keeper.measures import ProgressMeter
from tessera.service.agent.keeper.ranks import Ranks
from tessera.service.agent.keeper.reporting import MemberReporter
from tessera.service.agent.keeper.requests import CHECKPOINT, STOP, Requests
from tessera.service.agent.keeper.spec import ADDRESS, PORT
from tessera.service.agent.keeper.store import JobStore
from tessera.service.agent.keeper.trainer import PORT_WORD, TrainerDoor
from tessera.service.agent.keeper.tuning import TuningWatch
from tessera.service.agent.lease import LeaseWatch

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from typing import Any

    from tessera.service.agent.keeper.spec import KeeperSpec
    from tessera.service.agent.keeper.store import Checkpoint, Rendezvous

TICK_S = 0.5
"""Seconds between two looks at the files of the program."""

STAGING_LIMIT_S = 1800.0
"""Seconds after which the command before the program is killed, if the job states no stall limit."""

MAX_PROGRESS_BYTES = 65_536
"""The largest number of bytes that are read of the program's progress file."""


UNREPORTED_END = (
    "Trainer does not report its last iteration; unless the script does so after train(), by"
    " tessera.progress, submit the job with --until-exit"
)
"""The remark on a job that Trainer alone reports for."""


class MemberRun:
    """A member's program from its start to its end. Times are monotonic seconds."""

    def __init__(self, spec: KeeperSpec) -> None:
        self._spec = spec
        self._store = JobStore(spec.store, spec.generation, spec.job_number)
        self._requests = Requests()
        self._lease = LeaseWatch(spec.lease)
        self._is_alone = False  # for half of the lease no server was heard
        self._ranks = Ranks(spec, self._feed_text, self._take_report)
        self._ranks.wake_on(self._requests.descriptor)
        self._began_s = time.monotonic()
        self._resumed: Checkpoint | None = None  # from which the program went on
        self._stop_s: float | None = None  # when a stop was requested
        self._stopped: set[int] = set()  # processes that were asked to stop
        self._killed = ""  # why the keeper killed the program; "" if it did not
        self._silent_s = 0.0  # seconds without progress when it was killed
        self._asked = 0  # number of checkpoints that were asked for
        self._ask_s = math.inf  # when the next checkpoint is due
        self._failure: dict[str, object] | None = None  # that the program reported in its output
        self._read_ns = -1  # change time of the progress file that was read last
        self._listed: tuple[str, int] | None = None  # path and iterations of the last checkpoint
        self._meter = self._make_meter(None)
        self._tuning = TuningWatch(spec.tuning_s)
        self._reporter = MemberReporter(spec)
        self._trainer = TrainerDoor(spec)

    def run(self) -> dict[str, str]:
        """Run the program; return its outcome as in ``exit.json``.

        Raises:
            StaleGeneration: a newer generation has taken the job over.
            NoIntactCheckpoint: the job's checkpoints are damaged.
            ProgramNotStarted: the program could not be started, or the gang did not gather.
            OSError, ValueError: a file cannot be used.
        """
        spec = self._spec
        children.confine(spec)
        if spec.leads:
            self._store.claim()
            self._store.make_directories(spec.owner)
            self._resumed, self._reporter.remark = self._store.choose_checkpoint()
            self._reporter.checkpoint = self._resumed
        meeting = gather(spec, self._store, self._resumed, self._is_stopped)
        if meeting is None or self._is_stopped():
            return {"outcome": "stopped"}
        if meeting.resume_from:
            self._meter = self._make_meter(meeting.resume_iterations)
        if spec.leads:
            self._reporter.stop_times = self._store.take_stop()
        environment = self._environment(meeting)
        if not self._stage(environment):
            return {"outcome": "stopped"}
        words = [_filled(word, meeting) for word in spec.arguments.argv]
        directory = spec.launch.workdir or self._store.files
        program = self._ranks.start(words, environment, directory)
        status = self._watch(program)
        return self._conclude(status)

    def _make_meter(self, resumed: int | None) -> ProgressMeter:
        spec = self._spec
        return ProgressMeter(spec.iterations_total, resumed, may_exceed=spec.launch.until_exit)

    def close(self) -> None:
        """Close the output. All processes are dead."""
        self._ranks.close()
        self._trainer.close()
        if self._spec.leads:
            self._store.forget_rendezvous()

    def _environment(self, meeting: Rendezvous) -> dict[str, str]:
        """Return the program's environment, with where it meets others and where it goes on."""
        spec = self._spec
        variables = {
            name: _filled(value, meeting).replace(PORT_WORD, str(self._trainer.port))
            for name, value in self._spec.arguments.environment.items()
        }
        variables |= {
            "MASTER_ADDR": meeting.address,
            "MASTER_PORT": str(meeting.port),
            "TESSERA_JOB_DIR": self._store.files,
            "TESSERA_CHECKPOINT_DIR": self._store.own,
            "TESSERA_PROGRESS_FILE": os.path.join(spec.outbox, "progress.json"),
            "TESSERA_CONTROL_FILE": os.path.join(spec.inbox, "control.json"),
        }
        if meeting.resume_from:
            variables["TESSERA_RESUME_FROM"] = meeting.resume_from
            variables["TESSERA_RESUME_ITERATIONS"] = str(meeting.resume_iterations)
        return variables

    def _stage(self, environment: dict[str, str]) -> bool:
        """Run the command before the program; return False if a stop came meanwhile.

        Raises:
            ProgramNotStarted: it failed, or did not end in time.
        """
        if not self._spec.launch.staging_command:
            return True
        directory = self._spec.launch.workdir or self._store.files
        limit_s = self._spec.launch.stall_limit_s or STAGING_LIMIT_S
        staging = self._ranks.run_staging(self._spec.launch.staging_command, environment, directory)
        until_s = time.monotonic() + limit_s
        while staging.poll() is None:
            if self._is_stopped():
                return False
            if time.monotonic() > until_s:
                raise children.ProgramNotStarted(
                    f"the staging command did not end within {limit_s:g} s, and was killed; see its"
                    " output, or submit the job with a longer --stall-limit"
                )
            self._ranks.pump(TICK_S)
        self._ranks.drain()
        if staging.returncode:
            outputs = self._ranks.tails()
            what = failures.describe(staging.returncode, outputs)
            raise children.ProgramNotStarted(f"the staging command failed: {what}")
        return True

    def _watch(self, program: subprocess.Popen[bytes]) -> int:
        """Serve the program until it ends; return its status."""
        self._ask_s = time.monotonic() + (self._spec.checkpoint_s or math.inf)
        self._announce_if_up()
        while (status := program.poll()) is None:
            self._ranks.pump(TICK_S)
            self._announce_if_up()
            now_s = time.monotonic()
            if program.poll() is None:  # a request that comes later has not ended it
                self._take_requests(now_s)
            self._look(now_s)
            self._end_if_hanging(now_s)
        self._ranks.finish()
        self._look(time.monotonic())
        return status

    def _announce_if_up(self) -> None:
        """Tell the agent, once, that the program runs on all ranks."""
        if self._reporter.up_s is None and self._ranks.are_up():
            self._reporter.up_s = time.monotonic() - self._began_s
            self._report()
            announce_running()

    def _take_requests(self, now_s: float) -> None:
        """Carry out the signals that came, and ask for a checkpoint if one is due."""
        asked = self._requests.take() | self._heed_lease()
        if CHECKPOINT in asked:
            self._ask_s = now_s
        if STOP in asked and self._stop_s is None:
            self._stop_s = now_s
        if self._stop_s is not None:  # ranks that begin later are asked, too
            late = [pid for pid in self._ranks.processes() if pid not in self._stopped]
            self._stopped.update(late)
            children.send_signal(late, signal.SIGTERM)
        if now_s >= self._ask_s and self._stop_s is None:
            self._asked += 1
            self._ask_s = now_s + (self._spec.checkpoint_s or math.inf)
            control = os.path.join(self._spec.inbox, "control.json")
            write_json(control, {"checkpoint": self._asked}, mode=0o644)

    def _is_stopped(self) -> bool:
        """Return whether a stop was requested before the program ran."""
        return STOP in self._requests.take() | self._heed_lease()

    def _heed_lease(self) -> set[int]:
        """Return the requests that follow from the lease, although no agent may be left to make them."""
        left_s = self._lease.left_s()
        if left_s <= 0:
            return {STOP}
        was_alone, self._is_alone = self._is_alone, left_s < self._lease.lease_s / 2
        return {CHECKPOINT} if self._is_alone and not was_alone else set()

    def _look(self, now_s: float) -> None:
        """Read what the program reported, and report it to the agent if it is new."""
        if not self._spec.leads:
            return
        self._hear_trainer()
        path = os.path.join(self._spec.outbox, "progress.json")
        try:
            changed_ns = os.lstat(path).st_mtime_ns
            is_new = changed_ns != self._read_ns
            stored = self._read_outbox(path) if is_new else None
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            self._reporter.remark = f"the progress file cannot be read: {error}"
            self._report()
            return
        self._read_ns = changed_ns
        if stored is None:
            return
        if problem := self._tuning.feed(now_s, stored.get("tuning")):
            self._reporter.remark = f"{problem}; that was ignored"
        if "iterations" in stored or "tuning" not in stored:
            self._feed(
                stored.get("iterations"),
                stored.get("loss"),
                stored.get("memory_bytes"),
                stored.get("time_s"),
            )
        self._list_checkpoint(stored.get("checkpoint"))
        self._report()

    def _hear_trainer(self) -> None:
        """Take in what Hugging Face's Trainer reported."""
        reports = self._trainer.take_reports()
        if self._trainer.remark and self._trainer.remark != self._reporter.trainer_remark:
            self._reporter.trainer_remark = self._trainer.remark
            self._report()
        for iterations, loss, total in reports:
            self._feed(iterations, loss, source="trainer")
            if not (self._trainer.remark or self._spec.launch.until_exit):
                self._reporter.trainer_remark = UNREPORTED_END
            is_other = total is not None and total != self._spec.iterations_total
            if is_other and not self._spec.launch.until_exit:
                self._reporter.remark = (
                    f"Trainer counts {total} steps, but the job has"
                    f" {self._spec.iterations_total:g} iterations; submit it with the same number"
                )
            self._report()

    def _feed_text(self, rank: str, iterations: str, loss: str | None) -> None:
        """Take progress in that was found in a rank's output."""
        self._feed(iterations.replace(",", ""), loss, source=rank)
        self._report()

    def _take_report(self, report: dict[str, Any]) -> None:
        """Take in a report in the output of a program that has a protocol for that."""
        if "iterations" in report:
            self._feed(report["iterations"], report.get("loss"), source="report")
        self._list_checkpoint(report.get("checkpoint"))
        if self._failure is None and isinstance(failure := report.get("failure"), dict):
            self._failure = failure
        self._report()

    def _feed(
        self,
        iterations: object,
        loss: object = None,
        memory_bytes: object = None,
        done_s: object = None,
        source: str = "file",
    ) -> None:
        before = self._meter.first_s
        self._meter.feed(time.monotonic(), iterations, loss, memory_bytes, done_s, source)
        if before is None and self._meter.first_s is not None:
            self._note_first_iteration()

    def _note_first_iteration(self) -> None:
        """Note that this generation makes progress, from a checkpoint or without."""
        if self._resumed is not None:
            self._note_start("")
            return
        try:
            self._store.note_progress()
        except (OSError, StaleGeneration, ValueError) as error:
            self._reporter.remark = str(error)

    def _list_checkpoint(self, reported: object) -> None:
        """List the checkpoint that the program reported, unless it was listed already."""
        if not isinstance(reported, dict) or not isinstance(path := reported.get("path"), str):
            return
        iterations = reported.get("iterations")
        if not isinstance(iterations, int) or (path, iterations) == self._listed:
            return
        self._listed = path, iterations
        if not 0 <= iterations <= self._meter.most_iterations:
            self._reporter.remark = (
                f"the checkpoint {path} has {iterations} iterations, so it is not kept"
            )
            return
        try:
            self._reporter.checkpoint = self._store.add_checkpoint(iterations, path, time.time())  # noqa: TID251
        except (OSError, ValueError) as error:
            self._reporter.remark = str(error)
            return
        self._feed(iterations, source="checkpoint")  # it proves them
        if self._stop_s is not None:
            self._reporter.last_checkpoint_s = time.monotonic() - self._stop_s

    def _end_if_hanging(self, now_s: float) -> None:
        """Kill the program if it did not stop in time, or makes no progress any more."""
        if self._killed:
            return
        if self._stop_s is not None:
            if now_s > self._stop_s + self._spec.grace_s or self._lease.must_be_dead():
                self._killed = "grace"
        elif self._spec.leads:
            limit_s = self._spec.launch.stall_limit_s
            stalls_at_s = self._tuning.stalls_at_s(self._meter, limit_s, self._began_s)
            self._killed = "stall" if now_s > stalls_at_s else ""
        if self._killed:
            self._silent_s = now_s - (self._meter.advanced_s or self._began_s)
            children.send_signal(children.find_descendants(), signal.SIGKILL)

    def _conclude(self, status: int) -> dict[str, str]:
        """Return the outcome of a program that ended with ``status``."""
        children.end_descendants()
        self._save_stop()
        if status == 0 and self._reporter.up_s is None:  # it ended before all ranks were seen
            self._reporter.up_s = time.monotonic() - self._began_s
        self._report()
        if status == 0 and self._is_done():
            return {"outcome": "succeeded"}
        if self._killed == "stall":
            error = (
                f"the program made no progress for {self._silent_s:.0f} s after iteration"
                f" {self._meter.iterations}, and was ended"
            )
            self._note_start(error)
            return {"outcome": "failed", "reason": "stalled", "error": error}
        if self._stop_s is not None:
            return {"outcome": "stopped"}
        return self._explain(status)

    def _save_stop(self) -> None:
        """Keep how long the stop took, if there was one. Without space on the disk, it is not known."""
        if self._stop_s is None or not self._spec.leads:
            return
        try:
            self._store.save_stop(self._reporter.last_checkpoint_s, time.monotonic() - self._stop_s)
        except OSError as error:
            self._reporter.remark = f"the duration of the stop cannot be kept: {error}"

    def _is_done(self) -> bool:
        """Return whether a program that exited with 0 was done (``docs/training.md#success``).

        The leader decides for its gang. Other members have done their part.
        """
        if self._spec.launch.until_exit or not self._spec.leads:
            return self._stop_s is None and not self._killed
        return self._meter.is_complete

    def _explain(self, status: int) -> dict[str, str]:
        """Return the outcome of a failure, and note it if it was a start from a checkpoint."""
        outputs = self._ranks.tails()
        began = self._meter.first_s is not None
        reason = failures.classify(
            status,
            "\n".join(outputs.values()),
            began=began,
            resumed=self._resumed is not None,
            killed_by_kernel=self._ranks.killed_by_kernel(),
        )
        total, done = self._spec.iterations_total, self._meter.iterations
        error = failures.describe(status, outputs)
        if status == 0:
            error = failures.describe_early_end(done, total, outputs)
        if stated := self._read_failure():
            reason, error = stated
        if self._resumed is not None and not began and reason in ("bad_checkpoint", "killed"):
            self._note_start(error)
        return {"outcome": "failed", "reason": reason, "error": error}

    def _note_start(self, error: str) -> None:
        """Note whether the start from the checkpoint went on (""), or how it failed."""
        if self._resumed is None or (error and self._meter.first_s is not None):
            return
        try:
            self._store.note_start(self._resumed, error)
        except (OSError, StaleGeneration, ValueError) as problem:
            self._reporter.remark = str(problem)

    def _read_failure(self) -> tuple[str, str] | None:
        """Return the kind of failure and the sentence that the program stated, or None."""
        if stated := failures.read_statement(self._failure):
            return stated
        path = os.path.join(self._spec.outbox, "failure.json")
        try:
            return failures.read_statement(self._read_outbox(path))
        except (OSError, ValueError) as error:
            self._reporter.remark = f"the program's reason cannot be read: {error}"
            return None

    def _read_outbox(self, path: str) -> dict[str, Any] | None:
        """Return what the program wrote into a file, or None without one. Raises OSError, ValueError."""
        return read_json(path, MAX_PROGRESS_BYTES, owner=self._spec.user.uid)

    def _report(self) -> None:
        """Report to the agent. Of a member that does not lead, the report says that it runs."""
        self._reporter.write(self._meter, self._tuning, self._began_s)


def announce_running() -> None:
    """Report that the program runs, to an agent that may have died since."""
    try:
        os.write(1, b"running\n")
    except BrokenPipeError:
        os.write(2, b"no agent is listening any more; continuing\n")


def _filled(word: str, meeting: Rendezvous) -> str:
    return word.replace(ADDRESS, meeting.address).replace(PORT, str(meeting.port))
