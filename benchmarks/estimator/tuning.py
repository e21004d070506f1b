"""How much of the best plan pruned search spaces keep, and how much smaller they are.

Data and truth as in ``choice_of_plan.py``. The full search looks at all recorded plans of a cell and
finds the best. A pruned space keeps those recorded plans that are in it
(``tessera.estimator.planning.tuning``); its quality is the best plan's time by that of the best plan kept.
``tuning_quality`` is the mean over cells, ``tuning_reduction`` all recorded plans by all kept ones,
``tuning_reduction_mean`` the mean over cells of that ratio. ``tuning_space_reduction`` counts whole spaces
instead (every partition of 16 layers into two-GPU stages in either shape, recorded or not), as the geometric
mean.

Spaces, all guided by what the planner knows before anything runs (layers' loads learned from other cells
of the family, communication in bytes; no iteration time):

* ``arena`` (the figures without a name): Arena's three rules, section 3.6, with the frontier of the
recorded plans. Imbalance
  is a plan's most loaded stage; the paper names no measure.
* ``arena_roofline``: the same from uncorrected roofline loads; nothing at all is learned. *
``slack_1.1``, ``1.2``, ``1.3``: Arena's, with so much more imbalance allowed; shown to say what a wider
space buys, none was
  picked.
* ``crius``: the estimated plan's partition, each stage's half of the shapes (Crius, section 5.2), the
  estimate as in ``choice_of_plan.py``. With two GPUs a stage each half is one shape: nothing is left to
  tune.
* ``proxy``: the proxy plan alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from tessera.benchmarks.estimator.choice_of_plan import (
    assembled_best,
    learned,
    measures,
    proxy,
    roofline,
)
from tessera.benchmarks.estimator.recorded_cells import Cell, read_cells
from tessera.benchmarks.estimator.section import Section
from tessera.estimator.planning.pareto import undominated
from tessera.estimator.planning.tuning import (
    SearchSpace,
    arena_rules,
    crius_halves,
    proxy_alone,
    whole_space,
)
from tessera.formulation.tables import Bools, Floats
from tessera.simulator.figures import Figure

Guide = Callable[[SearchSpace, Cell, Sequence[Cell]], SearchSpace]


def section(data: Path, seeds: Sequence[int]) -> Section:
    """Return figures and rows of the protocol above; nothing is drawn, so seeds change nothing."""
    del seeds
    cells = read_cells(data)
    rows = [_row(name, cell, cells) for name in GUIDES for cell in cells]
    figures: dict[str, Figure] = {}
    for name in GUIDES:
        ending = "" if name == "arena" else f"_{name}"
        figures |= _figures(ending, [row for row in rows if row["space"] == name])
    return Section(figures=figures, rows=rows)


def kept_plans(space: SearchSpace, cell: Cell) -> Bools:
    """Return which recorded plans are in a space, (P,)."""
    return np.array([space.holds(rows) for rows in cell.rows])


def _by_arena(load: Floats, space: SearchSpace, cell: Cell, slack: float) -> SearchSpace:
    frontier = cell.rows[undominated(*measures(cell, load))]
    return arena_rules(space, [tuple(rows) for rows in frontier.tolist()], load, slack)


def _arena(slack: float) -> Guide:
    def guided(space: SearchSpace, cell: Cell, cells: Sequence[Cell]) -> SearchSpace:
        return _by_arena(learned(cell, cells), space, cell, slack)

    return guided


def _arena_roofline(space: SearchSpace, cell: Cell, cells: Sequence[Cell]) -> SearchSpace:
    return _by_arena(roofline(cell, cells), space, cell, 1.0)


def _crius(space: SearchSpace, cell: Cell, cells: Sequence[Cell]) -> SearchSpace:
    return crius_halves(space, cell.rows[assembled_best(cell, cells)].tolist())


def _proxy(space: SearchSpace, cell: Cell, cells: Sequence[Cell]) -> SearchSpace:
    return proxy_alone(space, cell.rows[proxy(cell, learned(cell, cells))].tolist())


GUIDES: Final[dict[str, Guide]] = {
    "arena": _arena(1.0),
    "arena_roofline": _arena_roofline,
    "slack_1.1": _arena(1.1),
    "slack_1.2": _arena(1.2),
    "slack_1.3": _arena(1.3),
    "crius": _crius,
    "proxy": _proxy,
}


def _row(name: str, cell: Cell, cells: Sequence[Cell]) -> dict[str, Figure | str]:
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
