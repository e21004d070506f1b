"""``tessera models``: its requests and output, against a server that holds models in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner, Result

from tessera.service.cli import limits
from tessera.service.cli.main import app
from tessera.service.rpc.convert import models as convert
from tessera.v1 import estimates_pb2 as pb
from tessera.v1 import estimates_pb2_grpc

ARCHITECTURE = (
    "{architecture: transformer, layers: 4, hidden: 64, heads: 4, sequence: 32, vocabulary: 100}"
)
PUBLISHED = pb.Model(model="bert", params="1.3B", parameters=1.4e9, dtype="f16", published=True)


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

    def _never_called(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    UpsertCells = ListCells = EstimateCells = AddProfiles = GetProfiling = _never_called
    DeleteCells = DeleteModels = _never_called


@pytest.fixture
def models() -> RecordingModelServer:
    """Return the servicer behind the server."""
    return RecordingModelServer()


@pytest.fixture
def tessera(models: RecordingModelServer) -> Iterator[Callable[..., Result]]:
    """Return a function that runs the command line against the server."""
    server = grpc.server(ThreadPoolExecutor(2))
    estimates_pb2_grpc.add_EstimatesServicer_to_server(models, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    def run(*arguments: str, code: int = 0, stdin: str | None = None) -> Result:
        env = {"TESSERA_SERVER": f"127.0.0.1:{port}", "TESSERA_CLUSTER": "c"}
        result = CliRunner().invoke(app, ["models", *arguments], env=env, input=stdin)
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        return result

    yield run
    server.stop(None).wait()


def test_a_model_is_sent_as_its_file_and_options_describe_it(
    tessera: Callable[..., Result], models: RecordingModelServer, tmp_path: Path
) -> None:
    file = tmp_path / "owl.yaml"
    file.write_text(ARCHITECTURE)
    result = tessera(
        "add",
        "owl/3B",
        "--architecture",
        str(file),
        "--micro-batches",
        "8",
        "--state-bytes",
        "12",
        "--checkpointing",
        "--dtype",
        "bf16",
        "--sequence",
        "64",
        "--flash",
        "--zero",
        "1",
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
    tessera: Callable[..., Result], models: RecordingModelServer, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "gpt2"}')
    tessera("add", "owl", "--hf", str(file))
    sent = models.sent[0].models[0]
    bare = convert.to_model("model", pb.Model(model="owl", architecture=file.read_text()))
    assert convert.to_model("model", sent) == bare


def test_a_validated_model_is_not_stored(
    tessera: Callable[..., Result], models: RecordingModelServer
) -> None:
    result = tessera("add", "owl", "--architecture", "-", "--validate-only", stdin=ARCHITECTURE)
    assert result.stderr == "owl is valid; nothing changed\n"
    assert models.sent[0].models[0].architecture == ARCHITECTURE
    assert models.kept == []


def test_a_list_has_every_page_and_published_models_only_on_request(
    tessera: Callable[..., Result], models: RecordingModelServer
) -> None:
    models.kept += [pb.Model(model="owl", params="3B"), pb.Model(model="owl")]
    assert tessera("-o", "name").stdout.split() == ["owl/3B", "owl"]
    assert tessera("--published", "-o", "name").stdout.split() == ["owl/3B", "owl", "bert/1.3B"]
    shown = json.loads(tessera("--published", "-o", "json").stdout)["models"]
    assert [m["published"] for m in shown] == [False, False, True]
    rows = tessera("--published").stdout.splitlines()
    assert rows[1].split()[0] == "owl/3B"
    assert rows[1].split()[-2:] == ["the", "cluster"]
    assert rows[3].split()[:2] == ["bert/1.3B", "1,400,000,000"]
    assert rows[3].split()[-2:] == ["this", "release"]


def test_a_cluster_without_user_models_says_how_to_add_one(
    tessera: Callable[..., Result],
) -> None:
    result = tessera()
    assert result.stdout == ""
    assert "`tessera models add` describes one" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["owl"], "--architecture, --hf: give one of them"),
        (["owl", "--architecture", "a", "--hf", "b"], "--architecture, --hf: exclude each other"),
        (["owl", "--hf", "none.json"], "none.json: cannot be read: No such file"),
        (["owl", "--hf", "-", "--dtype", "f8"], "--dtype: must be one of f32, bf16, f16, not 'f8'"),
        (["owl", "--hf", "-"], "-: must be a text of 1 to 65,536 characters, not 0"),
        (["/3B", "--hf", "-"], "/3B: must be NAME or NAME/PARAMS"),
        (["owl/", "--hf", "-"], "owl/: must be NAME or NAME/PARAMS"),
        (["a/b/c", "--hf", "-"], "a/b/c: must be NAME or NAME/PARAMS"),
    ],
)
def test_a_mistake_is_reported_before_anything_is_sent(
    tessera: Callable[..., Result], models: RecordingModelServer, arguments: list[str], message: str
) -> None:
    assert f"error: {message}" in tessera("add", *arguments, code=2, stdin="").stderr
    assert models.sent == []


def test_an_option_before_add_is_refused_because_it_would_be_ignored(
    tessera: Callable[..., Result], models: RecordingModelServer
) -> None:
    result = tessera("--cluster", "d", "add", "owl", "--hf", "-", code=2, stdin=ARCHITECTURE)
    assert result.stderr == "error: --cluster: must follow `add`, if that accepts it\n"
    assert models.sent == []


def test_the_clients_model_limits_equal_the_servers() -> None:
    assert limits.MAX_ARCHITECTURE == convert.MAX_ARCHITECTURE
    assert limits.MAX_MICRO_BATCHES == convert.MAX_MICRO_BATCHES
    assert limits.MAX_SEQUENCE == convert.MAX_SEQUENCE
    assert limits.MAX_STATE_BYTES == convert.MAX_STATE_BYTES
    assert limits.DTYPES == convert.DTYPES
