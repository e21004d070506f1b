"""The parts of `tessera bench hostile` that need no server: documents, requests, frames, figures."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor

from tessera.benchmarks.service.hostile import wire
from tessera.benchmarks.service.hostile.attacks import (
    document_calls,
    hostile_options,
    many_goals,
)
from tessera.benchmarks.service.hostile.caller import AttackOrders, Caller, call_from_threads
from tessera.benchmarks.service.hostile.documents import (
    hostile_architectures,
    hostile_texts,
    hostile_topologies,
)
from tessera.benchmarks.service.hostile.lab import find_raised
from tessera.benchmarks.service.hostile.monitor import (
    wait_until_quiet,
)
from tessera.benchmarks.service.hostile.neighbour import CallSample
from tessera.benchmarks.service.hostile.requests import (
    path_of,
    sample_requests,
)
from tessera.benchmarks.service.hostile.tally import MAX_EXAMPLES, CallTally, merge_tallies
from tessera.benchmarks.service.hostile.verdicts import AttackPhase, sum_up
from tessera.formulation.grammar import parse_objective
from tessera.service.cli.demo.stack import free_port
from tessera.service.rpc.servicers import SERVICES
from tests.support.methods import methods_of


def an_attack(**overrides: Any) -> AttackOrders:
    fields: dict[str, Any] = {
        "address": f"127.0.0.1:{free_port()}",
        "load": 0.01,
        "seed": 1,
        "until_s": time.monotonic() + 60.0,
    }
    return AttackOrders(**fields | overrides)


def a_sample(kind: str, seconds: float, failure: str = "") -> CallSample:
    return CallSample(kind=kind, began_s=0.0, seconds=seconds, failure=failure)


def test_tallies_of_several_attackers_add_up_also_after_a_json_round_trip() -> None:
    first, second = CallTally(), CallTally()
    for _ in range(MAX_EXAMPLES):
        first.record("a", "UNKNOWN", 1.0)
    second.record("a", "UNKNOWN", 2.0)
    second.record("b", "OK", 0.1)
    merged = merge_tallies(
        [CallTally.from_json(first.to_json()), CallTally.from_json(second.to_json())]
    )
    assert merged.codes == {"UNKNOWN": MAX_EXAMPLES + 1, "OK": 1}
    assert merged.slowest_s == {"a": 2.0, "b": 0.1}
    assert len(merged.examples) == MAX_EXAMPLES
    assert CallTally().slowest == ("", 0.0)


def test_frames_are_split_correctly_wherever_the_stream_was_cut() -> None:
    frames = [(wire.SETTINGS, 0, 0, b""), (wire.DATA, wire.END_STREAM, 7, b"x" * 300)]
    raw = b"".join(wire.pack_frame(*frame) for frame in frames)
    for cut in range(len(raw)):
        buffer = bytearray(raw[:cut])
        found = list(wire.split_frames(buffer))
        buffer += raw[cut:]
        assert [*found, *wire.split_frames(buffer)] == frames
        assert not buffer


@pytest.mark.parametrize("length", [0, 1, 126, 127, 128, 254, 255, 5000])
def test_headers_have_lengths_of_any_size(length: int) -> None:
    block = wire.pack_headers([("name", "v" * length)])
    assert block[:6] == b"\x00\x04name"
    read, at = block[6], 7
    if read == 127:  # RFC 7541, section 5.1
        shift = 0
        while True:
            byte, at = block[at], at + 1
            read += (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
    assert read == length
    assert block[at:] == b"v" * length


def test_hostile_texts_reach_the_limit_or_exceed_it_by_one_character() -> None:
    for limit in (65_536, 2**20):
        texts = dict(hostile_texts(limit))
        assert max(map(len, texts.values())) == limit + 1
        assert sum(len(text) > limit for text in texts.values()) == 1
    names = [
        name
        for texts in (hostile_texts(65_536), hostile_architectures(), hostile_topologies(10))
        for name, _ in texts
    ]
    assert len(names) == len(set(names))


def test_each_field_that_takes_a_document_gets_hostile_ones() -> None:
    attacked = {what.partition(":")[0] for what, _, _ in document_calls(an_attack())}
    fields = {
        field.name
        for method in methods_of(*SERVICES).values()
        for message in (method.input_type, *messages_in(method.input_type))
        for field in message.fields
    }
    assert {"architecture", "document", "objective", "page_token", "priority_weights"} <= fields
    assert {"architecture", "topology", "objective", "page token", "queue weights"} <= attacked
    assert "scheduler_parameters" in fields
    assert "scheduler parameters" in attacked


def messages_in(message: Descriptor) -> list[Descriptor]:
    """Return Tessera's messages that are fields of a message."""
    return [
        field.message_type
        for field in message.fields
        if field.message_type is not None and field.message_type.full_name.startswith("tessera")
    ]


def test_the_error_of_each_traceback_in_a_log_is_found() -> None:
    log = [
        "2026 ERROR rpc_failed the call failed",
        "  Traceback (most recent call last):",
        '    File "a.py", line 1, in f',
        "      raise KeyError(1)",
        "  KeyError: 1",
        "2026 INFO listening goes on",
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in f',
        "MemoryError",
    ]
    assert find_raised(log) == ["KeyError: 1", "MemoryError"]


def test_every_unary_method_has_a_valid_request() -> None:
    requests = sample_requests()
    unary = {
        path_of(method): method.input_type.full_name
        for method in methods_of(*SERVICES).values()
        if not (method.client_streaming or method.server_streaming)
    }
    assert {path: r.DESCRIPTOR.full_name for path, r in requests.items()} == unary


def test_hostile_objectives_are_valid_and_have_many_goals() -> None:
    text = many_goals(1000)
    assert len(text) <= 1000
    assert len(parse_objective(text)) > 30
    for options in hostile_options():
        parse_objective(options.objective)


def test_callers_stop_at_their_call_limit_and_count_their_answers() -> None:
    attack = an_attack()  # no server listens there

    def work(caller: Caller) -> None:
        caller.call("/tessera.v1.Jobs/GetJob", b"", timeout_s=5.0)

    tally = call_from_threads(attack, 2, work, most_calls=4)
    assert tally.codes == {"UNAVAILABLE": 4}


def test_an_error_of_an_attacker_is_not_mistaken_for_an_answer() -> None:
    def work(caller: Caller) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        call_from_threads(an_attack(), 1, work, most_calls=1)


def test_a_computing_thread_is_observed_from_outside_until_it_ends() -> None:
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        _, stuck = wait_until_quiet(os.getpid(), time.monotonic(), within_s=0.0, share=0.0)
    finally:
        over.set()
        thread.join()
    assert stuck >= 1


def test_figures_take_the_worst_phase_or_the_sum_of_all_phases() -> None:
    alone = AttackPhase(name="alone", samples=[a_sample("round", 0.4), a_sample("health", 0.01)])
    tally = CallTally()
    tally.record("x", "INTERNAL", 1.0)
    phases = [
        AttackPhase(
            name="documents",
            samples=[a_sample("round", 1.7), a_sample("health", 0.2), a_sample("list", 0.7)],
            tally=tally,
            rss_before_mib=100.0,
            rss_after_mib=150.0,
            logged=["a", "b"],
        ),
        AttackPhase(
            name="rounds",
            samples=[a_sample("round", 3.0, "round: ABORTED"), a_sample("control", 0.3)],
            rss_before_mib=150.0,
            rss_after_mib=140.0,
            threads_stuck=2,
            leases_lost=1,
            broken=["a", "b"],
            server_ended=True,
        ),
    ]
    figures = sum_up(alone, phases, sigterm_s=5.0, grace_s=3.0)
    assert (figures["sigterm_s"], figures["sigterm_over_grace_s"]) == (5.0, 2.0)
    assert figures["other_round_alone_s"] == 0.4
    assert figures["other_round_max_s"] == 3.0
    assert figures["other_round_excess_s"] == pytest.approx(3.0 - 2 * 0.4 - 1.0)
    assert figures["health_max_s"] == 0.2
    assert figures["other_call_max_s"] == 0.7
    assert figures["control_max_s"] == 0.3
    assert figures["rss_growth_mib"] == 50.0
    assert figures["internal_errors"] == 3
    assert figures["other_failures"] == 1
    assert (figures["threads_stuck"], figures["leases_lost"]) == (2, 1)
    assert (figures["invariants_broken"], figures["servers_ended"]) == (2, 1)
    assert {"phase": "documents", "internal_errors": 3}.items() <= phases[0].row().items()


def test_a_round_within_twice_its_time_alone_plus_a_second_is_no_excess() -> None:
    alone = AttackPhase(name="alone", samples=[a_sample("round", 0.5)])
    phase = AttackPhase(name="rounds", samples=[a_sample("round", 2.0)])
    assert sum_up(alone, [phase], sigterm_s=1.0, grace_s=3.0)["other_round_excess_s"] == 0.0
