"""The things that members and generations of a job share: the rendezvous, and its checkpoints.

Everything lies in the job's directory on a file system that its nodes share. The fence of
``tessera.service.agent.checkpoint`` decides which generation may write there: an older one cannot
add a checkpoint or a rendezvous once a newer one has opened the directory. A program writes its
checkpoints into its generation's own directory, and its keeper lists those that are complete.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from tessera.service.agent import checkpoint
from tessera.service.agent.files import (
    PASSAGE,
    change_mode,
    give_folder,
    make_private,
    measure_tree,
    read_json,
    remove_file,
    remove_tree,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LIST = "checkpoints.json"
OWNER = "owner.json"
LAST_STOP = "stop.json"
PROGRESSED = "progressed.json"

OWN_NAMES = ("generation-", "files", "rendezvous-", LIST, LAST_STOP, PROGRESSED)
"""The beginnings of the names of what this module writes."""

NO_CHECKPOINT = (
    "started without a checkpoint, because the job has reported none; unless its program keeps its own,"
    " it began again at iteration 0"
)
"""The remark on a start after iterations that may be lost."""

KEPT_CHECKPOINTS = 3
"""Number of the newest checkpoints that are kept."""

MAX_FAILED_STARTS = 2
"""Failed starts from a checkpoint after which an older one is taken."""


class NoIntactCheckpoint(RuntimeError):
    """None of the job's checkpoints is as it was when it was reported."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint. ``files`` and ``size_bytes`` are those of when it was reported."""

    iterations: int
    path: str
    generation: int
    files: int
    size_bytes: int
    saved_s: float  # seconds since 1970
    failed_starts: int = 0  # in a row
    last_error: str = ""  # of the last failed start

    def is_intact(self) -> bool:
        """Return whether all of its files are still there, with as many bytes."""
        above, name = os.path.split(self.path)  # above may be where the store was before
        path = os.path.join(os.path.realpath(above), name)
        return measure_tree(path) == (self.files, self.size_bytes)


@dataclass(frozen=True)
class Rendezvous:
    """The place of the members' meeting, and the checkpoint to go on from ("" at the start)."""

    address: str
    port: int
    resume_from: str
    resume_iterations: int


class JobStore:
    """The directory of a job, as one generation uses it."""

    def __init__(self, directory: str, generation: int, job_number: int) -> None:
        self.directory = directory
        self._generation, self._job = generation, job_number

    @property
    def files(self) -> str:
        """Return the directory that all generations of the job share."""
        return os.path.join(self.directory, "files")

    @property
    def own(self) -> str:
        """Return the directory for checkpoints of this generation."""
        return os.path.join(self.directory, f"generation-{self._generation}")

    def claim(self) -> None:
        """Claim the directory for this generation, and remove what another job of this name left.

        Raises:
            StaleGeneration: a newer generation, or a newer job of this name, was here before.
            ValueError: a file does not hold what this module writes.
        """
        make_private(self.directory)
        checkpoint.open_generation(self.directory, self._generation, self._job)
        owner = read_json(os.path.join(self.directory, OWNER)) or {}
        if owner.get("job") != self._job:
            self._clear()  # it may be another tenant's
            self._change(OWNER, lambda _: {"job": self._job})

    def make_directories(self, owner: tuple[int, int] | None) -> None:
        """Make the directories that the program uses, for its user and group. None: the keeper's."""
        for path in (self.files, self.own):
            if owner is not None:
                give_folder(path, *owner)
            else:
                make_private(path)
        if owner is not None:
            change_mode(self.directory, PASSAGE)

    def checkpoints(self) -> list[Checkpoint]:
        """Return the listed checkpoints, the furthest first. Raises ValueError (a broken list)."""
        path = os.path.join(self.directory, LIST)
        stored = read_json(path) or {}
        try:
            listed = [Checkpoint(**row) for row in stored.get("checkpoints", ())]
            return sorted(listed, key=lambda one: (one.iterations, one.generation), reverse=True)
        except TypeError as error:
            raise ValueError(f"{path} is broken: {error}; put back an older one") from error

    def choose_checkpoint(self) -> tuple[Checkpoint | None, str]:
        """Return the checkpoint to go on from, and a sentence on those that were passed over.

        It is the furthest one that is intact, unless starts from it have failed too often. If that
        is true of all, it is the one with the fewest failed starts. Without any, it is None, and the
        sentence says so if an earlier generation made progress.

        Raises:
            NoIntactCheckpoint: there are some, but none is intact. Starting at the beginning would
                throw work away, so a person has to decide.
        """
        listed = self.checkpoints()
        intact = [one for one in listed if one.is_intact()]
        if listed and not intact:
            raise NoIntactCheckpoint(
                f"no checkpoint of the job is intact; put back {listed[0].path}, or remove"
                f" {os.path.join(self.directory, LIST)} to start at the beginning"
            )
        if not intact:
            return None, NO_CHECKPOINT if self._has_progressed() else ""
        good = [one for one in intact if one.failed_starts < MAX_FAILED_STARTS]
        chosen = good[0] if good else min(intact, key=lambda one: one.failed_starts)
        return chosen, _passed_over(listed, intact, chosen)

    def add_checkpoint(self, iterations: int, path: str, now_s: float) -> Checkpoint:
        """List a checkpoint of this generation as complete, and delete the oldest ones.

        Raises:
            ValueError: ``path`` has no files, or is not in this generation's directory.
            StaleGeneration: a newer generation has taken over.
        """
        real, own = os.path.realpath(path), os.path.realpath(self.own)
        if os.path.dirname(real) != own:
            raise ValueError(
                f"the checkpoint {path} is not directly in {self.own} (TESSERA_CHECKPOINT_DIR), so it is"
                " not kept"
            )
        files, size_bytes = measure_tree(real)
        if not files:
            raise ValueError(f"the checkpoint {path} has no files, so it is not kept")
        new = Checkpoint(iterations, real, self._generation, files, size_bytes, now_s)
        dropped: list[Checkpoint] = []

        def add(listed: list[Checkpoint]) -> list[Checkpoint]:
            others = [one for one in listed if one.path != real]
            newest = [new, *sorted(others, key=lambda one: one.saved_s, reverse=True)]
            dropped.extend(newest[KEPT_CHECKPOINTS:])
            return newest[:KEPT_CHECKPOINTS]

        self._change_list(add)
        for old in dropped:
            self._delete(old)
        return new

    def note_start(self, used: Checkpoint, error: str = "") -> None:
        """Note how a start from a checkpoint went. An empty ``error`` means that it went on.

        Raises:
            StaleGeneration: a newer generation has taken over.
        """

        def change(listed: list[Checkpoint]) -> list[Checkpoint]:
            return [_with_start(one, error) if one.path == used.path else one for one in listed]

        self._change_list(change)

    def note_progress(self) -> None:
        """Note that this generation has done iterations. Raises StaleGeneration."""
        self._change(PROGRESSED, lambda _: {"generation": self._generation})

    def publish(self, rendezvous: Rendezvous) -> None:
        """Publish the rendezvous of this generation. Raises StaleGeneration."""
        self._change(self._rendezvous_name(), lambda _: vars(rendezvous))

    def find_rendezvous(self) -> Rendezvous | None:
        """Return the rendezvous of this generation, or None if it is not published yet."""
        stored = read_json(os.path.join(self.directory, self._rendezvous_name()))
        return Rendezvous(**stored) if stored else None

    def forget_rendezvous(self) -> None:
        """Remove the rendezvous, so that nobody joins a gang that has ended."""
        remove_file(os.path.join(self.directory, self._rendezvous_name()))

    def save_stop(self, checkpoint_s: float, stop_s: float) -> None:
        """Keep how long this generation took to stop, for the next one to report."""
        times = {"checkpoint_s": checkpoint_s, "stop_s": stop_s}
        self._change(LAST_STOP, lambda _: times)

    def take_stop(self) -> tuple[float, float]:
        """Return the durations that ``save_stop`` kept, or zeros, and forget them."""
        stored = read_json(os.path.join(self.directory, LAST_STOP)) or {}
        self._change(LAST_STOP, lambda _: {})
        return float(stored.get("checkpoint_s", 0.0)), float(stored.get("stop_s", 0.0))

    def _has_progressed(self) -> bool:
        """Return whether a generation of the job has done iterations."""
        return bool(read_json(os.path.join(self.directory, PROGRESSED)))

    def _rendezvous_name(self) -> str:
        return f"rendezvous-{self._generation}.json"

    def _change_list(self, change: Any) -> None:
        """Replace the list of checkpoints by ``change`` of it. Raises StaleGeneration."""

        def rewrite(_: dict[str, Any]) -> dict[str, Any]:
            return {"checkpoints": [vars(one) for one in change(self.checkpoints())]}

        self._change(LIST, rewrite)

    def _change(self, name: str, change: Any) -> None:
        checkpoint.rewrite_json(self.directory, name, change, self._generation, self._job)

    def _delete(self, old: Checkpoint) -> None:
        """Delete a checkpoint's files, if they are where this module lists them."""
        if os.path.dirname(os.path.dirname(old.path)) != os.path.realpath(self.directory):
            return
        _remove(old.path)

    def _clear(self) -> None:
        """Remove what an earlier job of this name left. The fence belongs to this job already."""
        for entry in os.scandir(self.directory):
            if entry.name.startswith(OWN_NAMES):
                _remove(entry.path)


def _remove(path: str) -> None:
    """Remove a file or a directory. What cannot be removed stays."""
    try:
        remove_tree(path)
    except OSError:
        return


def _with_start(one: Checkpoint, error: str) -> Checkpoint:
    failed = one.failed_starts + 1 if error else 0
    return Checkpoint(**{**vars(one), "failed_starts": failed, "last_error": error[:300]})


def _passed_over(listed: list[Checkpoint], intact: list[Checkpoint], chosen: Checkpoint) -> str:
    """Return a sentence on the checkpoints that are further than ``chosen``, or ""."""
    further = [one for one in listed if one.iterations > chosen.iterations]
    if not further:
        return ""
    reasons = []
    for one in further:
        if one in intact:
            error = f" ({one.last_error})" if one.last_error else ""
            reasons.append(
                f"{one.failed_starts} starts from iteration {one.iterations} failed{error}"
            )
        else:
            reasons.append(
                f"the checkpoint of iteration {one.iterations} is damaged or was removed"
            )
    return f"went back to iteration {chosen.iterations}, because " + "; ".join(reasons)
