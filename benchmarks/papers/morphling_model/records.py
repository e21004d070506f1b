"""Morphling's measurements as runs, and the authors' own validation points."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tessera.estimator.hardware import A800
from tessera.estimator.reconfiguration.configurations import (
    Configuration,
    MachineRates,
    TransformerFacts,
)
from tessera.estimator.reconfiguration.fitting import MeasuredRun
from tessera.formulation.execution_plan import ZeroStage

RATES: Final = MachineRates.of(A800)
FIGURE_SET: Final = "llama7b_bsz16"
"""The measurements of the paper's Figure 7: LLaMA-2-7B with another batch."""
SMALL_SET: Final = "t5_3B"
"""The measurements of the paper's Figure 8, which are fewer than the seven runs to fit and one to
predict."""
_SAME_MODEL: Final = {FIGURE_SET: "llama7"}
_LLAMA_30B_HIDDEN: Final = 6656
_LLAMA_30B_LAYERS: Final = 60
"""Touvron et al. 2023, Table 2, model of 32.5B parameters. The data's README says that its own sizes
are those of the 13B model."""
_OFFLOAD_CPUS: Final = 4.0
"""CPU threads for each GPU under ZeRO-Offload, where the data do not record them (README)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A measured iteration of a model under a plan."""

    model: str
    plan: str  # as in the data, e.g. "zero2_dp"
    label: str  # plan and placement as in the data, e.g. "zero-dp on 44"
    run: MeasuredRun


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A row of the data that is neither fitted nor predicted, with the reason."""

    model: str
    label: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorPoint:
    """A validation point of the authors, with the prediction of their artifact."""

    record: Record
    is_fitted: bool  # the authors also fitted this plan on this number of GPUs
    published_s: float


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file by column."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def read_facts(path: Path) -> dict[str, TransformerFacts]:
    """Return the facts of each model of ``models.csv``.

    The forward pass is the authors' profile of one GPU. LLaMA-30B has none: it has that of LLaMA-7B,
    times the ratio of parameters. That of LLaMA-7B is in seconds, the others in milliseconds.
    """
    rows = {row["model"]: row for row in read_rows(path)}
    forward = {m: _forward_s_per_sample(row) for m, row in rows.items()}
    small, large = (float(rows[name]["param_count"]) for name in ("llama7", "llama30"))
    forward["llama30"] = forward["llama7"] * large / small
    facts = {
        model: TransformerFacts(
            name=model,
            parameters=float(row["param_count"]),
            hidden=int(row["val_hidden"]),
            sequence=int(row["val_seq"]),
            layers=int(row["val_layers"]),
            forward_s_per_sample=forward[model],
        )
        for model, row in rows.items()
    }
    facts["llama30"] = replace(facts["llama30"], hidden=_LLAMA_30B_HIDDEN, layers=_LLAMA_30B_LAYERS)
    same = {name: replace(facts[model], name=name) for name, model in _SAME_MODEL.items()}
    return facts | same


def _forward_s_per_sample(row: Mapping[str, str]) -> float:
    if not row["val_forward_ms_1gpu"]:
        return math.nan
    unit_s = 1.0 if row["model"] == "llama7" else 1e-3
    return unit_s * float(row["val_forward_ms_1gpu"]) / float(row["global_batch"])


def read_records(folder: Path) -> tuple[list[Record], list[LeftOut]]:
    """Return the measured runs of ``measured.csv``, and the rows that are left out.

    A 3D plan runs its whole batch as one micro-batch, as in the authors' model. The Figure 7 set does
    not: see :func:`with_micro_batch`.
    """
    facts = read_facts(folder / "models.csv")
    records, left = [], []
    for row in read_rows(folder / "measured.csv"):
        label = f"{row['exec_plan_raw']} on {row['placement']}"
        reason = _defect(row)
        if reason:
            left.append(LeftOut(model=row["model"], label=label, reason=reason))
            continue
        run = MeasuredRun(
            configuration=_configuration(row, facts[row["model"]]),
            iter_time_s=float(row["iter_time_s"]),
            busy_s=_busy_s(row),
            update_s=_seconds(row["optimize_ms"]),
        )
        records.append(Record(model=row["model"], plan=row["plan_family"], label=label, run=run))
    return records, left


def _defect(row: Mapping[str, str]) -> str:
    """Return why a row is left out, or "". The first three are the defects of the data's README."""
    if row["feasible"] == "0":
        return "out of memory: no time"
    if "suspect_roberta_1gpu" in row["note"]:
        return "RoBERTa on 1 GPU is not slower than on 2"
    if row["model"] == "vit" and len(set(row["placement"])) > 1:
        return "ViT on uneven nodes is erratic"
    if row["model"] == SMALL_SET:
        return "six rows of the model: fewer than seven runs and one to predict"
    return ""


def _configuration(row: Mapping[str, str], facts: TransformerFacts) -> Configuration:
    family, cpus = row["plan_family"], row["cpu_threads_per_gpu"]
    stated = _of_plan(row, facts, family, tuple(int(digit) for digit in row["placement"]))
    return replace(
        stated,
        checkpointing=family.endswith("_gc"),
        cpus_per_gpu=float(cpus) if cpus else (_OFFLOAD_CPUS if stated.offload else 1.0),
    )


def _of_plan(
    row: Mapping[str, str], facts: TransformerFacts, plan: str, node_gpus: tuple[int, ...]
) -> Configuration:
    """Return what rows of both files state in the same way. The name of a plan starts with its kind."""
    return Configuration(
        facts=facts,
        rates=RATES,
        global_batch=int(row["global_batch"]),
        pp=int(row["pp"]),
        tp=int(row["tp"]),
        dp=int(row["dp"]),
        zero=ZeroStage.GRADIENTS if plan.startswith("zero") else ZeroStage.NONE,
        offload="offload" in plan,
        node_gpus=node_gpus,
    )


def _seconds(ms: str) -> float | None:
    return float(ms) / 1000 if ms else None


def _busy_s(row: Mapping[str, str]) -> float | None:
    """Return the passes with what of the synchronisation is in them.

    In rows without a forward time, the other column has both passes.
    """
    rest = _seconds(row["overlap_sync_ms"])
    return None if rest is None else rest + (_seconds(row["forward_ms"]) or 0.0)


def with_micro_batch(record: Record, samples: int) -> Record:
    """Return the record of a 3D plan with micro-batches of ``samples`` in each replica."""
    changed = divide_batch(record.run.configuration, samples)
    if changed is record.run.configuration:
        return record
    return replace(record, run=replace(record.run, configuration=changed))


def divide_batch(configuration: Configuration, samples: int) -> Configuration:
    """Return a 3D plan's configuration with micro-batches of ``samples`` in each replica.

    The runtime divides every batch alike. Without a pipeline, it accumulates the micro-batches'
    gradients. Other plans stay as they are.
    """
    if configuration.pp * configuration.tp == 1:
        return configuration
    micro_batches = max(1, configuration.global_batch // (configuration.dp * samples))
    if configuration.pp == 1:
        return replace(configuration, accumulation=micro_batches)
    return replace(configuration, micro_batches=micro_batches)


def read_author_points(folder: Path) -> tuple[list[MeasuredRun], list[AuthorPoint]]:
    """Return the runs that the authors fitted, and the points that they predicted.

    The fitted runs of LLaMA-30B are a copy of LLaMA-7B's, so they are no runs of it.
    """
    facts = read_facts(folder / "models.csv")
    runs: list[MeasuredRun] = []
    points: list[AuthorPoint] = []
    for row in read_rows(folder / "validation.csv"):
        configuration = _author_configuration(row, facts[row["model"]])
        measured_s = float(row["iter_ms_measured"]) / 1000
        if row["split"] == "fit":
            if row["model"] != "llama30":
                runs.append(_fitted_run(row, configuration, measured_s))
            continue
        record = Record(
            model=row["model"],
            plan=row["plan_label"],
            label=f"{row['exec_plan_trace']} on {row['num_gpus']}",
            run=MeasuredRun(configuration=configuration, iter_time_s=measured_s),
        )
        points.append(
            AuthorPoint(
                record=record,
                is_fitted=row["config_in_fit"] == "1",
                published_s=float(row["peer_pred_ms"]) / 1000,
            )
        )
    return runs, points


def _author_configuration(row: Mapping[str, str], facts: TransformerFacts) -> Configuration:
    """Return a configuration with the forward time that the authors gave their model.

    It is per accumulation step. A few are in seconds, or a typing error that is not used.
    """
    plan = row["exec_plan_trace"]
    unit_s = 1.0 if "forward_input_3_is_seconds" in row["note"] else 1e-3
    forward_s = unit_s * float(row["forward_ms_input"])
    return replace(
        _of_plan(row, facts, plan, (int(row["gpus_per_node"]),) * int(row["num_nodes"])),
        checkpointing=1.5 < float(row["alpha_fwd"] or 1) < 3 and row["alpha_bwd"] == "1.0",
        accumulation=round(float(row["alpha_bwd"] or 1)),
        cpus_per_gpu=float(row["cpu_threads_per_gpu"] or 1),
        forward_s=None if "typo" in row["note"] else forward_s,
    )


def _fitted_run(
    row: Mapping[str, str], configuration: Configuration, measured_s: float
) -> MeasuredRun:
    """Return a run with its breakdown, where that is in the same unit as the iteration."""
    if "typo" in row["note"] or row["model"] == "llama7":
        return MeasuredRun(configuration=configuration, iter_time_s=measured_s)
    busy_ms = float(row["forward_ms_input"]) + float(row["tcc_ms"])
    return MeasuredRun(
        configuration=configuration,
        iter_time_s=measured_s,
        busy_s=busy_ms / 1000,
        update_s=float(row["topt_ms"]) / 1000,
    )


def records_by_model(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the records of each model, in their order."""
    models = dict.fromkeys(record.model for record in records)
    return {model: [r for r in records if r.model == model] for model in models}
