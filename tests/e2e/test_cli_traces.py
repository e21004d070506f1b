"""Traces that are shaped for a running server: its nodes and estimates, tenants, quotas and labels."""

from __future__ import annotations

from pathlib import Path

from tessera.service.cli.names import short_name
from tests.support.command_line import TRACE, Tessera, read


def test_a_trace_is_shaped_for_the_servers_cluster_and_its_tenants_get_their_quota(
    tessera: Tessera, tmp_path: Path
) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(TRACE)
    done = tessera("import", "trace", str(file), "--guaranteed", "0.34", "--on-bad", "drop")
    assert "load" in done.stdout
    jobs = read(tessera, "jobs")["jobs"]
    assert sorted((j["tenant"], j["guaranteed"]) for j in jobs).count(("tenant-a", True)) == 1
    tenants = read(tessera, "tenants", "list")["tenants"]
    quotas = {short_name(t["name"]): sum(t["quotas"].values()) for t in tenants}
    assert quotas == {"tenant-a": 8, "tenant-b": 0}


def test_a_trace_that_the_servers_cluster_cannot_run_is_refused_completely(
    tessera: Tessera, tmp_path: Path
) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(TRACE + "giant,30,gpt9,1T,256,5000,4,\n")
    refused = tessera("import", "trace", str(file), "--on-bad", "refuse", code=2).stderr
    assert "giant (gpt9 1T 256)" in refused
    assert read(tessera, "jobs").get("jobs", []) == []


def test_the_execution_plan_of_a_submitted_job_becomes_a_label(
    tessera: Tessera, tmp_path: Path
) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(
        "job_id,submit_time_s,model,params,global_batch,iterations,num_gpus,plan,guaranteed\n"
        "p,5,bert,1.3B,256,100,4,248,1\n"
    )
    assert tessera("import", "trace", str(file)).stderr == "1 job imported\n"
    (job,) = read(tessera, "jobs")["jobs"]
    assert (job["labels"], job["guaranteed"], job["iterations"]) == ({"plan": "248"}, True, "100")


def test_a_trace_out_of_order_is_put_in_order_with_a_note(tessera: Tessera, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    header, *rows = TRACE.splitlines()
    file.write_text("\n".join([header, *reversed(rows), ""]))
    done = tessera("import", "trace", str(file)).stderr
    assert "listed after a job that arrives later" in done
    assert "3 jobs imported" in done
