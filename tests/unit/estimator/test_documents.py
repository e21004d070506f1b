"""Invalid documents of users, which every reader refuses before it builds anything."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tessera.estimator.architectures.files import load_graph, read_values
from tessera.estimator.cell_estimator import Estimator
from tessera.estimator.files.documents import read_document, read_yaml, text_of
from tessera.estimator.hardware.cluster_types import catalogue_of
from tessera.estimator.hardware.files import read_hardware
from tessera.estimator.models import read_model
from tessera.estimator.profiling import records
from tessera.formulation.answer import codec
from tessera.formulation.base.cancellation import never_cancelled
from tessera.formulation.base.documents import ARCHITECTURE, TOPOLOGY, DocumentLimits, read_json
from tessera.formulation.base.errors import DeadlineTooShort, InvalidInput
from tessera.formulation.base.values import Workload
from tessera.formulation.records.estimates import ModelSpec
from tessera.formulation.state.topologies import document
from tessera.formulation.state.topologies.described import decode_topology
from tessera.formulation.state.traffic import parse_cell_traffic
from tessera.service.agent.settings import read_nodes
from tessera.service.cli.clusters import clusterfile, tenantfile, topology
from tessera.service.cli.jobs import jobfile
from tessera.service.server.convert.networks import to_topology
from tessera.service.server.convert.rounds import read_options
from tessera.service.server.tasks import lanes
from tests.support.topologies import write_columns

SMALL = DocumentLimits(size_bytes=1000, depth=3, nodes=10, text=20)

OTHER_IN_YAML_1_1 = (
    *("010", "0123", "007", "-08", "0x10", "0b11", "0o17", "1_000", "22:30", "12:30:15", "01.5"),
    *(".inf", "-.inf", ".nan", "yes", "no", "on", "off", "NO", "y", "2026-11-28", "="),
)
JOB = "model: bert\nbatch: 8\niterations: 1"

LEVELS = 9
"""Levels of nine-element lists in the bomb: 500 bytes expand to 9^9 values."""


def a_bomb() -> str:
    names = "abcdefghi"
    lines = ["a: &a [" + ",".join(["lol"] * LEVELS) + "]"]
    for before, name in itertools.pairwise(names):
        lines.append(f"{name}: &{name} [" + ",".join([f"*{before}"] * LEVELS) + "]")
    return "\n".join(lines) + "\n"


def a_file(folder: Path, text: str) -> Path:
    path = folder / "document"
    path.write_text(text, encoding="utf-8")
    return path


def a_model(text: str) -> object:
    return read_model("models[0]", ModelSpec(model="m", params="", architecture=text))


YAML_READERS: dict[str, Callable[[Path, str], object]] = {
    "a model's architecture": lambda _, text: a_model(text),
    "an architecture file": lambda folder, text: load_graph(a_file(folder, text)),
    "a hardware file": lambda folder, text: read_hardware(a_file(folder, text)),
    "a topology": lambda _, text: to_topology("topology.document", text),
    "a topology file": lambda folder, text: topology.read_topology(str(a_file(folder, text))),
    "a policy": lambda _, text: read_options("policy", text),
    "a job file": lambda _, text: jobfile.read_jobs(text, "j.yaml", None),  # type: ignore[arg-type]
    "a cluster file": lambda _, text: clusterfile.read_cluster(text, "c.yaml"),
    "a tenant file": lambda _, text: tenantfile.read_tenants(text, "t.yaml"),
}

JSON_READERS: dict[str, Callable[[Path, str], object]] = {
    **YAML_READERS,
    "a snapshot": lambda _, text: codec.decode(text.encode()),
    "a Cell's traffic": lambda _, text: parse_cell_traffic(text),
    "a list of nodes": lambda folder, text: read_nodes(a_file(folder, text)),
    "measured layers": lambda folder, text: records.read_profile_records(a_file(folder, text)),
}


@pytest.mark.parametrize("reader", YAML_READERS)
def test_aliases_are_refused_wherever_yaml_is_read(reader: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"line 1: a: the anchor &a is not allowed"):
        YAML_READERS[reader](tmp_path, a_bomb())


@pytest.mark.parametrize("reader", JSON_READERS)
@pytest.mark.parametrize(
    "text",
    [
        '{"a":' * 100_000 + "1" + "}" * 100_000,
        "[" * 100_000,
        '{"a": ' + "9" * 10_000 + "}",
        '{"a": 1, "a": 2}',
        '{"a": NaN}',
        '{"a": [1e999]}',
        '{"a": -Infinity}',
        '{"a": "\\ud800"}',
        '{"a": "b\\u0000c"}',
        '{"a\\u0000": 1}',
    ],
    ids=[
        "deep",
        "open",
        "digits",
        "twice",
        "nan",
        "overflow",
        "infinite",
        "surrogate",
        "nul",
        "key",
    ],
)
def test_broken_json_is_refused_wherever_documents_are_read(
    reader: str, text: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput):
        JSON_READERS[reader](tmp_path, text)


@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, "9" * 10_000, '{"a": ' * 100_000, '{"kind": NaN}', "[1e999]", "&a [*a]"],
    ids=["open", "digits", "deep", "nan", "overflow", "alias"],
)
def test_a_broken_topology_inside_a_snapshot_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        decode_topology(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\nb: {c: *x}", "line 2: c: the alias [*]x is not allowed; write the value out"),
        ("a: !!python/object:os.system 1", "line 1: a: the tag .* is not allowed"),
        ("a: !!str 1", "the tag .* is not allowed"),
        ("<<: {a: 1}", "the key << is not allowed"),
        ("a: 1\na: 2", "line 2: the key 'a' occurs twice"),
        ("{a: 1, 'a': 2}", "the key 'a' occurs twice"),
        ("? [a]\n: 1", "a key must be a string or a number"),
        ("a: 1.0e+999", "must be a finite number"),
        (f"a: {'9' * 900}", "a text may have at most 20 characters"),
        (f"[-{'9' * 50}]", "the number -9999999999999999999... has more than 40 characters"),
        (f"a: {'9:' * 50}1", "."),
        ('a: "b\\0c"', "NUL"),
        ("a: [[[1]]]", "more than 3 levels"),
        ("[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]", "more than 10 keys and values"),
        ("- 1\n" * 11, "more than 10 keys and values"),
        ('{"a": "' + "x" * 21 + '"}', "a text may have at most 20 characters"),
        ("#" * 1001, "must be at most 1,000 bytes"),
        ("\u00e9" * 501, "must be at most 1,000 bytes"),
        ("a: \ud800", "is not UTF-8 text"),
        ("a: 1\n---\na: 2", "holds 2 documents; give one"),
    ],
)
def test_a_document_beyond_the_limits_is_refused_with_its_location(text: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=f"^doc: .*{says}"):
        read_document("doc", text, SMALL)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{architecture: transformer, layers: 2}", {"architecture": "transformer", "layers": 2}),
        ('{"a":\t[1, 2.5e3, true, null, "x"]}', {"a": [1, 2500.0, True, None, "x"]}),
        ("a:\n  - {b: c, d: 16}\n  - 'e: f'\n", {"a": [{"b": "c", "d": 16}, "e: f"]}),
        ("", None),
        ("# nothing\n", None),
        ("[[[]]]", [[[]]]),
        ("[1, 2, 3, 4, 5, 6, 7, 8, 9]", [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("x" * 20, "x" * 20),
        ("\u00e9", "\u00e9"),
        ('["\\u00e9"]', ["\u00e9"]),
    ],
)
def test_a_document_within_the_limits_is_read(text: str, value: object) -> None:
    assert read_document("doc", text, SMALL) == value


@pytest.mark.parametrize("text", OTHER_IN_YAML_1_1)
def test_what_yaml_1_1_would_change_is_read_as_it_is_written(text: str) -> None:
    assert read_yaml("doc", f"{{a: {text}, {text}: [{text}]}}", SMALL) == [
        {"a": text, text: [text]}
    ]


@pytest.mark.parametrize("text", ["0", "8", "-3", "1.10", "+8", "1e5", "1.5E-06"])
def test_numbers_keep_the_text_that_was_written(text: str) -> None:
    (value,) = read_yaml("doc", text, SMALL)
    assert value == json.loads(text.removeprefix("+"))
    assert text_of(value) == text


def test_booleans_and_nothing_have_the_three_cases_of_yaml_1_2() -> None:
    for value in (True, False, None):
        word = "null" if value is None else str(value).lower()
        cases = f"[{word}, {word.capitalize()}, {word.upper()}]"
        assert read_yaml("doc", cases, SMALL) == [[value] * 3]


@pytest.mark.parametrize("text", OTHER_IN_YAML_1_1)
def test_a_number_that_can_be_read_in_two_ways_is_refused_where_a_number_is_wanted(
    text: str, tmp_path: Path
) -> None:
    texts = {
        "a job file": f"{JOB}\ngpus: {text}",
        "a cluster file": f"gpu_types: {{a: 40GiB}}\nnodes: [{{name: n, gpu_type: a, gpus: {text}}}]",
        "a tenant file": f"tenants: {{nlp: {{quotas: {{a100: {text}}}}}}}",
        "a policy": f"gap: {text}",
        "a hardware file": f"hardware: [{{name: b, like: h100, link_bytes_per_s: {text}}}]",
        "a model's architecture": f"{{architecture: transformer, layers: {text}}}",
        "a topology": f"{{kind: clos, hosts: {text}, host: a100, tors: 2, tor_bytes_per_s: 1e9}}",
    }
    assert texts.keys() < YAML_READERS.keys()
    for reader, written in texts.items():
        with pytest.raises(InvalidInput, match=f"{re.escape(text)}'"):
            YAML_READERS[reader](tmp_path, written)


@pytest.mark.parametrize(
    "text",
    [
        '["' + '\\"' * 500_000,
        '"' * 1_000_001,
        '["' + "\\" * 1_000_001,
        "{" * 1_000_000,
        '{"a": "' + "x" * 2_000_000,
        "[" + "[]," * 1_000_000,
        "a: [" * 300_000,
        "- " * 500_000,
        "? " * 500_000,
        "a: " + "9" * 1_000_000,
        "--- a\n" * 20_000,
        " \n" * 500_000,
    ],
)
def test_a_megabyte_of_any_text_is_answered_with_a_short_error(text: str) -> None:
    for limits in (ARCHITECTURE, TOPOLOGY):
        if text.isspace():
            assert read_document("doc", text, limits) is None
            continue
        with pytest.raises(InvalidInput) as caught:
            read_document("doc", text, limits)
        assert len(str(caught.value)) < 1000


def test_several_yaml_documents_are_read_in_order() -> None:
    assert read_yaml("doc", "a: 1\n---\n---\n- 2\n", SMALL) == [{"a": 1}, [2]]


def test_json_accepts_only_bytes_of_utf_8() -> None:
    assert read_json("doc", b'{"a": 1}', SMALL) == {"a": 1}
    with pytest.raises(InvalidInput, match="is not UTF-8"):
        read_json("doc", b'{"a": "\xff"}', SMALL)


def test_the_documented_model_is_an_architecture_file(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "getting-started.md"
    after = page.read_text(encoding="utf-8").partition("cat owl.yaml\n")[2]
    (tmp_path / "owl.yaml").write_text(after.splitlines()[0].strip() + "\n", encoding="utf-8")
    graph = load_graph(tmp_path / "owl.yaml")
    assert (graph.name, round(graph.parameters)) == ("owl", 2_651_673_600)


def leave_after(most: int) -> Callable[[], bool]:
    """Return a function that returns whether the caller has left: False ``most`` times, then True."""
    asked = iter(range(most))
    return lambda: next(asked, None) is None


CLOS = "{kind: clos, hosts: 100, host: a100, tors: 10, aggregations: 4, tor_bytes_per_s: 25e9}"
COLUMNS = write_columns(document.build_topology(read_document("doc", CLOS, TOPOLOGY)))


@pytest.mark.parametrize(
    "work",
    [
        lambda cancelled: read_values("doc", "{layers: 2}", cancelled),
        lambda cancelled: to_topology("doc", CLOS, cancelled),
        lambda cancelled: document.build_topology(COLUMNS, cancelled),
    ],
)
def test_reading_stops_if_the_caller_leaves(
    work: Callable[[Callable[[], bool]], object],
) -> None:
    work(never_cancelled)
    for passes in (0, 2):
        with pytest.raises(DeadlineTooShort):
            work(leave_after(passes))


@pytest.mark.parametrize(("layers", "passes"), [(24, 0), (24, 40), (3000, 1000)])
def test_a_search_for_plans_stops_if_the_caller_leaves(layers: int, passes: int) -> None:
    sizes = f"layers: {layers}, hidden: 64, heads: 2, sequence: 8, vocabulary: 9"
    text = f"{{architecture: transformer, {sizes}}}"
    spec = ModelSpec(model="m", params=f"{layers}", architecture=text)
    workload = Workload(model="m", params=spec.params, global_batch=64)
    estimator = Estimator(catalogue_of(), {workload: read_model("", spec)})
    with pytest.raises(DeadlineTooShort):
        estimator.cells(workload, "a100", 64, None, leave_after(passes))


async def test_work_stops_when_its_caller_leaves_and_the_server_notices_its_end() -> None:
    began, ended = threading.Event(), threading.Event()
    calls = lanes.FairCalls(lanes.Lane(1, "test", lanes.LaneLimits(client=1, cluster=1, share=1)))

    def work(request: str, cancelled: Callable[[], bool]) -> str:
        began.set()
        while not cancelled():
            threading.Event().wait(0.001)
        ended.set()
        return request

    call = asyncio.ensure_future(calls.run_cancellable(work, "x"))
    await asyncio.to_thread(began.wait)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await calls.close()
    assert ended.is_set()


@pytest.mark.parametrize(
    "change",
    [
        "layers: 1000000000",
        "hidden: 1000000000000",
        "heads: 100000",
        "vocabulary: 9007199254740991",
        "sequence: 100000000",
        "intermediate: 99999999999",
        "classes: 9999999999",
        "head_dim: 999999",
    ],
)
def test_a_small_document_cannot_describe_a_model_of_unbounded_size(change: str) -> None:
    usual = {"layers": "2", "hidden": "64", "heads": "2", "sequence": "8", "vocabulary": "100"}
    key, _, value = change.partition(": ")
    text = ", ".join(f"{k}: {v}" for k, v in (usual | {key: value}).items())
    with pytest.raises(InvalidInput, match=rf"models\[0\]\.architecture\.{key}: must"):
        a_model(f"{{architecture: transformer, {text}}}")


def test_host_names_are_expanded_only_if_they_are_short() -> None:
    nodes = f"[{{name: '{'{}' * 400}', count: 100000}}]"
    with pytest.raises(InvalidInput, match=r"nodes\[0\]\.name: must make names of at most 128"):
        to_topology("doc", CLOS.replace("hosts: 100", f"nodes: {nodes}"))
    long = "x" * 129
    with pytest.raises(InvalidInput, match="has more than 128 characters"):
        to_topology("doc", CLOS.replace("hosts: 100", f"nodes: [{long}]"))
