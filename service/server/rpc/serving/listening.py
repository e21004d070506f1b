"""The addresses on which a server listens, and the credentials of each."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from tessera.formulation.base.errors import InvalidInput
from tessera.service.server.security.serving import CertificateFiles, ServingCertificate
from tessera.service.server.settings.access import TlsFiles
from tessera.service.server.settings.config import Config

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListeningAddress:
    """An address on which a server listens, from a ``setting``. Without credentials, it has no TLS."""

    setting: str
    address: str
    credentials: grpc.ServerCredentials | None = None

    def bind(self, server: grpc.aio.Server) -> int:
        """Let ``server`` listen here; return the port, which is 1 for a Unix socket.

        Raises:
            InvalidInput: the address cannot be bound.
        """
        try:
            if self.credentials is None:
                return server.add_insecure_port(self.address)
            return server.add_secure_port(self.address, self.credentials)
        except RuntimeError as error:
            raise InvalidInput(
                self.setting,
                f"cannot bind {self.address}; another program may use it: stop that one, or listen on"
                " another address",
            ) from error


def listening_addresses(config: Config, wall_s: Callable[[], float]) -> list[ListeningAddress]:
    """Return the addresses of the settings: that of ``listen`` first.

    Raises:
        InvalidInput: a file of TLS is wrong, or others can reach the Unix socket.
    """
    tls = config.tls_files()
    if tls is None:
        addresses = [ListeningAddress(setting="listen", address=config.listen)]
    else:
        addresses = _tls_addresses(config, tls, wall_s)
    if config.socket:
        path = Path(config.socket).absolute()
        _require_private_directory(path.parent)
        addresses.append(ListeningAddress(setting="socket", address=f"unix:{path}"))
    return addresses


def _tls_addresses(
    config: Config, tls: TlsFiles, wall_s: Callable[[], float]
) -> list[ListeningAddress]:
    """Return the address for all callers, and that for agents with certificates if there is one."""

    def listening(setting: str, address: str, files: CertificateFiles) -> ListeningAddress:
        credentials = ServingCertificate(files, wall_s, log).credentials()
        return ListeningAddress(setting=setting, address=address, credentials=credentials)

    own = CertificateFiles(certificate=tls.certificate, key=tls.key)
    addresses = [listening("listen", config.listen, own)]
    mutual = config.mutual_address()
    if tls.client_authorities is not None and mutual:
        files = CertificateFiles(
            certificate=tls.certificate, key=tls.key, client_authorities=tls.client_authorities
        )
        addresses.append(listening("mutual_listen", mutual, files))
    return addresses


def _require_private_directory(path: Path) -> None:
    """Make a directory that only this user can enter, or check that it is one. Raises InvalidInput."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise InvalidInput(
            "socket",
            f"other users can enter {path}, and whoever reaches the socket may do everything; run"
            f" chmod 700 {path}, or choose another directory",
        )
