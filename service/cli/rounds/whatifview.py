"""Views of answers to questions about what would happen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from tessera.service.cli.jobs.forecastview import band_span
from tessera.service.cli.jobs.jobview import cell_text
from tessera.service.cli.names import short_name
from tessera.service.cli.render import (
    Column,
    count_noun,
    format_number,
    format_span,
    format_time,
    print_line,
    print_note,
    show_facts,
    show_table,
)
from tessera.v1 import jobs_pb2, what_if_pb2

SMALLEST_SHARE: Final = 0.0005
"""The relative change below which two figures are shown as the same."""

TINY_SHARE: Final = 1e-6
"""The relative change that is left by rounding, and shown as 0."""


def _side(outlook: what_if_pb2.JobOutlook, is_there: bool) -> str:
    if not is_there:
        return ""
    if not outlook.HasField("cell"):
        return f"waits ({outlook.reason.code})" if outlook.reason.code else "waits"
    return cell_text(outlook.cell)


JOB_COLUMNS: Final[Sequence[Column[what_if_pb2.JobDifference]]] = (
    Column("JOB", lambda d: short_name(d.job)),
    Column("EFFECT", lambda d: d.effect),
    Column("WITHOUT", lambda d: _side(d.before, d.HasField("before"))),
    Column("WITH", lambda d: _side(d.after, d.HasField("after"))),
)


def show_answer(answer: what_if_pb2.WhatIfResponse) -> None:
    """Print an answer."""
    made = answer.create_time
    if answer.HasField("now"):
        show_facts(_facts(answer))
        if answer.now.jobs:
            show_table(answer.now.jobs, JOB_COLUMNS)
        _note_others(answer.now)
    for offer in answer.offers:
        show_offer(offer, answer.hours, made)
    if answer.hours.jobs:
        show_table(answer.hours.jobs, _hours_columns(made))
    for note in answer.notes:
        print_note(f"note: {note}")


def describe_effect(answer: what_if_pb2.WhatIfResponse, job: str) -> str:
    """Return a sentence on what the change of ``job``, a full name, does to it in the next round."""
    others = len(answer.now.jobs) + sum(answer.now.other_jobs.values())
    for one in answer.now.jobs:
        if one.job != job:
            continue
        others -= 1
        rest = f"; it changes {count_noun(others, 'other job')}, too" if others else ""
        return f"the next round: the job {_told(one.after)}; without the change it {_told(one.before)}{rest}"
    rest = f", but {count_noun(others, 'other job')} would change" if others else ""
    return f"the next round: the job gets the same as without the change{rest}"


def _told(outlook: what_if_pb2.JobOutlook) -> str:
    side = _side(outlook, is_there=True)
    return f"gets {side}" if outlook.HasField("cell") else side


def _facts(answer: what_if_pb2.WhatIfResponse) -> list[tuple[str, str]]:
    old, new = answer.now.before, answer.now.after
    facts = [
        ("as of", format_time(answer.create_time)),
        ("running jobs", _counts(old.running, new.running)),
        ("waiting jobs", _counts(old.waiting, new.waiting)),
        ("throughput", _changed(old.effective_gpus, new.effective_gpus, " effective GPUs")),
        ("samples/s", _changed(old.samples_per_s, new.samples_per_s)),
        ("GPUs in use", _gpus(old, new)),
        (
            "objective",
            _changed(old.objective, new.objective, f" {new.unit}")
            if answer.now.same_objective
            else "not comparable, because jobs are valued in another way",
        ),
    ]
    return facts + (_hours_facts(answer.hours) if answer.hours.futures else [])


def _hours_facts(hours: what_if_pb2.HoursDifference) -> list[tuple[str, str]]:
    wait, work, done = hours.mean_wait_seconds, hours.work_gpu_hours, hours.finished_jobs
    spans = [_signed_span(value) for value in (wait.change, wait.low, wait.high)]
    within = format_span(hours.horizon.ToSeconds())
    return [
        (
            f"next {within}",
            f"{hours.futures} pairs of futures; {hours.coverage:.0%} intervals",
        ),
        ("throughput soon", f"{_figure(hours.soon_effective_gpus)} effective GPUs"),
        ("waiting soon", _figure(hours.soon_waiting_jobs)),
        (
            "mean waiting",
            f"{format_span(wait.before)} -> {format_span(wait.after)}: {_interval(spans)}",
        ),
        ("work done", f"{_figure(work)} effective GPU-hours"),
        ("jobs finished", _figure(done)),
    ]


def _figure(figure: what_if_pb2.PairedFigure) -> str:
    least = TINY_SHARE * max(abs(figure.before), abs(figure.after))
    parts = (figure.change, figure.low, figure.high)
    spread = [_signed(value if abs(value) > least else 0.0) for value in parts]
    before, after = format_number(figure.before), format_number(figure.after)
    return f"{before} -> {after}: {_interval(spread)}"


def _interval(texts: Sequence[str]) -> str:
    change, low, high = texts
    return f"{change} ({low} to {high})"


def _signed(value: float) -> str:
    return f"{'-' if value < 0 else '+'}{format_number(abs(value))}"


def _signed_span(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{format_span(abs(seconds))}"


def _counts(old: int, new: int) -> str:
    return f"{new}, as without it" if old == new else f"{old} -> {new}"


def _changed(old: float, new: float, unit: str = "") -> str:
    if abs(new - old) <= SMALLEST_SHARE * max(abs(old), abs(new)):
        return f"{format_number(new)}{unit}, as without it"
    share = f" ({(new - old) / abs(old):+.1%})" if old else ""
    return f"{format_number(old)} -> {format_number(new)}{unit}{share}"


def _gpus(old: what_if_pb2.ClusterOutlook, new: what_if_pb2.ClusterOutlook) -> str:
    parts = []
    for kind in sorted(new.gpus):
        before = f"{old.used_gpus[kind]} of {old.gpus[kind]}"
        after = f"{new.used_gpus[kind]} of {new.gpus[kind]}"
        parts.append(f"{kind} {after}" if before == after else f"{kind} {before} -> {after}")
    return "; ".join(parts)


def _note_others(now: what_if_pb2.RoundDifference) -> None:
    if now.other_jobs:
        counts = ", ".join(f"{count} {effect}" for effect, count in sorted(now.other_jobs.items()))
        print_note(f"other jobs that differ: {counts}")
    if not now.jobs and not now.other_jobs:
        print_line("No job would notice the change in the next round.")


def _hours_columns(made: Timestamp) -> Sequence[Column[what_if_pb2.JobHours]]:
    def band(name: str) -> Column[what_if_pb2.JobHours]:
        event, side = name.split("_")
        verb = {"start": "STARTS", "finish": "FINISHES"}[event]
        title = f"{verb} {'WITHOUT' if side == 'before' else 'WITH'}"

        def text(job: what_if_pb2.JobHours) -> str:
            return band_span(getattr(job, name), made) if job.HasField(name) else ""  # type: ignore[arg-type]

        return Column(title, text)

    bands = ("start_before", "start_after", "finish_before", "finish_after")
    return (Column("JOB", lambda job: short_name(job.job)), *map(band, bands))


def show_offer(
    offer: what_if_pb2.JobOffer, hours: what_if_pb2.HoursDifference, made: Timestamp
) -> None:
    """Print the Cell that an added job gets, and what it costs."""
    own = [job for job in hours.jobs if job.job == offer.job]
    has_cell, unit = offer.HasField("cell"), offer.unit
    lost = [
        f"{', '.join(map(short_name, jobs))} would {what}"
        for jobs, what in ((offer.stopped, "stop"), (offer.slowed, "run more slowly"))
        if jobs
    ]
    if offer.other_losers:
        lost.append(f"{offer.other_losers} jobs of other tenants would stop or run more slowly")
    show_facts(
        [
            ("job", short_name(offer.job)),
            ("gets now", f"{cell_text(offer.cell)}, {_rate(offer.rate)}" if has_cell else ""),
            (
                "second best",
                f"{cell_text(offer.runner_up)}, {_rate(offer.runner_up_rate)}; worse by"
                f" {format_number(offer.worse_by)} {unit}"
                if offer.HasField("runner_up")
                else "",
            ),
            (
                "price",
                f"{format_number(offer.price)} of its value of {format_number(offer.value)} {unit}"
                if offer.HasField("price")
                else "",
            ),
            ("displaces", "; ".join(lost) or ("nobody" if has_cell else "")),
            ("waits", f"{offer.reason.code}: {offer.reason.message}" if not has_cell else ""),
            ("next step", "" if has_cell else offer.reason.next_step),
            ("starts", _own_band(own, "start_after", made)),
            ("finishes", _own_band(own, "finish_after", made)),
        ]
    )


def _rate(rate: float) -> str:
    return f"{format_number(rate)} samples/s" if rate else "at an unknown rate"


def _own_band(own: Sequence[what_if_pb2.JobHours], name: str, made: Timestamp) -> str:
    if not own or not own[0].HasField(name):  # type: ignore[arg-type]
        return ""
    band: jobs_pb2.TimeBand = getattr(own[0], name)
    return f"in {band_span(band, made)}"
