"""The share of a full search's speed and time that tuning at launch reaches in pruned spaces."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Final

import typer

from tessera.benchmarks.harness.progress import track_steps
from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.service.tuning.cells import ModelSize, TunedCell, list_cells
from tessera.benchmarks.service.tuning.searches import SpaceSearch, Workbench
from tessera.formulation.errors import InvalidInput
from tessera.formulation.launch import TuningSpace
from tessera.formulation.runtimes import JAX
from tessera.simulator.data import MissingData
from tessera.simulator.figures import Figure, Report

RULES: Final = {"crius": TuningSpace.HALVES, "arena": TuningSpace.ARENA}
"""The papers' rules by the names in figures."""

JUDGED_CELLS: Final = 3
"""The least number of Cells for which bounds are judged. With fewer, one small space decides."""


@register_case(
    "tuning",
    smoke={
        "degrees": "1",
        "devices": 2,
        "blocks": 1,
        "rounds": 1,
        "batch": 2,
        "micro_batches": 1,
    },
    pruned_speed=(">=", 0.96),
    pruned_time=("<=", 0.25),
)
def measure_tuning(
    degrees: Annotated[str, typer.Option(help="Comma-separated pipeline degrees.")] = "1,2,4",
    devices: Annotated[int, typer.Option(min=1, help="Virtual CPU devices.")] = 4,
    blocks: Annotated[
        int, typer.Option(min=1, help="Blocks of the GPT; embedding and head are layers, too.")
    ] = 4,
    rounds: Annotated[
        int, typer.Option(min=1, help="Iterations of each winner when winners are compared.")
    ] = 40,
    batch: Annotated[int, typer.Option(min=1, help="Samples of an iteration.")] = 16,
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches of an iteration.")] = 4,
    seed: int = 0,
) -> Report:
    """Search tuning spaces by really training a small GPT, as programs do at their start.

    There is a Cell for each pipeline degree on ``devices`` virtual CPU devices of one process. Its
    plan is that of its estimate on a core with round figures. For each Cell, three searches run as
    ``tessera.jax.tuning`` does for a job, each in a fresh process, in which nothing was compiled
    before: in the full space of that number of stages, in Crius' halves, and in the space of Arena's
    rules. Like a job's program, each also tries the plan of the Cell. Every plan is compiled and
    trains 2 iterations to warm up, and then 5 whose median is its time. The fastest is the winner.

    The winners of the three searches are then measured again, in a process of their own, by
    ``rounds`` iterations in an order that rotates, so that a search's luck does not count.
    ``speed_crius`` and ``speed_arena`` are the times of the full search's winner over those of the
    pruned one's: the share of speed, as the mean over Cells (``_worst``: the least).
    ``time_crius`` and ``time_arena`` are the seconds of all pruned searches over those of all full
    ones, with compilation. ``plans_crius`` and ``plans_arena`` are the shares of plans that were
    tried. ``pruned_speed`` and ``pruned_time`` are the worse ones of the two rules.

    All seconds are CPU seconds. Virtual devices share the cores of the machine, so an iteration takes
    as long as its work, and other processes disturb CPU seconds least. They do not show how long a
    device of a pipeline waits. The bounds are those of the issue that asked for tuning: 96 % of the
    speed in a quarter of the time. With fewer than 3 Cells they are not judged.
    """
    if importlib.util.find_spec("optax") is None:
        raise MissingData("needs jax and optax (pip install 'tessera-scheduler[jax]')")
    size = ModelSize(blocks=blocks)
    cells = list_cells(size, devices, _degrees(degrees), batch, micro_batches, JAX)
    bench = Workbench(size=size, batch=batch, devices=devices)
    table: list[dict[str, Figure | str]] = []
    for index in track_steps(len(cells), "tuning"):
        table += _measure_cell(bench, cells[index], rounds)
    waived = frozenset({"pruned_speed", "pruned_time"} if len(cells) < JUDGED_CELLS else ())
    return Report(seed=seed, figures=_figures(table), table=table, waived=waived)


def _degrees(text: str) -> list[int]:
    try:
        return sorted({int(word) for word in text.split(",")})
    except ValueError as error:
        raise InvalidInput("degrees", "must be whole numbers with commas, e.g. 1,2") from error


def _measure_cell(bench: Workbench, cell: TunedCell, rounds: int) -> list[dict[str, Figure | str]]:
    """Return a row for each space of a Cell, the full one first."""
    names = {"full": TuningSpace.FULL, **RULES}
    found = {name: bench.search_space(cell, space) for name, space in names.items()}
    seconds = bench.judge_plans([search.winner for search in found.values()], rounds)
    full_s = seconds[found["full"].winner]
    return [
        _row(cell, name, search, found["full"], full_s / seconds[search.winner])
        for name, search in found.items()
    ]


def _row(
    cell: TunedCell, name: str, search: SpaceSearch, full: SpaceSearch, speed: float
) -> dict[str, Figure | str]:
    return {
        "degree": cell.degree,
        "space": name,
        "plans": len(cell.spaces[TuningSpace.FULL if name == "full" else RULES[name]]),
        "tried": search.tried,
        "failed": search.failed,
        "spent_s": search.spent_s,
        "speed": speed,
        "time": search.spent_s / full.spent_s,
        "winner": str(search.winner),
    }


def _figures(table: list[dict[str, Figure | str]]) -> dict[str, Figure]:
    def numbers(space: str, column: str) -> list[float]:
        return [float(row[column]) for row in table if row["space"] == space]

    figures: dict[str, Figure] = {"cells": len(numbers("full", "tried"))}
    for name in RULES:
        speeds = numbers(name, "speed")
        figures |= {
            f"speed_{name}": sum(speeds) / len(speeds),
            f"speed_{name}_worst": min(speeds),
            f"time_{name}": sum(numbers(name, "spent_s")) / sum(numbers("full", "spent_s")),
            f"plans_{name}": sum(numbers(name, "tried")) / sum(numbers("full", "tried")),
        }
    figures["full_tried"] = int(sum(numbers("full", "tried")))
    figures["full_spent_s"] = sum(numbers("full", "spent_s"))
    figures["pruned_speed"] = min(float(figures[f"speed_{name}"]) for name in RULES)
    figures["pruned_time"] = max(float(figures[f"time_{name}"]) for name in RULES)
    return figures
