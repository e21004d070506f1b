"""Checks of this machine: settings of a server, database, port, disk and libraries."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tessera.formulation.base.errors import InvalidInput, TesseraError
from tessera.formulation.base.release import install_hint
from tessera.service.cli.render import GIB
from tessera.service.cli.servers.configprint import SERVER_LIBRARIES
from tessera.service.cli.servers.doctoring.checks import Check, CheckResult

if TYPE_CHECKING:
    from tessera.service.server.settings.config import Config

WARN_FREE_BYTES: Final = 5 * GIB
"""Free space below which a database and the output of jobs soon have no room."""

FAIL_FREE_BYTES: Final = 1 * GIB

TRAINING_LIBRARIES: Final = ("jax", "torch")


def check_machine(file: Path | None, address: str) -> Iterator[Check]:
    """Yield the checks of this machine. ``address`` is the server that was checked."""
    yield _check_training()
    if missing := [name for name in SERVER_LIBRARIES if find_spec(name) is None]:
        yield Check(
            name="settings",
            result=CheckResult.SKIPPED,
            found=f"only a client is installed here ({missing[0]} is not)",
            advice=f"to run a server here: {install_hint('server')}",
        )
        yield _check_disk(Path.home())
        return
    from tessera.service.server.settings.sources import load_config  # noqa: PLC0415 - a client has no such libraries

    try:
        settings = load_config(file, os.environ)
    except InvalidInput as error:
        yield Check(
            name="settings",
            result=CheckResult.FAIL,
            found=str(error),
            advice="correct it; `tessera config print` shows what is in effect",
        )
        return
    source = f"{file} and the environment" if file else "the environment"
    yield Check(name="settings", result=CheckResult.OK, found=f"valid, from {source}")
    yield _check_database(settings)
    yield _check_disk(_data_folder(settings))
    yield _check_port(settings.listen, address)


def _check_database(settings: Config) -> Check:
    """Connect to the database that is configured, and compare its schema."""
    if not settings.database_url:
        return Check(
            name="database",
            result=CheckResult.SKIPPED,
            found="the embedded one, which a server starts and upgrades",
        )
    from tessera.db.schema.migrate import head_revision  # noqa: PLC0415
    from tessera.service.server.settings.database import open_database  # noqa: PLC0415

    try:
        database = open_database(settings)
        try:
            with database.read():
                pass
        finally:
            database.engine.dispose()
    except TesseraError as error:
        return Check(
            name="database",
            result=CheckResult.FAIL,
            found=str(error),
            advice="check TESSERA_DATABASE_URL, that PostgreSQL runs, and its schema",
        )
    return Check(
        name="database",
        result=CheckResult.OK,
        found=f"{settings.shown('database_url')} has schema {head_revision()}",
    )


def _data_folder(settings: Config) -> Path:
    from tessera.db.schema.embedded import default_directory  # noqa: PLC0415

    return Path(settings.database_directory or default_directory()).expanduser()


def _check_disk(folder: Path) -> Check:
    """Return the free space where data is, or would be."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    found = f"{free / GIB:.1f} GiB free at {place}"
    if free >= WARN_FREE_BYTES:
        return Check(name="disk", result=CheckResult.OK, found=found)
    return Check(
        name="disk",
        result=CheckResult.FAIL if free < FAIL_FREE_BYTES else CheckResult.WARN,
        found=found,
        advice="free some space, or prune old rounds and jobs with `tessera prune`",
    )


def _check_port(listen: str, address: str) -> Check:
    """Return whether a server could listen where the settings say, or already does."""
    host, _, port = listen.rpartition(":")
    if not port.isdecimal() or port == "0":
        return Check(name="port", result=CheckResult.SKIPPED, found=f"{listen} is no fixed port")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), int(port)))
    except OSError as error:
        if listen == address:
            return Check(name="port", result=CheckResult.OK, found=f"{listen} is in use, see above")
        return Check(
            name="port",
            result=CheckResult.WARN,
            found=f"no server can listen on {listen}: {error.strerror}",
            advice="choose another one with --listen or TESSERA_LISTEN",
        )
    return Check(name="port", result=CheckResult.OK, found=f"{listen} is free for a server")


def _check_training() -> Check:
    """Return the versions of the libraries for training here."""

    def describe(name: str) -> str:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return f"no {name}"

    found = ", ".join(map(describe, TRAINING_LIBRARIES))
    return Check(name="training", result=CheckResult.OK, found=f"{found} here")
