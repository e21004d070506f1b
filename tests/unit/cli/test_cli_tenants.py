"""Tenants, GPU costs and pinned jobs in files: their meaning, and how mistakes are reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from typer.testing import CliRunner

from tessera.formulation.errors import InvalidInput
from tessera.service.cli import main, tenantfile
from tessera.service.cli.clusterfile import read_cluster
from tessera.service.cli.jobfile import read_jobs
from tessera.service.cli.options import Output
from tessera.service.cli.tenantfile import read_tenants
from tessera.service.cli.tenants import show_tree
from tessera.v1.tenants_pb2 import Tenant

JOB = "model: bert\nglobal_batch: 256\niterations: 1000\ngpus: 8\n"
NOW = Timestamp(seconds=1_800_000_000)


def test_every_key_of_a_tenant_reaches_the_request() -> None:
    text = (
        "tenants:\n  nlp: {weight: 0, quotas: {a100: 8, any: 16}, borrow_gpus: 0,"
        " keeps_idle_quota: true}\n  vision:\n"
    )
    nlp, vision = read_tenants(text, "t.yaml")
    assert nlp == Tenant(
        name="nlp", weight=0.0, borrow_gpus=0, keeps_idle_quota=True, quotas={"a100": 8, "": 16}
    )
    assert vision == Tenant(name="vision")
    assert not vision.HasField("weight")
    assert not vision.HasField("borrow_gpus")


def test_the_documented_tenants_are_a_valid_file() -> None:
    page = (Path(__file__).parents[3] / "docs" / "command-line.md").read_text()
    examples = [part.partition("```")[0] for part in page.split("```yaml\n")[1:]]
    research, nlp, vision = tenantfile.read_tenants(examples[-1], "command-line.md")
    assert (nlp.borrow_gpus, dict(vision.quotas)) == (16, {"": 24})
    assert (nlp.parent, research.parent) == (research.name, "")
    assert [t.name for t in read_cluster(examples[2], "command-line.md").tenants] == ["nlp"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tenants: [nlp]\n", "t.yaml: tenants: must map tenants to their settings"),
        ("tenants: {}\n", "t.yaml: contains no tenants"),
        ("", "t.yaml: must contain one document with tenants, not 0"),
        (
            "tenants: {nlp: {wieght: 2}}\n",
            "tenants: nlp: unknown key 'wieght'; did you mean 'weight'",
        ),
        ("tenants: {nlp: {weight: -1}}\n", "nlp: weight: must be a number from 0 to"),
        ("tenants: {nlp: {borrow_gpus: -1}}\n", "nlp: borrow_gpus: must be a whole number from 0"),
        ("tenants: {nlp: {quotas: 8}}\n", "nlp: quotas: must map GPU types to GPUs"),
        ("tenants: {nlp: {quotas: {a100: some}}}\n", "quotas: a100: must be a whole number"),
        ("tenants: {nlp: {}, nlp: {}}\n", "the key 'nlp' occurs twice"),
    ],
)
def test_a_mistake_in_a_tenants_file_is_reported_with_its_location(text: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_tenants(text, "t.yaml")
    assert message in str(caught.value)


def test_a_cluster_file_may_set_gpu_costs_and_tenants() -> None:
    text = (
        "gpu_types:\n  a100: {memory: 40GiB, dollars_per_hour: 2.5, watts: 400}\n  v100: 32GiB\n"
        "tenants: {nlp: {quotas: {a100: 8}}}\n"
    )
    cluster = read_cluster(text, "c.yaml")
    assert [(t.name, t.memory_bytes, t.dollars_per_hour, t.watts) for t in cluster.gpu_types] == [
        ("a100", 40 * 2**30, 2.5, 400.0),
        ("v100", 32 * 2**30, 0.0, 0.0),
    ]
    assert cluster.tenants == (Tenant(name="nlp", quotas={"a100": 8}),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu_types: {a: {watts: 1}}\n", "gpu_types: a: needs 'memory'"),
        ("gpu_types: {a: {memory: 1GiB, watts: -1}}\n", "a: watts: must be a number from 0"),
        ("gpu_types: {a: {memory: 1GiB, price: 1}}\n", "a: unknown key 'price' (allowed: memory, "),
        (
            "gpu_types: {a: 1GiB}\ntenants: {nlp: {quotas: {b: 1}}}\n",
            "tenants: nlp: quotas: unknown GPU type 'b'; must be one of a, any",
        ),
    ],
)
def test_a_mistake_in_the_tenants_of_a_cluster_file_is_named_with_its_place(
    text: str, message: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_cluster(text, "c.yaml")
    assert message in str(caught.value)


def test_a_job_file_can_pin_a_type_and_avoid_nodes() -> None:
    text = JOB + "gpu_type: a100\npin_type: true\navoid_nodes: [n1, clusters/d/nodes/n2]\n"
    (request,) = read_jobs(text, "j.yaml", NOW, "c")
    assert request.job.pinned_gpu_type
    assert list(request.job.avoid_nodes) == ["clusters/c/nodes/n1", "clusters/d/nodes/n2"]


def test_a_pin_without_a_type_is_refused_in_a_file_and_from_options() -> None:
    with pytest.raises(InvalidInput, match=r"j.yaml: pin_type: .*give both"):
        read_jobs(JOB + "pin_type: true\n", "j.yaml", NOW)
    with pytest.raises(InvalidInput, match="avoid_nodes: may name at most 256 nodes"):
        read_jobs(JOB + f"avoid_nodes: [{', '.join(f'n{i}' for i in range(257))}]\n", "j.yaml", NOW)
    submit = ["submit", "--model", "m", "--batch", "1", "--iterations", "1", "--gpus", "1"]
    result = CliRunner().invoke(main.app, [*submit, "--pin-type", "--server", "127.0.0.1:1"])
    assert (result.exit_code, result.stderr) == (
        2,
        "error: --pin-type: pins the type that --gpu-type names, so give both\n",
    )


def test_the_tree_shows_each_tenant_below_its_parent(capsys: pytest.CaptureFixture[str]) -> None:
    place = "clusters/c/tenants"
    parents = {"chat": "nlp", "lab": "", "nlp": "lab", "orphan": "unseen", "vision": "lab"}
    tenants = [Tenant(name=f"{place}/{name}", parent=p) for name, p in parents.items()]
    show_tree(tenants, Output.TABLE)
    names = [line[:12].rstrip() for line in capsys.readouterr().out.splitlines()[1:]]
    assert names == ["lab", "  nlp", "    chat", "  vision", "orphan"]
