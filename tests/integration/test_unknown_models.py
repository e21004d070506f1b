"""Jobs whose models nobody knows, in PostgreSQL: who finds that out, and how rounds see them."""

from __future__ import annotations

from typing import Any

import pytest

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.estimator.hardware.cluster_types import catalogue_of
from tessera.formulation.decisions import DecisionKind
from tessera.formulation.reasons import ReasonCode
from tessera.formulation.records.estimates import CellFilter
from tessera.formulation.values import BEST_FOUND, Cell, EstimateSource, Workload
from tessera.service.cells.deriver import CellDeriver
from tessera.service.rpc.convert.agents import of_desired
from tests.support.decided_rounds import decide
from tests.support.notices import round_requests
from tests.support.stored_cluster import (
    C,
    a_bare_cluster,
    a_record,
    a_spec,
    agents_report,
    do,
    job,
    submit,
)
from tests.support.training import TRAINER

SPHINX = Workload(model="sphinx", params="9B", global_batch=8)
BERT = Workload(model="bert", params="1.3B", global_batch=256)


def a_sphinx(name: str = "s", **more: Any) -> Any:
    stated = {"workload": SPHINX, "requested_gpus": 4, "requested_type": "a100"}
    return a_spec(name, **stated | more)


def a_deriver(store: PostgresStore, *, derives: bool = True) -> CellDeriver:
    return CellDeriver(store, catalogue_of(), (1.0,), derives=derives)


def reports(store: PostgresStore, runtime: str) -> None:
    for done in range(1, 8):
        agents_report(store, iterations_done=float(done), iter_time_s=2.0, runtime=runtime)


def unestimated(store: PostgresStore) -> dict[str, bool]:
    jobs = store.snapshot(C).jobs
    return dict(zip(jobs.name, jobs.unestimated.tolist(), strict=True))


def test_a_job_waits_until_the_server_has_found_that_nobody_knows_its_model(
    store: PostgresStore,
) -> None:
    a_bare_cluster(store)
    submit(store, a_sphinx(), a_spec("known", workload=BERT, requested_type="a100"))
    assert unestimated(store) == {"s": False, "known": False}
    first = decide(store)
    assert first["s"].reason is not None
    assert first["s"].reason.code is ReasonCode.ESTIMATING
    a_deriver(store).derive(C)
    assert unestimated(store) == {"s": True, "known": False}
    since = job(store, "s").reason
    assert since is not None
    assert "it will run on the GPUs that it requests, at an unknown rate" in since.message
    assert decide(store)["s"].kind is DecisionKind.START


def test_a_round_is_requested_once_it_is_known_that_nobody_knows_the_model(
    store: PostgresStore, database: Database
) -> None:
    a_bare_cluster(store)
    submit(store, a_sphinx())
    with round_requests(database) as requests:
        a_deriver(store).derive(C)
        assert requests.take() == [C]
        a_deriver(store).derive(C)
        assert requests.take() == []


def test_before_its_first_round_a_job_that_will_run_has_no_reason_to_wait(
    store: PostgresStore,
) -> None:
    a_bare_cluster(store)
    submit(store, a_sphinx(), a_sphinx("any", requested_type=""))
    a_deriver(store).derive(C)
    assert job(store, "s").reason is None
    other = job(store, "any").reason
    assert other is not None
    assert other.code is ReasonCode.NO_ESTIMATE
    assert other.next_step.endswith("a job that states a GPU type runs without")


def test_it_runs_on_its_request_and_its_agent_is_sent_no_iteration_time(
    store: PostgresStore,
) -> None:
    a_bare_cluster(store)
    submit(store, a_sphinx())
    a_deriver(store).derive(C)
    decide(store)
    held = job(store, "s").allocation
    assert held is not None
    assert held.cell == Cell(gpu_type="a100", gpus=4, pipeline_degree=BEST_FOUND)
    assert (held.rate, held.plan) == (0.0, None)
    (node, _), *_ = held.shares
    (gang,) = of_desired(store.desired(C, f"agent-{node}"), {node}).gangs
    assert (gang.iter_time_s, gang.plan, gang.gpus) == (0.0, "", 4)


def test_a_replay_leaves_its_rate_unknown(store: PostgresStore) -> None:
    a_bare_cluster(store)
    submit(store, a_sphinx())
    deriver = a_deriver(store)
    deriver.derive(C)
    decide(store)
    agents_report(store)
    reports(store, "replay")
    deriver.derive(C)
    assert unestimated(store) == {"s": True}
    mine = decide(store)["s"]
    assert (mine.kind, mine.rate) == (DecisionKind.KEEP, 0.0)
    held = job(store, "s").allocation
    assert held is not None
    assert held.iter_time_source is EstimateSource.REPLAYED


@pytest.mark.usefixtures("trainer")
@pytest.mark.parametrize("derives", [True, False])
def test_once_measured_it_is_a_job_like_any_other(store: PostgresStore, derives: bool) -> None:
    a_bare_cluster(store)
    submit(store, a_sphinx())
    deriver = a_deriver(store, derives=derives)
    deriver.derive(C)
    decide(store)
    agents_report(store)
    reports(store, TRAINER)
    deriver.derive(C)
    assert unestimated(store) == {"s": False}
    mine = decide(store)["s"]
    assert (mine.kind, mine.rate) == (DecisionKind.KEEP, 8 / 2.0)
    do(store, lambda w: w.upsert_estimates(C, [a_record(8, workload=SPHINX, iter_time_s=0.1)]))
    mine = decide(store)["s"]
    assert (mine.kind, mine.cell.gpus) == (DecisionKind.RESIZE, 8)


def test_a_server_that_derives_nothing_lets_all_jobs_without_estimates_run(
    store: PostgresStore,
) -> None:
    a_bare_cluster(store)
    submit(store, a_spec("known", workload=BERT, requested_gpus=2, requested_type="a100"))
    assert a_deriver(store, derives=False).derive(C) == 0
    assert decide(store)["known"].rate == 0.0
    assert store.list_estimates(C, BERT.model, BERT.params, BERT.global_batch, 0, 10)[0] == []


def test_a_job_is_found_unknown_again_after_a_user_deleted_its_estimates(
    store: PostgresStore,
) -> None:
    a_bare_cluster(store)
    submit(store, a_sphinx())
    deriver = a_deriver(store)
    deriver.derive(C)
    do(store, lambda w: w.upsert_estimates(C, [a_record(4, workload=SPHINX)]))
    assert unestimated(store) == {"s": False}
    do(store, lambda w: w.delete_cells(C, CellFilter(workload=SPHINX)))
    deriver.derive(C)
    assert unestimated(store) == {"s": True}
