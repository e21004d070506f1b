"""Launched jobs. Guaranteed ones must go on running."""

from __future__ import annotations

from dataclasses import replace

from tessera.formulation.base.tables import Bools
from tessera.formulation.job.lifecycle import ACTIVE
from tessera.formulation.round.draft import Draft
from tessera.formulation.state.snapshot import Snapshot


def is_launched(snapshot: Snapshot) -> Bools:
    """Return whether each job has its own GPUs, reserved or held, bool[jobs]."""
    return snapshot.jobs.among(ACTIVE)


def guaranteed_jobs_run(draft: Draft) -> Draft:
    """Mark the launched guaranteed jobs, which must keep running (Morphling section 5.1)."""
    stays = is_launched(draft.snapshot) & draft.snapshot.jobs.guaranteed & draft.promisable
    return replace(draft, must_run=draft.must_run | (stays & draft.has_columns))
