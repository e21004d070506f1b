"""The file in which a leader's keeper reports the job's progress to the agent."""

from __future__ import annotations

import os

from tessera.service.agent.files import write_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tessera.service.agent.keeper.measures import ProgressMeter
    from tessera.service.agent.keeper.spec import KeeperSpec
    from tessera.service.agent.keeper.store import Checkpoint
    from tessera.service.agent.keeper.tuning import TuningWatch

LEAST_PART_S = 1e-3
"""The least number of seconds of a part of a start that is known."""


class MemberReporter:
    """The writer of ``progress.json``."""

    def __init__(self, spec: KeeperSpec) -> None:
        self._spec = spec
        self._written: dict[str, Any] = {}
        self.remark = ""  # of the keeper itself; that of the program's progress comes after it
        self.trainer_remark = ""  # of the endpoint for Trainer
        self.checkpoint: Checkpoint | None = None  # the newest
        self.up_s: float | None = None  # seconds from the keeper's start until all ranks ran
        self.stop_times = (0.0, 0.0)  # of the last generation, until its checkpoint and its end
        self.last_checkpoint_s = 0.0  # from the request to stop until the last checkpoint

    def write(self, meter: ProgressMeter, tuning: TuningWatch, began_s: float) -> None:
        """Write what is known now, if it has changed. ``began_s`` is when the keeper started.

        On a full disk the agent keeps the progress that it knows.
        """
        if self.up_s is None:
            return
        plain: dict[str, Any] = {
            "iterations_done": meter.iterations,
            "iter_time_s": meter.iter_time_s,
            "runtime": self._spec.runtime,
            "remark": " ".join(filter(None, (self.remark, self.trainer_remark, meter.remark))),
            **tuning.to_plain(),
        }
        if meter.resumed is not None:
            plain["resumed_iterations"] = meter.resumed
        if meter.loss is not None:
            plain["loss"] = meter.loss
        if meter.memory_bytes:
            plain["memory_bytes"] = meter.memory_bytes
        if self.checkpoint is not None:
            plain["checkpoint_iterations"] = self.checkpoint.iterations
            plain["checkpoint_s"] = self.checkpoint.saved_s
        if meter.first_s is not None:
            checkpoint_s, stop_s = self.stop_times
            launch_s, first_iteration_s = divide_start(
                self.up_s, meter.first_s - began_s - tuning.tuned_s
            )
            plain["restart_times"] = {
                "checkpoint_s": checkpoint_s,
                "stop_s": stop_s,
                "launch_s": launch_s,
                "first_iteration_s": first_iteration_s,
            }
        if plain == self._written:
            return
        try:
            write_json(os.path.join(self._spec.directory, "progress.json"), plain)
        except OSError as error:
            self.remark = f"the progress cannot be written: {error}"
            return
        self._written = plain


def divide_start(up_s: float, first_s: float) -> tuple[float, float]:
    """Return the seconds of the launch and of the first iteration.

    Both arguments count from the keeper's start. The ranks are looked for at intervals, so the first
    iteration may be done before they are seen. Neither part is 0, which would mean that it is not
    known, and the whole restart with it.
    """
    launch_s = max(min(up_s, first_s - LEAST_PART_S), LEAST_PART_S)
    return launch_s, max(first_s - launch_s, LEAST_PART_S)
