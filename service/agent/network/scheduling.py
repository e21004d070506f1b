"""Checks that a NIC serves priorities strictly and in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class TransmissionSelection:
    """A NIC's scheduling of priorities (IEEE 802.1Qaz). The highest strict class goes first."""

    class_of: Mapping[int, int] = field(default_factory=dict)  # traffic class of each priority
    algorithm: Mapping[int, str] = field(default_factory=dict)  # of each traffic class
    lossless: frozenset[int] = frozenset()  # priorities with flow control


def find_shortcomings(used: Iterable[int], scheduling: TransmissionSelection) -> list[str]:
    """Return sentences on what keeps the priorities ``used`` from strict service.

    They should be strict, in order and alike in loss. ``vendor`` is not strict: mlx5 puts all of
    its classes into one group, which takes turns (Linux, en_dcbnl.c, mlx5e_build_tc_group).
    """
    s, found = scheduling, []
    known = [priority for priority in sorted(set(used)) if priority in s.class_of]
    loose = [p for p in known if s.algorithm.get(s.class_of[p], "strict") != "strict"]
    if loose:
        kinds = sorted({s.algorithm[s.class_of[p]] for p in loose})
        found.append(f"priorities {loose} are scheduled by {', '.join(kinds)}, not strictly")
    for lower, higher in pairwise(known):
        below, above = s.class_of[lower], s.class_of[higher]
        if below == above:
            found.append(f"priorities {lower} and {higher} share traffic class {above}")
        elif below > above:
            found.append(
                f"priority {lower} is in traffic class {below}, which is served before class {above} of"
                f" priority {higher}"
            )
    lossy = [priority for priority in sorted(set(used)) if priority not in s.lossless]
    if lossy and s.lossless:
        found.append(f"priorities {lossy} have no flow control: RoCE there must tolerate loss")
    return found
