"""The background check of collectives: stored once, in provenances, bounded, and never of users' code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.estimator.compiling.comparison import StepDegrees
from tessera.estimator.compiling.compile import CompileRequest
from tessera.estimator.compiling.compiled import Collective, CompiledStep, Memory, Uncompilable
from tessera.estimator.hardware.cluster_types import catalogue_of
from tessera.estimator.models import model_of
from tessera.estimator.plans import Primitive
from tessera.formulation.errors import InvalidInput
from tessera.formulation.records.estimates import EstimateRecord, ModelSpec
from tessera.formulation.values import Workload
from tessera.service.cells.deriver import CellDeriver
from tessera.service.collectivechecker import MAX_CHECKS_PER_MODEL, CollectiveChecker, plan_degrees
from tessera.service.config import Config
from tests.support.logged import logged_lines
from tests.support.stored_cluster import C, a_cluster, a_spec, do, execute, submit

BERT = Workload(model="bert", params="1.3B", global_batch=256)
VIT = Workload(model="vit", params="86M", global_batch=256)
JOB = a_spec("j", workload=BERT, requested_gpus=2)


class FakeXla:
    """A compiler whose steps have the gradients of the model, times a factor."""

    def __init__(self, factor: float = 1.0, workload: Workload = BERT) -> None:
        self.factor, self.requests = factor, list[CompileRequest]()
        self._graph = model_of("model", workload, ()).graph

    def __call__(self, request: CompileRequest, cancelled: Callable[[], bool]) -> CompiledStep:
        self.requests.append(request)
        assert not cancelled()
        graph, each = self._graph, list[tuple[float, tuple[tuple[int, ...], ...]]]()
        if request.dp > 1:
            payload = graph.element_bytes * float(
                graph.weights.sum() / request.tp + graph.shared_weights.sum()
            )
            groups = tuple((t, t + request.tp) for t in range(request.tp))
            each.append((payload, groups))
        if request.tp > 1:
            payload = 2 * graph.element_bytes * 2 * float(graph.reduced.sum())
            each.append((payload, tuple(_rows(request))))
        return CompiledStep(
            name="bert",
            dp=request.dp,
            tp=request.tp,
            collectives=tuple(
                Collective(
                    primitive=Primitive.ALL_REDUCE,
                    payload_bytes=self.factor * payload,
                    groups=groups,
                )
                for payload, groups in each
            ),
            flops=1.0,
            bytes=1.0,
            memory=Memory(arguments=1, outputs=1, aliased=0, temporaries=1),
            versions={"jax": "1"},
        )


def _rows(request: CompileRequest) -> list[tuple[int, ...]]:
    return [tuple(range(d * request.tp, (d + 1) * request.tp)) for d in range(request.dp)]


def refuse(request: CompileRequest, cancelled: Callable[[], bool]) -> CompiledStep:
    raise Uncompilable(f"{request.target} took longer than 1 s")


def derive(store: PostgresStore) -> int:
    return CellDeriver(store, catalogue_of(), (1.0,)).derive(C)


def cells_of(store: PostgresStore, workload: Workload = BERT) -> list[EstimateRecord]:
    key = (workload.model, workload.params, workload.global_batch)
    return store.list_estimates(C, *key, 0, 1000)[0]


def a_derived_cluster(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, JOB)
    assert derive(store) == 1


def test_the_degrees_of_stored_plans_are_compiled_once_and_provenances_say_so(
    store: PostgresStore,
) -> None:
    a_derived_cluster(store)
    wanted = {degrees for cell in cells_of(store) for degrees in plan_degrees(cell)}
    assert wanted
    xla = FakeXla()
    checker = CollectiveChecker(store, 1.0, xla)
    assert checker.check(C) == len(wanted)
    assert {StepDegrees(dp=r.dp, tp=r.tp, zero=r.zero) for r in xla.requests} == wanted
    assert all(r.target.startswith("tessera.estimator.tracing.models") for r in xla.requests)
    assert CollectiveChecker(store, 1.0, xla).check(C) == 0  # another replica finds them stored
    assert derive(store) == 1
    checked = [cell for cell in cells_of(store) if plan_degrees(cell)]
    assert checked
    assert all("as compiled by XLA" in cell.provenance for cell in checked)
    others = [cell for cell in cells_of(store) if not plan_degrees(cell)]
    assert not any("XLA" in cell.provenance for cell in others)
    assert derive(store) == 0


def test_a_difference_is_stored_with_both_numbers_and_warned_about(
    store: PostgresStore, caplog: pytest.LogCaptureFixture
) -> None:
    a_derived_cluster(store)
    CollectiveChecker(store, 1.0, FakeXla(factor=1.5)).check(C)
    checks = store.estimation(C).checks
    assert checks
    assert all(check.differs for check in checks)
    (group, *_) = json.loads(checks[0].document)["groups"]
    assert group["compiled_bytes"] == pytest.approx(1.5 * group["estimated_bytes"])
    assert "(+50.0 %)" in checks[0].note
    lines = [line for line in logged_lines(caplog) if "(+50.0 %)" in line]
    assert {line.partition(" ")[0] for line in lines} == {"WARNING"}
    derive(store)
    provenances = [cell.provenance for cell in cells_of(store) if plan_degrees(cell)]
    assert all("estimated," in text and "compiled (+50.0 %)" in text for text in provenances)


def test_a_failed_check_is_stored_not_repeated_and_leaves_provenances_alone(
    store: PostgresStore,
) -> None:
    a_derived_cluster(store)
    before = cells_of(store)
    assert CollectiveChecker(store, 1.0, refuse).check(C) > 0
    assert CollectiveChecker(store, 1.0, refuse).check(C) == 0
    assert all("took longer" in check.problem for check in store.estimation(C).checks)
    assert derive(store) == 0
    assert cells_of(store) == before


def test_another_release_compares_again(store: PostgresStore, database: Database) -> None:
    a_derived_cluster(store)
    xla = FakeXla()
    first = CollectiveChecker(store, 1.0, xla).check(C)
    execute(database, "UPDATE collective_checks SET release = '0.0.1'")
    assert derive(store) == 0  # old comparisons say nothing
    assert CollectiveChecker(store, 1.0, xla).check(C) == first
    assert len(store.estimation(C).checks) == first


def test_a_users_step_is_never_run_by_a_server(store: PostgresStore) -> None:
    a_cluster(store)
    own = ModelSpec(
        model="bert",
        params="1.3B",
        step="os:system",
        step_arguments=("command=false",),
        architecture="{architecture: transformer, layers: 4, hidden: 256, heads: 4, sequence: 128,"
        " vocabulary: 1000}",
    )
    do(store, lambda w: w.upsert_models(C, [own]))
    submit(store, JOB)
    assert derive(store) == 1
    xla = FakeXla()
    assert CollectiveChecker(store, 1.0, xla).check(C) == 0
    assert not xla.requests


def test_a_model_is_compiled_for_a_bounded_number_of_degrees_and_a_stop_ends_it(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_derived_cluster(store)
    many = [StepDegrees(dp=2, tp=2**k, zero=zero) for k in range(9) for zero in (False, True)]
    monkeypatch.setattr("tessera.service.collectivechecker.plan_degrees", lambda record: many)
    assert CollectiveChecker(store, 1.0, refuse).check(C, lambda: True) == 0
    assert CollectiveChecker(store, 1.0, refuse).check(C) == MAX_CHECKS_PER_MODEL


def test_the_setting_needs_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Config().check_collectives
    monkeypatch.setattr("tessera.service.settings.estimates.find_spec", lambda name: None)
    assert not Config().check_collectives
    with pytest.raises(InvalidInput, match=r"check_collectives: needs JAX .*\[estimator\]"):
        Config(check_collectives=True)


@pytest.mark.full
def test_a_published_model_is_really_compiled(
    store: PostgresStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    a_cluster(store)
    submit(store, replace(JOB, workload=VIT))
    assert derive(store) == 1
    assert CollectiveChecker(store, 300.0).check(C) > 0
    checks = store.estimation(C).checks
    assert not any(check.problem for check in checks)
    assert not any(check.differs for check in checks)
