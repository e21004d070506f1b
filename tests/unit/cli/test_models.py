"""``tessera models`` against a server that holds models, and ``tessera topology`` on files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tessera.service.cli.main import app
from tessera.service.rpc.convert import models as convert
from tessera.v1 import estimates_pb2 as pb
from tessera.v1 import estimates_pb2_grpc
from tests.support.local_server import serve_grpc

ARCHITECTURE = (
    "{architecture: transformer, layers: 4, hidden: 64, heads: 4, sequence: 32, vocabulary: 100}"
)
PUBLISHED = pb.Model(model="bert", params="1.3B", parameters=1.4e9, dtype="f16", published=True)

Tessera = Callable[..., Result]


class RecordingModelServer(estimates_pb2_grpc.EstimatesServicer):
    """Records the models that it receives. Each page of its lists holds one model."""

    def __init__(self) -> None:
        self.kept: list[pb.Model] = []
        self.sent: list[pb.UpsertModelsRequest] = []

    def UpsertModels(
        self, request: pb.UpsertModelsRequest, context: Any
    ) -> pb.UpsertModelsResponse:
        """Record the models of the request."""
        self.sent.append(request)
        self.kept.extend(() if request.validate_only else request.models)
        return pb.UpsertModelsResponse(models=request.models)

    def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        """Return the model whose index is the page token."""
        every = [*self.kept, *([PUBLISHED] if request.with_published else [])]
        at = int(request.page_token or 0)
        more = str(at + 1) if at + 1 < len(every) else ""
        return pb.ListModelsResponse(models=every[at : at + 1], next_page_token=more)


@pytest.fixture
def models() -> RecordingModelServer:
    """Return the servicer behind the server."""
    return RecordingModelServer()  # type: ignore[abstract] # other calls are not made


@pytest.fixture
def tessera(models: RecordingModelServer) -> Iterator[Tessera]:
    """Return a function that runs ``tessera models`` against the server."""
    with serve_grpc(partial(estimates_pb2_grpc.add_EstimatesServicer_to_server, models)) as address:

        def run(words: str, code: int = 0, stdin: str | None = None) -> Result:
            env = {"TESSERA_SERVER": address, "TESSERA_CLUSTER": "c"}
            result = CliRunner().invoke(app, ["models", *words.split()], env=env, input=stdin)
            assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
            return result

        yield run


def test_a_model_is_sent_as_its_file_and_options_describe_it(
    tessera: Tessera, models: RecordingModelServer, tmp_path: Path
) -> None:
    file = tmp_path / "owl.yaml"
    file.write_text(ARCHITECTURE)
    result = tessera(
        f"add owl/3B --architecture {file} --micro-batches 8 --state-bytes 12 --checkpointing"
        " --dtype bf16 --sequence 64 --flash --zero 1"
    )
    (request,) = models.sent
    assert request.parent == "clusters/c"
    assert request.request_id
    assert list(request.models) == [
        pb.Model(
            model="owl",
            params="3B",
            architecture=ARCHITECTURE,
            micro_batches=8,
            state_bytes=12.0,
            checkpointing=True,
            dtype="bf16",
            sequence=64,
            flash=True,
            zero=1,
        )
    ]
    assert result.stderr == "owl/3B added\n"


def test_options_not_given_have_the_defaults_of_the_api(
    tessera: Tessera, models: RecordingModelServer, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "gpt2"}')
    tessera(f"add owl --hf {file}")
    sent = models.sent[0].models[0]
    bare = convert.to_model("model", pb.Model(model="owl", architecture=file.read_text()))
    assert convert.to_model("model", sent) == bare


def test_a_validated_model_is_not_stored(tessera: Tessera, models: RecordingModelServer) -> None:
    result = tessera("add owl --architecture - --validate-only", stdin=ARCHITECTURE)
    assert result.stderr == "owl is valid; nothing changed\n"
    assert models.sent[0].models[0].architecture == ARCHITECTURE
    assert models.kept == []


def test_a_list_has_every_page_and_published_models_only_on_request(
    tessera: Tessera, models: RecordingModelServer
) -> None:
    empty = tessera("")
    assert empty.stdout == ""
    assert "`tessera models add` describes one" in empty.stderr
    models.kept += [pb.Model(model="owl", params="3B"), pb.Model(model="owl")]
    assert tessera("-o name").stdout.split() == ["owl/3B", "owl"]
    assert tessera("--published -o name").stdout.split() == ["owl/3B", "owl", "bert/1.3B"]
    shown = json.loads(tessera("--published -o json").stdout)["models"]
    assert [m["published"] for m in shown] == [False, False, True]
    rows = [row.split() for row in tessera("--published").stdout.splitlines()]
    assert (rows[1][0], rows[1][-2:]) == ("owl/3B", ["the", "cluster"])
    assert (rows[3][:2], rows[3][-2:]) == (["bert/1.3B", "1,400,000,000"], ["this", "release"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("add owl", "--architecture, --hf: give one of them"),
        ("add owl --architecture a --hf b", "--architecture, --hf: exclude each other"),
        ("add owl --hf none.json", "none.json: cannot be read: No such file"),
        ("add owl --hf - --dtype f8", "--dtype: must be one of f32, bf16, f16, not 'f8'"),
        ("add owl --hf -", "-: must be a text of 1 to 65,536 characters, not 0"),
        ("add /3B --hf -", "/3B: must be NAME or NAME/PARAMS"),
        ("add owl/ --hf -", "owl/: must be NAME or NAME/PARAMS"),
        ("add a/b/c --hf -", "a/b/c: must be NAME or NAME/PARAMS"),
        ("--cluster d add owl --hf -", "--cluster: must follow `add`, if that accepts it"),
    ],
)
def test_a_mistake_is_reported_before_anything_is_sent(
    tessera: Tessera, models: RecordingModelServer, words: str, message: str
) -> None:
    assert f"error: {message}" in tessera(words, code=2, stdin="").stderr
    assert models.sent == []


CLOS = """
kind: clos
nodes: [{name: "a100-{}", count: 4}]
host: a100
tors: 2
aggregations: 3
tor_bytes_per_s: 100 Gb/s
tor_delay_s: 1e-6
"""
LINGJUN = """
kind: lingjun
file: hosts.csv
host: a100
ports_per_nic: 2
asw_cables: 4
asw_bytes_per_s: 400 Gb/s
psw_cables: 4
psw_bytes_per_s: 50e9
"""
ROWS = "host_id,dsw,psw,asw\nh1,G,P1,S1\nh2,G,P1,S1\nh3,G,P2,S1\n"


@pytest.fixture
def topology(tmp_path: Path) -> Tessera:
    """Return a function that runs ``tessera topology show`` on a file with this text."""
    path = tmp_path / "net.yaml"

    def run(text: str, options: str = "", code: int = 0) -> Result:
        path.write_text(text, encoding="utf-8")
        result = CliRunner().invoke(app, ["topology", "show", str(path), *options.split()])
        assert result.exit_code == code, result.output
        return result

    return run


def test_a_topology_is_shown_by_tiers_links_and_paths(topology: Tessera) -> None:
    shown = topology(CLOS).stdout
    rows = [row.split() for row in shown.splitlines()]
    for row in (["hosts", "4"], ["ToR", "2"], ["GPU", "32"]):
        assert row in rows
    assert ["ToR", "aggregation", "6", "12.5", "1"] in rows
    assert "37.5 GB/s between halves of the ToRs" in shown
    paths = topology(CLOS, "--paths a100-0 a100-3").stdout
    lines = [text for text in paths.splitlines() if " > " in text]
    assert len(lines) == 3
    assert lines[1] == (
        "a100-0/gpu-0 > a100-0/pcie-0 > a100-0/nic-0 > tor-0 > agg-1 > tor-1 > a100-3/nic-0"
        " > a100-3/pcie-0 > a100-3/gpu-0"
    )
    some = topology(CLOS, "--paths a100-0 a100-3 --most 2")
    assert "2 of 3 equal-cost paths are listed; --most lists more" in some.stderr


def test_a_lingjun_file_is_read_from_the_same_folder_and_assumptions_are_printed(
    topology: Tessera, tmp_path: Path
) -> None:
    (tmp_path / "hosts.csv").write_text(ROWS, encoding="utf-8")
    output = json.loads(topology(LINGJUN, "--paths h1 h2 --json").stdout)
    assert (output["hosts"], output["vertices"]["tor"]) == (3, 2)
    assert "assumed" in output["assumed"][0]
    shown = topology(LINGJUN, "--paths h1 h2")
    assert "(4 parallel cables)" in shown.stdout
    assert "speeds of cables" in shown.stderr


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (CLOS + "---\n" + CLOS, "", "holds 2 documents; give one"),
        ("", "", "must contain one topology, but is empty"),
        (CLOS, "--paths a100-0 a100-9", "--paths: unknown host 'a100-9'; did you mean"),
        (CLOS, "--paths a100-0 a100-0", "--paths: needs two different hosts"),
        (LINGJUN, "", "hosts.csv: cannot be read"),
    ],
)
def test_a_mistake_in_a_topology_is_refused_by_name(
    topology: Tessera, text: str, options: str, message: str
) -> None:
    result = topology(text, options, code=2)
    assert message in result.stderr
    assert result.stdout == ""
