"""The quality and the size of pruned search spaces, compared with the full space.

Data and truth are those of ``choice_of_plan.py``. The full search looks at all recorded plans of a
cell and finds the best. A pruned space keeps the recorded plans that are in it
(``tessera.estimator.planning.tuning``). Its quality is the best plan's time over that of the best
plan kept. ``tuning_quality`` is the mean over cells. ``tuning_reduction`` is the number of all
recorded plans over that of all kept plans, and ``tuning_reduction_mean`` is the mean of that ratio
over cells. ``tuning_space_reduction`` counts whole spaces instead, as the geometric mean. A whole
space has every partition of 16 layers into two-GPU stages in either shape, recorded or not.

All spaces are guided by what the planner knows before anything runs: layers' loads learned from
other cells of the family, and communication in bytes, but no iteration time.

* ``arena`` (the figures without a name): Arena's three rules, section 3.6, with the frontier of the
  recorded plans. Imbalance is the load of a plan's most loaded stage; the paper names no measure.
* ``arena_roofline``: the same from uncorrected roofline loads, so that nothing at all is learned.
* ``slack_1.1``, ``1.2``, ``1.3``: Arena's rules with 1.1, 1.2 or 1.3 times the imbalance. They show
  the benefit of a wider space; none of them was picked.
* ``crius``: the estimated plan's partition and each stage's half of the shapes (Crius, section
  5.2). The estimate is as in ``choice_of_plan.py``. With two GPUs per stage, each half is one
  shape, so nothing is left to tune.
* ``proxy_plan``: the proxy plan alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from tessera.benchmarks.estimator.choice_of_plan import (
    assembled_best,
    learned_compute,
    plan_measures,
    proxy_plan,
    recorded_roofline,
)
from tessera.benchmarks.estimator.recorded_cells import RecordedCell, read_cells
from tessera.benchmarks.estimator.section import EstimatorSection
from tessera.estimator.planning.pareto import find_undominated_plans
from tessera.estimator.planning.tuning import (
    SearchSpace,
    arena_rules,
    crius_halves,
    proxy_alone,
    whole_space,
)
from tessera.formulation.base.tables import Bools, Floats
from tessera.simulator.figures import Figure

Guide = Callable[[SearchSpace, RecordedCell, Sequence[RecordedCell]], SearchSpace]


def run_tuning_section(data: Path, seeds: Sequence[int]) -> EstimatorSection:
    """Return the figures and rows of the protocol. Nothing is drawn, so seeds have no effect."""
    del seeds
    cells = read_cells(data)
    rows = [_row(name, cell, cells) for name in GUIDES for cell in cells]
    figures: dict[str, Figure] = {}
    for name in GUIDES:
        ending = "" if name == "arena" else f"_{name}"
        figures |= _figures(ending, [row for row in rows if row["space"] == name])
    return EstimatorSection(figures=figures, rows=rows)


def kept_plans(space: SearchSpace, cell: RecordedCell) -> Bools:
    """Return which recorded plans are in a space, (P,)."""
    return np.array([space.holds(rows) for rows in cell.rows])


def _by_arena(load: Floats, space: SearchSpace, cell: RecordedCell, slack: float) -> SearchSpace:
    frontier = cell.rows[find_undominated_plans(*plan_measures(cell, load))]
    return arena_rules(space, [tuple(rows) for rows in frontier.tolist()], load, slack)


def _arena(slack: float) -> Guide:
    def guided(
        space: SearchSpace, cell: RecordedCell, cells: Sequence[RecordedCell]
    ) -> SearchSpace:
        return _by_arena(learned_compute(cell, cells), space, cell, slack)

    return guided


def _arena_roofline(
    space: SearchSpace, cell: RecordedCell, cells: Sequence[RecordedCell]
) -> SearchSpace:
    return _by_arena(recorded_roofline(cell, cells), space, cell, 1.0)


def _crius(space: SearchSpace, cell: RecordedCell, cells: Sequence[RecordedCell]) -> SearchSpace:
    return crius_halves(space, cell.rows[assembled_best(cell, cells)].tolist())


def _proxy(space: SearchSpace, cell: RecordedCell, cells: Sequence[RecordedCell]) -> SearchSpace:
    return proxy_alone(space, cell.rows[proxy_plan(cell, learned_compute(cell, cells))].tolist())


GUIDES: Final[dict[str, Guide]] = {
    "arena": _arena(1.0),
    "arena_roofline": _arena_roofline,
    "slack_1.1": _arena(1.1),
    "slack_1.2": _arena(1.2),
    "slack_1.3": _arena(1.3),
    "crius": _crius,
    "proxy": _proxy,
}


def _row(name: str, cell: RecordedCell, cells: Sequence[RecordedCell]) -> dict[str, Figure | str]:
    model, params, gpus, stages = cell.key
    full = whole_space(cell.candidates, gpus, stages)
    space = GUIDES[name](full, cell, cells)
    kept = kept_plans(space, cell)
    return {
        "section": "tuning",
        "space": name,
        "cell": f"{model}-{params} {gpus} GPUs {stages} stages",
        "quality": float(cell.share[kept].max()),
        "recorded": len(kept),
        "kept": int(kept.sum()),
        "plans": full.count,
        "plans_kept": space.count,
    }


def _figures(ending: str, rows: Sequence[dict[str, Figure | str]]) -> dict[str, Figure]:
    """Return a space's figures over the cells."""
    quality, recorded, kept, plans, left = (
        np.array([float(row[name]) for row in rows])
        for name in ("quality", "recorded", "kept", "plans", "plans_kept")
    )
    return {
        f"tuning_quality{ending}": float(quality.mean()),
        f"tuning_quality_worst{ending}": float(quality.min()),
        f"tuning_reduction{ending}": float(recorded.sum() / kept.sum()),
        f"tuning_reduction_mean{ending}": float((recorded / kept).mean()),
        f"tuning_space_reduction{ending}": float(np.exp(np.log(plans / left).mean())),
    }
