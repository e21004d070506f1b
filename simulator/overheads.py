"""The cost of starts, changes and failures: one table, which is the same for every policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tessera.formulation.base.errors import InvalidInput

_COUNTS: Final = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """The seconds in which a job holds its GPUs without training. They are equal for all policies.

    A start that is cut short has no effect, so that its work is charged again at the next start.

    Morphling measures 78 s on average for a whole reconfiguration, including the checkpoint (section
    5.1). By default, this time is split evenly between saving and loading. Arena's papers state 1 to
    2 minutes for a pruned plan search. The default is the middle. Writing and reading a checkpoint
    is charged at the start that follows, because GPUs change hands immediately.
    """

    save_s: float = 39.0
    """Seconds to write the checkpoint of a job that is moved, changed or suspended. They are charged
    when the job continues."""
    load_s: float = 39.0
    """Seconds to start the processes and read the checkpoint, for each start, move and change."""
    search_s: Mapping[int, float] = field(default_factory=lambda: {1: 90.0})
    """Seconds to search the execution plan of a Cell, by GPU count. They are charged for each start
    on, or change to, a Cell other than the last one. Between GPU counts, they are interpolated
    linearly in the logarithm of the count. Outside, the value of the nearest count applies."""
    profile_s: float = 0.0
    """Seconds in which a profiling task measures a model on one GPU of a type. Each of its starts
    takes ``load_s`` in addition. If it is 0, nothing is profiled, and rounds see all estimates."""
    checkpoint_every_s: float = 1800.0
    """Seconds between the checkpoints of a training job. They cost nothing. A failure loses all
    progress since the last one."""

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        if not all(0 <= v < math.inf for v in (self.save_s, self.load_s, self.profile_s)):
            raise InvalidInput("overheads", "must be finite numbers of seconds of at least 0")
        known = self.search_s.items()
        if not known or not all(n >= 1 and 0 <= s < math.inf for n, s in known):
            raise InvalidInput("search_s", "must map GPU counts to seconds of at least 0")
        if not self.checkpoint_every_s > 0:
            raise InvalidInput("checkpoint_every_s", "must be above 0; use inf for no checkpoints")

    def searching_s(self, gpus: int) -> float:
        """Return the seconds of a plan search on ``gpus`` GPUs."""
        counts = sorted(self.search_s)
        seconds = [self.search_s[n] for n in counts]
        return float(np.interp(np.log2(gpus), np.log2(counts), seconds))

    @property
    def profiles(self) -> bool:
        """Return whether models are profiled before rounds see their estimates."""
        return self.profile_s > 0

    def start_s(self, gpus: int, *, saved: bool, new_cell: bool) -> float:
        """Return the seconds that a start on ``gpus`` GPUs costs.

        If ``saved``, a checkpoint was written for the job. If ``new_cell``, the job ran on another
        Cell before, or has never run.
        """
        seconds = self.load_s + (self.save_s if saved else 0.0)
        return seconds + (self.searching_s(gpus) if new_cell else 0.0)


def _by_count(*seconds: float) -> dict[int, float]:
    return dict(zip(_COUNTS, seconds, strict=True))


PRESETS: Final[Mapping[str, Overheads]] = {
    "default": Overheads(),
    # The middle of 20 to 40 minutes, for systems that do not prune (Arena's papers).
    "full-search": Overheads(search_s={1: 1800.0}),
    # Medians over the runs on 32 A40 and 32 A10 in Arena's artifact, for 1, 2, 4, 8 and 16 GPUs.
    "testbed-pruned": Overheads(search_s=_by_count(39, 61, 68, 65, 42)),
    "testbed-full": Overheads(search_s=_by_count(27, 315, 540, 240, 31)),
    # Morphling only charges the reconfiguration (section 5.1).
    "morphling": Overheads(search_s={1: 0.0}),
    # 8.5 minutes on one GPU of each type, the least of Arena's 8.5 to 30.
    "profiled": Overheads(profile_s=510.0),
    "testbed-pruned-profiled": Overheads(search_s=_by_count(39, 61, 68, 65, 42), profile_s=510.0),
    "testbed-full-profiled": Overheads(search_s=_by_count(27, 315, 540, 240, 31), profile_s=510.0),
    "none": Overheads(save_s=0.0, load_s=0.0, search_s={1: 0.0}),
}
"""The tables of overheads by name."""


def preset_overheads(name: str) -> Overheads:
    """Return the table with the given name.

    Raises:
        InvalidInput: there is no such table.
    """
    if name not in PRESETS:
        raise InvalidInput("overheads", f"unknown {name!r}; use one of {', '.join(PRESETS)}")
    return PRESETS[name]
