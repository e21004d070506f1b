"""Record what Tessera decides and prints, and compare it after a change that should alter neither.

`python scripts/black_box.py record FILE` writes digests of every decision of 2,000 rounds of Philly
and of 20 synthetic scenarios under five policies, and what commands print with `-o json`.
`compare FILE` does the same and says what differs; it ends with 1 if anything does.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from typer.testing import CliRunner

from tessera.benchmarks.service.fleet import Fleet
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.cli.demo.stack import free_port
from tessera.service.cli.main import app
from tessera.simulator.comparison.policies import options_of
from tessera.simulator.comparison.workload import ROUND_S, WorkloadSpec, make_scenario
from tessera.simulator.data import require_data_file
from tessera.simulator.run import Conditions, Decider, simulate
from tessera.solvers.rounds.plan import RoundOutcome

ROUNDS: Final = 2000
SCENARIOS: Final = 20
POLICIES: Final = (
    "ilp:balanced:0.25",
    "ilp:throughput",
    "ilp:deadline@deadlines=look-ahead",
    "arena",
    "sia",
)
DIGITS: Final = 6
"""Hexadecimal digits kept of the digest of a round."""

CLUSTER: Final = """\
name: c1
gpu_types: {a100: 40GiB, v100: 32GiB}
nodes:
  - {name: "a{}", count: 4, gpu_type: a100, gpus: 4, rack: r0}
  - {name: "v{}", count: 2, gpu_type: v100, gpus: 8, rack: r1}
"""
NODES: Final = [
    *(NodeSpec(name=f"a{n}", gpu_type="a100", gpus=4, rack="r0") for n in range(4)),
    *(NodeSpec(name=f"v{n}", gpu_type="v100", gpus=8, rack="r1") for n in range(2)),
]
TENANTS: Final = "tenants: [{name: red, weight: 2, quotas: {a100: 8}}, {name: blue}]\n"
JOBS: Final = (
    "--model bert --params 1.3B --batch 256 --iterations 2000 --gpus 8",
    "--model bert --params 2.6B --batch 128 --iterations 900 --gpus 4 --priority 5",
    "--model wide_resnet --params 1B --batch 256 --iterations 500 --gpus 2",
    "--model moe --params 1.3B --batch 256 --iterations 700 --gpus 16",
    "--model gpt2 --params 1.5B --batch 64 --iterations 100 --gpus 4",
    "--model bert --params 1.3B --batch 256 --iterations 4000 --gpus 8 --guaranteed",
    "--model bert --params 0.76B --batch 256 --iterations 800 --gpus 4 --deadline 3h",
)
COMMANDS: Final = (
    "cluster apply -f {folder}/cluster.yaml",
    "import samples --cluster c1",
    "tenants apply -f {folder}/tenants.yaml --cluster c1",
    *(f"submit j{number} {options} --cluster c1" for number, options in enumerate(JOBS)),
    "round --cluster c1",
    "round show 1 --cluster c1 --all",
    "rounds --cluster c1",
    "jobs --cluster c1",
    *(f"job j{number} --cluster c1" for number in range(len(JOBS))),
    *(f"explain j{number} --cluster c1" for number in range(len(JOBS))),
    "queue --cluster c1",
    "whatif --add-nodes a100:2 --cluster c1",
    "curve j0 --cluster c1",
    "replay 1 --cluster c1",
    "certificate verify 1 --cluster c1",
    "update j1 --priority 1 --cluster c1",
    "hold j2 --cluster c1",
    "release j2 --cluster c1",
    "cancel j3 --cluster c1",
    "drain a0 --cluster c1",
    "round --cluster c1",
    "undrain a0 --cluster c1",
    "policy set --objective throughput --cluster c1",
    "policy show --cluster c1",
    "policy history --cluster c1",
    "cluster get c1",
    "cluster list",
    "cluster types list --cluster c1",
    "tenants list --cluster c1",
    "usage --cluster c1",
    "reserve list --cluster c1",
    "webhooks list --cluster c1",
    "cells --cluster c1",
    "models --cluster c1",
    "network plan --cluster c1",
    "audit",
    "whoami",
    "topology",
    "estimate bert/1.3B/256 --gpu a100 --count 4",
    "no-such-command",
    "submit j0 --model bert",
)
BLANK: Final = "-"
"""What replaces values that differ from run to run."""


def main() -> None:
    """Record or compare."""
    match sys.argv[1:]:
        case ["record", path]:
            decisions = dict(decide_all())
            commands = blank(dict(run_commands()), dict(run_commands()))
            observed = {"decisions": decisions, "commands": commands}
            Path(path).write_text(json.dumps(observed, indent=0, sort_keys=True) + "\n")
        case ["compare", path]:
            recorded = json.loads(Path(path).read_text())
            observed = {"decisions": dict(decide_all()), "commands": dict(run_commands())}
            differences = list(compare(recorded, observed))
            sys.stdout.write("\n".join(differences or ["nothing differs"]) + "\n")
            sys.exit(bool(differences))
        case _:
            sys.exit(__doc__)


def compare(recorded: dict[str, Any], observed: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each difference."""
    for part, values in recorded.items():
        for name in sorted(values.keys() | observed[part].keys()):
            before = values.get(name)
            after = blank_like(before, observed[part].get(name))
            if before == after:
                continue
            if part == "decisions" and before and after:
                length = next(
                    (k for k in range(min(len(before), len(after))) if before[k] != after[k]),
                    min(len(before), len(after)),
                )
                yield f"{name}: decisions differ from round {length // DIGITS} on"
            else:
                yield from (f"{name}{line}" for line in describe(before, after))


def describe(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield the paths and values in which two outputs differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from describe(before.get(key), after.get(key), f"{path}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from describe(one, other, f"{path}[{number}]")
    elif before != after:
        yield f"{path}: was {json.dumps(before)[:300]}, is {json.dumps(after)[:300]}"


def decide_all() -> Iterator[tuple[str, str]]:
    """Yield the digests of the rounds of each scenario and policy."""
    trace = str(require_data_file("arena", "trace_philly.csv"))
    philly = WorkloadSpec(trace=trace, rounds=ROUNDS, on_bad="keep")
    yield "philly", decide(philly, "ilp:throughput")
    for seed in range(SCENARIOS):
        for policy in POLICIES:
            work = WorkloadSpec(
                trace="synthetic",
                gpus_share=0.05,
                jobs=30,
                rounds=60,
                load=1.5,
                tightness=3.0 if "deadline" in policy else 0.0,
                seed=seed,
            )
            yield f"synthetic-{seed} {policy}", decide(work, policy)


def decide(work: WorkloadSpec, policy: str) -> str:
    """Return the digests of all rounds of ``work`` under ``policy``, one after the other."""
    options = replace(options_of(policy), seed=work.seed)
    decider, digests = Decider(options), []

    def watched(snapshot: Snapshot) -> RoundOutcome:
        outcome = decider(snapshot)
        rows = [
            (
                snapshot.jobs.name[d.job],
                str(d.kind),
                None if d.gang is None else snapshot.cell(d.cell),
                () if d.gang is None else d.gang.members,
                d.admitted,
            )
            for d in outcome.decisions
        ]
        digests.append(hashlib.sha256(repr(rows).encode()).hexdigest()[:DIGITS])
        return outcome

    simulate(
        make_scenario(work).scenario,
        watched,
        Conditions(round_s=ROUND_S, horizon_s=ROUND_S * work.rounds),
        SystemClock(),
    )
    return "".join(digests)


def run_commands() -> Iterator[tuple[str, Any]]:
    """Yield what each command prints, in order, from a server of its own."""
    with (
        tempfile.TemporaryDirectory() as name,
        serving(Path(name)) as server,
        ExitStack() as agents,
    ):
        folder = Path(name)
        (folder / "cluster.yaml").write_text(CLUSTER)
        (folder / "tenants.yaml").write_text(TENANTS)
        runner = CliRunner(env={"TESSERA_SERVER": server, "COLUMNS": "120", "HOME": name})
        fleet: Fleet | None = None
        for number, command in enumerate(COMMANDS):
            if command == "round --cluster c1" and fleet is None:
                fleet = agents.enter_context(Fleet(server, "c1", NODES, "fleet"))
                time.sleep(1)
            arguments = command.format(folder=folder).split()
            done = runner.invoke(app, [*arguments, "-o", "json"])
            if "No such option" in done.output:
                done = runner.invoke(app, arguments)
            if arguments[0] == "round" and len(arguments) == 3:
                time.sleep(1)  # agents report
            yield (
                f"{number:02} {command}",
                [done.exit_code, normalise(done.stdout, name), normalise(done.stderr, name)],
            )


def normalise(text: str, folder: str) -> Any:
    """Return what a command printed, without what surely differs from run to run."""
    text = text.replace(folder, "FOLDER")
    text = re.sub(
        r"\d{4}-\d\d-\d\d[T ][\d:.]+Z?|127.0.0.1:\d+|\d+(\.\d+)? (m?s|min|h)\b", BLANK, text
    )
    try:
        return json.loads(text)
    except ValueError:
        return text.split()


def blank(first: Any, second: Any) -> Any:
    """Return ``first`` with everything blanked that differs in ``second``, another run, or is blank."""
    if isinstance(first, dict) and isinstance(second, dict):
        return {key: blank(first.get(key), second.get(key)) for key in first.keys() | second.keys()}
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [blank(one, other) for one, other in zip(first, second, strict=True)]
    return first if first == second else BLANK


def blank_like(recorded: Any, value: Any) -> Any:
    """Return ``value`` with everything blanked that is blank in ``recorded``."""
    if recorded == BLANK:
        return BLANK
    if isinstance(recorded, dict) and isinstance(value, dict):
        return {key: blank_like(recorded.get(key), item) for key, item in value.items()} | {
            key: BLANK for key in recorded if recorded[key] == BLANK
        }
    if isinstance(recorded, list) and isinstance(value, list) and len(recorded) == len(value):
        return [blank_like(one, other) for one, other in zip(recorded, value, strict=True)]
    return value


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Run a server on an empty embedded database, and yield its address."""
    address = f"127.0.0.1:{free_port()}"
    environment = os.environ | {"TESSERA_HOME": str(folder / "home"), "HOME": str(folder)}
    command = [sys.executable, "-m", "tessera.service.cli.main", "serve", "--listen", address]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, "--period", "0s"], env=environment, stderr=log)
    try:
        runner = CliRunner(env={"TESSERA_SERVER": address})
        while runner.invoke(app, ["cluster", "list"]).exit_code and process.poll() is None:
            pass
        yield address
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
