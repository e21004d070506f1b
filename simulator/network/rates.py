"""Long-run rates of jobs under a network plan. Groups that have not changed are not simulated again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from zlib import crc32

import numpy as np

from tessera.formulation.answer.network.contention import LinkDemand
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats, Ints
from tessera.solvers.network.fluid import contending_groups, simulate_fluid

MAX_REMEMBERED_JOBS = 12
"""The largest number of jobs in a group for which the engine remembers all sets of senders
(``solvers.network.kernels.fluid``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateWindow:
    """The time for which a group of jobs is simulated to find long-run rates.

    It is a multiple of the longest iteration alone. ``noise`` is that of compute times.
    """

    iterations: float = 20.0
    of_few: float = 120.0  # the same for small groups, which cost little to simulate
    warm: float = 0.25  # share of the window before counting begins
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse windows in which nothing would be counted."""
        if not (self.iterations > 0 and self.of_few > 0 and self.warm >= 0):
            raise InvalidInput(
                "window", "iterations and of_few must be above 0, and warm at least 0"
            )


class GroupRates:
    """The rates of jobs, simulated by group.

    The jobs of a group can slow each other down, directly or through others. A group is simulated
    again only if its jobs, their loads, the order of their priority levels or their shifts differ
    from the last call. Without shifts, a job begins at a point of its iteration that is drawn from
    its name, like a job that is not aligned with others.
    """

    def __init__(self, window: RateWindow | None = None) -> None:
        self.window = RateWindow() if window is None else window
        self.played, self.kept = 0, 0  # numbers of groups
        self._last: dict[bytes, Floats] = {}

    def __call__(
        self, names: Sequence[str], demand: LinkDemand, level: Ints, offset_s: Floats | None = None
    ) -> Floats:
        """Return each job's iterations/s, float64[jobs]."""
        rates: Floats = 1.0 / demand.alone_s
        now: dict[bytes, Floats] = {}
        for jobs in contending_groups(demand):
            group = demand.among(jobs)
            rank = np.unique(level[jobs], return_inverse=True)[1]
            called = [names[j] for j in jobs.tolist()]
            if offset_s is None:
                begin_s = group.alone_s * np.array([self._phase(name) for name in called])
            else:
                begin_s = offset_s[jobs]
            key = _key(called, group, rank, begin_s)
            if key in self._last:
                now[key] = self._last[key]
                self.kept += 1
            else:
                now[key] = self._played(group, rank, begin_s)
                self.played += 1
            rates[jobs] = now[key]
        self._last = now
        return rates

    def _phase(self, name: str) -> float:
        return crc32(f"{self.window.seed} {name}".encode()) / 2**32

    def _played(self, group: LinkDemand, rank: Ints, begin_s: Floats) -> Floats:
        w, longest_s = self.window, float(group.alone_s.max())
        horizon_s = longest_s * (w.of_few if group.jobs <= MAX_REMEMBERED_JOBS else w.iterations)
        return simulate_fluid(
            group,
            rank,
            horizon_s=horizon_s,
            warm_s=w.warm * horizon_s,
            offset_s=begin_s,
            noise=w.noise,
            seed=w.seed,
        ).iterations


def _key(names: Sequence[str], group: LinkDemand, rank: Ints, begin_s: Floats) -> bytes:
    digest = blake2b(repr(names).encode(), digest_size=16)
    for part in (
        rank,
        begin_s,
        group.compute_s,
        group.start_s,
        group.delay_s,
        group.link_start,
        group.link,
        group.busy_s,
    ):
        digest.update(np.ascontiguousarray(part).data)
    return digest.digest()
