"""The passes in which a round is solved again, and the work of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tessera.formulation.answer.solution import Solution
from tessera.solvers.base import Budget

PASSES_KEY: Final = "packing"
"""Name under which the number of passes is recorded. Without it, a recorded round had none."""
MAX_PASSES: Final = 8
"""Times that a round is solved again with more rows."""
COLUMN_S: Final = 1e-4
"""Wall seconds that are planned for each column of a round that is solved again."""
PASS_TIME_SHARE: Final = 0.5
"""Share of the remaining time that one pass may take."""


class Passes:
    """The passes of a round, and the work of each, under the limits of the record if there is one."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        recorded = budget.work.get(PASSES_KEY, 0.0 if budget.work else float(MAX_PASSES))
        self._is_repeated = bool(budget.work)
        self._most, self.done = int(recorded), 0
        self.work: list[tuple[str, float]] = []

    @property
    def left(self) -> bool:
        """Return whether another pass may begin. If the round is repeated, the clock has no say."""
        if self.done >= self._most:
            return False
        return self._is_repeated or not self._budget.expired()

    def affords(self, columns: int) -> bool:
        """Return whether there is time to solve a round of this many columns again."""
        planned_s = COLUMN_S * columns
        return self._is_repeated or planned_s < PASS_TIME_SHARE * self._budget.remaining_s()

    def budget(self) -> Budget:
        """Begin a pass, and return its budget."""
        self.done += 1
        mine = f"{PASSES_KEY} {self.done}/"
        work = {
            key.removeprefix(mine): amount
            for key, amount in self._budget.work.items()
            if key.startswith(mine)
        }
        answers = tuple(
            replace(answer, stage=answer.stage.removeprefix(mine))
            for answer in self._budget.recorded
            if answer.stage.startswith(mine)
        )
        return replace(self._budget.share(PASS_TIME_SHARE), work=work, recorded=answers)

    def note(self, name: str, amount: float) -> None:
        """Record work of the pass that began last."""
        self.work.append((f"{PASSES_KEY} {self.done}/{name}", amount))

    def record(self, solution: Solution) -> Solution:
        """Return the solution of the pass with its recorded answers under the name of the pass."""
        mine = f"{PASSES_KEY} {self.done}/"
        for name, amount in solution.work:
            self.note(name, amount)
        return replace(
            solution,
            recorded=tuple(replace(one, stage=mine + one.stage) for one in solution.recorded),
        )
