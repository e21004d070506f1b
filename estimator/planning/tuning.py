"""Spaces of the plans that a runtime tries once a Cell is chosen, instead of all plans.

A space is given by the stages from which its plans may be built. Its plans are counted and
enumerated without listing any outside the space. Crius, section 5.2, keeps the partition and half
of each stage's shapes. Arena, section 3.6, keeps partitions that are no more imbalanced than those
of its frontier, and the shapes of the frontier's stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tessera.estimator.planning.options import StageOptions, options_of, stages_at
from tessera.estimator.planning.stages import stage_shares
from tessera.estimator.plans import Candidates
from tessera.formulation.base.errors import TesseraError
from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.job.execution_plan import PlanStage


class Mismatch(TesseraError):
    """An error for a plan with a stage that is not in the search space."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchSpace:
    """All plans of ``stages`` stages on ``gpus`` GPUs from ``options``.

    The options are rows of ``candidates``.
    """

    name: str
    candidates: Candidates
    options: StageOptions
    stages: int
    gpus: int

    @property
    def count(self) -> int:
        """Return the number of plans."""
        return int(self._ways()[self.stages, 0, self.gpus])

    def plans(self) -> Iterator[tuple[PlanStage, ...]]:
        """Yield every plan once, in order of the rows of its stages."""
        for rows in self.rows():
            yield stages_at(self.candidates, np.array(rows, dtype=np.int64))

    def rows(self) -> Iterator[tuple[int, ...]]:
        """Yield every plan as rows of the candidates."""
        ways, option = self._ways(), self.options
        first = np.searchsorted(option.start, np.arange(option.layers + 2))

        def onward(layer: int, gpus: int, left: int) -> Iterator[tuple[int, ...]]:
            if left == 0:
                yield ()
                return
            for k in range(first[layer], first[layer + 1]):
                end, rest = int(option.end[k]), gpus - int(option.gpus[k])
                if rest >= 0 and option.depth[k] >= left and ways[left - 1, end, rest]:
                    for more in onward(end, rest, left - 1):
                        yield (int(option.source[k]), *more)

        if ways[self.stages, 0, self.gpus]:
            yield from onward(0, self.gpus, self.stages)

    def holds(self, rows: Sequence[int] | Ints) -> bool:
        """Return whether a plan, rows of the candidates in order, is in the space."""
        inside = np.isin(np.asarray(rows), self.options.source).all()
        return bool(inside) and len(rows) == self.stages and self._fits(rows)

    def _fits(self, rows: Sequence[int] | Ints) -> bool:
        """Return whether the options follow one another, use all GPUs, and fit at their places."""
        at = np.array([int(np.flatnonzero(self.options.source == r)[0]) for r in rows])
        option, left = self.options, np.arange(self.stages, 0, -1)
        start, end = option.start[at], option.end[at]
        follows = start[0] == 0 and end[-1] == option.layers and bool((start[1:] == end[:-1]).all())
        return (
            follows
            and option.gpus[at].sum() == self.gpus
            and bool((option.depth[at] >= left).all())
        )

    def _ways(self) -> Ints:
        """Return the number of plans from each state to the end, as in tables of :mod:`.chain`.

        The entries are Python integers, which do not overflow.
        """
        option = self.options
        ways = np.zeros((self.stages + 1, option.layers + 1, self.gpus + 1), dtype=object)
        ways[0, option.layers, 0] = 1
        for left in range(1, self.stages + 1):
            for k in np.flatnonzero((option.depth >= left) & (option.gpus <= self.gpus)):
                size = int(option.gpus[k])
                after = ways[left - 1, option.end[k], : self.gpus + 1 - size]
                ways[left, option.start[k], size:] += after
        return ways


def whole_space(
    candidates: Candidates, gpus: int, stages: int, depth: Ints | None = None
) -> SearchSpace:
    """Return all plans of the candidates that fit, which is the space of an unguided search."""
    return SearchSpace(
        name="full",
        candidates=candidates,
        options=options_of(candidates, depth),
        stages=stages,
        gpus=gpus,
    )


def proxy_alone(space: SearchSpace, proxy: Sequence[int]) -> SearchSpace:
    """Return the space of the proxy plan only, rows of the candidates (Arena, section 3.6)."""
    return _kept(space, "proxy", np.isin(space.options.source, np.asarray(proxy)))


def crius_halves(space: SearchSpace, estimated: Sequence[int]) -> SearchSpace:
    """Return the estimated plan's stages with half of their shapes (Crius, section 5.2).

    A stage of N GPUs with data parallelism keeps the shapes from there to the half-hybrid shape,
    sqrt N x sqrt N. A stage with tensor parallelism keeps those from the half-hybrid shape on. If N
    is an odd power of two, sqrt N lies between two powers of two, and each half has its own: dp >=
    tp, or tp >= dp. A stage whose shape is the half-hybrid itself keeps both halves.
    """
    c, option = space.candidates, space.options
    kept = np.zeros(len(option), dtype=np.bool_)
    for row in _checked(space, estimated):
        dp, tp = c.dp[option.source], c.tp[option.source]
        same = (option.start == c.start[row]) & (option.end == c.end[row])
        same &= option.gpus == c.gpus[row]
        if c.dp[row] > c.tp[row]:
            same &= dp >= tp
        elif c.tp[row] > c.dp[row]:
            same &= tp >= dp
        kept |= same
    return _kept(space, "crius", kept)


def relative_loads(space: SearchSpace, load: Floats) -> Floats:
    """Return the load per GPU of each option relative to a balanced plan, shape (K,).

    The largest value among a plan's stages is its pace relative to the best possible pace. It is our
    measure of "imbalance", which Arena, section 3.6, does not define.
    """
    option = space.options
    share: Floats = stage_shares(load, space.gpus, option.start, option.end) / option.gpus
    return share


def arena_rules(
    space: SearchSpace, frontier: Sequence[Sequence[int]], load: Floats, slack: float = 1.0
) -> SearchSpace:
    """Return the space that Arena's rules leave (section 3.6), given the plans of the frontier.

    1. The pipeline degree is that of the best Cell, i.e. of ``space``.
    2. No stage has more load than the most loaded stage of the frontier's plans, times ``slack``.
    3. A stage with the same layers as a stage on the frontier has the GPUs and shape of that stage.
       If the frontier's plans differ, it may have those of any.
    """
    option = space.options
    on_it = np.unique(np.concatenate([_checked(space, rows) for rows in frontier]))
    chosen = np.isin(option.source, on_it)
    loaded = relative_loads(space, load)
    kept = loaded <= loaded[chosen].max() * slack * (1 + 1e-9)
    layers = option.start * (option.layers + 1) + option.end
    matched = np.isin(layers, layers[chosen])
    return _kept(space, "arena", kept & (chosen | ~matched))


def _checked(space: SearchSpace, rows: Sequence[int]) -> Ints:
    """Return rows as an array.

    Raises:
        Mismatch: a row is not among the options of the space.
    """
    at = np.asarray(rows, dtype=np.int64)
    if missing := at[~np.isin(at, space.options.source)].tolist():
        raise Mismatch(f"candidate {missing[0]} of the plan is not in the space {space.name!r}")
    return at


def _kept(space: SearchSpace, name: str, kept: Bools) -> SearchSpace:
    return SearchSpace(
        name=name,
        candidates=space.candidates,
        options=space.options.only(kept),
        stages=space.stages,
        gpus=space.gpus,
    )
