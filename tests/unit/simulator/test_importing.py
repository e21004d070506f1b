from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import BEST_FOUND, EstimateSource, Workload
from tessera.formulation.job.execution_plan import ExecutionPlan, PlanStage
from tessera.simulator.data import data_dir
from tessera.simulator.traces.csv_writer import profiles_csv
from tessera.simulator.traces.profiles import parse_profiles, read_profiles
from tessera.simulator.traces.trace import Arrival, TraceOptions, parse_trace, read_trace

PROFILE = "model,params,global_batch,gpu_type,num_nodes,gpus_per_node,iter_time_s,status"
TRACE = "job_id,submit_time_s,model,params,global_batch,num_iterations,num_gpus,gpu_type,deadline_s"


def a_profile(**changes: str) -> str:
    row = {
        "model": "bert",
        "params": "1.3B",
        "global_batch": "256",
        "gpu_type": "a100",
        "num_nodes": "2",
        "gpus_per_node": "4",
        "iter_time_s": "1.5",
        "status": "ok",
    }
    return ",".join((row | changes).values())


def a_trace_row(**changes: str) -> str:
    row = {
        "job_id": "j1",
        "submit_time_s": "1000",
        "model": "moe",
        "params": "10B",
        "global_batch": "512",
        "num_iterations": "1003",
        "num_gpus": "8",
        "gpu_type": "v100",
        "deadline_s": "1600",
    }
    return ",".join((row | changes).values())


def a_file(*lines: str) -> bytes:
    return "\n".join([*lines, ""]).encode()


def profile_message(*lines: str) -> str:
    with pytest.raises(InvalidInput) as caught:
        parse_profiles(a_file(*lines), "p.csv")
    return str(caught.value)


def trace_message(*lines: str) -> str:
    with pytest.raises(InvalidInput) as caught:
        parse_trace(a_file(*lines), "t.csv")
    return str(caught.value)


def published(name: str) -> Path:
    folder = data_dir()
    if folder is None or not (folder / "arena" / name).is_file():
        pytest.skip(f"{name} is not there; set TESSERA_DATA to the folder that has arena/")
    return folder / "arena" / name


def test_a_profile_row_becomes_an_estimate() -> None:
    (e,) = parse_profiles(a_file(PROFILE, a_profile()), "p.csv")
    assert e.workload == Workload(model="bert", params="1.3B", global_batch=256)
    assert (e.cell.gpu_type, e.cell.gpus, e.cell.nodes, e.cell.pipeline_degree, e.cell.plan) == (
        "a100",
        8,
        2,
        BEST_FOUND,
        "",
    )
    assert (e.iter_time_s, e.source, e.provenance) == (1.5, EstimateSource.MEASURED, "p.csv")


def test_a_failed_run_becomes_an_infeasible_estimate() -> None:
    rows = [a_profile(iter_time_s="", status=s, params=s) for s in ("failed", "oom", "infeasible")]
    records = parse_profiles(a_file(PROFILE, *rows), "p.csv")
    assert [e.iter_time_s for e in records] == [math.inf] * 3


def test_optional_columns_are_read_at_any_position() -> None:
    header = "plan,source,provenance,pipeline_degree," + PROFILE
    data = a_file(header, 'p7,analytic,"host a, b",4,' + a_profile())
    (e,) = parse_profiles(data, "p.csv")
    assert (e.cell.plan, e.source, e.provenance, e.cell.pipeline_degree) == (
        "p7",
        EstimateSource.ANALYTIC,
        "host a, b",
        4,
    )


PIPELINE = ExecutionPlan(
    stages=(PlanStage(start=0, end=13, dp=4), PlanStage(start=13, end=26, dp=2, tp=2)),
    micro_batch=32,
    accumulation=8,
    shape=(4, 4),
    model="bert/1.3B",
)


def quote(text: str) -> str:
    """Return a field of CSV that may have quotes and commas."""
    return '"' + text.replace('"', '""') + '"'


def test_a_row_carries_its_execution_plan_and_is_written_as_it_was_read() -> None:
    own_words = PIPELINE.to_json().replace(":", ": ")  # not canonical
    header = "execution_plan," + PROFILE
    records = parse_profiles(
        a_file(
            header,
            f"{quote(own_words)},{a_profile()}",
            f",{a_profile(status='oom', iter_time_s='')}",
        ),
        "p.csv",
    )
    assert [r.plan for r in records] == [PIPELINE, None]
    assert (records[0].cell.plan, records[0].cell.pipeline_degree) == (PIPELINE.digest, 2)
    text = profiles_csv(records)
    assert quote(PIPELINE.to_json()) in text
    assert parse_profiles(text.encode(), "q.csv") == records


@pytest.mark.parametrize(
    ("columns", "changes", "message"),
    [
        ("", {"global_batch": "128"}, "execution_plan: has 8 micro-batches of 32 samples"),
        ("", {"gpus_per_node": "8"}, "execution_plan: is for 8 GPUs, not for 16"),
        ("", {"params": "760M"}, "execution_plan: was made for the model bert/1.3B, not for"),
        ("plan,", {"model": "p7," + "bert"}, f"column plan: must be {PIPELINE.digest}, as in the"),
        ("pipeline_degree,", {"model": "4,bert"}, "column pipeline_degree: must be 2, as in the"),
    ],
)
def test_a_plan_that_is_not_for_its_row_is_refused(
    columns: str, changes: dict[str, str], message: str
) -> None:
    header = f"execution_plan,{columns}{PROFILE}"
    assert message in profile_message(header, f"{quote(PIPELINE.to_json())},{a_profile(**changes)}")


@pytest.mark.parametrize("text", ["dp4", '{"stages": []}', '{"stagse": []}'])
def test_what_is_no_execution_plan_is_refused_at_its_line(text: str) -> None:
    message = profile_message(f"execution_plan,{PROFILE}", f"{quote(text)},{a_profile()}")
    assert message.startswith("p.csv line 2, column execution_plan: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "a/b"}, "column model: must be 1 to 100 letters"),
        ({"global_batch": "0"}, "column global_batch: must be a whole number from 1 to 2147483647"),
        ({"gpu_type": "A100"}, "column gpu_type: must be 1 to 63 lower-case letters"),
        ({"gpus_per_node": "65"}, "column gpus_per_node: must be a whole number from 1 to 64"),
        ({"iter_time_s": "0"}, "column iter_time_s: must be a number above 0, at most 1e+06"),
        ({"status": "fine"}, "column status: must be one of ok, failed, oom, infeasible"),
        ({"status": "oom"}, "column iter_time_s: must be empty where status is oom"),
    ],
)
def test_a_wrong_field_is_named_with_the_allowed_values(
    changes: dict[str, str], message: str
) -> None:
    said = profile_message(PROFILE, a_profile(), a_profile(**changes))
    assert said.startswith("p.csv line 3, ")
    assert message in said


def test_all_mistakes_are_reported_at_once() -> None:
    message = profile_message(
        PROFILE, a_profile(status="x", num_nodes="0"), "1,2", a_profile(model="")
    )
    assert [line.partition(":")[0] for line in message.splitlines()] == [
        "p.csv line 2, column status",
        "p.csv line 2, column num_nodes",
        "p.csv line 3",
        "p.csv line 4, column model",
    ]


def test_reading_stops_at_the_twentieth_mistake() -> None:
    message = profile_message(PROFILE, *["x"] * 50).splitlines()
    assert len(message) == 21
    assert message[19].startswith("p.csv line 21")
    assert message[20] == "p.csv: reading stopped after 20 mistakes"


def test_a_missing_an_unknown_and_a_repeated_column_are_named() -> None:
    message = profile_message(PROFILE.replace("status", "state") + ",model")
    assert "column model: must occur only once in the header" in message
    assert "line 1, column status: is missing" in message
    assert "line 1, column 'state': is not a known column" in message
    assert "the header must name model,params,global_batch," in message


@pytest.mark.parametrize("data", [b"", b"\n\r\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused_with_the_columns_to_give(data: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"p\.csv line 1: must name the columns: model, params"):
        parse_profiles(data, "p.csv")


def test_a_byte_order_mark_crlf_blanks_and_empty_lines_are_fine() -> None:
    text = f"\ufeff{PROFILE}\r\n\r\n {a_profile(status=' ok ')}\r\n"
    (e,) = parse_profiles(text.encode(), "p.csv")
    assert e.workload.model == "bert"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (a_file(PROFILE) + b"\xff\xfe", "p.csv line 2: must be UTF-8 text"),
        (a_file(PROFILE) + b"a\0b", "p.csv line 2: must be text without NUL characters"),
        (a_file(PROFILE, a_profile()) + b'"open', "p.csv line 3: must be valid CSV"),
        (a_file(PROFILE) + b'"a"b,', "p.csv line 2: must be valid CSV"),
        (a_file(PROFILE) + b"x" * 200_000, "p.csv line 2: must be valid CSV (field larger"),
    ],
)
def test_malformed_csv_is_refused_with_its_line(data: bytes, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_profiles(data, "p.csv")
    assert str(caught.value).startswith(message)


def test_line_numbers_account_for_quoted_line_breaks() -> None:
    rows = ('"a\nb",' + a_profile().partition(",")[2], a_profile(status="x"))
    message = profile_message(PROFILE, *rows).splitlines()
    assert [line.partition(",")[0] for line in message] == ["p.csv line 2", "p.csv line 4"]


def test_a_trace_row_becomes_a_job() -> None:
    (arrival,) = parse_trace(a_file(TRACE, a_trace_row()), "t.csv")
    spec = arrival.spec
    assert (spec.name, spec.requested_gpus, spec.requested_gpu_type) == ("j1", 8, "v100")
    assert spec.workload == Workload(model="moe", params="10B", global_batch=512)
    assert spec.iterations == 200  # 1003 // 5
    assert (arrival.arrival_s, spec.deadline_s) == (0.0, 600.0)


def test_arrivals_count_from_the_first_and_come_in_order() -> None:
    times = ("500", "100.5", "500", "300")
    rows = [a_trace_row(job_id=f"j{i}", submit_time_s=t) for i, t in enumerate(times)]
    arrivals = parse_trace(a_file(TRACE, *rows), "t.csv")
    assert [(a.spec.name, a.arrival_s) for a in arrivals] == [
        ("j1", 0.0),
        ("j3", 199.5),
        ("j0", 399.5),
        ("j2", 399.5),
    ]


def test_a_column_of_rounds_gives_the_arrival_times() -> None:
    rows = [a_trace_row(job_id=f"j{r}", submit_time_s=str(1000 + r)) + f",{r}" for r in (2, 7)]
    data = a_file(TRACE + ",arena_round", *rows)
    assert [a.arrival_s for a in parse_trace(data, "t.csv")] == [600.0, 2100.0]
    assert [a.arrival_s for a in parse_trace(data, "t.csv", TraceOptions(round_s=None))] == [0, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"job_id": "a b"}, "column job_id: must be 1 to 100 letters"),
        ({"submit_time_s": "now"}, "column submit_time_s: must be a number from -1e+12 to 1e+12"),
        ({"num_iterations": "0"}, "column num_iterations: must be a whole number from 1"),
        ({"num_gpus": "2.0"}, "column num_gpus: must be a whole number from 1"),
        ({"deadline_s": "1000"}, "column deadline_s: must be later than submit_time_s, or empty"),
    ],
)
def test_a_wrong_field_of_a_trace_is_named(changes: dict[str, str], message: str) -> None:
    assert message in trace_message(TRACE, a_trace_row(**changes))


def test_a_duplicate_names_both_lines() -> None:
    message = trace_message(TRACE, a_trace_row(), a_trace_row())
    assert message == "t.csv line 3, column job_id: must be unique; line 2 has the same"
    message = profile_message(PROFILE, a_profile(), a_profile(params="2.6B"), a_profile())
    assert message == "p.csv line 4: must not repeat the configuration of line 2"
    message = profile_message(PROFILE + ",pipeline_degree", a_profile() + ",9")
    assert message == "p.csv line 2, column pipeline_degree: must be at most the number of GPUs, 8"


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: TraceOptions(iteration_divisor=0), "iteration_divisor"),
        (lambda: TraceOptions(round_s=0.0), "round_s"),
        (lambda: TraceOptions(round_s=math.nan), "round_s"),
        (lambda: TraceOptions(limit=-1), "limit"),
    ],
)
def test_meaningless_options_are_refused(make: Callable[[], TraceOptions], field: str) -> None:
    with pytest.raises(InvalidInput, match=field):
        make()


def test_the_published_profiles_are_read_as_they_are() -> None:
    records = read_profiles(published("alpa_optimal.csv"))
    assert len(records) == 329
    assert sum(math.isinf(e.iter_time_s) for e in records) == 11
    assert {e.cell.pipeline_degree for e in records} == {BEST_FOUND}


def test_the_published_trace_is_read_as_it_is() -> None:
    path = published("trace_philly.csv")
    arrivals = read_trace(path)
    assert len(arrivals) == 1938
    first = arrivals[0]
    assert first == Arrival(0.0, first.spec)
    assert (first.spec.iterations, first.spec.deadline_s) == (119_965 // 5, 1_956_739 - 1_945_645)
    assert [a.arrival_s % 300 for a in arrivals] == [0] * 1938
    assert sum(a.arrival_s < 2000 * 300 for a in arrivals) == 986
    assert read_trace(path, limit=10) == arrivals[:10]
