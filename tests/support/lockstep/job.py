"""A job of two ranks in lockstep on a real cluster: where it is, and what it has done."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.lockstep import program
from tests.support.system import Agent, until
from tests.support.training_lab import TrainingLab, keeper_of, processes_of

ITERATIONS = 10
SCRIPT = (sys.executable, program.__file__)


class LockstepJob:
    """A job, its gates and its ledger. Each of the ``agents`` has one GPU."""

    def __init__(
        self, lab: TrainingLab, agents: Mapping[str, Agent], name: str, folder: Path, gate: str
    ) -> None:
        """Submit the job. At ``gate``, GENERATION-POINT, both ranks wait until it is opened."""
        self.lab, self.agents, self.name, self.folder = lab, agents, name, folder
        launch: dict[str, Any] = {"env": {"TEST_FOLDER": str(folder), "TEST_GATE": gate}}
        if gate.endswith("staging"):
            launch["staging_command"] = (*SCRIPT, "stage")
        lab.train(name, SCRIPT, gpus=2, iterations=ITERATIONS, launch=launch)

    def wait_at(self, generation: int, point: str) -> dict[int, int]:
        """Wait until both ranks are at a point; return their process ids, by rank."""
        notes = [self.folder / f"{generation}-{rank}-{point}" for rank in (0, 1)]
        until(lambda: all(note.exists() for note in notes), f"{self.name} is at {point}")
        return {rank: int(note.read_text()) for rank, note in enumerate(notes)}

    def open_gate(self) -> None:
        """Let the ranks go on."""
        (self.folder / "go").touch()

    def member(self, generation: int, rank: int) -> tuple[Agent, int]:
        """Wait for a rank's keeper; return its agent and its process id."""

        def here() -> tuple[Agent, int] | None:
            found = [
                (agent, keeper_of(agent, self.name, generation, leads=rank == 0))
                for agent in self.agents.values()
            ]
            return next(((agent, pid) for agent, pid in found if pid), None)

        return until(here, f"{self.name} has rank {rank} of generation {generation}")

    def has_met(self, generation: int) -> bool:
        """Return whether a generation's leader has published where its members meet."""
        return (self.lab.store(self.name) / f"rendezvous-{generation}.json").exists()

    def wait_until_listed(self, iterations: int) -> None:
        """Wait until the checkpoint of ``iterations`` counts as complete."""
        until(lambda: iterations in self.lab.listed(self.name), f"checkpoint {iterations}")

    def check_ledger(self, generations: int, resumed: list[int]) -> None:
        """Check what both ranks did in all generations, which began at ``resumed``.

        Each began at the iteration that the last complete checkpoint before it holds, and did all
        that follow in order. Ranks whose gang failed early may or may not have begun, so those that
        began at the same iteration count once.
        """
        for rank in (0, 1):
            done: dict[int, str] = {}
            begins, complete = [], 0
            for generation in range(1, generations + 1):
                path = self.lab.files(self.name) / f"ledger-{generation}-{rank}"
                entries = _entries(path)
                if not entries:
                    continue
                begin = entries[0]["begin"]
                assert begin == complete, (rank, generation)
                begins.append(begin)
                numbers = [entry["done"] for entry in entries if "done" in entry]
                assert numbers == list(range(begin + 1, begin + 1 + len(numbers)))
                done |= {entry["done"]: entry["digest"] for entry in entries if "done" in entry}
                complete = max([complete, *(e["checkpoint"] for e in entries if "checkpoint" in e)])
            assert (rank, list(dict.fromkeys(begins))) == (rank, resumed)
            assert done == undisturbed_digests()

    def check_nothing_left(self) -> None:
        """Check that no GPU was used twice, all are free, and no process is left."""
        self.lab.wait_until_free()
        mark = f"TEST_FOLDER={self.folder}"
        until(lambda: not processes_of(self.name, mark), f"no process of {self.name} is left")
        assert not list(self.folder.glob("twice-*"))
        assert self.lab.broken_rules() == []


def undisturbed_digests() -> dict[int, str]:
    """Return the digest after each iteration of a run that nothing disturbs."""
    digests, digest = {}, ""
    for number in range(ITERATIONS):
        digest = hashlib.sha256(f"{digest} {number}".encode()).hexdigest()
        digests[number + 1] = digest
    return digests


def _entries(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a ledger. A rank that was killed may have cut off the last line."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
