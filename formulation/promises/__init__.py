"""Promises and limits, one rule a function: what jobs are owed and what a round may not do.

A rule is ``Draft -> Draft``. Rules that drop columns come before those that mark launched jobs, then come
rows, then the rules that mark waiting jobs, which pack them into what all rows leave: each sees what those
before it left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tessera.formulation.capacity import pools_have_enough
from tessera.formulation.draft import Draft
from tessera.formulation.promises.backoff import failed_jobs_wait
from tessera.formulation.promises.deadlines import deadlines_are_kept
from tessera.formulation.promises.guarantee import guaranteed_jobs_are_as_fast_as_requested
from tessera.formulation.promises.launched import launched_jobs_run
from tessera.formulation.promises.pins import avoided_nodes, bounded_gpus, pinned_type
from tessera.formulation.promises.profiling import profiling_waits
from tessera.formulation.promises.queues import (
    guaranteed_jobs_within_quota_start,
    long_waits_are_reserved,
    queues_launch_in_order,
)
from tessera.formulation.promises.quotas import (
    guaranteed_jobs_stay_within_quota,
    tenants_borrow_within_limits,
    unlent_quota_is_kept,
)
from tessera.formulation.promises.stability import changes_are_capped, jobs_run_their_minimum_time

Rule = Callable[[Draft], Draft]

PHYSICAL: Final[tuple[Rule, ...]] = (
    pinned_type,
    bounded_gpus,
    avoided_nodes,
    pools_have_enough,
)
"""What no policy can do otherwise: where a job may run at all, and what there is beside GPUs."""

PUBLISHED: Final[tuple[Rule, ...]] = (*PHYSICAL, failed_jobs_wait, profiling_waits)
"""The same where a published policy decides."""

PROMISES: Final[tuple[Rule, ...]] = (
    failed_jobs_wait,  # of this round only: a schedule of later rounds may still hold such jobs
    guaranteed_jobs_are_as_fast_as_requested,
    jobs_run_their_minimum_time,
    launched_jobs_run,
    guaranteed_jobs_stay_within_quota,
    tenants_borrow_within_limits,
    unlent_quota_is_kept,
    deadlines_are_kept,  # sees the quotas; those after it see what it promised
    changes_are_capped,
    # These mark waiting jobs that fit beside all that was said before, so nothing may come after them that
    # could take the room away: other columns' loss, other jobs' marks, other rows.
    guaranteed_jobs_within_quota_start,
    queues_launch_in_order,
    long_waits_are_reserved,
)
"""What jobs are owed and what a round may not do; published policies have rules of their own instead."""
