"""Simulated jobs that share a network: their traffic, their contention and the reported figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.answer.network.contention import Contention, demand_of
from tessera.formulation.answer.network.plan import NetworkPlan
from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import BEST_FOUND, CellKey, Workload
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.state.topologies.document import build_topology
from tessera.formulation.state.topologies.topology import Topology
from tessera.formulation.state.traffic import CellTraffic, StageTraffic
from tessera.service.cli.main import app
from tessera.service.cli.simulation.network import (
    NO_MECHANISM,
    NetworkOptions,
    SharedNetwork,
    network_of,
    read_network_options,
)
from tessera.simulator.executor import replay_lines
from tessera.simulator.hazards import Straggler
from tessera.simulator.logfile import lines_of, log_of
from tessera.simulator.network.figures import contention_figures
from tessera.simulator.network.rates import GroupRates, RateWindow
from tessera.simulator.network.slowdowns import ContentionRecord, ContentionSlowdowns
from tessera.simulator.network.traffic_source import TrafficSource
from tessera.simulator.run import Result
from tessera.simulator.scenario import Scenario
from tessera.simulator.store.gpus import AllocationChange
from tessera.solvers.network.fluid import simulate_fluid as played
from tessera.solvers.network.mechanisms import make_mechanism
from tessera.solvers.network.paths import least_comm_s
from tests.support.laws import examples
from tests.support.worlds import (
    FCFS,
    a_profile,
    a_random_scenario,
    a_scenario,
    an_arrival,
    simulate_scenario,
    some_specs,
)

FOUR = tuple(some_specs(("a100", 4, 4)))
KNOWN = Workload(model="bert", params="1.3B", global_batch=256)
LONG = RateWindow(of_few=600)
BETWEEN = """
hosts: [{hosts}]
host: {{like: a100, gpus: 4, nics: 1}}
switches: [{{name: left, tier: tor}}, {{name: right, tier: tor}}]
links:
  - {{from: a100-0, to: left, bytes_per_s: 1e11}}
  - {{from: a100-1, to: right, bytes_per_s: 1e11}}
  - {{from: a100-2, to: left, bytes_per_s: 1e11}}
  - {{from: a100-3, to: right, bytes_per_s: 1e11}}
  - {{from: left, to: right, bytes_per_s: 1e9}}
""".format(hosts=", ".join(f"a100-{i}" for i in range(4)))
"""Two ToRs and one cable: the only link that jobs on nodes 0-1 and on nodes 2-3 share."""
HALF = "\n".join(
    line.replace(", a100-2, a100-3", "")
    for line in BETWEEN.splitlines()
    if "from: a100-2" not in line and "from: a100-3" not in line
)
"""The same without the last two nodes."""
CUT = "\n".join(line for line in BETWEEN.splitlines() if "from: left" not in line)
"""The same without the cable."""
CLOS = "{kind: clos, host: a100, hosts_per_tor: 1, aggregations: 1, tor_bytes_per_s: 8e8}\n"


def ring_traffic(gpus: int, ring_bytes: float, compute_s: float = 1.0) -> CellTraffic:
    """Return the traffic of replicas that send ``ring_bytes`` around a ring after computing."""
    stage = StageTraffic(dp=gpus, tp=1, data=(ring_bytes, 1))
    return CellTraffic(work_flop=1e12, compute_s=compute_s, start_s=compute_s, stages=(stage,))


TWO_SECONDS = ring_traffic(8, 2e9)
"""An iteration sends for 2 s on the cable."""


def two_jobs(traffic: CellTraffic | None = TWO_SECONDS, iter_time_s: float = 3.0) -> Scenario:
    """Return two jobs of 1,000 iterations on two nodes each: 1 s of computing, 2 s on the cable."""
    profile = a_profile(8, iter_time_s, traffic=traffic)
    jobs = [an_arrival(name, requested_gpus=8) for name in "ab"]
    return a_scenario(*jobs, nodes=FOUR, profiles=[profile])


def a_topology(tmp_path: Path, text: str = BETWEEN) -> str:
    path = tmp_path / "net.yaml"
    path.write_text(text)
    return str(path)


def a_network(
    tmp_path: Path, scenario: Scenario, text: str = BETWEEN, names: Sequence[str] = ("crux-full",)
) -> SharedNetwork:
    wiring = NetworkOptions(file=a_topology(tmp_path, text), mechanisms=tuple(names), levels=8)
    return network_of(wiring, scenario)


def contended_network(network: SharedNetwork, name: str = "crux-full") -> ContentionSlowdowns:
    def plan(contention: Contention) -> NetworkPlan:
        return make_mechanism(name).plan(contention, levels=8)

    return ContentionSlowdowns(network.sending, plan, GroupRates(LONG))


def replays_identically(result: Result) -> bool:
    """Return whether the executor computes the same completion times."""
    jct_s = (result.end_s - result.arrival_s).tolist()
    return list(replay_lines(lines_of(log_of(result))).values()) == pytest.approx(jct_s, rel=1e-9)


def a_start(gang: Gang, plan: int = 0, degree: int = 1) -> AllocationChange:
    return AllocationChange(
        job=0,
        kind=DecisionKind.START,
        cell=CellKey(gpu_type=0, gpus=gang.gpus, pipeline_degree=degree, plan=plan),
        gang=gang,
    )


def a_gang_across(first: int, second: int, gpus: int = 4) -> Gang:
    return Gang(members=((first, tuple(range(gpus))), (second, tuple(range(gpus)))))


def test_the_less_urgent_of_two_jobs_on_one_cable_is_half_as_fast_until_the_other_ends(
    tmp_path: Path,
) -> None:
    """Alone: 3 s an iteration. The urgent job frees the cable for 1 s in 3, so the other takes 6 s."""
    scenario = two_jobs()
    slowdowns = contended_network(a_network(tmp_path, scenario))
    result = simulate_scenario(scenario, FCFS, slowdowns=slowdowns)
    assert sorted(result.end_s.tolist()) == pytest.approx([3000, 4500], rel=0.01)
    assert replays_identically(result)
    figures = contention_figures(result, slowdowns.seen)
    # 1,500 of 7,500 s are lost, on 8 GPUs each
    assert figures["contention_loss"] == pytest.approx(0.2, abs=0.01)
    assert figures["slowdown_mean"] == pytest.approx((1 + 1.5) / 2, rel=0.01)
    assert figures["slowdown_worst"] == pytest.approx(1.5, rel=0.01)
    assert (figures["jobs_met"], figures["jobs_trained"]) == (2, 2)
    assert figures["network_plans"] == 2  # when both start and when one ends; no plan without jobs


def test_slowdowns_match_the_engines_rates(tmp_path: Path) -> None:
    scenario = two_jobs()
    network, calls = a_network(tmp_path, scenario), list[tuple[Contention, NetworkPlan]]()

    def plan(contention: Contention) -> NetworkPlan:
        network_plan = make_mechanism("ecmp").plan(contention, levels=8)
        calls.append((contention, network_plan))
        return network_plan

    runs = {k: replace(a_start(a_gang_across(2 * k, 2 * k + 1)), job=k) for k in (0, 1)}
    slowdowns = ContentionSlowdowns(network.sending, plan, GroupRates(LONG))
    factors = slowdowns(runs)
    assert (slowdowns(dict(runs)), slowdowns.seen.plans) == (factors, 1)  # it is planned once
    contention, network_plan = calls[0]
    demand = demand_of(contention, network_plan.chosen)
    apart_s = np.array([0.0, 1.3])  # in step they would take even longer
    run = played(demand, network_plan.level, horizon_s=10_000.0, warm_s=100.0, offset_s=apart_s)
    expected = 1 / (run.iterations * demand.alone_s)
    assert demand.alone_s == pytest.approx([3.0, 3.0])
    assert expected == pytest.approx([4 / 3, 4 / 3], rel=1e-3)  # the cable is never free
    assert list(factors.values()) == pytest.approx(expected.tolist(), rel=1e-3)


def test_a_stragglers_delay_does_not_count_as_contention(tmp_path: Path) -> None:
    scenario = two_jobs()
    alone = a_scenario(scenario.arrivals[0], nodes=FOUR, profiles=scenario.profiles)
    slowdowns = contended_network(a_network(tmp_path, alone))
    lag = Straggler(node="a100-0", start_s=0.0, end_s=600.0, factor=2.0)
    result = simulate_scenario(alone, FCFS, slowdowns=slowdowns, stragglers=[lag])
    assert result.end_s[0] == pytest.approx(3300)
    assert contention_figures(result, slowdowns.seen)["slowdown_worst"] == 1.0
    assert replays_identically(result)
    untrained = contention_figures(replace(result, segments=()), ContentionRecord())
    names = ("contention_loss", "slowdown_mean", "jobs_trained")
    assert [untrained[name] for name in names] == [0, 1, 0]


@examples(12)
@given(st.integers(0, 10_000))
def test_any_run_on_a_network_replays_to_the_same_completion_times(seed: int) -> None:
    rng, scenario = np.random.default_rng(seed), a_random_scenario(seed)
    profiles = [
        replace(e, traffic=ring_traffic(e.cell.gpus, float(rng.uniform(0, 2e9))))
        if rng.random() < 0.8
        else e
        for e in scenario.profiles
    ]
    scenario = replace(scenario, profiles=profiles)
    topology = clos_of(scenario)
    slowdowns = ContentionSlowdowns(
        TrafficSource(scenario, topology), lambda c: make_mechanism("crux-pa").plan(c, levels=8)
    )
    assert replays_identically(simulate_scenario(scenario, FCFS, slowdowns=slowdowns))


def clos_of(scenario: Scenario) -> Topology:
    return build_topology(
        {
            "kind": "clos",
            "nodes": [node.name for node in scenario.nodes],
            "host": "a100",
            "hosts_per_tor": 2,
            "aggregations": 2,
            "tor_bytes_per_s": 4e8,
        }
    )


def test_jobs_of_unknown_traffic_run_bit_for_bit_as_without_a_network(tmp_path: Path) -> None:
    scenario = two_jobs(traffic=None)
    network = a_network(tmp_path, scenario)
    with_it = simulate_scenario(scenario, FCFS, slowdowns=contended_network(network))
    without = simulate_scenario(scenario, FCFS)
    assert with_it.segments == without.segments
    assert with_it.end_s.tolist() == without.end_s.tolist()
    (warning,) = network.warnings()
    assert warning.startswith("the traffic of 2 jobs is not known, so it caused no contention")
    assert "the model bert 1B is unknown" in warning


def test_a_published_models_traffic_is_derived_and_its_iterations_last_as_profiled() -> None:
    sends = derived_contention(a_profile(8, 5.0, workload=KNOWN), pipeline_degree=1)
    assert sends.fixed_bytes.sum() > 0
    alone_s = max(float(sends.compute_s[0]), float(sends.start_s[0] + least_comm_s(sends)[0]))
    assert alone_s == pytest.approx(5.0)


def test_without_a_recorded_degree_the_best_plan_is_assumed() -> None:
    def sent_at(d: int) -> float:
        profile = a_profile(8, 5.0, workload=KNOWN, pipeline_degree=d)
        return float(derived_contention(profile, d).fixed_bytes.sum())

    degrees = {d: sent_at(d) for d in (1, 2, 4, 8)}
    best = sent_at(BEST_FOUND)
    assert best in degrees.values()


def derived_contention(profile: EstimateRecord, pipeline_degree: int) -> Contention:
    job = an_arrival("a", workload=KNOWN, requested_gpus=8)
    scenario = a_scenario(job, nodes=FOUR, profiles=[profile])
    sending = TrafficSource(scenario, clos_of(scenario))
    contention = sending(a_start(a_gang_across(0, 1), degree=pipeline_degree), a_gang_across(0, 1))
    assert contention is not None
    assert not sending.unknown
    return contention


def test_traffic_that_does_not_fit_the_profiles_iterations_is_reported(tmp_path: Path) -> None:
    scenario = two_jobs(iter_time_s=0.5)  # less than the 2 s on the cable
    network = a_network(tmp_path, scenario)
    simulate_scenario(scenario, FCFS, slowdowns=contended_network(network))
    assert any("the traffic of 2 jobs does not fit" in warning for warning in network.warnings())


@pytest.mark.parametrize(
    ("text", "warnings"),
    [
        (HALF, ["2 of 4 nodes are not in the topology", "1 job had no contention"]),
        (CUT, ["2 jobs had no contention while running outside the topology: no path"]),
    ],
)
def test_jobs_that_the_topology_does_not_connect_are_reported_and_have_no_contention(
    tmp_path: Path, text: str, warnings: list[str]
) -> None:
    scenario = two_jobs()
    network = a_network(tmp_path, scenario, text)
    result = simulate_scenario(scenario, FCFS, slowdowns=contended_network(network))
    assert result.end_s.tolist() == pytest.approx([3000, 3000])
    for warning, start in zip(network.warnings(), warnings, strict=True):
        assert warning.startswith(start)
    few = a_network(tmp_path, two_jobs(), BETWEEN.replace("gpus: 4", "gpus: 2"))
    assert few.warnings()[0].startswith("4 of 4 nodes have more GPUs than in the topology")


def test_network_options_without_a_topology_and_meaningless_ones_are_refused() -> None:
    assert read_network_options(None, [], None) is None
    for mechanisms, levels in ((["ecmp"], None), ([], 4)):
        with pytest.raises(InvalidInput, match="--topology FILE"):
            read_network_options(None, mechanisms, levels)
    with pytest.raises(InvalidInput, match="unknown mechanism 'best'; choose from ecmp"):
        read_network_options("net.yaml", ["best"], None)
    with pytest.raises(InvalidInput, match="is for 4 GPUs, but its profile is for 8"):
        TrafficSource(two_jobs(ring_traffic(4, 1e9)), clos_of(two_jobs()))
    options = read_network_options("net.yaml", ["ecmp", "ecmp", NO_MECHANISM], None)
    assert options is not None
    assert options.mechanisms == ("ecmp", NO_MECHANISM)


def test_a_topology_of_other_hosts_is_refused_and_unnamed_ones_are_the_clusters_nodes(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        InvalidInput, match=r"host-0, host-1.*give hosts the names of nodes.*omit the hosts"
    ):
        a_network(tmp_path, two_jobs(), CLOS.replace("host:", "hosts: 4, host:"))
    with pytest.raises(InvalidInput, match=r"net\.yaml.*kind"):
        a_network(tmp_path, two_jobs(), "{kind: ring}")
    network = a_network(tmp_path, two_jobs(), CLOS)
    assert network.topology.hosts == tuple(node.name for node in FOUR)
    assert network.notes == ()


TRACE = """\
job_id,submit_time_s,model,params,global_batch,iterations,num_gpus,gpu_type,deadline_s
a,0,bert,1.3B,256,1000,8,a100,
b,0,bert,1.3B,256,1000,8,a100,
"""
PROFILES = """\
model,params,global_batch,gpu_type,num_nodes,gpus_per_node,pipeline_degree,iter_time_s,status
bert,1.3B,256,a100,2,4,1,6.0,ok
"""


def run_simulate(tmp_path: Path, *options: str, code: int = 0) -> Any:
    trace, profiles = tmp_path / "trace.csv", tmp_path / "profiles.csv"
    trace.write_text(TRACE)
    profiles.write_text(PROFILES)
    command = f"simulate {trace} --profiles {profiles} --nodes a100=4x4 --policy fcfs"
    arguments = [*command.split(), "--divide-iterations", "1", *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return json.loads(result.stdout) if "--json" in options else result.output


def test_mechanisms_are_compared_like_policies_and_their_logs_replay(tmp_path: Path) -> None:
    file, options = a_topology(tmp_path, CLOS), ("--network", NO_MECHANISM, "--network", "ecmp")
    output = run_simulate(tmp_path, "--topology", file, *options, "--replay", "--json")
    alone, shared = output["policies"]
    assert (alone["policy"], shared["policy"]) == ("fcfs, none", "fcfs, ecmp")
    assert (output["hosts"], output["networks"]) == (4, ["none", "ecmp"])
    assert (alone["jobs_met"], shared["jobs_trained"]) == (0, 2)
    assert (alone["contention_loss"], alone["slowdown_mean"]) == (0, 1)
    assert all(row["replay"] == {"jobs": 2, "off": 0.0, "wrong": ""} for row in (alone, shared))
    shown = run_simulate(tmp_path, "--topology", file, *options)
    assert "LOST %" in shown
    assert "4 hosts" in shown
    (single,) = run_simulate(tmp_path, "--topology", file, "--json")["policies"]
    assert (single["policy"], single["network"]) == ("fcfs", "crux-full")
    without = run_simulate(tmp_path, "--json")
    assert "topology" not in without
    assert not {"network", "contention_loss", "jobs_met"} & set(without["policies"][0])
    assert without["policies"][0]["jct_mean_s"] == alone["jct_mean_s"]
    assert "LOST" not in run_simulate(tmp_path)
