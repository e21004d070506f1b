"""Job and cluster files for the command line: their meaning, and how mistakes are reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from tessera.formulation.errors import InvalidInput
from tessera.service.cli import clusterfile, options, yamlfile
from tessera.service.cli.jobfile import read_jobs

NOW = Timestamp(seconds=1_800_000_000)

MINIMAL = "model: bert\nparams: 1.3B\nglobal_batch: 256\niterations: 1000\ngpus: 8\n"


def test_a_job_file_may_hold_one_job() -> None:
    (request,) = read_jobs("name: j\n" + MINIMAL, "j.yaml", NOW)
    assert request.job_id == "j"
    assert request.job.workload.model == "bert"
    assert request.job.workload.params == "1.3B"
    assert (request.job.workload.global_batch, request.job.iterations) == (256, 1000)
    assert request.job.requested_gpus == 8
    assert not request.job.HasField("restart")
    assert not request.job.HasField("deadline")
    assert not request.job.HasField("max_retries")


def test_every_key_of_a_job_reaches_the_request() -> None:
    text = MINIMAL + (
        "name: j\ngpu_type: a100\ntenant: nlp\npriority: 2\nweight: 1.5\nguaranteed: true\n"
        "restart: 2m\ndeadline: 2027-01-15T09:00:00Z\npinned: true\nlabels: {team: nlp, run: 7}\n"
        "command: [python, train.py, 3]\nmax_retries: 0\n"
    )
    job = read_jobs(text, "j.yaml", NOW)[0].job
    assert (job.requested_gpu_type, job.tenant, job.priority, job.weight) == ("a100", "nlp", 2, 1.5)
    assert job.guaranteed
    assert job.pinned
    assert job.restart.seconds == 120
    assert job.deadline.ToJsonString() == "2027-01-15T09:00:00Z"
    assert dict(job.labels) == {"team": "nlp", "run": "7"}
    assert list(job.command) == ["python", "train.py", "3"]
    assert job.HasField("max_retries")
    assert job.max_retries == 0


def test_documents_lists_and_defaults_can_each_hold_many_jobs() -> None:
    text = (
        f"{MINIMAL}---\n- {{model: a, global_batch: 1, iterations: 1, gpus: 1}}\n---\n"
        "defaults: {model: b, global_batch: 2, iterations: 3, gpus: 4, tenant: t}\n"
        "jobs: [{name: x}, {name: y, gpus: 8}]\n"
    )
    jobs = read_jobs(text, "many.yaml", NOW)
    assert [r.job.workload.model for r in jobs] == ["bert", "a", "b", "b"]
    assert [r.job_id for r in jobs] == ["", "", "x", "y"]
    assert [r.job.requested_gpus for r in jobs] == [8, 1, 4, 8]
    assert jobs[3].job.tenant == "t"


@pytest.mark.parametrize("text", ["010", "0x10", "22:30", "1.10", "1e5", "yes", "NO", "8"])
def test_texts_of_a_job_are_those_that_were_written(text: str) -> None:
    (request,) = read_jobs(
        f"name: {text}\nlabels: {{a: {text}, {text}: b}}\ncommand: [{text}]\ntenant: {text}\n"
        f"environment: {{V: {text}}}\nstaging: [{text}]\nuser: {text}\n{MINIMAL}",
        "j.yaml",
        NOW,
    )
    job = request.job
    assert request.job_id == text
    assert dict(job.labels) == {"a": text, text: "b"}
    assert dict(job.launch.environment) == {"V": text}
    assert {*job.command, *job.launch.staging_command, job.launch.user, job.tenant} == {text}


@pytest.mark.parametrize("key", ["restart", "longest_run", "stall_limit", "stop_grace", "deadline"])
@pytest.mark.parametrize("text", ["6", "1.5", "1798761600", "'6'", "010", "22:30"])
def test_a_number_without_a_unit_is_neither_a_duration_nor_a_time(key: str, text: str) -> None:
    with pytest.raises(
        InvalidInput, match=rf"^j.yaml: {key}: .*(no unit|is not a (time|duration))"
    ):
        read_jobs(f"{MINIMAL}{key}: {text}\n", "j.yaml", NOW)


@pytest.mark.parametrize("text", ["6", "1798761600", "20261128", "1.5"])
def test_a_time_or_a_duration_needs_its_unit_on_the_command_line(text: str) -> None:
    for read in (options.parse_time, options.parse_past):
        with pytest.raises(InvalidInput, match=r"^--deadline: .*(is not a time|has no time zone)"):
            read("--deadline", text, NOW)
    with pytest.raises(InvalidInput, match=f"{text} has no unit; write e.g. {text}s, {text}m"):
        options.parse_seconds("--min-run", text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINIMAL + "gpu: 8\n", "j.yaml: unknown key 'gpu'; did you mean 'gpus'? (allowed: name,"),
        ("jobs:\n- {model: m, modle: m}\n", "j.yaml: jobs[0]: unknown key 'modle'"),
        ("defaults: {name: n}\njobs: []\n", "j.yaml: defaults: unknown key 'name'"),
        ("model: bert\n", "j.yaml: needs 'global_batch'"),
        (
            MINIMAL.replace("256", "many"),
            "j.yaml: global_batch: must be a whole number from 1 to 1,000",
        ),
        (
            MINIMAL.replace("8", "true"),
            "j.yaml: gpus: must be a whole number from 1 to 65,536, not true",
        ),
        (MINIMAL + "restart: soon\n", "j.yaml: restart: 'soon' is not a duration"),
        (
            MINIMAL + "deadline: 2027-01-15T09:00:00\n",
            "j.yaml: deadline: 2027-01-15T09:00:00 has no",
        ),
        (MINIMAL + "deadline: 2027-01-15\n", "has no time zone"),
        (MINIMAL + "labels: [a]\n", "j.yaml: labels: must map texts to texts"),
        (MINIMAL + "command: python\n", "j.yaml: command: must be a list of texts"),
        (MINIMAL + "guaranteed: 1\n", "j.yaml: guaranteed: must be true or false, not 1"),
        (MINIMAL + "gpus: 9\n", "the key 'gpus' occurs twice"),
        (f"{MINIMAL}---\n5\n", "j.yaml: document 2: must be a mapping of keys to values, not 5"),
        ("jobs: 5\n", "j.yaml: jobs: must be a list, not 5"),
        ("a: [", "j.yaml: is not valid YAML"),
        ("", "j.yaml: contains no jobs"),
    ],
)
def test_a_mistake_in_a_job_file_is_reported_with_its_location(text: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_jobs(text, "j.yaml", NOW)
    assert message in str(caught.value)


def test_the_documented_job_files_are_valid() -> None:
    page = (Path(__file__).parents[3] / "docs" / "command-line.md").read_text()
    examples = [part.partition("```")[0] for part in page.split("```yaml\n")[1:]]
    jobs = [request for text in examples[:2] for request in read_jobs(text, "command-line.md", NOW)]
    assert len(jobs) == 4
    assert clusterfile.read_cluster(examples[2], "command-line.md").nodes


def test_a_cluster_file_expands_counts_and_racks() -> None:
    text = (
        "name: c\ngpu_types: {a100: 40GiB}\nnodes:\n"
        "- {name: 'n{}', count: 5, gpu_type: a100, gpus: 4, rack: 'r{}', nodes_per_rack: 2}\n"
        "- {name: big, gpu_type: a100, gpus: 8}\n"
    )
    cluster = clusterfile.read_cluster(text, "c.yaml")
    assert cluster.name == "c"
    assert [(t.name, t.memory_bytes) for t in cluster.gpu_types] == [("a100", 40 * 2**30)]
    assert [n.name for n in cluster.nodes] == ["n0", "n1", "n2", "n3", "n4", "big"]
    assert [n.rack for n in cluster.nodes] == ["r0", "r0", "r1", "r1", "r2", ""]
    assert [n.gpus for n in cluster.nodes] == [4] * 5 + [8]


def test_the_default_cluster_is_a_valid_cluster_file() -> None:
    cluster = clusterfile.read_cluster(clusterfile.EXAMPLE_CLUSTER, "default")
    assert sum(node.gpus for node in cluster.nodes) == 32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu_types: {}\n", "gpu_types: must name at least one type"),
        ("gpu_types: [a100]\n", "gpu_types: must map GPU types to their memory"),
        ("gpu_types: {a100: big}\n", "gpu_types: a100: 'big' is not a size"),
        ("gpu_types: {a: 40960}\n", "gpu_types: a: '40960' has no unit; write e.g. 40GiB or 80GB"),
        ("gpu_types: {a: {memory: 40}}\n", "gpu_types: a: memory: '40' has no unit"),
        (
            "gpu_types: {a: 1GiB}\nnodes: [{name: n, gpu_type: a, gpus: 1, host_memory: 512}]\n",
            "nodes[0]: host_memory: '512' has no unit",
        ),
        (
            "gpu_types: {a: 1GiB}\nnodes: [{name: n, gpu_type: b, gpus: 1}]\n",
            "unknown GPU type 'b'; must be one of a",
        ),
        ("gpu_types: {a: 1GiB}\nnodes: [{name: n, gpu_type: a}]\n", "nodes[0]: needs 'gpus'"),
        (
            "gpu_types: {a: 1GiB}\nnodes: [{name: n, gpu_type: a, gpus: 1, count: 2}]\n",
            "must contain {}",
        ),
        (
            "gpu_types: {a: 1GiB}\nnodes: [{name: n, gpu_type: a, gpus: 1},"
            " {name: n, gpu_type: a, gpus: 1}]\n",
            "the node n occurs twice",
        ),
        ("a: 1\n---\nb: 1\n", "must contain one cluster, not 2"),
    ],
)
def test_a_mistake_in_a_cluster_file_is_reported_with_its_location(text: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        clusterfile.read_cluster(text, "c.yaml")
    assert message in str(caught.value)


def test_a_missing_file_is_named_once_in_the_error(tmp_path: Path) -> None:
    path = tmp_path / "absent.yaml"
    with pytest.raises(InvalidInput) as caught:
        yamlfile.read_text(str(path))
    assert str(caught.value) == f"{path}: cannot be read: No such file or directory"


def test_a_file_that_is_not_text_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match=r"binary\.yaml: is not UTF-8 text"):
        yamlfile.read_text(str(path))


def test_an_unknown_key_without_a_similar_one_gets_no_suggestion() -> None:
    with pytest.raises(InvalidInput, match=r"unknown key 'nodes' \(allowed: name"):
        read_jobs(MINIMAL + "nodes: 2\n", "j.yaml", NOW)


@pytest.mark.parametrize(
    ("text", "expected_s"), [("0", 0), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("1d", 86400)]
)
def test_durations_are_read_with_their_units(text: str, expected_s: float) -> None:
    assert options.parse_seconds("x", text) == expected_s


@pytest.mark.parametrize("text", ["", "-5s", "5 weeks", "1e3", "s", "5M"])
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="is not a duration"):
        options.parse_seconds("x", text)


def test_a_deadline_may_be_relative_to_now() -> None:
    assert options.parse_time("x", "2h", NOW).seconds == NOW.seconds + 7200
    assert options.parse_time("x", "2027-01-15T10:00:00+01:00", NOW).ToJsonString() == (
        "2027-01-15T09:00:00Z"
    )


def test_a_job_file_has_the_plan_of_a_file_next_to_it(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("--tensor-model-parallel-size 8")
    text = f"jobs:\n- {{{', '.join(MINIMAL.splitlines())}, plan: run.sh, plan_first: true}}\n"
    (request,) = read_jobs(text, str(tmp_path / "jobs.yaml"), NOW)
    assert request.job.stated_plan == "--tensor-model-parallel-size 8"
    assert request.job.stated_plan_first


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("plan: nowhere.json\n", "j.yaml: plan: nowhere.json cannot be read"),
        ("plan_first: true\n", "j.yaml: plan_first: needs a plan"),
    ],
)
def test_a_plan_of_a_job_file_that_is_missing_is_named(keys: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read_jobs(MINIMAL + keys, "j.yaml", NOW)


def test_a_job_file_may_have_a_submitted_plan_techniques_and_cores(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("--tensor-model-parallel-size 8")
    text = MINIMAL + "submitted_plan: run.sh\ntechniques: [dp, tp]\ncpus: 96\n"
    (request,) = read_jobs(text, str(tmp_path / "jobs.yaml"), NOW)
    assert request.job.submitted_plan == "--tensor-model-parallel-size 8"
    assert not request.job.stated_plan
    assert (list(request.job.techniques), request.job.requested_cpus) == (["dp", "tp"], 96)
    (request,) = read_jobs(MINIMAL + "submitted_plan: '{\"stages\": []}'\n", "jobs.yaml", NOW)
    assert request.job.submitted_plan == '{"stages": []}'


def test_a_cluster_file_states_cores_and_host_memory_in_units() -> None:
    text = (
        "gpu_types: {a100: 40GiB}\nnodes:\n"
        "- {name: 'n{}', count: 2, gpu_type: a100, gpus: 4, cpus: 96, host_memory: 1.5 TiB}\n"
        "- {name: printed, gpu_type: a100, gpus: 4, cpus: 0, host_bytes: '1024'}\n"
        "- {name: silent, gpu_type: a100, gpus: 4, found_cpus: 8, found_host_bytes: '1'}\n"
    )
    nodes = clusterfile.read_cluster(text, "c.yaml").nodes
    stated = [(n.cpus, n.host_bytes) for n in nodes[:3]]
    assert stated == [(96, 3 * 2**39), (96, 3 * 2**39), (0, 1024)]
    assert nodes[2].HasField("cpus")
    assert not nodes[3].HasField("cpus")
    assert not nodes[3].HasField("host_bytes")


def test_host_memory_may_be_stated_only_once() -> None:
    text = (
        "gpu_types: {a: 1GiB}\n"
        "nodes: [{name: n, gpu_type: a, gpus: 1, host_memory: 1GiB, host_bytes: '1'}]\n"
    )
    with pytest.raises(InvalidInput, match=r"nodes\[0\]: host_memory: is the same as 'host_bytes'"):
        clusterfile.read_cluster(text, "c.yaml")


def test_the_nodes_of_a_cluster_file_are_counted_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make(*_: object) -> None:
        raise AssertionError("a node was made")

    entries = "".join(
        f"  - {{name: 'n{i}-{{}}', count: 100000, gpu_type: a100, gpus: 4}}\n" for i in range(100)
    )
    monkeypatch.setattr(clusterfile, "Node", make)
    with pytest.raises(InvalidInput, match=r"nodes: has 10,000,000 nodes, and may have 100,000"):
        clusterfile.read_cluster(f"gpu_types: {{a100: 40GiB}}\nnodes:\n{entries}", "c.yaml")
