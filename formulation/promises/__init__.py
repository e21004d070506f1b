"""Promises and limits, one rule a function: what jobs are owed and what a round may not do.

A rule is ``Draft -> Draft``. Rules that drop columns come before those that mark jobs, and rows come last,
because each sees what the ones before it left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from formulation.draft import Draft
from formulation.promises.launched import launched_jobs_run

Rule = Callable[[Draft], Draft]

PHYSICAL: Final[tuple[Rule, ...]] = ()
"""What no policy can do otherwise: where a job may run at all."""

PROMISES: Final[tuple[Rule, ...]] = (launched_jobs_run,)
"""What jobs are owed and what a round may not do; published policies have rules of their own instead."""
