"""The simulator compared with a cluster: replays of recorded allocations, and their differences."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer

from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.papers.testbed.own_decisions import DecidedCampaign, decide_again
from tessera.benchmarks.papers.testbed.records import (
    PRUNED_POLICIES,
    ROUND_S,
    RecordedJob,
    fit_overheads,
    read_runs,
)
from tessera.benchmarks.papers.testbed.replay import (
    Campaign,
    ReplayErrors,
    as_recorded,
    campaign_of,
    compare_replay,
    each_searched,
    jobs_with_speeds,
    mean_by_round,
    recorded_rates,
    refine_profiles,
    replayed_rates,
)
from tessera.formulation.errors import InvalidInput
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.simulator.data import MissingData, data_dir
from tessera.simulator.figures import Figure, Report
from tessera.simulator.overheads import Overheads
from tessera.simulator.recordings import ReplayResult
from tessera.simulator.report.comparisons import bars_plot
from tessera.simulator.report.lines import time_plot
from tessera.simulator.report.model import Plot, ReportFolder, report_of
from tessera.simulator.report.style import series_styles
from tessera.simulator.report.write import write_report
from tessera.simulator.statistics import Interval
from tessera.simulator.traces.profiles import read_profiles
from tessera.simulator.traces.trace import read_trace

MAIN_CAMPAIGN: Final = "rt_plot"
"""The campaign that the papers report. The others are shorter."""

Requests = Mapping[str, tuple[float, JobSpec]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FidelityInputs:
    """The inputs of the comparison: the record, the requests by job and the profiles."""

    recorded: Sequence[RecordedJob]
    requests: Requests
    profiles: Sequence[EstimateRecord]

    def of(self, campaign: str, policy: str) -> tuple[list[RecordedJob], list[RecordedJob]]:
        """Return the jobs of a campaign under a policy, and all others."""
        mine: list[RecordedJob] = []
        others: list[RecordedJob] = []
        for job in self.recorded:
            (mine if (job.campaign, job.policy) == (campaign, policy) else others).append(job)
        return mine, others


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CampaignComparison:
    """The replays of a campaign under a policy, one for each kind of speeds."""

    campaign: str
    policy: str
    recorded: int  # the number of jobs that began
    overheads: Overheads
    errors: dict[str, ReplayErrors]
    replayed: tuple[Campaign, ReplayResult]  # at the profiles' speeds
    decided: DecidedCampaign | None


@register_case(
    "fidelity",
    smoke={"decide": False},
    throughput_error=("<=", 0.0316),
    jct_error=("<=", 0.0731),
    inconsistent=("==", 0),
)
def compare_with_testbed(
    campaign: Annotated[
        str, typer.Option(help="Campaign to which the figures refer.")
    ] = MAIN_CAMPAIGN,
    runs: Annotated[Path | None, typer.Option(help="CSV of records. Default: Arena's.")] = None,
    trace: Annotated[Path | None, typer.Option(help="CSV of the jobs' requests.")] = None,
    profiles: Annotated[
        Path | None, typer.Option(help="CSV of profiles. Default: Arena's.")
    ] = None,
    decide: Annotated[bool, typer.Option(help="Also let our policies decide the campaign.")] = True,
    report: ReportFolder = None,
) -> Report:
    """Replay the testbed's record of 32 A40 and 32 A10 under five schedulers, and compare JCT and throughput.

    The simulator is given the GPUs that each job held, from which time, and when rounds took them
    away. It computes how long each start took and how fast jobs trained (from the profiles and the
    Cells' shape rule), and hence when they ended. The record has no starts. Each start is the last
    round of 300 s that leaves time for the run's search and iterations. So the queueing times
    before first starts are those of the record, which makes JCT more accurate; ``active_error``
    leaves them out. Jobs with a run that the profiles cannot price are left out on both sides.

    Seconds of start-up and search are medians over the other policies and campaigns, never the
    replayed one (pruned and full search are separate). ``jct_error`` and ``throughput_error`` are
    means over the policies of the absolute error of mean JCT and of mean throughput. Crius' section
    8.3 counts 7.31 % and 3.16 % in this way. That simulation made its own decisions, while this one
    replays decisions, so it tests progress, speeds and overheads.

    The rest is explained by changing one thing at a time. ``searched`` charges a search at every
    start, as the testbed did (the simulator keeps a Cell's plan). ``refined`` uses speeds measured
    under the other policies. ``recorded`` uses each job's own recorded speeds.
    ``recorded-searched`` does both, which leaves the start-up table and the simulator. That part
    stays small because starts are found from recorded work. ``jct_part_search`` is the reduction of
    ``jct_error`` by the first change, and ``jct_part_profile`` the further reduction by recorded
    speeds. ``jct_part_simulator`` is the remainder. Throughput counts start-ups as if they trained.
    So searches weigh on it: they differ by model but are charged by GPU count. The bounds are for
    the papers' campaign.

    Finally, our own policies decide the same trace until the end of the record (rows ``decided``).
    ``decided_*`` is the error of mean JCT over the jobs that ended in both. It says more about how
    close the policies are to the testbed's schedulers than about the simulator: ours follow the
    papers, which the artifact does not.
    """
    inputs = read_campaigns(runs, trace, profiles)
    groups = sorted({(j.campaign, j.policy) for j in inputs.recorded if j.name in inputs.requests})
    if campaign not in {name for name, _ in groups}:
        known = ", ".join(sorted({name for name, _ in groups}))
        raise InvalidInput(
            "campaign", f"{campaign!r} has no jobs of the trace; choose from {known}"
        )
    result = [
        compare_campaign(inputs, name, policy, decide=decide and name == campaign)
        for name, policy in groups
    ]
    mine = [one for one in result if one.campaign == campaign]
    made = Report(
        seed=0,
        figures=_figures(inputs, mine),
        table=_table(result),
        waived=frozenset()
        if campaign == MAIN_CAMPAIGN
        else frozenset({"jct_error", "throughput_error"}),
    )
    if report is not None:
        page = report_of(
            made,
            title="The simulator compared with the cluster",
            options={"campaign": campaign},
            plots=_plots(mine),
            summary="A replay of recorded allocations, and the causes of the difference.",
            notes=_notes(mine),
        )
        write_report(page, report)
    return made


def read_campaigns(runs: Path | None, trace: Path | None, profiles: Path | None) -> FidelityInputs:
    """Return the inputs of the comparison.

    Raises:
        MissingData: a file is absent.
    """
    folder = data_dir()
    result = []
    for given, name in (
        (runs, "testbed_runs.csv"),
        (trace, "trace_testbed_a_244.csv"),
        (profiles, "alpa_optimal.csv"),
    ):
        path = given or (folder / "arena" / name if folder else Path(name))
        if not path.is_file():
            raise MissingData(f"{path} does not exist; name it, or set TESSERA_DATA")
        result.append(path)
    requests = read_requests(result[1])
    submitted_s = {name: at_s for name, (at_s, _) in requests.items()}
    return FidelityInputs(
        recorded=read_runs(result[0], submitted_s),
        requests=requests,
        profiles=read_profiles(result[2]),
    )


def read_requests(path: Path) -> Requests:
    """Return each job's arrival on the trace's clock and its request. Row k, from 1, is job_k."""
    specs = {one.spec.name: one.spec for one in read_trace(path, iteration_divisor=1)}
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {
        f"job_{k:03d}": (float(row["submit_time_s"]), specs[row["job_id"]])
        for k, row in enumerate(rows, 1)
    }


def compare_campaign(
    inputs: FidelityInputs, campaign: str, policy: str, *, decide: bool
) -> CampaignComparison:
    """Replay a campaign under a policy at each kind of speeds, with nothing fitted on it."""
    mine, others = inputs.of(campaign, policy)
    overheads = fit_overheads(others, policy in PRUNED_POLICIES)
    jobs = jobs_with_speeds(campaign_of(mine, inputs.requests, inputs.profiles))
    base = campaign_of(jobs, inputs.requests, inputs.profiles)
    kinds: dict[str, Callable[[], Campaign]] = {
        "profiles": lambda: base,
        "searched": lambda: each_searched(base),
        "refined": lambda: campaign_of(
            jobs, inputs.requests, refine_profiles(inputs.profiles, others)
        ),
        "recorded": lambda: as_recorded(base),
        "recorded-searched": lambda: as_recorded(base, searched=True),
    }
    results = {name: compare_replay(make(), overheads) for name, make in kinds.items()}
    return CampaignComparison(
        campaign=campaign,
        policy=policy,
        recorded=len(mine),
        overheads=overheads,
        errors={name: errors for name, (errors, _) in results.items()},
        replayed=(base, results["profiles"][1]),
        decided=decide_again(mine, inputs.requests, inputs.profiles, overheads) if decide else None,
    )


def _mean(found: Sequence[CampaignComparison], kind: str, value: str) -> float:
    """Return the mean over policies of the absolute error."""
    return float(np.mean([abs(getattr(one.errors[kind], value)) for one in found]))


def _figures(inputs: FidelityInputs, mine: Sequence[CampaignComparison]) -> dict[str, Figure]:
    names = ("jct_error", "throughput_error", "jct_job_error", "active_error", "round_error")
    figures: dict[str, Figure] = {name: _mean(mine, "profiles", name) for name in names}
    figures |= {f"jct_error_{one.policy}": one.errors["profiles"].jct_error for one in mine}
    for kind in ("searched", "refined", "recorded", "recorded-searched"):
        for name in ("jct_error", "throughput_error"):
            figures[f"{name}_{kind}"] = _mean(mine, kind, name)
    figures |= {
        f"decided_jct_error_{one.policy}": one.decided.jct_s / one.decided.jct_recorded_s - 1.0
        for one in mine
        if one.decided is not None
    }
    searched, given = figures["jct_error_searched"], figures["jct_error_recorded-searched"]
    return figures | {
        "jct_part_search": figures["jct_error"] - searched,
        "jct_part_profile": searched - given,
        "jct_part_simulator": given,
        "speed_bias": float(np.mean([one.errors["profiles"].speed_bias for one in mine])),
        "speed_error": _mean(mine, "profiles", "speed_error"),
        "jobs": sum(one.errors["profiles"].jobs for one in mine),
        "unpriced": sum(one.recorded - len(one.replayed[0].jobs) for one in mine),
        "inconsistent": sum(not job.consistent for job in inputs.recorded),
    }


def _table(found: Sequence[CampaignComparison]) -> list[dict[str, Figure | str]]:
    table: list[dict[str, Figure | str]] = []
    for one in found:
        for kind, errors in one.errors.items():
            table.append(
                {
                    "campaign": one.campaign,
                    "policy": one.policy,
                    "speeds": kind,
                    "jobs": errors.jobs,
                    "jct_recorded_s": errors.jct_recorded_s,
                    "jct_replayed_s": errors.jct_replayed_s,
                    "jct_error": errors.jct_error,
                    "jct_job_error": errors.jct_job_error,
                    "active_error": errors.active_error,
                    "throughput_recorded": errors.throughput_recorded,
                    "throughput_replayed": errors.throughput_replayed,
                    "throughput_error": errors.throughput_error,
                    "round_error": errors.round_error,
                    "speed_bias": errors.speed_bias,
                    "speed_error": errors.speed_error,
                    "start_recorded_s": errors.start_recorded_s,
                    "start_charged_s": errors.start_charged_s,
                    "left_out": one.recorded - len(one.replayed[0].jobs),
                    "runs": errors.runs,
                    "done_recorded": sum(job.done for job in one.replayed[0].jobs),
                    "done": errors.done,
                }
            )
        if one.decided is not None:
            none: dict[str, Figure | str] = dict.fromkeys(table[-1], np.nan)
            table.append(none | _decided_row(one, one.decided))
    return table


def _decided_row(one: CampaignComparison, decided: DecidedCampaign) -> dict[str, Figure | str]:
    return {
        "campaign": one.campaign,
        "policy": one.policy,
        "speeds": f"decided by {decided.policy}",
        "jobs": decided.jobs,
        "jct_recorded_s": decided.jct_recorded_s,
        "jct_replayed_s": decided.jct_s,
        "jct_error": decided.jct_s / decided.jct_recorded_s - 1.0,
        "throughput_recorded": decided.throughput_recorded,
        "throughput_replayed": decided.throughput,
        "throughput_error": decided.throughput / decided.throughput_recorded - 1.0,
        "left_out": 0,
        "done_recorded": decided.done_recorded,
        "done": decided.done,
    }


def _notes(mine: Sequence[CampaignComparison]) -> list[str]:
    """Return notes on the values fitted for each policy on the others."""
    notes = []
    for one in mine:
        searches = ", ".join(f"{s:.0f} s on {n}" for n, s in one.overheads.search_s.items())
        notes.append(
            f"{one.policy}: a start takes {one.overheads.load_s:.0f} s, later starts"
            f" {one.overheads.save_s:.0f} s"
            f" more, a search {searches} GPUs (medians over the other policies and campaigns)."
        )
    return notes


def _plots(mine: Sequence[CampaignComparison]) -> list[Plot]:
    kinds = ("profiles", "searched", "recorded-searched")
    plots = [
        bars_plot(
            f"Error of mean {what}",
            {
                kind: {one.policy: _alone(getattr(one.errors[kind], value)) for one in mine}
                for kind in kinds
            },
            label="replayed over recorded, less 1",
            percent=True,
        )
        for what, value in (("JCT", "jct_error"), ("throughput", "throughput_error"))
    ]
    for one in mine:
        base, replayed = one.replayed
        until_s = max(job.runs[-1].end_s for job in base.jobs)
        lines = {
            "recorded": mean_by_round(recorded_rates(base.jobs).trained, until_s),
            "replayed": mean_by_round(replayed_rates(base, replayed).trained, until_s),
        }
        plots.append(
            time_plot(
                f"Throughput under {one.policy}",
                {name: (ROUND_S * np.arange(len(y)), y) for name, y in lines.items()},
                label="samples/s trained",
                end_s=until_s,
                styles=series_styles(lines, bold=["replayed"]),
            )
        )
    return plots


def _alone(value: float) -> Interval:
    return Interval(value=value, low=np.nan, high=np.nan)
