"""Standing policies: messages, and the JSON in which the options of a policy are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from tessera.formulation.errors import InvalidInput
from tessera.formulation.records.policies import PolicyRecord
from tessera.service.rpc import fields, names
from tessera.service.rpc.convert.rounds import of_options, to_options
from tessera.solvers.rounds.options import RoundOptions
from tessera.v1 import scheduler_pb2 as pb


def stored_options(message: pb.RoundOptions) -> dict[str, Any]:
    """Return the options that a message sets, as they are stored."""
    return MessageToDict(message, preserving_proto_field_name=True)


def read_stored_options(field: str, stored: Mapping[str, Any], usual: RoundOptions) -> RoundOptions:
    """Return all options of a stored policy. Those that it does not set are ``usual``.

    Raises:
        InvalidInput: this release does not accept them, e.g. after a downgrade.
    """
    return to_options(field, _message(field, stored), usual)


def of_policy(
    cluster: str, record: PolicyRecord, effective: RoundOptions, usual: RoundOptions
) -> pb.StandingPolicy:
    """Return the message of a version that was set."""
    message = _of_options(cluster, record.version, effective)
    if record.options is None:
        message.options.CopyFrom(_different_options(effective, usual))
        message.from_settings = True
    else:
        message.options.CopyFrom(_message(f"policies/{record.version}", record.options))
    message.set_by, message.message = record.set_by, record.message
    message.create_time.CopyFrom(fields.timestamp_of(record.set_s))
    return message


def of_configured(cluster: str, configured: RoundOptions, usual: RoundOptions) -> pb.StandingPolicy:
    """Return the message of version 0, the policy of the server's settings."""
    message = _of_options(cluster, 0, configured)
    message.options.CopyFrom(_different_options(configured, usual))
    message.from_settings = True
    return message


def _of_options(cluster: str, version: int, effective: RoundOptions) -> pb.StandingPolicy:
    return pb.StandingPolicy(
        name=names.policy_name(cluster, version),
        version=version,
        effective_options=_all_options(effective),
        etag=fields.etag_of(version),
    )


def _all_options(options: RoundOptions) -> pb.RoundOptions:
    plain = asdict(options)
    del plain["work"], plain["recorded"]
    return of_options(plain)


def _different_options(options: RoundOptions, usual: RoundOptions) -> pb.RoundOptions:
    """Return the options that differ from the usual ones."""
    message, before = _all_options(options), _all_options(usual)
    for known, value in message.ListFields():
        if before.HasField(known.name) and getattr(before, known.name) == value:
            message.ClearField(known.name)
    return message


def _message(field: str, stored: Mapping[str, Any]) -> pb.RoundOptions:
    try:
        return ParseDict(dict(stored), pb.RoundOptions())
    except ParseError as error:
        raise InvalidInput(
            field,
            f"this release does not know an option of the stored policy ({' '.join(str(error).split())});"
            " set the policy again, or use the release that set it",
        ) from error
