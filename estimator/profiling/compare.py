"""Comparison of summed layer profiles with whole steps, both measured on the available device.

``python -m tessera.estimator.profiling.compare`` reads a request as JSON and writes a report as
JSON, so that its caller need not import JAX.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from tessera.estimator.profiling.records import ProfileRecord, append_records
from tessera.estimator.profiling.stages import (
    StepMaker,
    kinds_of,
    measure_step,
    measure_update,
    profile_stage,
    total_s,
)
from tessera.estimator.profiling.timing import TimingEffort, device_name, library_versions
from tessera.formulation.errors import TesseraError

_STEPS = "tessera.estimator.tracing.models.steps:"

SMALL_MODELS: tuple[tuple[str, StepMaker, tuple[int, ...]], ...] = (
    (
        "gpt",
        StepMaker(
            target=f"{_STEPS}decoder",
            arguments={
                "hidden": 256,
                "layers": 4,
                "heads": 4,
                "vocabulary": 2048,
                "sequence": 128,
                "dtype": "f32",
            },
        ),
        (4,),
    ),
    (
        "moe",
        StepMaker(
            target=f"{_STEPS}decoder",
            arguments={
                "hidden": 128,
                "layers": 4,
                "heads": 4,
                "vocabulary": 2048,
                "sequence": 128,
                "dtype": "f32",
                "experts": 4,
                "expert_group": 256,
            },
        ),
        (4,),
    ),
    (
        "wide_resnet",
        StepMaker(
            target=f"{_STEPS}wide_resnet",
            arguments={
                "base": 16,
                "width": 2,
                "side": 64,
                "classes": 128,
            },
        ),
        (4,),
    ),
)
"""Names, models and numbers of samples for a CPU. The models are of the papers' families, with a few
million parameters each."""

PAPER_MODELS: tuple[tuple[str, StepMaker, tuple[int, ...]], ...] = (
    (
        "bert 760M",
        StepMaker(
            target=f"{_STEPS}decoder",
            arguments={
                "hidden": 1536,
                "layers": 24,
                "heads": 16,
                "vocabulary": 51_200,
                "sequence": 1024,
            },
        ),
        (2, 4),
    ),
    (
        "moe 690M",
        StepMaker(
            target=f"{_STEPS}decoder",
            arguments={
                "hidden": 768,
                "layers": 8,
                "heads": 16,
                "vocabulary": 32_000,
                "sequence": 1024,
                "inner": 8 * 768,
                "experts": 16,
            },
        ),
        (4, 8),
    ),
    (
        "wide_resnet 500M",
        StepMaker(
            target=f"{_STEPS}wide_resnet",
            arguments={
                "base": 224,
                "width": 2,
                "classes": 1024,
            },
        ),
        (8, 16),
    ),
)
"""The same for an accelerator with at least 40 GB. The models have the smallest sizes of the papers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The comparison of one model at one number of samples.

    ``passes_s`` is forward and backward, and ``step_s`` includes the update. ``profile_device_s``
    only counts the time that this number of samples added to the profile.
    """

    model: str
    samples: int
    layers: int
    kinds: int
    summed_s: float
    passes_s: float
    update_s: float
    step_s: float
    profile_device_s: float
    direct_device_s: float
    method: str


def compare_profiles(
    models: Sequence[tuple[str, StepMaker, Sequence[int]]],
    *,
    date: str,
    effort: TimingEffort | None = None,
) -> tuple[list[Comparison], list[ProfileRecord]]:
    """Return comparisons and the records behind them.

    Raises:
        Untraceable: a model cannot be traced.
    """
    effort = effort or TimingEffort(warmups=2, repeats=10)
    comparisons: list[Comparison] = []
    records: list[ProfileRecord] = []
    for name, source, counts in models:
        graph = kinds_of(source)
        for samples in counts:
            new = profile_stage(
                source, samples, date=date, known=records, effort=effort, names=graph
            )
            records += new
            step = source.step(samples)
            whole = measure_step(step, effort=effort)
            comparisons.append(
                Comparison(
                    model=name,
                    samples=samples,
                    layers=len(graph),
                    kinds=len(set(graph.kind)),
                    summed_s=total_s(graph, records, samples),
                    passes_s=whole.passes_s,
                    update_s=measure_update(step, effort=effort),
                    step_s=whole.step_s,
                    profile_device_s=sum(r.device_s for r in new),
                    direct_device_s=whole.device_s,
                    method=whole.method,
                )
            )
    return comparisons, records


def main() -> None:
    """Answer the request on the standard input: models, date and a path for records.

    If there are no models, they are chosen by device.
    """
    request: dict[str, Any] = json.load(sys.stdin)
    given = [
        (name, StepMaker(**source), counts) for name, source, counts in request.get("models", [])
    ]
    models = given or (SMALL_MODELS if jax.default_backend() == "cpu" else PAPER_MODELS)
    try:
        comparisons, records = compare_profiles(models, date=request.get("date", ""))
    except TesseraError as error:
        sys.stdout.write(json.dumps({"error": str(error)}) + "\n")
        return
    if keep := request.get("records"):
        append_records(records, Path(keep))
    report = {
        "device": device_name(),
        "versions": library_versions(),
        "comparisons": [asdict(c) for c in comparisons],
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
