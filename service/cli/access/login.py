"""``tessera login``, ``logout`` and ``whoami``: how a user proves who it is to a server."""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from tessera.client import (
    ChannelRefused,
    ChannelSettings,
    Client,
    Login,
    forget_login,
    load_login,
    save_login,
)
from tessera.formulation.base.errors import InvalidInput, TesseraError
from tessera.formulation.base.secrets import JOIN_PREFIX, USER_PREFIX, parse_token
from tessera.service.cli.access.deviceflow import DeviceFlow, read_account, read_unverified_claims
from tessera.service.cli.access.renewal import make_login, read_refresh
from tessera.service.cli.client import CallFailed, Exit, connect
from tessera.service.cli.options import DEFAULT_SERVER, Output, OutputOption, Server
from tessera.service.cli.render import (
    format_time,
    print_line,
    print_note,
    show_facts,
    show_message,
)
from tessera.v1 import access_pb2

PANEL: Final = "Access"

SYSTEM: Final = "system"
"""The value of ``--ca`` for the authorities that this machine trusts."""

MAX_TOKEN_CHARS: Final = 8192
"""Longest token. The server refuses longer ones."""

NO_PROVIDER: Final = (
    "this server has no identity provider; use `tessera login --token` with a token that an"
    " administrator made for you with `tessera token create`"
)


def add_commands(app: typer.Typer) -> None:
    """Add ``login``, ``logout`` and ``whoami``."""
    app.command("login", rich_help_panel=PANEL)(log_in)
    app.command("logout", rich_help_panel=PANEL)(log_out)
    app.command("whoami", rich_help_panel=PANEL)(show_caller)


def log_in(
    token: Annotated[
        bool,
        typer.Option(
            "--token",
            help="Save a token instead. It is read from stdin, or asked for without being shown.",
        ),
    ] = False,
    ca: Annotated[
        str,
        typer.Option(
            metavar="FILE|system",
            help="Authorities that signed the server's certificate: a file (PEM), or `system` for those of"
            " this machine. Saved with the login. Default: TESSERA_CA, or those of the last login.",
        ),
    ] = "",
    server: Server = DEFAULT_SERVER,
) -> None:
    """Log in to a server, with a code that you confirm in a browser on any device.

    The login is saved in a file that only you can read, and renewed while you use it. TESSERA_TOKEN takes
    precedence over it.
    """
    try:
        authorities = _find_authorities(ca, server)
        login = _read_login(authorities) if token else _ask_provider(authorities, server)
        caller = _get_caller(server, login)
        save_login(server, login)
    except ChannelRefused as error:
        raise CallFailed(str(error), Exit.REFUSED) from None
    print_note(f"logged in to {server} as {caller.subject}, with the role {caller.role}")
    _note_precedence()


def log_out(server: Server = DEFAULT_SERVER) -> None:
    """Forget the login at a server, and end it at the identity provider if that is possible."""
    try:
        login = load_login(server)
        forget_login(server)
    except ChannelRefused as error:
        raise CallFailed(str(error), Exit.REFUSED) from None
    if login is None:
        print_note(f"there was no login at {server}")
    else:
        _end_session(login)
        print_note(f"logged out of {server}")
    _note_precedence()


def show_caller(server: Server = DEFAULT_SERVER, output: OutputOption = Output.TABLE) -> None:
    """Show who you are to a server: your name, role, tenants and clusters."""
    with connect(server) as client:
        caller = client.call(client.stubs.access.GetCaller, access_pb2.GetCallerRequest())
    if output is Output.NAME:
        print_line(caller.subject)
    elif not show_message(caller, output):
        show_facts(
            (
                ("SUBJECT", caller.subject),
                ("ROLE", caller.role),
                ("TENANTS", "all" if caller.all_tenants else ", ".join(caller.tenants) or "none"),
                (
                    "CLUSTERS",
                    "all" if caller.all_clusters else ", ".join(caller.clusters) or "none",
                ),
                ("EXPIRES", format_time(caller.expire_time) or "never"),
            )
        )
    if not caller.verified:
        print_note(f"{server} does not ask callers who they are, so everybody is {caller.subject}")


def _find_authorities(ca: str, server: str) -> str:
    """Return the authorities of the server's certificate, or "" for plain text."""
    if ca == SYSTEM:
        return ca
    if ca:
        if not os.path.isfile(ca):
            raise InvalidInput(
                "--ca", "there is no such file; name a file of certificates, or `system`"
            )
        return str(Path(ca).resolve())
    try:
        last = load_login(server)
    except ChannelRefused:
        last = None  # a damaged file is reported when the login is saved
    given = os.environ.get("TESSERA_CA", "")
    if os.path.isfile(given):  # else it is `system`, or the certificates themselves
        given = str(Path(given).resolve())
    return given or (last.authorities if last is not None else "")


def _read_login(authorities: str) -> Login:
    """Return the login with the token that the user gives."""
    if sys.stdin.isatty():
        text = getpass.getpass("Token: ").strip()
    else:
        text = sys.stdin.read(MAX_TOKEN_CHARS + 2).strip()
    if text.startswith(f"{JOIN_PREFIX}_"):
        raise InvalidInput(
            "--token", "this is a join token, which is for agents: `tessera-agent` takes it"
        )
    if len(text) > MAX_TOKEN_CHARS or read_unverified_claims(text) is None:
        parse_token("--token", text, USER_PREFIX)
    return Login(authorities=authorities, token=text)


def _ask_provider(authorities: str, server: str) -> Login:
    """Return the login that the user confirms at the server's identity provider."""
    with connect(server, _settings(authorities)) as client:
        way = client.call(client.stubs.access.GetLogin, access_pb2.GetLoginRequest())
    if not way.issuer:
        raise CallFailed(NO_PROVIDER, Exit.REFUSED)
    account = read_account(way.issuer, way.audience, way.client_id, way.scopes)
    flow = DeviceFlow(account)
    code = flow.begin()
    print_note(f"open {code.url} and enter the code {code.user_code}")
    if code.full_url:
        print_note(f"or open {code.full_url} and check that it shows this code")
    print_note("waiting for you to confirm ... (Ctrl-C ends this)")
    return make_login(authorities, account, flow.wait_for_user(code))


def _get_caller(server: str, login: Login) -> access_pb2.Caller:
    """Return who the server says the user is. Raises CallFailed: nobody, or it does not ask."""
    with connect(server, _settings(login.authorities, login.token)) as client:
        caller = _call_once(client)
    if not caller.verified:
        raise CallFailed(
            f"{server} does not ask callers who they are, so there is no need to log in; nothing was saved",
            Exit.REFUSED,
        )
    return caller


def _call_once(client: Client) -> access_pb2.Caller:
    return client.call(client.stubs.access.GetCaller, access_pb2.GetCallerRequest())


def _settings(authorities: str, token: str = "") -> ChannelSettings:
    """Return the settings of a channel without the login that is to be replaced."""
    return ChannelSettings(
        authorities=authorities,
        token=token,
        server_name=os.environ.get("TESSERA_SERVER_NAME", ""),
    )


def _end_session(login: Login) -> None:
    """End the login at the identity provider. A failure is only a note: the file is clean."""
    if not login.refresh:
        return
    try:
        account, refresh_token = read_refresh(login.refresh)
        DeviceFlow(account).revoke(refresh_token)
    except TesseraError as error:
        print_note(f"the identity provider was not informed: {error}")


def _note_precedence() -> None:
    for variable in ("TESSERA_TOKEN", "TESSERA_TOKEN_FILE", "TESSERA_CERTIFICATE"):
        if os.environ.get(variable):
            print_note(f"{variable} is set and takes precedence over logins; unset it to use them")
