"""A DSCP tag for each job, and the map from tags to priorities.

A live queue pair cannot change its traffic class (Linux ``qp_state_table``: no IB_QP_AV from RTS to
RTS for RC). A job therefore keeps the tag that it was launched with. A new priority is a new entry
of the map.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from tessera.formulation.base.errors import InvalidInput

CODE_POINTS = 64
PRIORITIES = 8

MAX_NAMED_JOBS = 10
"""Largest number of jobs that a remark names."""

RESERVED_TAGS: Mapping[int, str] = {
    0: "unmarked traffic",
    1: "lower effort (RFC 8622), which switches may serve last",
    26: "the mark that vendors' RoCE guides give all RDMA traffic (NCCL_IB_TC 104 to 107)",
    33: "HCCL's default",
    46: "expedited forwarding (RFC 3246), which switches often police",
    48: "routing protocols (CS6, RFC 4594), and congestion notifications of RoCE by default",
    56: "network control (CS7)",
}
"""Code points that no job gets, each with the reason."""

CONTROL_TAG = 40
"""The tag of the NCCL control messages of all jobs: CS5, which RFC 4594 calls signalling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricCapabilities:
    """The capabilities of NICs and switches.

    ``priorities`` are those that jobs may use. The one served last is first.
    """

    priorities: tuple[int, ...] = tuple(range(PRIORITIES))
    reserved: Mapping[int, str] = field(default_factory=lambda: dict(RESERVED_TAGS))
    control_tag: int = CONTROL_TAG

    def __post_init__(self) -> None:
        """Refuse values that no fabric has."""
        one_each = len(set(self.priorities)) == len(self.priorities)
        if not (self.priorities and one_each and all(0 <= p < PRIORITIES for p in self.priorities)):
            raise InvalidInput(
                "priorities", f"must be different numbers from 0 to {PRIORITIES - 1}"
            )
        for tag in (*self.reserved, self.control_tag):
            check_tag(tag, "reserved")

    @property
    def control_priority(self) -> int:
        """Return the priority of control messages, which is the one served first."""
        return self.priorities[-1]

    def priority(self, level: int, levels: int) -> int:
        """Return the priority of ``level``. Surplus priorities, which are the last, stay free.

        Raises:
            InvalidInput: there is no such level, or the fabric has fewer priorities than levels.
        """
        if not 1 <= levels <= len(self.priorities):
            raise InvalidInput(
                "levels",
                f"must be 1 to {len(self.priorities)}, the priorities that jobs may use, not {levels}",
            )
        if not 0 <= level < levels:
            raise InvalidInput("level", f"must be 0 to {levels - 1}, not {level}")
        return self.priorities[level]

    @property
    def free_tags(self) -> tuple[int, ...]:
        """Return the tags that jobs may get, in rising order."""
        taken = {*self.reserved, self.control_tag}
        return tuple(tag for tag in range(CODE_POINTS) if tag not in taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class TagSettings:
    """The settings for a node to carry out: a tag for each job, a priority for each tag.

    ``remarks`` states in sentences what was not possible, e.g. that jobs share a tag.
    """

    tags: Mapping[str, int]
    priorities: Mapping[int, int]  # DSCP -> priority, the control tag among them
    control_tag: int = CONTROL_TAG
    remarks: tuple[str, ...] = ()


def assign_tags(
    levels_of: Mapping[str, int],
    levels: int,
    tags: Mapping[str, int] | None = None,
    *,
    fabric: FabricCapabilities | None = None,
    spare: int = 8,
) -> TagSettings:
    """Return a tag for each job in ``levels_of`` (0 to ``levels`` - 1, the higher is served first).

    A job in ``tags`` keeps its tag, even if its level has changed. Other jobs get a free tag, the
    most urgent job first. Tags that were just released are given last. The last ``spare`` tags are
    not for the lowest level, whose jobs share instead.

    If no tag is left, a job shares the tag whose level is nearest to its own. A shared tag is
    carried at the highest level of its jobs, so that none is served later than it should be.
    ``remarks`` says which are shared. If only levels change, the tags stay.

    Raises:
        InvalidInput: a level, or a tag of a running job, does not exist.
    """
    fabric = fabric or FabricCapabilities()
    before = tags or {}
    for level in {0, *levels_of.values()}:
        fabric.priority(level, levels)
    # Running jobs keep their tags.
    kept = {job: check_tag(before[job], job) for job in levels_of if job in before}
    at: defaultdict[int, set[str]] = defaultdict(set)
    for job, tag in kept.items():
        at[tag].add(job)
    released = set(before.values()) - set(at)
    free = [tag for tag in fabric.free_tags if tag not in at]
    free.sort(key=lambda tag: (tag in released, tag), reverse=True)
    # New jobs get tags, the most urgent job first.
    newcomers = sorted(levels_of.keys() - kept.keys(), key=lambda job: (-levels_of[job], job))
    given = dict(kept)
    carried = {tag: max(levels_of[job] for job in jobs) for tag, jobs in at.items()}
    for job in newcomers:
        level = levels_of[job]
        if free and not (level == 0 and len(free) <= spare and at):
            given[job] = free.pop()
        elif at:
            given[job] = _nearest(at, carried, level)
        else:
            raise InvalidInput("reserved", "leaves no tag for jobs; reserve fewer code points")
        at[given[job]].add(job)
        carried[given[job]] = max(level, carried.get(given[job], level))
    priorities = {tag: fabric.priority(level, levels) for tag, level in carried.items()}
    priorities[fabric.control_tag] = fabric.control_priority
    return TagSettings(
        tags=given,
        priorities=dict(sorted(priorities.items())),
        control_tag=fabric.control_tag,
        remarks=(*_sharing(at, levels_of), *_misplaced(at, fabric)),
    )


def check_tag(tag: int, whose: str) -> int:
    """Return ``tag``. Raises InvalidInput if it is not a DSCP code point."""
    if not 0 <= tag < CODE_POINTS:
        raise InvalidInput(whose, f"a DSCP tag must be 0 to {CODE_POINTS - 1}, not {tag}")
    return tag


def _nearest(at: Mapping[int, set[str]], carried: Mapping[int, int], level: int) -> int:
    """Return the tag in use with the nearest level. Of several, it is one with the fewest jobs."""

    def distance(tag: int) -> tuple[int, int, int]:
        return abs(carried[tag] - level), len(at[tag]), tag

    return min(at, key=distance)


def _sharing(at: Mapping[int, set[str]], levels_of: Mapping[str, int]) -> Iterable[str]:
    for tag, jobs in sorted(at.items()):
        if len(jobs) == 1:
            continue
        carried = max(levels_of[job] for job in jobs)
        lifted = [job for job in jobs if levels_of[job] < carried]
        rest = f", which raises the level of {_named(lifted)}" if lifted else ""
        yield f"jobs {_named(jobs)} share DSCP tag {tag} at level {carried}{rest}"


def _misplaced(at: Mapping[int, set[str]], fabric: FabricCapabilities) -> Iterable[str]:
    for tag, jobs in sorted(at.items()):
        why = fabric.reserved.get(tag, "control messages" if tag == fabric.control_tag else "")
        if why:
            yield f"jobs {_named(jobs)} run with DSCP tag {tag}, which is reserved for {why}"


def _named(jobs: Collection[str]) -> str:
    shown = ", ".join(sorted(jobs)[:MAX_NAMED_JOBS])
    return (
        f"{shown} and {len(jobs) - MAX_NAMED_JOBS:,} more" if len(jobs) > MAX_NAMED_JOBS else shown
    )
