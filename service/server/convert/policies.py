"""Standing policies: messages, and the JSON in which the options of a policy are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.records.policies import PolicyRecord
from tessera.service import fields
from tessera.service.server.convert import names
from tessera.service.server.convert.rounds import of_options, to_options
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
    return to_options(field, options_message(field, stored), usual)


def of_policy(
    cluster: str, record: PolicyRecord, effective: RoundOptions, usual: RoundOptions
) -> pb.StandingPolicy:
    """Return the message of a version that was set."""
    message = _of_options(cluster, record.version, effective)
    if record.options is None:
        message.options.CopyFrom(_different_options(effective, usual))
        message.from_settings = True
    else:
        message.options.CopyFrom(options_message(f"policies/{record.version}", record.options))
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
        effective_options=all_options(effective),
        etag=fields.etag_of(version),
    )


def all_options(options: RoundOptions) -> pb.RoundOptions:
    """Return the message of options, with every one of them."""
    plain = asdict(options)
    del plain["work"], plain["recorded"]
    return of_options(plain)


def _different_options(options: RoundOptions, usual: RoundOptions) -> pb.RoundOptions:
    """Return the options that differ from the usual ones."""
    plain, before = stored_options(all_options(options)), stored_options(all_options(usual))
    different = {name: value for name, value in plain.items() if before.get(name) != value}
    return options_message("policy", different)


def options_message(field: str, stored: Mapping[str, Any]) -> pb.RoundOptions:
    """Return the message of stored options. Raises InvalidInput if this release knows no such."""
    try:
        return ParseDict(dict(stored), pb.RoundOptions())
    except ParseError as error:
        raise InvalidInput(
            field,
            f"this release does not know an option of the stored policy ({' '.join(str(error).split())});"
            " set the policy again, or use the release that set it",
        ) from error
