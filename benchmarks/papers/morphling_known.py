"""Known results on Morphling's traces: those of its paper, and of its artifact's simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np


@dataclass(frozen=True, slots=True)
class KnownResult:
    """A published or re-measured result, in hours.

    ``jct_h``, ``guaranteed_h`` and ``best_effort_h`` are mean JCTs.
    """

    trace: str
    policy: str
    source: str
    jct_h: float
    p99_h: float
    makespan_h: float
    guaranteed_h: float = np.nan
    best_effort_h: float = np.nan


_PAPER: Final = "Morphling, Table 4"
_SHIPPED: Final = "its simulator as shipped, 260 s"
_FIXED: Final = "its simulator, no job without GPUs, 78 s"
_FIXED_260: Final = "its simulator, no job without GPUs, 260 s"
KNOWN_RESULTS: Final = (
    KnownResult("morphling-base", "morphling", _PAPER, 0.96, 7.1, 15.3),
    KnownResult("morphling-base", "morphling-r", _PAPER, 1.6, 9.9, 19.8),
    KnownResult("morphling-base", "morphling-e", _PAPER, 2.4, 10.9, 20.2),
    KnownResult("morphling-base", "morphling-n", _PAPER, 3.1, 12.8, 22.0),
    KnownResult("morphling-base", "sia", _PAPER, 2.5, 12.2, 18.8),
    KnownResult("morphling-base", "synergy", _PAPER, 3.1, 13.5, 21.5),
    KnownResult("morphling-base", "morphling", _SHIPPED, 1.01, 8.1, 16.3),
    KnownResult("morphling-base", "morphling", _FIXED, 1.68, 12.2, 24.6),
    KnownResult("morphling-base", "synergy", _FIXED, 1.38, 10.9, 20.6),
    KnownResult("morphling-bp", "morphling", _PAPER, 0.96, 7.1, 15.3),
    KnownResult("morphling-bp", "sia", _PAPER, 1.8, 9.0, 16.5),
    KnownResult("morphling-bp", "synergy", _PAPER, 2.3, 10.8, 20.5),
    KnownResult("morphling-bp", "synergy", _FIXED, 1.59, 10.7, 20.7),
    KnownResult("morphling-mt", "morphling", _PAPER, 1.1, 11.4, 17.9, 0.85, 1.34),
    KnownResult("morphling-mt", "antman", _PAPER, 1.75, 13.4, 19.6, 1.41, 2.1),
    KnownResult("morphling-mt", "morphling", _SHIPPED, 1.12, 7.9, 16.9, 0.65, 1.55),
    KnownResult("morphling-mt", "antman", _FIXED_260, 2.81, 11.2, 20.8, 1.22, 4.26),
)
"""Known results. Those of the paper are from its cluster, the others from the artifact's simulator.

The simulator was run as it is, or with a stop for the jobs that it lets train without GPUs. It
charges 260 s for a restart; the paper has 78 s.
"""


def paper_result(trace: str, policy: str) -> KnownResult | None:
    """Return the paper's result of a policy on a trace, or None if it has none."""
    of_paper = (known for known in KNOWN_RESULTS if known.source == _PAPER)
    return next((k for k in of_paper if (k.trace, k.policy) == (trace, policy)), None)
