"""A field has one name in the API, in records, in the database, in files, and as an option.

The names differ only by what their types say. A moment is ``create_time`` in the API, ``created_s`` in
Python and ``created_at`` in SQL, and a duration ``restart`` is ``restart_s`` where it is a number of
seconds. A reference is ``plan`` in the API and ``plan_id`` in SQL. Options and keys of files leave out
``requested_`` and ``global_``, and an option that is repeated names one value (``--label``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Final

import pytest
import typer
from google.protobuf.message import Message

from tessera.client.requests import JobFields
from tessera.db.schema.tables import access as access_tables
from tessera.db.schema.tables import clusters as cluster_tables
from tessera.db.schema.tables import estimates as estimate_tables
from tessera.db.schema.tables import forecasts as forecast_tables
from tessera.db.schema.tables import jobs as job_tables
from tessera.db.schema.tables import reservations as reservation_tables
from tessera.db.schema.tables import webhooks as webhook_tables
from tessera.formulation.base.values import GpuType, Workload
from tessera.formulation.job.arrays import ArrayMember
from tessera.formulation.job.launch import LaunchSpec
from tessera.formulation.records import access, clusters, forecasts, jobs, reservations
from tessera.formulation.records.webhooks import WebhookRecord, WebhookSpec
from tessera.service.cli.jobs.jobfile import JobEntry
from tessera.service.cli.jobs.jobs import add_commands
from tessera.solvers.rounds.options import RoundOptions
from tessera.v1 import (
    access_pb2,
    clusters_pb2,
    estimates_pb2,
    jobs_pb2,
    launch_pb2,
    reservations_pb2,
    scheduler_pb2,
    tenants_pb2,
    webhooks_pb2,
)

VERBS: Final = ("create", "start", "end", "revoke", "expire", "drain", "queue", "issue")
"""Verbs of moments, whose names are participles outside the API (AIP-142)."""

DERIVED_FIELDS: Final = {"etag", "state", "warnings", "version", "spec", "cluster", "job"}
"""What the API derives from a record, and the key of a record, which the API has as its name."""

KINDS: Final[dict[str, tuple[type[Message], tuple[type, ...], Any, set[str]]]] = {
    "job": (
        jobs_pb2.Job,
        (jobs.JobSpec, jobs.JobRecord),
        job_tables.jobs,
        {"reason_round", "dependencies"},  # parts of `reason` and `after`
    ),
    "launch": (launch_pb2.Launch, (LaunchSpec,), None, set()),
    "training": (jobs_pb2.Training, (jobs.TrainingRecord,), None, set()),
    "array member": (jobs_pb2.ArrayMember, (ArrayMember,), None, set()),
    "forecast": (jobs_pb2.Forecast, (forecasts.JobForecast,), forecast_tables.forecasts, set()),
    "node": (
        clusters_pb2.Node,
        (clusters.NodeSpec, clusters.NodeRecord),
        cluster_tables.nodes,
        {"draining", "offers", "runtimes", "tools"},  # `state`, and what `offers` has
    ),
    "GPU type": (clusters_pb2.GpuType, (GpuType,), cluster_tables.gpu_types, {"node_gpus"}),
    "tenant": (tenants_pb2.Tenant, (clusters.TenantSpec,), cluster_tables.tenants, set()),
    "workload": (estimates_pb2.Workload, (Workload,), estimate_tables.workloads, set()),
    "reservation": (
        reservations_pb2.Reservation,
        (reservations.ReservationSpec, reservations.ReservationRecord),
        reservation_tables.reservations,
        {"active"},  # `state`
    ),
    "webhook": (
        webhooks_pb2.Webhook,
        (WebhookSpec, WebhookRecord),
        webhook_tables.webhooks,
        {"secret", "salt", "delivery_time"},  # the secret is derived from the salt
    ),
    "token": (
        access_pb2.Token,
        (access.TokenSpec, access.TokenRecord),
        access_tables.tokens,
        {"secret_hash", "all_tenants"},
    ),
    "join token": (
        access_pb2.JoinToken,
        (access.JoinTokenSpec, access.JoinTokenRecord),
        access_tables.join_tokens,
        {"secret_hash"},
    ),
    "certificate": (
        access_pb2.Certificate,
        (access.CertificateRecord,),
        access_tables.agent_certificates,
        set(),
    ),
    "audit entry": (access_pb2.AuditEntry, (access.AuditRecord,), access_tables.audit_log, set()),
    "round options": (scheduler_pb2.RoundOptions, (RoundOptions,), None, {"work", "recorded"}),
}
"""Message, records and table of each kind, and the fields that only one of them has."""


def stem_of(name: str) -> str:
    """Return a name without what its type adds to it."""
    stem = re.sub(r"_(s|time|at|seconds|id)$", "", name)
    for verb in VERBS:
        if stem in (f"{verb}d", f"{verb}ed", f"{verb}s"):
            return verb
    return stem


def stems_of(names: Iterable[str]) -> dict[str, str]:
    return {stem_of(name): name for name in names}


@pytest.mark.parametrize("kind", KINDS)
def test_messages_records_and_tables_name_a_field_alike(kind: str) -> None:
    message, records, table, exceptions = KINDS[kind]
    api_names = stems_of(field.name for field in message.DESCRIPTOR.fields)
    record_names = stems_of(field.name for record in records for field in fields(record))
    differences = (api_names.keys() ^ record_names.keys()) - stems_of(
        DERIVED_FIELDS | exceptions
    ).keys()
    assert differences == set()
    if table is not None:
        columns = stems_of(column.name for column in table.columns).keys()
        absent_columns = set(record_names) - columns
        guesses = {
            name: get_close_matches(name, columns - record_names.keys(), 1, 0.8)
            for name in absent_columns
        }
        assert not any(guesses.values()), guesses


PREFIXES: Final = ("requested_", "global_")
OTHER_FIELDS: Final = {
    *("name", "etag", "state", "create_time", "start_time", "end_time", "iterations_done"),
    *("allocation", "reason", "generation", "retries", "last_error", "admitted", "schedule"),
    *("opportunistic", "service_gpu_seconds", "queue_time", "retry_time", "warnings", "training"),
    *("forecast", "run_seconds", "start_by", "planned_start", "workload", "launch", "array"),
}
"""The fields of a Job that are output only, or stand for the fields of another message."""


def submitted_names() -> set[str]:
    """Return the short names of all fields that a user states of a job."""
    names = {field.name for field in jobs_pb2.Job.DESCRIPTOR.fields} - OTHER_FIELDS
    names |= {field.name for field in launch_pb2.Launch.DESCRIPTOR.fields} - {"image"}
    names |= {field.name for field in estimates_pb2.Workload.DESCRIPTOR.fields}
    return {re.sub(f"^({'|'.join(PREFIXES)})", "", name) for name in names}


def test_job_files_and_the_python_client_name_the_fields_of_the_api() -> None:
    assert set(JobEntry.model_fields) - {"name", "array"} == submitted_names()
    assert set(JobFields.__annotations__) == submitted_names()


def test_options_of_submit_name_the_fields_of_the_api() -> None:
    app = typer.Typer()
    add_commands(app)
    group: Any = typer.main.get_command(app)
    submit = group.commands["submit"]
    options = {name.removeprefix("--").replace("-", "_") for p in submit.params for name in p.opts}
    for name in submitted_names():
        assert {name, name.removesuffix("s")} & options, name
