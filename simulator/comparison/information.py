"""A reader of published measurements that information is built from."""

from __future__ import annotations

import csv
import math
from collections.abc import Collection
from pathlib import Path

import numpy as np

from tessera.formulation.errors import InvalidInput
from tessera.formulation.information import DpMemory
from tessera.formulation.values import Workload
from tessera.simulator.data import MissingData, data_file

GIB = 2**30


def read_dp_memory(path: Path) -> DpMemory:
    """Return the peak memory of data-parallel runs from ``arena/dp_memory.csv`` of the data sets.

    A row that is not ``ok`` ran out of memory or was not measured: the file does not distinguish
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
        raise InvalidInput(path.name, f"not a table of data-parallel memory: {error!r}") from None


def memory_file(information: Collection[str], given: Path | None) -> str:
    """Return the file that data-parallel information needs.

    If no policy uses it, return "". Raises MissingData.
    """
    if "data-parallel" not in information:
        return ""
    found = data_file(given, "arena", "dp_memory.csv")
    if found is None:
        raise MissingData(
            f"{given or 'dp_memory.csv'} is absent: pass --dp-memory, or set TESSERA_DATA"
        )
    return str(found)
