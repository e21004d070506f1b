"""A job from the values that files and options state, by the names of ``JobFields``.

A field of a job that is a text, a number, a list of texts, a duration or a time needs nothing here.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from google.protobuf.timestamp_pb2 import Timestamp

from tessera.client.requests import describe_field, make_job
from tessera.estimator.files.userfiles import read_text
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.secrets import holds_secret
from tessera.formulation.job.stated_secrets import refuse_variables
from tessera.service.cli import options
from tessera.service.cli.client import current_timestamp
from tessera.service.cli.jobs.changeoptions import removes_field
from tessera.service.cli.jobs.workflow import parse_after
from tessera.service.cli.names import full_name
from tessera.v1 import jobs_pb2

MAX_FILE_BYTES: Final = 2**20
"""The size of a file of variables, far beyond what a job may have."""

COMMENT: Final = "#"
"""The beginning of a line of a file of variables that is skipped."""

_NEEDS: Final = {
    "pinned_gpu_type": ("gpu_type", "pins the type that {} names, so give both"),
    "plan_first": ("plan", "needs {}, the plan of the first start"),
}
"""The fields that mean nothing without another one, and the sentence for its name."""

_SINGULARS: Final = {"avoid_nodes": "avoid_node", "labels": "label", "secrets": "secret"}
"""The names of options that are repeated."""

Places = Callable[[str], str]
"""A function that returns the place of a field in errors. It ends with ``: `` and the field's name, or
is only the name."""


def option_name(field: str) -> str:
    """Return the option that states a field of a job, e.g. ``--max-gpus``."""
    return f"--{_SINGULARS.get(field, field).replace('_', '-')}"


def require_partners(values: Mapping[str, Any], place: Places) -> None:
    """Refuse fields of a new job that mean nothing without another one. Raises InvalidInput."""
    for name, (partner, problem) in _NEEDS.items():
        if values.get(name) and not values.get(partner):
            raise InvalidInput(place(name), problem.format(_last_word(place(partner))))


def build_job(
    values: Mapping[str, Any], cluster: str, current_time: Timestamp, place: Places
) -> jobs_pb2.Job:
    """Return the job that ``values`` state. Values that are empty or false are left out.

    Durations and times may be texts, and durations numbers of seconds. Jobs may have a condition.

    Raises:
        InvalidInput: names the place, and lists the allowed values. It repeats no secret.
    """
    fields = {
        name: _convert(name, value, cluster, current_time, place)
        for name, value in values.items()
        if value is not False and value not in (None, "", [], {})
    }
    return make_job(cluster, **fields)


def build_optional_job(option_values: Mapping[str, Any], cluster: str) -> jobs_pb2.Job:
    """Return the job that the options of a command state. Those that are None were not given."""
    values = {
        name: _read_option(name, value)
        for name, value in option_values.items()
        if value is not None and name != "env_from_file"
    }
    if path := option_values.get("env_from_file"):
        values["env"] = _read_variables("--env-from-file", path) | values.get("env", {})
    return build_job(values, cluster, current_timestamp(), option_name)


def _convert(name: str, value: Any, cluster: str, current_time: Timestamp, place: Places) -> Any:
    """Return the value of a field in the form in which ``make_job`` takes it."""
    source = place(name)
    match name, describe_field(name)[1]:
        case "plan" | "submitted_plan", _:
            return options.read_plan_file(source, value)
        case "after", _:
            return parse_after(source, value, cluster)
        case "avoid_nodes", _:
            return [full_name(cluster, "nodes", node) for node in value]
        case "env", _:
            refuse_variables(value, source, _last_word(place("secrets")))
        case "secrets", _:
            _refuse_secrets(source, value)
        case _, "Duration":
            length_s = options.parse_seconds(source, value) if isinstance(value, str) else value
            return options.to_duration(length_s)
        case _, "Timestamp":
            return options.parse_time(source, value, current_time)
    return value


def _last_word(place: str) -> str:
    """Return the key or the option of a place."""
    return place.rpartition(": ")[2]


def _refuse_secrets(where: str, names: Mapping[str, str]) -> None:
    """Refuse a secret in place of the name of its file."""
    for variable, name in names.items():
        if holds_secret(name):
            raise InvalidInput(
                where, f"{variable} needs the name of a file on the nodes, and not the secret"
            )


def _read_option(name: str, value: Any) -> Any:
    """Return the value of an option in the form that a file has."""
    option = option_name(name)
    if removes_field(name, value):
        return None
    match name:
        case "labels":
            return options.parse_labels(option, value)
        case "env":
            return options.unique_pairs(option, (_parse_variable(option, text) for text in value))
        case "secrets":
            form = "VARIABLE=NAME"
            return options.unique_pairs(
                option, (_parse_variable(option, text, form) for text in value)
            )
        case "command" | "staging_command":
            return _split_command(option, value)
    if isinstance(value, str) and describe_field(name)[0].is_repeated:
        return options.split_words(value)
    return value


def _parse_variable(where: str, text: str, form: str = "NAME=VALUE") -> tuple[str, str]:
    """Return the parts of ``NAME=VALUE``. The error does not repeat the text, which may be a secret."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise InvalidInput(where, f"must have the form {form}")
    return name, value


def _read_variables(where: str, path: str) -> dict[str, str]:
    """Return the variables of a file. Raises InvalidInput."""
    try:
        text = read_text(path, MAX_FILE_BYTES)
    except InvalidInput as error:
        raise InvalidInput(where, f"{path} {error.problem}") from error
    variables: dict[str, str] = {}
    for number, ending in enumerate(text.split("\n"), 1):
        line = ending.removesuffix("\r")
        if not line.strip() or line.lstrip().startswith(COMMENT):
            continue
        name, value = _parse_variable(f"{where}: {path}, line {number}", line)
        variables[name.strip()] = value
    return variables


def _split_command(option: str, command: str) -> Sequence[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise InvalidInput(option, f"must be quoted as in a shell: {error}") from error
