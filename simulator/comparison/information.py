"""A reader of published measurements that information is built from."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Final

import numpy as np

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import Workload
from tessera.formulation.state.information import DpMemory

GIB = 2**30
DP_MEMORY: Final = ("arena", "dp_memory.csv")
"""The file of the data folder with the memory of data-parallel runs."""


def read_dp_memory(path: Path) -> DpMemory:
    """Return the peak memory of data-parallel runs from ``DP_MEMORY``.

    A row that is not ``ok`` ran out of memory or was not measured. The file does not distinguish
    the two.

    Raises:
        InvalidInput: the file lacks a column, or a cell is not a number.
    """
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    try:
        return DpMemory(
            workload=tuple(
                Workload(
                    model=r["model"], params=r["params"], global_batch=int(r["global_batch"])
                ).key
                for r in rows
            ),
            gpus=np.array([int(r["dp_degree"]) for r in rows], dtype=np.int64),
            memory_bytes=np.array(
                [
                    float(r["mem_per_gpu_gib"]) * GIB if r["status"] == "ok" else math.inf
                    for r in rows
                ]
            ),
        )
    except (KeyError, ValueError) as error:
        raise InvalidInput(
            path.name, f"is not a table of data-parallel memory: {error!r}"
        ) from None
