"""The server's side of TLS: credentials of a port, from files that may be replaced while it serves."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, cast

import grpc

from tessera.formulation.base.errors import InvalidInput
from tessera.service.server.security.key_files import (
    parse_certificates,
    parse_key,
    read_file,
    require_authorities,
    require_current,
    require_pair,
)

DAY_S: Final = 86_400.0
WARNING_S: Final = 7 * DAY_S
"""The time before the end of a certificate from which the log warns of it once a day."""

RETRY_S: Final = 60.0
"""The time after which refused files are read again: they may have been valid too early."""

FilesState = tuple[tuple[int, ...], ...]
"""Times of the last changes of content and of rights in nanoseconds, size and inode of each file. It
is () for a file that is missing.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFiles:
    """The files (PEM) of a port's certificate, with its intermediates, and of its key.

    ``client_authorities`` has the authorities of the clients' certificates, which are then
    required. If it is None, clients are not asked for any.
    """

    certificate: Path
    key: Path
    client_authorities: Path | None = None

    def paths(self) -> tuple[Path, ...]:
        """Return the files."""
        own = (self.certificate, self.key)
        return own if self.client_authorities is None else (*own, self.client_authorities)

    def state(self) -> FilesState:
        """Return what changes with the content of the files."""
        return tuple(_file_state(path) for path in self.paths())


class ServingCertificate:
    """The certificate of a port. New handshakes follow its files; old connections stay open.

    The files are looked at in each handshake, and only read if they have changed. If the new ones
    do not fit together, e.g. because they are being written, the earlier ones stay in use.
    """

    def __init__(
        self, files: CertificateFiles, wall_s: Callable[[], float], log: logging.Logger
    ) -> None:
        """Read the files.

        Raises:
            InvalidInput: they are wrong; says what to do.
        """
        self._files, self._wall_s, self._log = files, wall_s, log
        self._lock = threading.Lock()
        self._warned_s = -float("inf")
        self._state = files.state()
        self._refused_state: FilesState | None = None
        self._retry_s = -float("inf")
        self._configuration, self._expires_s = self._read()
        self._warn_of_end()

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials for ``add_secure_port`` of one port."""
        fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", self.fetch)  # or None
        return grpc.dynamic_ssl_server_credentials(
            self._configuration,
            fetch,
            require_client_authentication=self._files.client_authorities is not None,
        )

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the configuration for a handshake, or None if it is the same as before."""
        with self._lock:
            self._warn_of_end()
            state, now_s = self._files.state(), self._wall_s()
            was_refused = state == self._refused_state
            if state == self._state or (was_refused and now_s < self._retry_s):
                return None
            try:
                self._configuration, self._expires_s = self._read()
            except InvalidInput as error:
                self._refused_state, self._retry_s = state, now_s + RETRY_S
                if not was_refused:
                    self._log.error(
                        "the earlier certificate stays in use, because the new files are not right",
                        extra={"event": "certificate_kept", "error": error},
                    )
                return None
            self._state, self._refused_state = state, None
            self._log.info(
                "serving a new certificate",
                extra={"event": "certificate_replaced", "ends": _format_moment(self._expires_s)},
            )
            self._warned_s = -float("inf")
            self._warn_of_end()
            return self._configuration

    def _read(self) -> tuple[grpc.ServerCertificateConfiguration, float]:
        """Return the configuration that the files describe, and when their certificate ends."""
        files, now_s = self._files, self._wall_s()
        chain_pem = read_file(files.certificate)
        key_pem = read_file(files.key, private=True)
        chain = parse_certificates(files.certificate, chain_pem)
        require_pair(chain[0], files.certificate, parse_key(files.key, key_pem), files.key)
        require_current(chain[0], files.certificate, now_s)
        roots = None
        if files.client_authorities is not None:
            roots = read_file(files.client_authorities)
            authorities = parse_certificates(files.client_authorities, roots)
            require_authorities(authorities, files.client_authorities, now_s)
        configuration = grpc.ssl_server_certificate_configuration([(key_pem, chain_pem)], roots)
        return configuration, chain[0].not_valid_after_utc.timestamp()

    def _warn_of_end(self) -> None:
        """Log once a day that the certificate ends soon, or has ended."""
        now_s = self._wall_s()
        left_s = self._expires_s - now_s
        if left_s >= WARNING_S or now_s - self._warned_s < DAY_S:
            return
        self._warned_s = now_s
        self._log.log(
            logging.WARNING if left_s > 0 else logging.ERROR,
            "the server's certificate ends soon; replace it, e.g. with `tessera ca server`"
            if left_s > 0
            else "the server's certificate has ended; replace it, e.g. with `tessera ca server`",
            extra={
                "event": "certificate_ends",
                "file": self._files.certificate,
                "left_s": left_s,
                "ends": _format_moment(self._expires_s),
            },
        )


def _file_state(path: Path) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)


def _format_moment(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M} UTC"
