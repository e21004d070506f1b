"""Judgement of proofs: which bounds have a certificate that a script without our code accepts."""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from collections.abc import Iterator
from enum import StrEnum
from functools import lru_cache
from types import CodeType
from typing import Final

from tessera.formulation.certificate_check import check_certificate
from tessera.formulation.certificate_document import certificate_document
from tessera.formulation.certificates import Certificate
from tessera.formulation.errors import InvalidCertificate
from tessera.formulation.problem import Problem
from tessera.formulation.solution import Solution, SolveStatus
from tessera.simulator.provenance import ROOT
from tessera.solvers.answers import trivial_bound
from tessera.solvers.cpsat import CpSat

SCRIPT: Final = ROOT / "docs" / "examples" / "verify_certificate.py"
"""The script that users check certificates with."""


class ProofVerdict(StrEnum):
    """The verdict on the proof of an answer's bound."""

    NO_CLAIM = "no claim"  # there is no answer, or its bound is the trivial one
    CHECKED = "checked"  # the script accepts the certificate of exactly this bound
    WITHOUT = "without a certificate"
    REFUSED = "refused"  # there is a certificate, and the script or our checker refuses it


def judge_proof(problem: Problem, solution: Solution) -> ProofVerdict:
    """Return the verdict on the proof of the solution's bound.

    A bound counts if the answer is optimal, or if the bound is below the trivial one.
    """
    claims = solution.status is SolveStatus.OPTIMAL or solution.bound < trivial_bound(problem)
    if not solution.has_answer or not claims:
        return ProofVerdict.NO_CLAIM
    certificate = solution.certificate
    by_word = solution.proved_by == CpSat.name and not solution.is_certified
    if certificate is None or by_word:
        return ProofVerdict.WITHOUT
    return (
        ProofVerdict.CHECKED
        if _is_accepted(problem, solution, certificate)
        else ProofVerdict.REFUSED
    )


def _is_accepted(problem: Problem, solution: Solution, certificate: Certificate) -> bool:
    """Return whether our checker and the script both find the claimed bound proven."""
    try:
        proven = check_certificate(problem, certificate)
        document = certificate_document(
            problem, certificate, solution.choice, name="answer", bound=math.floor(solution.bound)
        )
    except InvalidCertificate:
        return False
    return proven <= solution.bound and script_accepts(json.dumps({"goals": [document]}))


def script_accepts(document: str) -> bool:
    """Return whether the script ends without a complaint. It runs in this process, to save time."""
    with _replaced_input(document), contextlib.redirect_stdout(io.StringIO()):
        try:
            exec(_script(), {"__name__": "__main__"})  # noqa: S102
        except SystemExit:
            return False
    return True


@lru_cache(maxsize=1)
def _script() -> CodeType:
    return compile(SCRIPT.read_text(), str(SCRIPT), "exec")


@contextlib.contextmanager
def _replaced_input(text: str) -> Iterator[None]:
    kept, sys.stdin = sys.stdin, io.StringIO(text)
    try:
        yield
    finally:
        sys.stdin = kept
