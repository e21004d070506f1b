"""The addresses of the server, and its callers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.client import is_on_this_machine
from tessera.formulation.base.access import PEOPLE
from tessera.formulation.base.errors import InvalidInput
from tessera.service.server.security.oidc import OidcSettings
from tessera.service.server.settings.values import Hours, Seconds

_TLS_NAMES: Final = {
    "tls_certificate": "server.pem",
    "tls_key": "server.key",
    "tls_client_authorities": "ca.pem",
    "ca_certificate": "ca.pem",
    "ca_key": "ca.key",
}
"""From a setting of TLS to the name of its file in ``tls_directory``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The files of TLS (PEM). A file that is not set is None."""

    certificate: Path
    key: Path
    client_authorities: Path | None
    ca_certificate: Path | None
    ca_key: Path | None


@dataclass(frozen=True, kw_only=True)
class AccessSettings:
    """The server's addresses, TLS, and the identity provider."""

    listen: str = "127.0.0.1:7070"
    """Host and port, or unix:/path. With port 0 the system chooses a free port."""
    socket: str = ""
    """Path of a Unix socket on which the server listens, too. Its directory must belong to the
    server's user alone. Callers there may do everything and need no token.
    """
    insecure: bool = False
    """Whether to listen on addresses that other machines can reach although callers need no token.
    Everybody who reaches the server may then do everything, so this must be allowed explicitly.
    """
    insecure_any_interface: bool = False
    """The earlier name of ``insecure``."""
    tls_directory: str = ""
    """Directory made by `tessera ca init`. It gives the next five settings their defaults: the files
    server.pem, server.key, ca.pem (twice) and ca.key in it.
    """
    tls_certificate: str = ""
    """The server's certificate with those of intermediate authorities (PEM). With it, the server
    takes only TLS connections, and every caller needs a token or a certificate. The files are read
    again when they change.
    """
    tls_key: str = ""
    """The private key of ``tls_certificate`` (PEM). Other users must not be able to read it."""
    tls_client_authorities: str = ""
    """The authorities whose certificates agents may have (PEM). With it, the server listens on
    ``mutual_listen``.
    """
    ca_certificate: str = ""
    """The certificate of the authority that signs the certificates of agents that enrol (PEM). If it
    is empty, agents cannot enrol: give them certificates of your own authority.
    """
    ca_key: str = ""
    """The private key of ``ca_certificate`` (PEM)."""
    mutual_listen: str = ""
    """Host and port for agents, where TLS asks for their certificates. If it is empty, the host of
    ``listen`` with the next port.
    """
    agent_certificate_hours: Hours = 24.0
    """Lifetime of the certificates of agents in hours. Agents renew them after two thirds of it."""
    authenticate: bool = False
    """Whether callers need a token even without TLS, for example because other users of this machine
    can reach the server, or a proxy ends TLS. With TLS they always do.
    """
    oidc_issuer: str = ""
    """URL of the identity provider whose tokens (JWT) are accepted in addition to the server's own."""
    oidc_audience: str = ""
    """The audience that these tokens must be for."""
    oidc_client_id: str = ""
    """The client id of the command line at the identity provider, for `tessera login`."""
    oidc_scopes: str = "openid profile offline_access"
    """The scopes that `tessera login` asks for."""
    oidc_roles_claim: str = "roles"
    """The claim that names the caller's roles or groups. Dots lead into nested claims."""
    oidc_tenants_claim: str = "tenants"
    """The claim that names the tenants of viewers and users."""
    oidc_clusters_claim: str = ""
    """The claim that names the clusters that the caller sees. If it is empty, all clusters."""
    oidc_skew_s: Seconds = 60.0
    """Largest difference in seconds between the clocks of the server and of the provider."""
    oidc_roles: str = ""
    """What the values of the roles claim stand for, e.g. "ml-admins=admin, everyone=user". If it is
    empty, they are the names of roles.
    """
    oidc_authorities: str = ""
    """File of the authorities (PEM) that the identity provider's certificate may be signed by. If it
    is empty, those of this machine.
    """
    oidc_default_role: str = ""
    """The role of callers without a known one. If it is empty, they are refused."""

    def uses_tls(self) -> bool:
        """Return whether the server takes only TLS connections."""
        return bool(self.tls_directory or self.tls_certificate)

    def asks_callers(self) -> bool:
        """Return whether callers must prove who they are."""
        return self.uses_tls() or self.authenticate

    def tls_files(self) -> TlsFiles | None:
        """Return the files of TLS, or None without it.

        Raises:
            InvalidInput: some are set and others that they need are not.
        """
        folder = Path(self.tls_directory) if self.tls_directory else None

        def path(setting: str, name: str) -> Path | None:
            given = getattr(self, setting)
            return Path(given) if given else folder / name if folder else None

        files = {setting: path(setting, name) for setting, name in _TLS_NAMES.items()}
        for first, second in (("tls_certificate", "tls_key"), ("ca_certificate", "ca_key")):
            for one, other in ((first, second), (second, first)):
                if files[one] and not files[other]:
                    raise InvalidInput(other, f"must be set, since {one} is; they belong together")
        if files["tls_certificate"] is None or files["tls_key"] is None:
            for setting in ("tls_client_authorities", "ca_certificate", "mutual_listen"):
                if getattr(self, setting):
                    raise InvalidInput("tls_certificate", f"must be set, since {setting} is")
            return None
        return TlsFiles(
            certificate=files["tls_certificate"],
            key=files["tls_key"],
            client_authorities=files["tls_client_authorities"],
            ca_certificate=files["ca_certificate"],
            ca_key=files["ca_key"],
        )

    def mutual_address(self) -> str:
        """Return the address for agents: ``mutual_listen``, or the port after that of ``listen``."""
        host, _, port = self.listen.rpartition(":")
        if self.mutual_listen or not port.isdecimal():
            return self.mutual_listen
        return f"{host}:{int(port) + 1 if int(port) else 0}"

    def oidc(self) -> OidcSettings | None:
        """Return the identity provider and what its tokens mean, or None. Raises InvalidInput."""
        if not self.oidc_issuer:
            return None
        return OidcSettings(
            issuer=self.oidc_issuer,
            audience=self.oidc_audience,
            client_id=self.oidc_client_id,
            scopes=self.oidc_scopes,
            roles_claim=self.oidc_roles_claim,
            tenants_claim=self.oidc_tenants_claim,
            clusters_claim=self.oidc_clusters_claim,
            skew_s=self.oidc_skew_s,
            role_names=self.role_names(),
            default_role=self.oidc_default_role,
            authorities=self.oidc_authorities,
        )

    def role_names(self) -> dict[str, str]:
        """Return the role for each value of the roles claim. Raises InvalidInput."""
        known, names = {str(role) for role in PEOPLE}, dict[str, str]()
        if not self.oidc_roles.strip():
            return names
        for part in self.oidc_roles.split(","):
            value, equals, role = (text.strip() for text in part.partition("="))
            if not value or not equals or role not in known:
                raise InvalidInput(
                    "oidc_roles",
                    f"{part.strip()!r} must be VALUE=ROLE, with a role of {', '.join(PEOPLE)}",
                )
            names[value] = role
        return names

    def require_safe_address(self) -> None:
        """Refuse to expose the server to other machines by accident. Raises InvalidInput."""
        allowed = self.insecure or self.insecure_any_interface or self.uses_tls()
        if not (allowed or is_on_this_machine(self.listen)):
            danger = (
                "tokens are sent in plain text" if self.authenticate else "callers need no token"
            )
            raise InvalidInput(
                "listen",
                f"{self.listen} can be reached from other machines, and {danger}; use TLS"
                " (make certificates with `tessera ca init DIR`, then add --tls DIR), listen on 127.0.0.1,"
                " or set insecure (--insecure) if you trust everybody on the network",
            )
