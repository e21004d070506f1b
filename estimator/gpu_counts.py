"""The numbers of GPUs for which Cells are estimated."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

GPU_MULTIPLES: Final = (0.5, 1.0, 2.0)
"""Multiples of a job's requested GPUs for which Cells are estimated (Crius, section 4.1)."""

MAX_GPUS: Final = 8_192
"""Largest number of GPUs of an estimate. The search takes some tenths of a second there."""


def gpu_counts_of(requests: Iterable[int], multiples: Iterable[float]) -> list[int]:
    """Return these multiples of the requested numbers of GPUs, ascending.

    Only whole numbers of at least 1 are returned.
    """
    products = {request * multiple for request in requests for multiple in multiples}
    return sorted({round(p) for p in products if p >= 1 and math.isclose(p, round(p))})
