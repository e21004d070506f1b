"""``tessera simulate``: run a trace of jobs on a simulated cluster, under one policy or several."""

from __future__ import annotations

import inspect
import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from tessera.formulation.base import limits
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.round.grammar import parse_objective
from tessera.formulation.round.policy import NETWORK_LEVELS
from tessera.service.cli.options import parse_label, parse_seconds, unique_pairs, with_options
from tessera.service.cli.render import print_error, print_line, print_note
from tessera.service.cli.simulation import traces, view
from tessera.service.cli.simulation.network import (
    DEFAULT_MECHANISM,
    NO_MECHANISM,
    network_of,
    read_network_options,
)
from tessera.service.cli.simulation.runs import (
    PolicyRun,
    ReplayOutcome,
    SimulationSettings,
    conditions_of,
    replay_log,
    run_all,
)
from tessera.service.cli.simulation.world import SYNTHETIC_CLUSTER, SimulationInput, choose_scenario
from tessera.simulator.clusters import PRESETS as CLUSTERS
from tessera.simulator.comparison.policies import DEFAULT_POLICY, options_of
from tessera.simulator.completion_bound import completion_bound
from tessera.simulator.hazards import Hazards
from tessera.simulator.logfile import log_of, write_log
from tessera.simulator.overheads import PRESETS as OVERHEADS
from tessera.simulator.overheads import preset_overheads as overheads_of
from tessera.simulator.provenance import json_number, measured_commit
from tessera.simulator.run import Conditions
from tessera.simulator.traces.trace import TraceOptions
from tessera.simulator.workloads.published import NAMES
from tessera.solvers.network import mechanisms
from tessera.solvers.schedulers import registry

DEFAULT_POLICIES: Final = ("fcfs", "arena", DEFAULT_POLICY)
"""The policies that run if no policy is named."""
DEFAULT_JOBS: Final = 60
"""The default number of synthetic jobs, with which a run takes seconds."""
PARAMETERS: Final = "; ".join(
    f"{name}: {', '.join(f'{p.name}={p.shown_default}'.rstrip('=') for p in parameters)}"
    for name in registry.scheduler_names()
    if (parameters := registry.parameters_of(name)) and not name.startswith("arena-")
)
"""The parameters of published schedulers with their defaults. Variants of arena have the same."""
EPILOG: Final = f"""\
A policy is one of our integer programs, `ilp:OBJECTIVE` (e.g. ilp:jct, 'ilp:0.5*throughput + jct'), greedy on
the same statement, `greedy:OBJECTIVE`, or a published scheduler: {", ".join(registry.scheduler_names())}.
`MODULE:CLASS` is a scheduler of your own, and `ilp:MODULE:FUNCTION` an objective, in a module in the current
folder or on PYTHONPATH (docs/simulating.md).
`@OPTION=VALUE` changes an option of a round, e.g. ilp:jct@max_changes=3, or a parameter of a published
scheduler, e.g. arena@depth=5. These have parameters: {PARAMETERS}.
All policies run on the same jobs, see the same estimates and pay the same overheads. Jobs progress at the
true speeds of their Cells, and run until they are completed or --horizon is reached.

Examples:

    tessera simulate
    tessera simulate trace.csv --profiles profiles.csv --nodes a100=8x4 --policy fcfs --policy ilp:jct
    tessera simulate trace.csv --profiles profiles.csv --cluster testbed-a --on-bad drop --report out
    tessera simulate --policy fcfs --policy smallest_first:SmallestFirst
"""


def add_commands(app: typer.Typer) -> None:
    """Add ``simulate`` to the command line."""
    shaped = with_options(simulate, "wanted", _shaping(), EPILOG)
    app.command("simulate")(with_options(shaped, "settings", simulation_settings))


def _option(text: str, *names: str, **rest: Any) -> Any:
    return typer.Option(*names, help=text, show_default=False, **rest)


def _shaping() -> Any:
    """Return ``traces.shaping_options`` without ``to``, and with help texts for a simulation."""
    here = {
        "profiles": Annotated[
            Path | None,
            _option(
                "Iteration times of the models, which are the simulation's true speeds"
                " (docs/traces.md).",
                metavar="FILE.csv",
            ),
        ],
        "nodes": Annotated[
            list[str] | None,
            _option(
                "Nodes of the cluster, e.g. a100=80x4: 80 nodes of 4 x a100. Repeatable.",
                metavar="TYPE=NODESxGPUS",
            ),
        ],
        "seed": Annotated[
            int,
            _option(
                "Seed of all random draws (jobs, errors, failures). Default: 0.",
                min=0,
                max=limits.MAX_SEED,
            ),
        ],
    }
    given = inspect.signature(traces.shaping_options, eval_str=True).parameters.values()
    known = [p.replace(annotation=here.get(p.name, p.annotation)) for p in given if p.name != "to"]

    def asked(**options: Any) -> traces.ShapingSettings:
        return traces.shaping_options(**options)

    asked.__signature__ = inspect.Signature(known)  # type: ignore[attr-defined]
    return asked


def simulation_settings(
    *,
    round_length: Annotated[
        str, _option("Time between two rounds. Default: 300s.", "--round")
    ] = "300s",
    on_events: Annotated[
        bool,
        _option(
            "Run a round whenever something has happened, but at most one in each --round.",
            "--on-events",
        ),
    ] = False,
    horizon: Annotated[
        str | None,
        _option("Simulated time after which to stop, e.g. 7d. Default: when all jobs have ended."),
    ] = None,
    overheads: Annotated[
        str,
        _option(
            f"Costs of starts, changes and failures: {', '.join(OVERHEADS)}. Default: default."
        ),
    ] = "default",
    error: Annotated[
        float,
        _option(
            "Mean relative error of the estimates on which rounds decide, e.g. 0.1. Default: 0.",
            min=0.0,
            max=0.99,
        ),
    ] = 0.0,
    failures: Annotated[
        str | None,
        _option(
            "Mean time between failures of a node, e.g. 340d (Llama 3). A failed node is down for 4 h."
            " Default: no failures."
        ),
    ] = None,
    stragglers: Annotated[
        str | None,
        _option(
            "Mean time between slow periods of a node, e.g. 60d. It is then up to 2 times slower for 2 h."
            " Default: no slow periods."
        ),
    ] = None,
    topology: Annotated[
        str | None,
        _option(
            "Network that the jobs share, in YAML or JSON (docs/network.md). Jobs"
            " that share"
            " links slow each other down. Its hosts are the cluster's nodes, by name.",
            metavar="FILE",
        ),
    ] = None,
    network: Annotated[
        list[str] | None,
        _option(
            "Mechanism that decides the paths and priority levels:"
            f" {', '.join(mechanisms.mechanism_names())}, or {NO_MECHANISM}, without any"
            f" contention. Repeatable. Default: {DEFAULT_MECHANISM}.",
            metavar="MECHANISM",
        ),
    ] = None,
    network_levels: Annotated[
        int | None,
        _option(
            f"Number of network priority levels. Default: {NETWORK_LEVELS}.",
            min=1,
            max=NETWORK_LEVELS,
        ),
    ] = None,
) -> SimulationSettings:
    """Return the conditions under which policies run. Raises InvalidInput."""
    overheads_of(overheads)  # refuses an unknown name
    hazards = None
    if failures or stragglers:
        hazards = Hazards(
            between_failures_s=_positive_s("--failures", failures),
            between_lags_s=_positive_s("--stragglers", stragglers),
        )
    return SimulationSettings(
        overheads=overheads,
        round_s=_positive_s("--round", round_length),
        on_events=on_events,
        horizon_s=_positive_s("--horizon", horizon),
        error=error,
        hazards=hazards,
        wiring=read_network_options(topology, network or (), network_levels),
    )


def _positive_s(option: str, text: str | None) -> float:
    """Return a duration in seconds, or inf if ``text`` is None."""
    if text is None:
        return math.inf
    duration_s = parse_seconds(option, text)
    if not duration_s > 0:
        raise InvalidInput(option, "must be longer than 0")
    return duration_s


def simulate(
    wanted: traces.ShapingSettings,
    settings: SimulationSettings,
    trace: Annotated[
        str | None,
        typer.Argument(
            metavar="TRACE",
            show_default=False,
            help=f"CSV of jobs (docs/traces.md), or one of {', '.join(NAMES)}, which"
            " need the data"
            f" sets. Default: synthetic jobs with sample profiles, on the cluster `{SYNTHETIC_CLUSTER}`.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        _option(f"Name of a cluster, instead of --nodes: {', '.join(CLUSTERS)}."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        _option(
            f"Policy that decides the rounds; see above. Repeatable. Default: {', '.join(DEFAULT_POLICIES)}.",
            metavar="NAME",
        ),
    ] = None,
    price: Annotated[
        list[str] | None,
        _option(
            "Dollars per GPU and hour, for the objective `cost`. Repeatable.",
            metavar="TYPE=DOLLARS",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        _option(
            f"Number of synthetic jobs. Default: {DEFAULT_JOBS}.",
            min=1,
            max=limits.MAX_SYNTHETIC_JOBS,
        ),
    ] = None,
    complete: Annotated[
        bool,
        _option(
            "The file of --profiles has every shape on which its workloads run. Other shapes are taken"
            " not to run.",
            "--complete",
        ),
    ] = False,
    limit: Annotated[
        int | None,
        _option(
            "Run only the first N jobs of the trace.", "--limit", "-n", min=1, max=limits.MAX_ROWS
        ),
    ] = None,
    divide_iterations: Annotated[
        int,
        _option(
            "Divide a file's `num_iterations` by this number. Use 1 for traces that are not"
            " Arena's. Default: 5.",
            min=1,
        ),
    ] = 5,
    results: Annotated[
        Path | None,
        _option(
            "Write all figures and the outcome of each job to this file (JSON).", dir_okay=False
        ),
    ] = None,
    log: Annotated[
        Path | None,
        _option(
            "Write a log of the GPUs that each job held over time (docs/internals/simulator.md). Several"
            " policies get a file each.",
            dir_okay=False,
        ),
    ] = None,
    replay: Annotated[
        bool,
        _option(
            "Replay each log with the independent executor. The exit code is 1 if any completion time"
            " differs.",
            "--replay",
        ),
    ] = False,
    report: Annotated[
        Path | None,
        _option("Write report.html, a page with pictures, to this folder.", file_okay=False),
    ] = None,
    as_json: Annotated[bool, _option("Print one JSON object and nothing else.", "--json")] = False,
) -> None:
    """Run a trace on a simulated cluster under one or more policies, and compare the results.

    The simulator decides rounds with the same code as the service, on its own clock. Progress is written to
    stderr.
    """
    names = list(dict.fromkeys(policy or DEFAULT_POLICIES))
    prices = unique_pairs("--price", (_price(text) for text in price or ()))
    for name in names:
        _require_decidable(name, prices)
    if trace is not None and jobs is not None:
        raise InvalidInput(
            "--jobs", "is only for synthetic jobs; use --limit for the first jobs of a trace"
        )
    _require_writable(*(path for path in (results, log) if path is not None))
    source = SimulationInput(
        trace=trace,
        cluster=cluster,
        jobs=jobs or DEFAULT_JOBS,
        wanted=wanted,
        reading=TraceOptions(iteration_divisor=divide_iterations, limit=limit, screened=True),
        prices=prices,
        complete=complete,
    )
    world, seed = choose_scenario(source), wanted.recipe.seed
    under = conditions_of(world, settings, seed)
    network = None if settings.wiring is None else network_of(settings.wiring, world.scenario)
    runs = run_all(names, world, under, seed, network)
    bound = completion_bound(world.scenario, under.overheads)
    table, warned = view.policy_rows(runs, bound), view.run_warnings(runs, world, under)
    warned += network.warnings() if network else []
    checks = {run.policy: replay_log(run) for run in runs} if replay else {}
    about = _about(trace or "synthetic", settings, under, seed) | {
        "jct_bound_s": json_number(bound.mean_s),
        **(network.facts() if network else {}),
    }
    document = view.as_json(runs, table, world, about, checks, warned)
    if as_json:
        print_line(json.dumps(document))
    else:
        view.show_runs(runs, table, world, about)
    for text in warned:
        print_note(f"warning: {text}")
    if results is not None:
        results.write_text(json.dumps(view.with_jobs(document, runs)) + "\n", encoding="utf-8")
        print_note(f"results written to {results}")
    _write_logs(log, runs)
    if report is not None:
        from tessera.service.cli.simulation import page  # noqa: PLC0415 - matplotlib starts slowly

        print_note(
            f"report written to {page.write_page(runs, table, world, about, warned, report)}"
        )
    _report_checks(checks)


def _about(
    trace: str, settings: SimulationSettings, under: Conditions, seed: int
) -> dict[str, Any]:
    """Return the facts that determined the runs."""
    return {
        "command": shlex.join(["tessera", *sys.argv[1:]]),
        "commit": measured_commit(),
        "seed": seed,
        "trace": trace,
        "rounds": _rounds(settings),
        "overheads": settings.overheads,
        "error": settings.error,
        "failures": len(under.failures),
        "stragglers": len(under.stragglers),
        "horizon_s": json_number(settings.horizon_s),
    }


def _price(text: str) -> tuple[str, float]:
    """Return a GPU type and its dollars per hour."""
    name, dollars = parse_label("--price", text)
    try:
        price = float(dollars)
    except ValueError:
        price = 0.0
    if not 0 < price < math.inf:
        raise InvalidInput(
            "--price", f"must be a GPU type and a positive number, as in a100=3.5, not {text!r}"
        )
    return name, price


def _require_decidable(policy: str, prices: Mapping[str, float]) -> None:
    """Refuse a policy that is unknown, or that minimizes a cost that is not given."""
    options = options_of(policy)
    terms = [term.objective for stage in parse_objective(options.objective) for term in stage.terms]
    if "cost" not in terms or options.scheduler:
        return
    if options.cost_of != "dollars":
        raise InvalidInput(
            "--policy", f"{policy} counts watts, but no GPU type has watts in a simulation"
        )
    if not prices:
        raise InvalidInput("--price", f"is required by {policy}, e.g. a100=3.5")


def _rounds(settings: SimulationSettings) -> str:
    period = f"every {settings.round_s:g} s"
    return f"on events, at most one {period}" if settings.on_events else period


def _require_writable(*files: Path) -> None:
    """Refuse files in missing folders before anything runs."""
    for file in files:
        if not file.parent.is_dir():
            raise InvalidInput(str(file), "cannot be written, because its folder does not exist")


def _write_logs(log: Path | None, runs: Sequence[PolicyRun]) -> None:
    if log is None:
        return
    for k, run in enumerate(runs, 1):
        file = log if len(runs) == 1 else log.with_stem(f"{log.stem}-{k}")
        write_log(log_of(run.result), file)
        print_note(f"log of {run.policy} written to {file}")


def _report_checks(checks: Mapping[str, ReplayOutcome]) -> None:
    """Print the results of the executor. Raises Exit if they differ from the simulator's."""
    for policy, check in checks.items():
        if not check.wrong:
            precision = f", within {check.off:.0e}" if check.off else ""
            print_note(
                f"{policy}: the executor confirms all {check.jobs:,} completion times{precision}"
            )
    wrong = {policy: check.wrong for policy, check in checks.items() if check.wrong}
    for policy, text in wrong.items():
        print_error(f"{policy}: the executor disagrees: {text}")
    if wrong:
        raise typer.Exit(1)
