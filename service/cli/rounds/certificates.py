"""Commands on the certificates of rounds: check one, and write it for others to check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tessera.client import Client
from tessera.service.cli.client import CallFailed, Exit, connect
from tessera.service.cli.names import full_name
from tessera.service.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_SERVER,
    Cluster,
    Output,
    OutputOption,
    RoundNumber,
    Server,
)
from tessera.service.cli.render import (
    Column,
    format_number,
    print_line,
    show_message,
    show_table,
)
from tessera.service.cli.rounds.roundview import UNPROVEN_TEXT, proof_text, proven_bound
from tessera.v1 import scheduler_pb2

LIMIT_S: Final = 300.0
"""Time limit of a call. A large round takes long to state and to check."""


CHECK_COLUMNS: Final[Sequence[Column[scheduler_pb2.GoalCheck]]] = (
    Column("GOAL", lambda c: c.goal.name),
    Column("REACHED", lambda c: format_number(c.goal.objective), right=True),
    Column("BOUND", lambda c: proven_bound(c.goal), right=True),
    Column(
        "CERTIFIED",
        lambda c: format_number(c.proven) if c.HasField("proven") else UNPROVEN_TEXT,
        right=True,
    ),
    Column("UNIT", lambda c: c.goal.unit),
    Column("PROVED BY", lambda c: proof_text(c.goal)),
)
"""The columns of the goals of a round that was checked, in order."""


def verify_certificate(
    number: RoundNumber,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Check the certificate of a stored round's bound, in integers.

    The problem is stated again from the round's snapshot. A bound that is CP-SAT's word has a
    certificate of a larger one. If the round's objective has no certificate, or a wrong one, the exit
    code is 1.
    """
    name = full_name(cluster, "rounds", number)
    with connect(server) as client:
        answer = _verify(client, name, with_document=False)
    if output is Output.NAME:
        print_line(answer.round.name)
    elif not show_message(answer, output):
        show_table(answer.goals, CHECK_COLUMNS)
        for check in answer.goals:
            print_line(_explain(check))
    _require_proof(answer)


def export_certificate(
    number: RoundNumber, server: Server = DEFAULT_SERVER, cluster: Cluster = DEFAULT_CLUSTER
) -> None:
    """Write a round's certificate to stdout as JSON, for a program that trusts nothing of Tessera.

    It has the problem by classes of identical jobs, the answer and the proof, all in integers.
    `docs/examples/verify_certificate.py` checks it.
    """
    name = full_name(cluster, "rounds", number)
    with connect(server) as client:
        answer = _verify(client, name, with_document=True)
    _require_proof(answer)
    if not answer.document:
        raise CallFailed(
            f"there is no document of {name}: {answer.goals[-1].note}; `certificate verify` checks its bound",
            Exit.REFUSED,
        )
    print_line(answer.document.decode())


def _verify(client: Client, name: str, *, with_document: bool) -> scheduler_pb2.VerifyRoundResponse:
    request = scheduler_pb2.VerifyRoundRequest(name=name, with_document=with_document)
    return client.call(client.stubs.scheduler.VerifyRound, request, LIMIT_S)


def _explain(check: scheduler_pb2.GoalCheck) -> str:
    """Return in words what the check of a goal has shown."""
    goal = check.goal
    if check.problem:
        return f"{goal.name}: the certificate is not a proof of this round: {check.problem}"
    if check.HasField("proven"):
        proven = f"{format_number(check.proven)} {goal.unit}"
        outside = f" (but {check.note})" if check.note else ""
        if not goal.certified:
            return (
                f"{goal.name}: no answer is worth more than {proven}, by its certificate, which was checked"
                f" in integers{outside}; that none is worth more than {proven_bound(goal)} is by"
                f" {proof_text(goal)}"
            )
        return (
            f"{goal.name}: no answer is worth more than {proven}, by {proof_text(goal)}, which were checked"
            f" in integers{outside}"
        )
    if goal.bound_is_trivial:
        return f"{goal.name}: nothing is proven"
    by = proof_text(goal) or "a solver that left no certificate"
    return f"{goal.name}: the bound is not certified; it is by {by}"


def _require_proof(answer: scheduler_pb2.VerifyRoundResponse) -> None:
    """Fail if a certificate is wrong, or if the round's objective has none."""
    wrong = [check for check in answer.goals if check.problem]
    if wrong or not answer.goals or not answer.goals[-1].HasField("proven"):
        last = wrong[0] if wrong else answer.goals[-1] if answer.goals else None
        why = _explain(last) if last is not None else "the round has no goals"
        raise CallFailed(f"{answer.round.name} is not certified: {why}", Exit.REFUSED)
