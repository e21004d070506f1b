"""Plug-ins of a server: only those that its operator allows, whatever a client names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tessera.db.store import PostgresStore
from tessera.v1 import scheduler_pb2
from tests.support.api import INVALID, a_batch, a_round, a_submit, api, api_with_agent, refusal_of
from tests.support.patience import PATIENCE_S

MODULE = "allowed_lab"
TEXT = """
import numpy as np
from tessera.formulation.objectives.values import ColumnValues

class LastFirst:
    name = "last-first"
    def choose(self, seen):
        choice = np.full(len(seen.draft.current), -1)
        choice[-1] = seen.draft.job_start[-2]
        return choice

def running(draft):
    gross = draft.weight[draft.job]
    return ColumnValues(gross=gross, price=np.zeros(len(gross)), unit="jobs")
"""


@pytest.fixture(autouse=True)
def _lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (MODULE, "other_lab"):
        (tmp_path / f"{name}.py").write_text(TEXT)
    monkeypatch.syspath_prepend(tmp_path)


async def test_a_client_chooses_among_the_plugins_that_the_operator_allows(
    store: PostgresStore,
) -> None:
    allowed = f"{MODULE}:LastFirst,{MODULE}:running"
    async with api_with_agent(store, plugins=allowed) as a:
        await a.jobs.SubmitJobs(a_batch(*[a_submit(name, requested_gpus=8) for name in "abc"]))
        done = await a.scheduler.Schedule(
            a_round(scheduler=f"{MODULE}:LastFirst"), timeout=PATIENCE_S
        )
        assert (done.outcome, done.running, done.waiting) == ("committed", 1, 2)
        replayed = await a.scheduler.ReplayRound(scheduler_pb2.ReplayRoundRequest(name=done.name))
        assert replayed.same_decisions
        done = await a.scheduler.Schedule(
            a_round(objective=f"{MODULE}:running"), timeout=PATIENCE_S
        )
        assert done.goals[-1].unit == "jobs"
        for field, name in (("scheduler", "LastFirst"), ("objective", "running")):
            call = a.scheduler.Schedule(a_round(**{field: f"other_lab:{name}"}))
            assert await refusal_of(call) == (INVALID, "INVALID_INPUT", [f"options.{field}"])
        assert "other_lab" not in sys.modules


async def test_a_server_without_plugins_imports_nothing_that_a_client_names(
    store: PostgresStore,
) -> None:
    async with api(store) as a:
        for field in ("scheduler", "objective"):
            call = a.scheduler.Schedule(a_round(**{field: "this:zen"}))
            assert await refusal_of(call) == (INVALID, "INVALID_INPUT", [f"options.{field}"])
        assert "this" not in sys.modules
