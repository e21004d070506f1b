"""The proof that jobs trained as if nothing had happened: their losses, and the samples that they used."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tessera.service.cli.demo.train.jobs import PROGRESS_PATTERN

TOLERANCE: Final = 1e-5
"""The largest difference of a loss from that of the undisturbed run. Sums differ in their order."""

_LINE: Final = re.compile(rf"^{PROGRESS_PATTERN}\r?$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """An iteration, counted from 0, as a start of a job executed it on all of its ranks.

    ``samples`` is empty for a program that keeps no ledger.
    """

    generation: int
    iteration: int
    loss: float
    samples: tuple[int, ...] = ()


def read_ledger(folder: Path) -> list[Execution]:
    """Return the executions in the ledgers GENERATION-RANK.jsonl of all ranks."""
    parts = [
        execution
        for path in sorted(folder.glob("*-*.jsonl"))
        for execution in parse_ledger(
            int(path.name.partition("-")[0]), path.read_text(encoding="utf-8")
        )
    ]
    return join_ranks(parts)


def parse_ledger(generation: int, text: str) -> list[Execution]:
    """Return the executions in a rank's ledger. A last line that a kill cut off is left out."""
    entries = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [
        Execution(
            generation=generation,
            iteration=entry["iteration"],
            loss=entry["loss"],
            samples=tuple(entry["samples"]),
        )
        for entry in entries
    ]


def join_ranks(parts: Iterable[Execution]) -> list[Execution]:
    """Return one execution for each start and iteration, with the samples of all ranks."""
    joined: dict[tuple[int, int], Execution] = {}
    for part in parts:
        key = part.generation, part.iteration
        known = joined.get(key)
        joined[key] = replace(part, samples=known.samples + part.samples) if known else part
    return list(joined.values())


def parse_output(generation: int, text: str) -> list[Execution]:
    """Return the executions that a program has printed. It counts iterations from 1."""
    return [
        Execution(
            generation=generation,
            iteration=int(match["iteration"]) - 1,
            loss=float(match["loss"]),
        )
        for match in _LINE.finditer(text)
    ]


def last_executions(executions: Iterable[Execution]) -> dict[int, Execution]:
    """Return each iteration as it was executed last: what earlier starts did of it was lost."""
    last: dict[int, Execution] = {}
    for execution in executions:
        known = last.get(execution.iteration)
        if known is None or execution.generation >= known.generation:
            last[execution.iteration] = execution
    return last


def largest_difference(
    ours: Mapping[int, Execution], undisturbed: Mapping[int, Execution]
) -> float:
    """Return the largest difference of losses at the same iteration. It is inf where one is missing."""
    if not undisturbed or ours.keys() != undisturbed.keys():
        return math.inf
    differences = [abs(ours[n].loss - undisturbed[n].loss) for n in undisturbed]
    return math.inf if any(map(math.isnan, differences)) else max(differences)


def find_ledger_fault(last: Mapping[int, Execution], total: int, batch: int, samples: int) -> str:
    """Return what is wrong with the samples of a job's iterations, or "".

    ``samples`` is the size of the data set. It is used in epochs, so the numbers of uses of two
    samples differ by 1 at most.
    """
    missing = sorted(set(range(total)) - last.keys())
    if missing:
        return f"iteration {missing[0] + 1} is missing"
    if beyond := sorted(last.keys() - set(range(total))):
        return f"iteration {beyond[0] + 1} is beyond the last, {total}"
    for number in range(total):
        used = last[number].samples
        if len(used) != batch:
            return f"iteration {number + 1} used {len(used)} samples, and its batch is {batch}"
    uses = Counter(sample for number in range(total) for sample in last[number].samples)
    if strange := sorted(uses.keys() - set(range(samples))):
        return f"sample {strange[0]} does not exist"
    least, most = (total * batch) // samples, -(-total * batch // samples)
    for sample in range(samples):
        if uses[sample] > most:
            return f"sample {sample} was used {uses[sample]} times, and {most} are right"
        if uses[sample] < least:
            return f"sample {sample} was skipped: it was used {uses[sample]} times of {least}"
    return ""
