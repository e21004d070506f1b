"""The door of the endpoint for Hugging Face's Trainer: it opens when a program first knocks.

The endpoint needs TLS and a thread, which most programs never use. Until one connects, there is just
a socket that listens.
"""

from __future__ import annotations

import os
import select
import socket
from collections import deque
from urllib.parse import quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from tessera.service.agent.keeper.spec import KeeperSpec
    from tessera.service.agent.keeper.trainer_endpoint import TrainerEndpoint

HOST = "127.0.0.1"
PORT_WORD = "@TESSERA_TRAINER_PORT@"
"""The word in the program's environment that stands for the endpoint's port."""

TOKEN_FILE = "trainer-token"  # noqa: S105 - the name of a file
AUTHORITY_FILE = "trainer-authority.pem"
BACKLOG = 128
MAX_REPORTS = 1000
"""The number of reports that wait to be taken. Of more, the oldest are dropped."""


def endpoint_path(job: str) -> str:
    """Return the path of a job's endpoint, which has the form of Kubeflow's."""
    name = quote(job, safe="")
    return f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/tessera/trainjobs/{name}/status"


def trainer_variables(job: str, inbox: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which the callback of transformers finds the endpoint.

    The files of the authority and of the token are in ``inbox``. If the program's ``environment``
    names a proxy, requests to the endpoint pass it by.
    """
    variables = {
        "KUBEFLOW_TRAINER_SERVER_URL": f"https://{HOST}:{PORT_WORD}{endpoint_path(job)}",
        "KUBEFLOW_TRAINER_SERVER_CA_CERT": os.path.join(inbox, AUTHORITY_FILE),
        "KUBEFLOW_TRAINER_SERVER_TOKEN": os.path.join(inbox, TOKEN_FILE),
    }
    if any(name.lower() in ("https_proxy", "all_proxy") for name in environment):
        for name in ("no_proxy", "NO_PROXY"):
            variables[name] = ",".join(filter(None, (environment.get(name), HOST)))
    return variables


class TrainerDoor:
    """The socket of the endpoint, and the reports that came through it."""

    def __init__(self, spec: KeeperSpec) -> None:
        """Listen, if this member leads and has a certificate. Raises OSError."""
        self._spec = spec
        self._listener: socket.socket | None = None
        self._endpoint: TrainerEndpoint | None = None
        self._reports: deque[tuple[int, float | None, int | None]] = deque(maxlen=MAX_REPORTS)
        self._problem = ""
        self.port = 0
        if spec.leads and all(spec.certificate):
            self._listener = socket.create_server((HOST, 0), backlog=BACKLOG)
            self._listener.setblocking(False)
            self.port = self._listener.getsockname()[1]

    @property
    def remark(self) -> str:
        """Return the latest problem that was not a client's, or ""."""
        return self._problem or (self._endpoint.remark if self._endpoint else "")

    def take_reports(self) -> list[tuple[int, float | None, int | None]]:
        """Return (iterations done, loss, all iterations) of new reports; open up for a knock."""
        if self._listener is None:
            return []
        if self._endpoint is None and select.select([self._listener], (), (), 0)[0]:
            self._open(self._listener)
        reports = []
        while self._reports:
            reports.append(self._reports.popleft())
        return reports

    def close(self) -> None:
        """End the endpoint, or just stop listening."""
        if self._endpoint is not None:
            self._endpoint.close()
        elif self._listener is not None:
            self._listener.close()
        self._listener = self._endpoint = None

    def _open(self, listener: socket.socket) -> None:
        from tessera.service.agent.keeper.trainer_endpoint import (  # noqa: PLC0415 - few need it
            TrainerEndpoint,
        )

        certificate, key = self._spec.certificate
        try:
            self._endpoint = TrainerEndpoint(
                certificate=certificate,
                key=key,
                token=self._spec.trainer_token,
                path=endpoint_path(self._spec.job),
                accept=lambda *report: self._reports.append(report),
            )
        except OSError as error:  # ssl.SSLError is one
            self._problem = f"progress of Trainer is not received: {error}"
            self._listener = None
            listener.close()
            return
        self._endpoint.start(listener)
