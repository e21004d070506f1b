"""Every error class has a canonical gRPC code, and its details fit into the headers."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from google.rpc import error_details_pb2

from tessera.formulation import errors
from tessera.formulation.errors import InvalidInput, RoundSuperseded, TesseraError
from tessera.service.rpc.errors import CODES, DOMAIN, code_of, status_of
from tessera.solvers.base import SolverFailed


def subclasses_of(kind: type[TesseraError]) -> Iterator[type[TesseraError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from subclasses_of(child)


@pytest.mark.parametrize(
    "kind",
    [
        k
        for k in subclasses_of(TesseraError)
        if k.__module__ in (errors.__name__, SolverFailed.__module__)
    ],
)
def test_every_error_class_is_in_the_table(kind: type[TesseraError]) -> None:
    assert kind in CODES


def test_a_class_missing_from_the_table_has_its_ancestors_code() -> None:
    class Special(errors.NotFound):
        """An error that only this test defines."""

    assert code_of(Special("x")) is grpc.StatusCode.NOT_FOUND


def test_a_wrong_field_is_named_in_a_bad_request() -> None:
    status = status_of(InvalidInput("job.weight", "must be positive"))
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad)
    assert (info.domain, info.reason) == (DOMAIN, "INVALID_INPUT")
    assert bad.field_violations[0].field == "job.weight"
    assert bad.field_violations[0].description == "must be positive"


def test_an_overtaken_round_names_the_winning_round() -> None:
    status = status_of(RoundSuperseded("clusters/c/rounds/7"))
    info = error_details_pb2.ErrorInfo()
    assert status.code == grpc.StatusCode.ABORTED.value[0]
    assert status.details[0].Unpack(info)
    assert (info.reason, dict(info.metadata)) == (
        "ROUND_SUPERSEDED",
        {"winner": "clusters/c/rounds/7"},
    )


@pytest.mark.parametrize("letter", ["x", "é", "😀"])
def test_a_long_message_is_cut_to_fit_into_headers(letter: str) -> None:
    status = status_of(InvalidInput(letter * 9000, letter * 9000))
    percent_encoded = 3 * len(status.message.encode())
    base64_encoded = status.ByteSize() * 4 // 3
    assert percent_encoded + base64_encoded < 8192


def test_no_part_of_a_status_shows_a_secret() -> None:
    secret = "tessera_token_0123456789ab_" + "s" * 43
    long_text = "x" * 560 + secret  # the end of the token is cut off
    for error in (
        InvalidInput(secret, f"{secret} is not a token"),
        errors.NotFound(f"tokens/{secret}"),
        errors.Unavailable(f"cannot reach postgresql://ada:ssssss@db: {secret}"),
        errors.NotAllowed(long_text),
    ):
        encoded = status_of(error).SerializeToString()
        assert b"ssss" not in encoded
        assert b"***" in encoded
