"""The JSON of rounds: values and documents read back equal, and malformed text is refused."""

from __future__ import annotations

import gzip
import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from typer.testing import CliRunner

from tessera.formulation.answer.codec import decode, digest, encode
from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.errors import DeadlineTooShort, InvalidInput
from tessera.formulation.base.tables import Table
from tessera.formulation.round.problem import CouplingRow, Problem, RowKind
from tessera.formulation.state import traffic
from tessera.formulation.state.network_facts import Traffics
from tessera.formulation.state.snapshot import Snapshot
from tessera.formulation.state.topologies import described
from tessera.formulation.state.topologies.described import decode_topology
from tessera.formulation.state.traffic import CellTraffic, StageTraffic, intern_traffic
from tessera.service.cli import main
from tests.support.builders import a_job, a_random_problem, a_random_snapshot, a_snapshot
from tests.support.recording import load_rounds


def test_a_snapshot_with_infinities_reads_back_equal() -> None:
    snapshot = a_random_snapshot(1, jobs=5)
    again = decode(encode(snapshot))
    assert isinstance(again, Snapshot)
    assert math.isinf(again.jobs.deadline_s[0])
    for table in ("nodes", "estimates", "jobs", "allocations"):
        assert getattr(again, table).equals(getattr(snapshot, table))
    assert digest(again) == digest(snapshot)


def test_columns_without_an_unusual_value_are_left_out() -> None:
    snapshot = a_snapshot(nodes=[], jobs=[a_job("a"), a_job("b", retry_s=9.0)], estimates=[])
    text = encode(snapshot)
    assert b'"retry_s":' in text
    assert b'"failures":' not in text
    again = decode(text)
    assert isinstance(again, Snapshot)
    assert again.jobs.equals(snapshot.jobs)


SAMPLES: Final = {"Ints": 1, "Floats": 0.5, "Bools": True, "tuple[str, ...]": "x"}
"""A value of each kind of column that no column has by default."""


def a_full_table(kind: type[Table]) -> Table:
    """Return two rows of which every column has an unusual value."""
    return kind.from_rows(2 * [{f.name: SAMPLES[str(f.type)] for f in fields(kind)}])


def test_every_table_and_column_of_a_snapshot_reads_back() -> None:
    plain = a_random_snapshot(1, jobs=2)
    tables = {f.name: getattr(plain, f.name) for f in fields(plain) if f.name != "traffic"}
    changes: dict[str, Any] = {"plans": ("", "p"), "use_half_life_s": 0.5, "clock_factor": 2.0}
    changes |= {n: a_full_table(type(t)) for n, t in tables.items() if isinstance(t, Table)}
    full = replace(plain, **changes)
    again = decode(encode(full))
    assert isinstance(again, Snapshot)
    for name, table in tables.items():
        read, stored = getattr(again, name), getattr(full, name)
        assert read.equals(stored) if isinstance(table, Table) else read == stored, name


def test_a_job_may_be_called_inf() -> None:
    snapshot = a_snapshot(nodes=[], jobs=[a_job("inf"), a_job("nan")], estimates=[])
    again = decode(encode(snapshot))
    assert isinstance(again, Snapshot)
    assert again.jobs.name == ("inf", "nan")


def test_a_problem_reads_back_with_the_same_values() -> None:
    problem = a_random_problem(2, jobs=5)
    again = decode(encode(problem))
    assert isinstance(again, Problem)
    assert encode(again) == encode(problem)
    assert again.value.tolist() == problem.value.tolist()


def test_a_solution_reads_back() -> None:
    solution = Solution(
        status=SolveStatus.FEASIBLE,
        choice=np.array([3, -1]),
        objective=7,
        bound=math.inf,
        solver="s",
        prices=np.array([0.5]),
        work=(("s", 1.0),),
    )
    again = decode(encode(solution))
    assert isinstance(again, Solution)
    assert (again.status, again.bound, again.work) == (solution.status, math.inf, solution.work)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b'{"format":99,"body":1}',
        b'{"format":2}',
        b'{"format":2,"body":{"is":"Nothing"}}',
        b'{"format":2,"body":{"is":"Nodes","name":["a"]}}',
        b'{"format":2,"body":7}',
        b'{"format":2,"body":null}',
        b'{"format":2,"body":NaN}',
        b'{"format":2,"body":{"i":[1180591620717411303424]}}',
        b'{"format":2,"body":{"i":[1.5]}}',
        b"[" * 100_000,
        b'{"format":2,"body":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"format":2,"body":{"x":[1],"y":[2]}}',
        b'{"format":2,"body":{"q":[1]}}',
    ],
)
def test_malformed_stored_values_are_refused(text: bytes) -> None:
    with pytest.raises(InvalidInput):
        decode(text)


def test_a_snapshot_with_meaningless_numbers_is_refused() -> None:
    snapshot = a_snapshot(nodes=[], jobs=[a_job("a", weight=2.0)], estimates=[])
    text = encode(snapshot).replace(b'"weight":{"f":[2.0', b'"weight":{"f":["nan"')
    with pytest.raises(InvalidInput, match="weight"):
        decode(text)


@pytest.mark.parametrize(
    ("row", "name"),
    [
        (CouplingRow(kind=RowKind.GPUS, subject="a100", capacity=4), "gpus/a100"),
        (
            CouplingRow(kind=RowKind.QUOTA, subject="research/a100", capacity=4),
            "quota/research/a100",
        ),
        (CouplingRow(kind=RowKind.KEPT, subject="research", capacity=4), "kept for/research"),
        (CouplingRow(kind=RowKind.CHANGES, capacity=4), "changes"),
    ],
)
def test_a_row_and_its_name_are_equivalent(row: CouplingRow, name: str) -> None:
    assert row.name == name
    assert CouplingRow.from_name(name, 4) == row


CLOS = {
    "tors": 2,
    "kind": "clos",
    "hosts": 4,
    "host": "a100",
    "aggregations": 2,
    "tor_bytes_per_s": "25GB/s",
}

SPACED = json.dumps(CLOS, indent=1)
"""A document that our own encoder would write differently."""

SENT = CellTraffic(
    work_flop=1e15, compute_s=0.1, start_s=0.0, stages=(StageTraffic(dp=2, tp=1, data=(5e9, 2)),)
)


def a_networked_snapshot(topology: str = SPACED, traffic: str = SENT.to_json()) -> bytes:
    """Return a stored snapshot whose network has this topology and whose Cells send this traffic."""
    snapshot = a_random_snapshot(1, jobs=3)
    e = snapshot.estimates
    known = Traffics(
        workload=e.workload,
        gpu_type=e.gpu_type,
        gpus=e.gpus,
        nodes=e.nodes,
        plan=e.plan,
        pipeline_degree=e.pipeline_degree,
        document=(intern_traffic("{}"),) * len(e),
    )
    plain = json.loads(
        encode(replace(snapshot, topology=decode_topology(json.dumps(CLOS)), traffic=known))
    )
    plain["body"]["topology"] = topology
    plain["body"]["traffic"]["document"] = [traffic] * len(e)
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def test_a_snapshot_is_encoded_with_its_original_documents() -> None:
    stored = a_networked_snapshot()
    snapshot = decode(stored)
    assert isinstance(snapshot, Snapshot)
    assert snapshot.topology is not None
    assert len(snapshot.topology.topology.hosts) == 4
    assert {traffic.cell for traffic in snapshot.traffic.document} == {SENT}
    assert encode(snapshot) == stored


@pytest.mark.parametrize("path", load_rounds(), ids=lambda path: path.name)
def test_recorded_snapshots_are_encoded_unchanged(path: Path) -> None:
    stored = json.loads(gzip.decompress(path.read_bytes()))["snapshot"].encode()
    snapshot = decode(stored)
    assert isinstance(snapshot, Snapshot)
    assert encode(snapshot) == stored


def test_a_recently_read_document_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps(CLOS | {"hosts": 6})
    first = decode_topology(text)
    sent = intern_traffic(SENT.to_json())
    assert sent.traffic.exchanges
    monkeypatch.setattr(described, "build_topology", None)
    monkeypatch.setattr(traffic, "parse_cell_traffic", None)
    assert decode_topology(json.dumps(CLOS | {"hosts": 6})) is first
    assert intern_traffic(SENT.to_json()).traffic is sent.traffic


def test_only_the_latest_topologies_are_cached() -> None:
    first, *others = (
        json.dumps(CLOS | {"hosts": n}) for n in range(2, described.MAX_CACHED_TOPOLOGIES + 3)
    )
    before = decode_topology(first)
    for text in others:
        decode_topology(text)
    again = decode_topology(first)
    assert again is not before
    assert again == before


def test_threads_that_read_one_topology_concurrently_get_the_same_object() -> None:
    text = json.dumps(CLOS | {"hosts": 500})
    with ThreadPoolExecutor(8) as pool:
        topologies = list(pool.map(decode_topology, [text] * 16))
    assert len({id(one) for one in topologies}) == 1


def test_reading_a_topology_stops_if_the_caller_leaves() -> None:
    with pytest.raises(DeadlineTooShort):
        decode_topology(json.dumps(CLOS | {"hosts": 1000}), lambda: True)


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ("{", "topology"),
        ("[]", "topology"),
        (json.dumps(CLOS | {"kind": "closs"}), "kind"),
        (json.dumps(CLOS | {"tors": 0}), "tors"),
        (json.dumps(CLOS | {"hosts": ["a", "a"]}), "hosts"),
    ],
)
def test_a_snapshot_with_an_invalid_topology_is_refused(document: str, field: str) -> None:
    with pytest.raises(InvalidInput) as wrong:
        decode(a_networked_snapshot(topology=document))
    assert wrong.value.field == field


def test_a_saved_snapshot_with_invalid_traffic_is_refused_when_it_is_read(
    tmp_path: Path,
) -> None:
    stored = a_networked_snapshot(traffic='{"work_flop":1}')
    snapshot = decode(stored)
    assert isinstance(snapshot, Snapshot)
    with pytest.raises(InvalidInput) as wrong:
        snapshot.traffic.require_readable()
    assert wrong.value.field == "traffic"
    (tmp_path / "round.json").write_bytes(stored)
    result = CliRunner().invoke(main.app, ["solve", str(tmp_path / "round.json")])
    assert result.exit_code != 0
    assert "traffic: is not the traffic of a Cell" in " ".join(result.stderr.split())
