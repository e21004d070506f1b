"""Tenants, pins, deadlines and policies on the command line, against a real server on PostgreSQL."""

from __future__ import annotations

from pathlib import Path

from tessera.benchmarks.service.fleet import Fleet
from tests.support.command_line import CLUSTER, Tessera, read, submit

TENANTS = "tenants: {nlp: {weight: 2, quotas: {a100: 6, any: 8}, borrow_gpus: 0}, vision: {}}\n"


def test_tenants_are_applied_listed_and_deleted(tessera: Tessera) -> None:
    assert "each has weight 1" in tessera("tenants", "list").stderr
    done = tessera("tenants", "apply", "-f", "-", "--validate-only", stdin=TENANTS)
    assert "2 tenants valid; nothing changed" in done.stderr
    assert read(tessera, "tenants", "list")["tenants"] == []
    tessera("tenants", "apply", "-f", "-", stdin=TENANTS)
    head, nlp, vision = tessera("tenants", "list").stdout.splitlines()
    assert head.split() == ["TENANT", "WEIGHT", "QUOTAS", "BORROWS", "LENDS"]
    assert nlp.split() == [
        "nlp",
        "2",
        "6",
        "x",
        "a100,",
        "8",
        "GPUs",
        "of",
        "any",
        "type",
        "0",
        "yes",
    ]
    assert vision.split() == ["vision", "1", "any", "number", "yes"]
    too_much = TENANTS.replace("vision: {}", "vision: {quotas: {a100: 3}}")
    refused = tessera("tenants", "apply", "-f", "-", stdin=too_much, code=1).stderr
    assert "quotas of a100 sum to 9 GPUs, but the cluster has 8" in refused
    assert tessera("tenants", "list", "-o", "name").stdout.split() == [
        "clusters/c/tenants/nlp",
        "clusters/c/tenants/vision",
    ]
    tessera("tenants", "delete", "nlp", "absent", code=4)
    assert "deleted: nlp, vision" in tessera("tenants", "delete", "nlp", "vision").stderr
    assert read(tessera, "tenants", "list")["tenants"] == []


def test_a_cluster_file_sets_tenants_and_gpu_costs(tessera: Tessera) -> None:
    text = CLUSTER.replace("40GiB", "{memory: 40GiB, dollars_per_hour: 2.5, watts: 400}") + TENANTS
    assert "1 GPU types, 2 nodes, 2 tenants applied" in (
        tessera("cluster", "apply", "-f", "-", stdin=text).stderr
    )
    assert "a100 (40 GiB, $2.5/h, 400 W)" in tessera("cluster", "get").stdout
    assert len(read(tessera, "tenants", "list")["tenants"]) == 2


def test_a_job_is_pinned_and_avoids_nodes(tessera: Tessera, fleet: Fleet) -> None:
    submit(tessera, "j", "--gpu-type", "a100", "--pin-type", "--avoid-node", "n0")
    shown = tessera("job", "j").stdout
    assert "4 x a100, pinned to the type" in shown
    tessera("round")
    shares = read(tessera, "job", "j")["allocation"]["shares"]
    assert [share["node"] for share in shares] == ["clusters/c/nodes/n1"]
    tessera("update", "j", "--any-type", "--avoid-node", "none")
    job = read(tessera, "job", "j")
    assert (job["pinned_gpu_type"], job["avoid_nodes"]) == (False, [])
    refused = tessera("update", "j", "--avoid-node", "n9", code=1).stderr
    assert "n9" in refused


def test_a_round_shows_its_goals_promises_and_policy(tessera: Tessera, fleet: Fleet) -> None:
    submit(tessera, "easy", "--deadline", "30d")
    submit(tessera, "never", "--deadline", "60s")
    policy = ["--objective", "deadline then jct", "--queue-order", "--promote-after", "2h"]
    shown = tessera("round", *policy).stdout
    assert "deadline then jct; queue order yes; promote after 2h" in shown
    assert "1 promised" in shown
    rows = [line.split() for line in tessera("round", "show", "1").stdout.splitlines()]
    goals = [row[0] for row in rows if row[0] in ("deadline", "jct") and "%" in row]
    assert goals == ["deadline", "jct"]
    easy = tessera("job", "easy").stdout
    assert "promised (schedule below)" in easy
    # The number of GPUs depends on where the slots lie now.
    assert " x a100, pp 2" in easy.splitlines()[-1]
    assert "refused; the earliest that could be met is 20" in tessera("job", "never").stdout
    assert "all decisions are the same" in tessera("replay", "1").stderr
    changed = tessera("replay", "1", "--objective", "jct", "--no-queue-order")
    assert "REPLAYED" in changed.stdout


def test_a_snapshot_is_solved_by_another_policy_without_a_server(
    tessera: Tessera, fleet: Fleet, tmp_path: Path
) -> None:
    submit(tessera, "a")
    tessera("round")
    file = tmp_path / "round.json"
    tessera("replay", "1", "--save-snapshot", str(file))
    shown = tessera("solve", str(file), "--objective", "max-min within 5% then throughput").stdout
    assert "max-min within 5% then throughput" in shown
    assert (
        "the published scheduler fcfs" in tessera("solve", str(file), "--scheduler", "fcfs").stdout
    )


def test_an_invalid_standing_policy_is_refused_before_anything_starts(tessera: Tessera) -> None:
    for command in ("serve", "up"):
        refused = tessera(command, "--policy", "objective: speed", code=2).stderr
        assert (
            "policy.objective: 'speed' is not an objective; choose from throughput, deadline"
            in refused
        )
