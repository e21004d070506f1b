"""The sensitivity curves of a job through the real CLI and server."""

from __future__ import annotations

import json
from pathlib import Path

from tessera.benchmarks.service.fleet import Fleet
from tests.support.command_line import Tessera, submit


def test_a_user_sees_a_jobs_curves_as_tables_json_and_a_picture(
    tessera: Tessera, fleet: Fleet, tmp_path: Path
) -> None:
    submit(tessera, "own", "--guaranteed", "--gpu-type", "a100")
    tessera("round")
    picture = tmp_path / "own.svg"

    tables = tessera("curve", "own", "--picture", str(picture))
    document = json.loads(tessera("curve", "own", "--json").stdout)

    rows = [line.split() for line in tables.stdout.splitlines()]
    assert ["4", "128", "128", "32"] in [row[:4] for row in rows]  # 128 more for 4 more GPUs
    assert ["8", "256", "256", "0"] in [row[:4] for row in rows]
    assert any(row[:1] == ["4"] and {"request,", "minimum"} <= set(row) for row in rows)
    assert any(row[:1] == ["8"] and "now" in row for row in rows)  # it got the whole cluster
    assert picture.read_text().startswith("<?xml")
    assert document["current"]["cell"]["gpus"] == 8
    assert document["guaranteed_rate"] == 128.0
    (own,) = document["types"]
    assert [point["amount"] for point in own["gpus"]] == ["4", "8"]
    assert own["minimum_demand"]["cell"]["gpus"] == 4
    only = tessera("curve", "own", "--of", "gpus").stdout
    assert "GPUs of type a100" in only
    assert "Nodes with" not in only


def test_a_count_without_cells_and_a_missing_job_are_refused(
    tessera: Tessera, fleet: Fleet
) -> None:
    submit(tessera, "own")

    assert "it has those of 4, 8" in tessera("curve", "own", "--gpus", "3", code=1).stderr
    assert "clusters/c/jobs/none" in tessera("curve", "none", code=4).stderr
