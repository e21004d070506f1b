"""Morphling's measurements as runs, of which seven of each model are fitted."""

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
from tessera.estimator.reconfiguration.pooling import choose_runs, fit_pooled
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
    label: str  # plan and placement as in the data, e.g. "zero-dp on 44"
    run: MeasuredRun


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


def read_records(folder: Path) -> list[Record]:
    """Return the measured runs of ``measured.csv``, without its defects.

    A 3D plan runs its whole batch as one micro-batch, as in the authors' model. The Figure 7 set does
    not: see :func:`with_micro_batch`.
    """
    facts = read_facts(folder / "models.csv")
    records = []
    for row in read_rows(folder / "measured.csv"):
        if _is_left_out(row):
            continue
        run = MeasuredRun(
            configuration=_configuration(row, facts[row["model"]]),
            iter_time_s=float(row["iter_time_s"]),
            busy_s=_busy_s(row),
            update_s=_seconds(row["optimize_ms"]),
        )
        label = f"{row['exec_plan_raw']} on {row['placement']}"
        records.append(Record(model=row["model"], label=label, run=run))
    return records


def _is_left_out(row: Mapping[str, str]) -> bool:
    """Return whether a row has a defect that the data's README names, or is of ``SMALL_SET``.

    The defects are rows without a time, RoBERTa on one GPU, which is not slower than on two, and ViT
    on uneven nodes, which is erratic.
    """
    return (
        row["feasible"] == "0"
        or "suspect_roberta_1gpu" in row["note"]
        or (row["model"] == "vit" and len(set(row["placement"])) > 1)
        or row["model"] == SMALL_SET
    )


def _configuration(row: Mapping[str, str], facts: TransformerFacts) -> Configuration:
    family, cpus = row["plan_family"], row["cpu_threads_per_gpu"]
    offload = "offload" in family
    return Configuration(
        facts=facts,
        rates=RATES,
        global_batch=int(row["global_batch"]),
        pp=int(row["pp"]),
        tp=int(row["tp"]),
        dp=int(row["dp"]),
        zero=ZeroStage.GRADIENTS if family.startswith("zero") else ZeroStage.NONE,
        offload=offload,
        node_gpus=tuple(int(digit) for digit in row["placement"]),
        checkpointing=family.endswith("_gc"),
        update_cores=float(cpus) if cpus else (_OFFLOAD_CPUS if offload else 1.0),
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


def choose_fitted(records: Sequence[Record]) -> list[Record]:
    """Return the seven runs of each model that are fitted, chosen before any time is known."""
    fitted: list[Record] = []
    for model in dict.fromkeys(record.model for record in records):
        own = [record for record in records if record.model == model]
        chosen = set(choose_runs([record.run.configuration for record in own]))
        fitted += [record for i, record in enumerate(own) if i in chosen]
    return fitted


def choose_micro_batch(fitted: Sequence[Record]) -> int:
    """Return the samples of a micro-batch of the Figure 7 set with which its runs fit best.

    The data do not record them. Only fitted runs are looked at.
    """
    own = [record for record in fitted if record.model == FIGURE_SET]
    if not own:
        return 1
    largest = own[0].run.configuration.global_batch
    sizes = [1 << power for power in range(largest.bit_length())]
    losses = [
        fit_pooled([record.run for record in set_micro_batch(fitted, size)]).loss for size in sizes
    ]
    _, best = min(zip(losses, sizes, strict=True))
    return best


def set_micro_batch(records: Sequence[Record], samples: int) -> list[Record]:
    """Return the records, with the micro-batch in those of the Figure 7 set."""
    return [
        with_micro_batch(record, samples) if record.model == FIGURE_SET else record
        for record in records
    ]
