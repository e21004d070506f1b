"""Requests for the output of jobs, and the answers of agents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tessera.formulation.records.logs import LogAnswer, LogRead, StartedJob


class LogStore(Protocol):
    """The place of requests for the output of jobs until they are answered.

    Every method is one transaction, and safe to call from any thread. Requests expire soon. A
    request notifies the channel ``tessera_logs`` with ``agent_key``, and its answer with
    ``answer_key`` (see ``formulation.records.logs``).
    """

    def find_start(self, cluster: str, job: str, generation: int) -> StartedJob:
        """Return a job and one of its starts.

        If ``generation`` is 0, it is the last one, but one that still waits for GPUs counts only if
        there is no other. Raises NotFound.
        """
        ...

    def ask_agent(self, cluster: str, read: LogRead, client: str) -> None:
        """Store a request for the agent of the node that it names.

        Raises:
            NotFound: the cluster. NodeSilent: the node has no agent, or a silent one.
            TooBusy: the client or the cluster has too many requests that wait.
        """
        ...

    def take_answer(self, read_id: str) -> LogAnswer | None:
        """Return the answer to a request and delete both, or return None if there is no answer."""
        ...

    def withdraw(self, read_id: str) -> None:
        """Delete a request that nobody waits for any more."""
        ...

    def silence_s(self, cluster: str, node: str) -> float | None:
        """Return the seconds since a node was heard, or None if it was never heard."""
        ...

    def find_pending(self, cluster: str, agent: str) -> list[LogRead]:
        """Return the requests that an agent has not answered, a bounded number, oldest first."""
        ...

    def store_answers(self, cluster: str, agent: str, answers: Sequence[LogAnswer]) -> None:
        """Store an agent's answers. Those to requests that it was not asked are ignored."""
        ...
