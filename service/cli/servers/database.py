"""Commands that access the database directly, not through a server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

import typer

from tessera.db.access.tokens import create_token
from tessera.db.schema.embedded import default_directory
from tessera.db.schema.engine import Database
from tessera.db.schema.migrate import head_revision, upgrade_schema
from tessera.db.store.store import Store
from tessera.formulation.base import limits
from tessera.formulation.base.access import AUDITED, AuditedCall, Role
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.secrets import USER_PREFIX
from tessera.formulation.records.access import TokenSpec
from tessera.service.cli import options
from tessera.service.cli.render import print_line, print_note
from tessera.service.server.convert.names import require_identifier
from tessera.service.server.rpc.access import make_token
from tessera.service.server.settings.config import Config
from tessera.service.server.settings.database import open_database
from tessera.service.server.settings.printing import without_password
from tessera.service.server.settings.sources import load_config

MAX_AGE_S: Final = 36_500 * 86_400.0
"""Seconds in a century. The database cannot represent times before its own calendar."""

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="File with the server's settings (TOML)."),
]


def add_commands(app: typer.Typer) -> None:
    """Add the commands on the database."""
    panel = "Servers"
    app.command("migrate", rich_help_panel=panel)(migrate_database)
    app.command("prune", rich_help_panel=panel)(prune_database)
    group = typer.Typer(
        help="Show the database's address, or create the first administrator's token in it.",
        no_args_is_help=True,
    )
    group.command("url")(print_url)
    group.command("admin-token")(create_admin_token)
    app.add_typer(group, name="db", rich_help_panel=panel)


def _open(settings: Config) -> Database:
    return open_database(settings)


def _place(settings: Config) -> str:
    """Return a description of the settings' database, without its password."""
    if settings.database_url:
        return without_password(settings.database_url)
    return f"the embedded database in {_directory(settings)}"


def _directory(settings: Config) -> Path:
    return Path(settings.database_directory or default_directory()).expanduser()


def migrate_database(config: ConfigFile = None) -> None:
    """Upgrade the database schema to this release, completely or not at all."""
    settings = load_config(config, os.environ)
    upgrade_schema(_open(settings))
    print_note(f"{_place(settings)} has the schema revision {head_revision()}")


def prune_database(
    older_than: Annotated[
        str, typer.Option(help="Keep everything younger than this, e.g. 30d.")
    ] = "30d",
    keep_rounds: Annotated[
        int,
        typer.Option(
            min=0,
            max=limits.MAX_ROWS,
            help="Number of the latest rounds to keep in each cluster, whatever their age, even below the"
            " 100 that servers keep.",
        ),
    ] = 100,
    config: ConfigFile = None,
    embedded: Annotated[
        bool,
        typer.Option("--embedded", help="Prune the embedded database. Needed if no URL is set."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the numbers of what would be deleted.")
    ] = False,
) -> None:
    """Delete old request ids, rounds, ended jobs and history, and print the number of each.

    Servers do this in the background, according to their retain_* settings. Entries of the audit log
    are kept for as long as the setting retain_audit_days says, whatever --older-than is. What deleted
    jobs have used stays in the sums that `tessera usage` reads.
    """
    age_s = options.parse_seconds("--older-than", older_than)
    if age_s > MAX_AGE_S:
        raise InvalidInput("--older-than", f"must be at most {MAX_AGE_S / 86400:,.0f}d")
    settings = load_config(config, os.environ)
    if not settings.database_url:
        _require_embedded(settings, chosen=embedded)
    elif embedded:
        raise InvalidInput(
            "--embedded",
            f"contradicts the settings, which name {_place(settings)}; omit one of the two",
        )
    print_note(f"{'would delete' if dry_run else 'deleting'} from {_place(settings)}")
    store = Store(_open(settings))
    work = store.count_old if dry_run else store.prune
    audit_s = settings.retention().audit_s
    for kind, count in work(age_s, keep_rounds, audit_s).items():
        print_line(f"{kind}\t{count}")


def _require_embedded(settings: Config, *, chosen: bool) -> None:
    """Refuse to delete from the embedded database unless the caller chose it and it exists."""
    place = _directory(settings)
    if not chosen:
        raise InvalidInput(
            "database",
            f"no URL is set; set TESSERA_DATABASE_URL to your server's database, or pass --embedded to prune"
            f" the embedded database in {place}",
        )
    if not (place / "PG_VERSION").exists():
        raise InvalidInput("--embedded", f"there is no embedded database in {place}")


def print_url(config: ConfigFile = None) -> None:
    """Print the database's URL with its password. The embedded database answers only while it is in use."""
    print_line(_open(load_config(config, os.environ)).url.replace("+psycopg2", "", 1))


def create_admin_token(
    name: Annotated[str, typer.Argument(help="Who uses the token, e.g. alice.")],
    expires: Annotated[
        str, typer.Option(metavar="DURATION", help="Time after which the token expires.")
    ] = "90d",
    config: ConfigFile = None,
) -> None:
    """Create an administrator's token directly in the database, and print it on stdout.

    Use it for the first administrator, who can then make other tokens with `tessera token create`.
    """
    settings = load_config(config, os.environ)
    lifetime_s = options.parse_seconds("--expires", expires)
    print_line(store_admin_token(_open(settings), name, lifetime_s))
    print_note(f"token {name} with the role admin, in {_place(settings)}; it cannot be shown again")


def store_admin_token(database: Database, name: str, lifetime_s: float) -> str:
    """Store a new administrator's token, with an entry in the audit log; return its text.

    Raises:
        InvalidInput: the name is wrong. AlreadyExists: a token of this name is not revoked.
    """
    made = make_token()
    spec = TokenSpec(
        id=made.id,
        name=require_identifier("NAME", name),
        secret_hash=made.secret_hash,
        role=Role.ADMIN,
        expires_s=SystemClock().wall_s() + lifetime_s,
    )
    call = AuditedCall(
        subject=f"user {os.getuid()} of the server's machine",
        role=Role.ADMIN,
        proof="database",
        method="Access.CreateToken",
        target=name,
        peer="",
    )
    audited = AUDITED.set(call)
    try:
        Store(database).change(create_token, spec, call.subject)
    finally:
        AUDITED.reset(audited)
    return made.text(USER_PREFIX)
