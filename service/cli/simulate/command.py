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

from tessera.formulation.errors import InvalidInput
from tessera.formulation.grammar import parse
from tessera.formulation.policy import NETWORK_LEVELS
from tessera.service.cli import limits, traces
from tessera.service.cli.options import label, seconds, with_options
from tessera.service.cli.render import complain, line, note
from tessera.service.cli.simulate import view
from tessera.service.cli.simulate.network import DEFAULT, NOBODY, network_of, wiring_of
from tessera.service.cli.simulate.runs import (
    Replayed,
    Run,
    Told,
    conditions_of,
    replay_log,
    run_all,
)
from tessera.service.cli.simulate.world import SMALL, Source, choose_scenario
from tessera.simulator.clusters import PRESETS as CLUSTERS
from tessera.simulator.comparison.contestants import options_of
from tessera.simulator.hazards import Hazards
from tessera.simulator.logfile import log_of, write_log
from tessera.simulator.overheads import PRESETS as OVERHEADS
from tessera.simulator.overheads import overheads as overheads_of
from tessera.simulator.provenance import commit, json_number
from tessera.simulator.report.write import write_report
from tessera.simulator.run import Conditions
from tessera.simulator.traces.trace import TraceOptions
from tessera.simulator.workloads.published import NAMES
from tessera.solvers.network import mechanisms
from tessera.solvers.schedulers import registry

POLICIES: Final = ("fcfs", "arena", "ilp:balanced")
"""The policies that run if none is named."""
JOBS: Final = 60
"""The number of synthetic jobs if none is given. A run takes seconds."""
EPILOG: Final = f"""\
Policies are our integer programs, `ilp:OBJECTIVE` (e.g. ilp:jct, 'ilp:0.5*throughput + jct'), greedy on the
same statement, `greedy:OBJECTIVE`, and published ones: {", ".join(registry.names())}. `@OPTION=VALUE` changes
an option of a round, e.g. ilp:jct@max_changes=3. All run on the same jobs, see the same estimates and pay
the same overheads; progress accrues at the speed then in force, and jobs run to completion or to --horizon.

Examples: tessera simulate
          tessera simulate trace.csv --profiles profiles.csv --nodes a100=8x4 --policy fcfs --policy ilp:jct
          tessera simulate trace.csv --profiles profiles.csv --cluster testbed-a --on-bad drop --report out
"""


def add(app: typer.Typer) -> None:
    """Add ``simulate`` to the command line."""
    shaped = with_options(simulate, "wanted", _shaping(), EPILOG)
    app.command("simulate")(with_options(shaped, "told", conditions))


def _option(text: str, *names: str, **rest: Any) -> Any:
    return typer.Option(*names, help=text, show_default=False, **rest)


def _shaping() -> Any:
    """Return ``traces.asked`` without ``to``, and with help texts for a simulation."""
    here = {
        "profiles": Annotated[
            Path | None,
            _option(
                "How fast models run, the truth of the simulation (docs/traces.md).",
                metavar="FILE.csv",
            ),
        ],
        "nodes": Annotated[
            list[str] | None,
            _option(
                "The cluster, e.g. a100=80x4: 80 nodes of 4; repeatable.", metavar="TYPE=NODESxGPUS"
            ),
        ],
        "seed": Annotated[
            int,
            _option("Of all that is drawn: jobs, errors, failures; 0.", min=0, max=limits.MAX_SEED),
        ],
    }
    given = inspect.signature(traces.shaping_options, eval_str=True).parameters.values()
    known = [p.replace(annotation=here.get(p.name, p.annotation)) for p in given if p.name != "to"]

    def asked(**options: Any) -> traces.Wanted:
        return traces.shaping_options(**options)

    asked.__signature__ = inspect.Signature(known)  # type: ignore[attr-defined]
    return asked


def conditions(
    *,
    round_length: Annotated[str, _option("Time between rounds; 300s.", "--round")] = "300s",
    on_events: Annotated[
        bool,
        _option(
            "Rounds come when something has happened, at most one each --round.", "--on-events"
        ),
    ] = False,
    horizon: Annotated[
        str | None, _option("End after so long, e.g. 7d; by default when all jobs are over.")
    ] = None,
    overheads: Annotated[
        str, _option(f"What starts, changes and failures cost: {', '.join(OVERHEADS)}.")
    ] = "default",
    error: Annotated[
        float,
        _option(
            "Mean relative error of the estimates that rounds decide on, e.g. 0.1; 0.",
            min=0.0,
            max=0.99,
        ),
    ] = 0.0,
    failures: Annotated[
        str | None,
        _option(
            "A node fails each so long on average, e.g. 340d (Llama 3's), and is away for 4 h; never."
        ),
    ] = None,
    stragglers: Annotated[
        str | None,
        _option("A node lags each so long on average, e.g. 60d, by up to 2 times for 2 h; never."),
    ] = None,
    topology: Annotated[
        str | None,
        _option(
            "Jobs share this network, YAML or JSON (docs/network.md), and slow each"
            " other down where they meet. Its hosts are the cluster's nodes, by name.",
            metavar="FILE",
        ),
    ] = None,
    network: Annotated[
        list[str] | None,
        _option(
            f"Who decides paths and levels on it; repeatable: {', '.join(mechanisms.names())}, or {NOBODY}:"
            f" nobody meets; by default {DEFAULT}.",
            metavar="MECHANISM",
        ),
    ] = None,
    network_levels: Annotated[
        int | None,
        _option(
            f"Levels of urgency that switches keep apart; {NETWORK_LEVELS}.",
            min=1,
            max=NETWORK_LEVELS,
        ),
    ] = None,
) -> Told:
    """Return the conditions under which policies run. Raises InvalidInput."""
    overheads_of(overheads)  # refuses an unknown name
    hazards = None
    if failures or stragglers:
        hazards = Hazards(
            between_failures_s=_positive_s("--failures", failures),
            between_lags_s=_positive_s("--stragglers", stragglers),
        )
    return Told(
        overheads=overheads,
        round_s=_positive_s("--round", round_length),
        on_events=on_events,
        horizon_s=_positive_s("--horizon", horizon),
        error=error,
        hazards=hazards,
        wiring=wiring_of(topology, network or (), network_levels),
    )


def _positive_s(option: str, text: str | None) -> float:
    """Return a duration in seconds, or inf if ``text`` is None."""
    if text is None:
        return math.inf
    found = seconds(option, text)
    if not found > 0:
        raise InvalidInput(option, "must be longer than 0")
    return found


def simulate(
    wanted: traces.Wanted,
    told: Told,
    trace: Annotated[
        str | None,
        typer.Argument(
            metavar="TRACE",
            show_default=False,
            help=f"A CSV of jobs (docs/traces.md), or one of {', '.join(NAMES)}, which need the"
            f" data sets; by default synthetic jobs with sample profiles, on the cluster `{SMALL}`.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        _option(f"A cluster that has a name, in place of --nodes: {', '.join(CLUSTERS)}."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        _option(f"Who decides; repeatable; by default {', '.join(POLICIES)}.", metavar="NAME"),
    ] = None,
    price: Annotated[
        list[str] | None,
        _option(
            "Dollars an hour of one GPU, for the objective `cost`; repeatable.",
            metavar="TYPE=DOLLARS",
        ),
    ] = None,
    jobs: Annotated[
        int | None, _option(f"How many synthetic jobs; {JOBS}.", min=1, max=limits.MAX_ROWS)
    ] = None,
    limit: Annotated[
        int | None,
        _option(
            "Only the first so many jobs of the trace.", "--limit", "-n", min=1, max=limits.MAX_ROWS
        ),
    ] = None,
    divide_iterations: Annotated[
        int,
        _option(
            "Divide a file's `num_iterations` by this; 5, as Arena's want; 1 for others.", min=1
        ),
    ] = 5,
    results: Annotated[
        Path | None, _option("Write all figures and each job's fate as JSON.", dir_okay=False)
    ] = None,
    log: Annotated[
        Path | None,
        _option(
            "Write who held which GPUs when (docs/internals/simulator.md, The log); of several"
            " policies, each to a file of its own.",
            dir_okay=False,
        ),
    ] = None,
    replay: Annotated[
        bool,
        _option(
            "Let the independent executor replay each log, and exit 1 where it comes to other completion"
            " times.",
            "--replay",
        ),
    ] = False,
    report: Annotated[
        Path | None,
        _option("Write an HTML page and Markdown with pictures into this folder.", file_okay=False),
    ] = None,
    as_json: Annotated[bool, _option("Print one JSON object and nothing else.", "--json")] = False,
) -> None:
    """Run a trace on a simulated cluster, under one policy or several, and compare what they come to.

    Decisions are made by the same rounds as the service's, on the simulator's clock; progress goes to stderr.
    """
    names = list(dict.fromkeys(policy or POLICIES))
    prices = dict(_price(text) for text in price or ())
    for name in names:
        _decidable(name, prices)
    if trace is not None and jobs is not None:
        raise InvalidInput("--jobs", "is of synthetic jobs; --limit takes the first of a trace")
    _writable(*(path for path in (results, log) if path is not None))
    source = Source(
        trace=trace,
        cluster=cluster,
        jobs=jobs or JOBS,
        wanted=wanted,
        reading=TraceOptions(iteration_divisor=divide_iterations, limit=limit, screened=True),
        prices=prices,
    )
    world, seed = choose_scenario(source), wanted.recipe.seed
    under = conditions_of(world, told, seed)
    network = None if told.wiring is None else network_of(told.wiring, world.scenario)
    runs = run_all(names, world, under, seed, network)
    table, warned = view.rows(runs), view.warnings(runs, world, under)
    warned += network.warnings() if network else []
    checks = {run.policy: replay_log(run) for run in runs} if replay else {}
    about = _about(trace or "synthetic", told, under, seed) | (network.told() if network else {})
    found = view.as_json(runs, table, world, about, checks, warned)
    if as_json:
        line(json.dumps(found))
    else:
        view.show(runs, table, world, about)
    for text in warned:
        note(f"warning: {text}")
    if results is not None:
        results.write_text(json.dumps(view.with_jobs(found, runs)) + "\n", encoding="utf-8")
        note(f"results written to {results}")
    _write_logs(log, runs)
    if report is not None:
        page = write_report(view.report(runs, table, world, about, warned), report)
        note(f"report written to {page}")
    _say(checks)


def _about(trace: str, told: Told, under: Conditions, seed: int) -> dict[str, Any]:
    """Return the facts that determined the runs."""
    return {
        "command": shlex.join(["tessera", *sys.argv[1:]]),
        "commit": commit(),
        "seed": seed,
        "trace": trace,
        "rounds": _rounds(told),
        "overheads": told.overheads,
        "error": told.error,
        "failures": len(under.failures),
        "stragglers": len(under.stragglers),
        "horizon_s": json_number(told.horizon_s),
    }


def _price(text: str) -> tuple[str, float]:
    """Return a GPU type and its dollars per hour."""
    name, dollars = label("--price", text)
    try:
        found = float(dollars)
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise InvalidInput(
            "--price", f"{text!r}: write a type and a positive number, as in a100=3.5"
        )
    return name, found


def _decidable(policy: str, prices: Mapping[str, float]) -> None:
    """Refuse a policy that is unknown, or that minimizes a cost that is not given."""
    options = options_of(policy)
    terms = [term.objective for stage in parse(options.objective) for term in stage.terms]
    if "cost" not in terms or options.scheduler:
        return
    if options.cost_of != "dollars":
        raise InvalidInput("--policy", f"{policy} counts watts, which no GPU type has here")
    if not prices:
        raise InvalidInput("--price", f"is needed by {policy}, e.g. a100=3.5")


def _rounds(told: Told) -> str:
    each = f"each {told.round_s:g} s"
    return f"on events, at most one {each}" if told.on_events else each


def _writable(*files: Path) -> None:
    """Refuse files in missing folders before anything runs."""
    for file in files:
        if not file.parent.is_dir():
            raise InvalidInput(str(file), "cannot be written: its folder does not exist")


def _write_logs(log: Path | None, runs: Sequence[Run]) -> None:
    if log is None:
        return
    for k, run in enumerate(runs, 1):
        file = log if len(runs) == 1 else log.with_stem(f"{log.stem}-{k}")
        write_log(log_of(run.result), file)
        note(f"log of {run.policy} written to {file}")


def _say(checks: Mapping[str, Replayed]) -> None:
    """Print the executor's results. Raises Exit if they differ."""
    for policy, check in checks.items():
        if not check.wrong:
            near = f", within {check.off:.0e}" if check.off else ""
            note(f"{policy}: the executor comes to the same {check.jobs:,} completion times{near}")
    wrong = {policy: check.wrong for policy, check in checks.items() if check.wrong}
    for policy, text in wrong.items():
        complain(f"{policy}: the executor disagrees: {text}")
    if wrong:
        raise typer.Exit(1)
