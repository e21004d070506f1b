"""Promises and limits of a round, one rule for each function.

A rule is ``Draft -> Draft``. Each rule sees what those before it left. Rules that drop columns come
before those that mark launched jobs. Then come rows, and then the rules that mark waiting jobs,
which pack them into what all rows leave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tessera.formulation.round.capacity import pools_have_enough
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.promises.arrays import arrays_run_few_members
from tessera.formulation.round.promises.backoff import failed_jobs_wait
from tessera.formulation.round.promises.deadlines import deadlines_are_kept
from tessera.formulation.round.promises.guarantee import guaranteed_jobs_are_as_fast_as_requested
from tessera.formulation.round.promises.launched import guaranteed_jobs_run
from tessera.formulation.round.promises.nodes import permitted_nodes, selected_nodes_have_enough
from tessera.formulation.round.promises.pins import (
    allowed_gpu_types,
    bounded_gpus,
    pinned_gpu_type,
    unmovable_jobs_keep_their_shape,
)
from tessera.formulation.round.promises.queues import guaranteed_jobs_within_quota_start
from tessera.formulation.round.promises.quotas import (
    guaranteed_jobs_stay_within_quota,
    tenants_borrow_within_limits,
    unlent_quota_is_kept,
)
from tessera.formulation.round.promises.stability import (
    changes_are_capped,
    jobs_settle_before_they_change,
    replans_are_rare_and_pay_back,
)
from tessera.formulation.round.promises.starts import (
    jobs_keep_what_they_asked_for,
    planned_starts_are_kept,
    running_jobs_go_on,
)
from tessera.formulation.round.promises.stated_plans import stated_plans
from tessera.formulation.round.promises.windows import windows_are_kept

Rule = Callable[[Draft], Draft]

PHYSICAL: Final[tuple[Rule, ...]] = (
    stated_plans,
    pinned_gpu_type,
    allowed_gpu_types,
    bounded_gpus,
    permitted_nodes,
    windows_are_kept,
    unmovable_jobs_keep_their_shape,
    pools_have_enough,
    selected_nodes_have_enough,
)
"""Rules that hold under every policy: where a job may run, and capacities other than GPUs."""

PUBLISHED: Final[tuple[Rule, ...]] = (*PHYSICAL, failed_jobs_wait, arrays_run_few_members)
"""The rules that apply if a published scheduler decides."""

PROMISES: Final[tuple[Rule, ...]] = (
    failed_jobs_wait,  # only this round: later slots of a schedule may still hold such jobs
    arrays_run_few_members,  # after the back-off, so that a failed member leaves its place to others
    guaranteed_jobs_are_as_fast_as_requested,
    jobs_settle_before_they_change,
    replans_are_rare_and_pay_back,
    jobs_keep_what_they_asked_for,
    guaranteed_jobs_run,
    guaranteed_jobs_stay_within_quota,
    tenants_borrow_within_limits,
    unlent_quota_is_kept,
    deadlines_are_kept,  # sees the quotas; later rules see its promises
    changes_are_capped,
    # These mark jobs that fit next to everything before them. No rule may come after them that could
    # take the room away by dropping columns, marking jobs or adding rows.
    guaranteed_jobs_within_quota_start,
    running_jobs_go_on,
    planned_starts_are_kept,
)
"""Promises and limits of a round. Published schedulers have their own rules instead."""
