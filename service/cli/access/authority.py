"""``tessera ca``: makes the authority and the certificates of a server, and replaces them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final

import typer
from cryptography import x509
from cryptography.hazmat.primitives import hashes

from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.errors import InvalidInput, NotAllowed
from tessera.service.cli.render import Column, print_line, print_note, show_table
from tessera.service.server.security.authority import (
    SERVER_DAYS,
    KeyedCertificate,
    create_authority,
    format_certificate,
    issue_server_certificate,
    list_hosts,
)
from tessera.service.server.security.key_files import (
    parse_certificates,
    parse_key,
    read_authority,
    read_file,
    require_pair,
    write_private,
    write_public,
)

AUTHORITIES: Final = "ca.pem"
AUTHORITY_KEY: Final = "ca.key"
CERTIFICATE: Final = "server.pem"
KEY: Final = "server.key"
FILES: Final = (AUTHORITIES, AUTHORITY_KEY, CERTIFICATE, KEY)
"""The files of a directory of ``tessera ca``."""

MAX_DAYS: Final = 3650

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the authority.")]
Days = Annotated[
    int, typer.Option(min=1, max=MAX_DAYS, help="Lifetime of the server's certificate in days.")
]


def add_commands(app: typer.Typer) -> None:
    """Add the commands of the authority."""
    group = typer.Typer(
        help="Make and replace the certificates of a server and its authority.",
        no_args_is_help=True,
    )
    group.command("init")(init_authority)
    group.command("server")(renew_server)
    group.command("rotate")(rotate_authority)
    group.command("retire")(retire_authority)
    group.command("show")(show_authority)
    app.add_typer(group, name="ca", rich_help_panel="Servers")


def init_authority(
    directory: Directory,
    host: Annotated[
        list[str],
        typer.Option(help="Name or address by which clients call the server. May be repeated."),
    ],
    days: Days = SERVER_DAYS,
) -> None:
    """Make an authority, and a certificate of a server that it signs.

    DIR then holds ca.pem, which clients need, and ca.key, server.pem and server.key. Keep the keys
    secret.
    """
    server = make_authority(directory, host, days)
    print_line(str(directory / AUTHORITIES))
    print_note(
        f"the server's certificate is valid until {_day(server.certificate.not_valid_after_utc)}. Next:\n"
        f"  * give the server {directory / CERTIFICATE} and {directory / KEY};\n"
        f"  * give clients {directory / AUTHORITIES}, and set TESSERA_CA to its path;\n"
        f"  * keep {directory / AUTHORITY_KEY} secret: whoever has it can be any agent or server"
    )


def make_authority(
    directory: Path, hosts: Sequence[str], days: int = SERVER_DAYS
) -> KeyedCertificate:
    """Write the files of a new authority, and of a server's certificate, which is returned.

    Raises:
        NotAllowed: a file exists. InvalidInput: a host is wrong, or a file cannot be written.
    """
    existing = [name for name in FILES if (directory / name).exists()]
    if existing:
        raise NotAllowed(
            f"{directory} already holds {', '.join(existing)}; nothing was changed. Choose another"
            " directory, or use `tessera ca server` or `tessera ca rotate` to replace certificates"
        )
    now_s = SystemClock().wall_s()
    authority = create_authority(now_s)
    server = issue_server_certificate(authority, hosts, now_s, days)
    write_private(directory / AUTHORITY_KEY, authority.key_pem())
    _write_server(directory, server)
    write_public(directory / AUTHORITIES, authority.certificate_pem())
    return server


def renew_server(
    directory: Directory,
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name or address by which clients call the server. May be repeated. Default: those of"
            " the present certificate."
        ),
    ] = None,
    days: Days = SERVER_DAYS,
) -> None:
    """Make a new certificate of the server. A running server takes it up without a restart."""
    now_s = SystemClock().wall_s()
    authority = _read(directory, now_s).authority
    hosts = host or list_hosts(_server_certificate(directory))
    server = issue_server_certificate(authority, hosts, now_s, days)
    _write_server(directory, server)
    print_line(str(directory / CERTIFICATE))
    print_note(
        f"it is for {', '.join(hosts)}, and valid until"
        f" {_day(server.certificate.not_valid_after_utc)}. A server that reads it there takes it up"
        " without a restart"
    )


def rotate_authority(directory: Directory) -> None:
    """Make a new authority. Both it and the old one are trusted until ``tessera ca retire``."""
    path, key_path = directory / AUTHORITIES, directory / AUTHORITY_KEY
    trusted = parse_certificates(path, read_file(path))
    key = parse_key(key_path, read_file(key_path, private=True))
    # An interrupted rotation leaves a new authority without its key at the beginning: drop it.
    owned = [k for k, held in enumerate(trusted) if held.public_key() == key.public_key()]
    trusted = trusted[owned[0] :] if owned else trusted
    if len(trusted) > 1:
        raise NotAllowed(
            f"{path} already holds {len(trusted)} authorities; end that change first, with `tessera ca"
            f" retire {directory}`"
        )
    require_pair(trusted[0], path, key, key_path)
    authority = create_authority(SystemClock().wall_s())
    old = b"".join(map(format_certificate, trusted))
    write_public(path, authority.certificate_pem() + old)
    write_private(key_path, authority.key_pem())
    print_line(str(directory / AUTHORITIES))
    print_note(
        "it holds the new authority, and after it the old one. Next, in this order:\n"
        f"  1. give clients and agents (--ca) the new {AUTHORITIES}, and let agents renew their\n"
        "     certificates: they do so after two thirds of the lifetime, or at once at SIGUSR1;\n"
        f"  2. once all have (`tessera certificate list`), run `tessera ca server {directory}`, so that the\n"
        "     new authority signs the server's certificate;\n"
        f"  3. then run `tessera ca retire {directory}`"
    )


def retire_authority(directory: Directory) -> None:
    """Stop trusting the old authorities, after ``tessera ca rotate``."""
    present = _read(directory, SystemClock().wall_s())
    if len(present.trusted) == 1:
        raise NotAllowed(f"{directory / AUTHORITIES} holds one authority; there is no old one")
    if _server_certificate(directory).issuer != present.authority.certificate.subject:
        raise NotAllowed(
            f"the old authority signed {directory / CERTIFICATE}, so clients would no longer trust the"
            f" server; run `tessera ca server {directory}` first"
        )
    write_public(directory / AUTHORITIES, present.authority.certificate_pem())
    print_line(str(directory / AUTHORITIES))
    print_note("certificates of the old authority are no longer valid; give clients the new file")


@dataclass(frozen=True, slots=True)
class CertificateRow:
    """A certificate, as ``tessera ca show`` lists it."""

    what: str
    certificate: x509.Certificate


COLUMNS: Final[Sequence[Column[CertificateRow]]] = (
    Column("WHAT", lambda row: row.what),
    Column("NAMES", lambda row: _names(row.certificate)),
    Column("VALID UNTIL", lambda row: _day(row.certificate.not_valid_after_utc)),
    Column("SHA-256", lambda row: row.certificate.fingerprint(hashes.SHA256()).hex()),
)


def show_authority(directory: Directory) -> None:
    """List the authorities and the server's certificate."""
    path = directory / AUTHORITIES
    trusted = parse_certificates(path, read_file(path))
    rows = [
        CertificateRow("old authority" if k else "authority", certificate)
        for k, certificate in enumerate(trusted)
    ]
    if (directory / CERTIFICATE).exists():
        rows.append(CertificateRow("server", _server_certificate(directory)))
    show_table(rows, COLUMNS)


@dataclass(frozen=True, slots=True)
class StoredAuthority:
    """The authority of a directory, and all authorities that its clients trust."""

    authority: KeyedCertificate
    trusted: Sequence[x509.Certificate]


def _read(directory: Path, now_s: float) -> StoredAuthority:
    path = directory / AUTHORITIES
    if not path.exists():
        raise InvalidInput(
            str(path), "does not exist; make an authority with `tessera ca init DIR --host NAME`"
        )
    authority, content = read_authority(path, directory / AUTHORITY_KEY, now_s)
    return StoredAuthority(authority, parse_certificates(path, content))


def _server_certificate(directory: Path) -> x509.Certificate:
    path = directory / CERTIFICATE
    return parse_certificates(path, read_file(path))[0]


def _write_server(directory: Path, server: KeyedCertificate) -> None:
    """Write the key and the certificate. A server that reads in between keeps its earlier ones."""
    write_private(directory / KEY, server.key_pem())
    write_public(directory / CERTIFICATE, format_certificate(server.certificate))


def _names(certificate: x509.Certificate) -> str:
    return ", ".join(list_hosts(certificate)) or certificate.subject.rfc4514_string()


def _day(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d}"
