"""The certificate of the endpoints to which Hugging Face's Trainer reports.

An agent makes one when the first job needs it. It is signed by its own key, holds for the loopback
address alone, and lives in memory and in the private folders of gangs. A keeper that outlives the
agent goes on with the one that it has.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Final

from tessera.formulation.base.errors import Unavailable
from tessera.service.agent.files import write_text

VALID_DAYS: Final = 3650
"""Days for which a certificate is valid: longer than any job."""

OPENSSL_S: Final = 60.0
"""Seconds that the program openssl may take."""

CERTIFICATE_FILE: Final = "trainer-certificate.pem"
KEY_FILE: Final = "trainer-key.pem"

_BEGIN: Final = "-----BEGIN CERTIFICATE-----"
_OPENSSL: Final = (
    *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
    *("-days", str(VALID_DAYS), "-subj", "/CN=tessera-agent", "-batch"),
    *("-addext", "subjectAltName=IP:127.0.0.1"),
    *("-addext", "keyUsage=critical,digitalSignature,keyCertSign"),
    *("-keyout", "-", "-out", "-"),
)


@dataclass(frozen=True, slots=True)
class TrainerCertificate:
    """A certificate and its private key (PEM; the key is not shown)."""

    certificate: str
    key: str = field(repr=False)

    def write_files(self, folder: str) -> tuple[str, str]:
        """Write both into a folder. Return their paths. Only this user may read them."""
        paths = os.path.join(folder, CERTIFICATE_FILE), os.path.join(folder, KEY_FILE)
        for path, text in zip(paths, (self.certificate, self.key), strict=True):
            write_text(path, text)
        return paths


class CertificateSource:
    """The maker of an agent's certificate, which makes it when it is first needed."""

    def __init__(self, now_s: float) -> None:
        self._now_s = now_s
        self._certificate: TrainerCertificate | None = None
        self.remark = ""
        """The reason why there is no certificate, or "" as long as none was found missing."""

    def find(self) -> TrainerCertificate | None:
        """Return the certificate, or None if none can be made. It may take a second.

        Without one, jobs run as they do otherwise, but no endpoint receives their progress.
        """
        if self._certificate is None and not self.remark:
            try:
                self._certificate = make_certificate(self._now_s)
            except Unavailable as missing:
                self.remark = str(missing)
        return self._certificate


def make_certificate(now_s: float) -> TrainerCertificate:
    """Return a new certificate, by the package cryptography or else by the program openssl.

    Raises:
        Unavailable: this node has neither, or openssl failed.
    """
    if find_spec("cryptography") is not None:
        made = import_module("tessera.service.agent.keys").make_loopback_certificate(
            now_s, VALID_DAYS
        )
        return TrainerCertificate(*made)
    openssl = shutil.which("openssl")
    if openssl is None:
        raise Unavailable(
            "progress of Hugging Face's Trainer is not received, because this node can make no certificate;"
            " install the package cryptography or the program openssl"
        )
    return make_by_openssl(openssl)


def make_by_openssl(program: str) -> TrainerCertificate:
    """Return a new certificate that a program ``openssl`` makes. Raises Unavailable."""
    try:
        done = subprocess.run(
            (program, *_OPENSSL), capture_output=True, text=True, timeout=OPENSSL_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"progress of Trainer is not received: {program}: {error}") from error
    key, begin, rest = done.stdout.partition(_BEGIN)
    if done.returncode or not begin or "PRIVATE KEY-----" not in key:
        last = done.stderr.strip().rpartition("\n")[2][:200]
        raise Unavailable(f"progress of Trainer is not received: {program} failed: {last}")
    return TrainerCertificate(begin + rest, key)
