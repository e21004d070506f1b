"""Launched jobs that must go on running."""

from __future__ import annotations

from dataclasses import replace

from tessera.formulation.draft import Draft
from tessera.formulation.lifecycle import ACTIVE
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.tables import Bools


def is_launched(snapshot: Snapshot) -> Bools:
    """Return whether each job has its own GPUs, reserved or held, bool[jobs]."""
    return snapshot.jobs.among(ACTIVE)


def launched_jobs_run(draft: Draft) -> Draft:
    """Mark the launched jobs that must keep running.

    These are guaranteed jobs (Morphling section 5.1), and all launched jobs under run to completion
    (Arena section 3.5). Jobs that were started past a blocked one are excluded from the latter.
    """
    jobs = draft.snapshot.jobs
    promised = jobs.guaranteed | (draft.policy.run_to_completion & ~jobs.opportunistic)
    stays = is_launched(draft.snapshot) & promised & draft.promisable
    return replace(draft, must_run=draft.must_run | (stays & draft.has_columns))
