"""Certificates: proofs of a round's bound that anyone can check with integers alone.

A certificate is a tree. A branch divides all answers into those with at most a number of jobs on
some columns, and those with more. A leaf bounds the answers that reach it by weak duality: prices
of rows, each a rational number, turn the problem into one small choice for each job (Eq. 8 of
``docs/mathematics.md``). The bound of the tree is the largest bound of its leaves.

Identical jobs count together: a branch names columns of one job of each class, and means the same
columns of all jobs of that class. Two jobs are identical if they have the same columns, value by
value and use by use, use the same rows by waiting, and both must run or both may wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tessera.formulation.base.errors import InvalidCertificate


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceLeaf:
    """A bound by prices, which are integers over the certificate's ``denominator``.

    ``prices`` maps rows to the prices of one unit, at least 0; a row that is not named is free.
    ``branch_prices`` has a price, at least 0, for each branch on the way from the root to this leaf,
    in this order. A branch is a row, too: ``sum x <= most`` below it, ``-sum x <= -(most + 1)``
    above it, where the sum is over the branch's columns.

    Without ``knapsacks``, the bound is the sum over jobs of the best margin (waiting has margin 0),
    plus what all rows cost.

    With ``knapsacks``, these rows are not priced, and no column uses two of them. Each is solved
    exactly instead. ``job_prices`` maps the first job of each class to the price of running a job of
    that class; jobs that are not named have 0, and only jobs that must run may have a negative one.
    The bound is the sum of all jobs' prices, plus the most that the margins less job prices of
    columns can add up to within each row (of each job at most one column in each row, or none),
    plus the best margin less job price, if above 0, of each job among columns that use none of
    these rows, plus what the priced rows cost.
    """

    prices: tuple[tuple[int, int], ...]  # (row, price), rows rise
    branch_prices: tuple[int, ...] = ()
    knapsacks: tuple[int, ...] = ()  # rows, rising
    job_prices: tuple[tuple[int, int], ...] = ()  # (job, price), jobs rise


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Two cases: ``most`` or fewer jobs run on ``columns``, or more do.

    ``columns`` (rising) belong to the first job of their class; the same columns of identical jobs
    count, too.
    """

    columns: tuple[int, ...]
    most: int
    below: CertificateNode
    above: CertificateNode


CertificateNode = PriceLeaf | Branch


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A proof of an upper bound on the objective of a problem, in the problem's integers.

    ``bound`` is what it is said to prove. A checker computes the bound of each leaf exactly, divides
    it by ``denominator``, and rounds it down to a multiple of the greatest common divisor of all
    values, because every objective is one. It may first round each capacity down to a multiple of
    the greatest common divisor of the amounts of its row, and price what is left.

    A round in which waiting uses rows is proven on the problem with waiting as a column (see
    ``tessera.solvers.exact.waiting_columns``): there, each such job has one more column, its last, of
    value 0, with these uses, and must take one of its columns.
    """

    bound: int
    denominator: int
    root: CertificateNode = field(repr=False)

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], Certificate], tuple[dict[str, Any]]]:
        """Pickle the flat form: a tree may be deeper than pickling can recurse."""
        return certificate_from_plain, (certificate_to_plain(self),)


def certificate_to_plain(certificate: Certificate) -> dict[str, Any]:
    """Return the certificate as plain values for JSON, with its tree as a flat list of nodes.

    The first node is the root. ``below`` and ``above`` of a branch are places of later nodes. What
    is empty is left out.
    """
    nodes: list[dict[str, Any]] = []
    open_nodes: list[tuple[CertificateNode, dict[str, Any], str]] = []

    def add(node: CertificateNode) -> int:
        if isinstance(node, PriceLeaf):
            plain = {
                "prices": [list(pair) for pair in node.prices],
                "branch_prices": list(node.branch_prices),
                "knapsacks": list(node.knapsacks),
                "job_prices": [list(pair) for pair in node.job_prices],
            }
            nodes.append({name: values for name, values in plain.items() if values})
        else:
            branch: dict[str, Any] = {"columns": list(node.columns), "most": node.most}
            nodes.append(branch)
            open_nodes.extend([(node.above, branch, "above"), (node.below, branch, "below")])
        return len(nodes) - 1

    add(certificate.root)
    while open_nodes:
        node, parent, side = open_nodes.pop()
        parent[side] = add(node)
    return {"bound": certificate.bound, "denominator": certificate.denominator, "nodes": nodes}


def certificate_from_plain(plain: dict[str, Any]) -> Certificate:
    """Return the certificate that ``certificate_to_plain`` wrote.

    Raises:
        InvalidCertificate: the nodes are not those of a tree, or a number is not an integer.
    """
    try:
        nodes: list[CertificateNode] = []
        last = len(plain["nodes"]) - 1
        for place, node in zip(range(last, -1, -1), reversed(plain["nodes"]), strict=True):
            nodes.append(_branch(node, place, nodes) if "columns" in node else _leaf(node))
        bound, denominator = _whole([plain["bound"], plain["denominator"]])
        return Certificate(bound=bound, denominator=denominator, root=nodes[-1])
    except (KeyError, IndexError, TypeError, ValueError) as wrong:
        raise InvalidCertificate(f"it is not well formed: {wrong!r}") from wrong


def _branch(plain: dict[str, Any], place: int, later: list[CertificateNode]) -> Branch:
    """Return the branch at ``place``. ``later`` has the later nodes, the last of them first."""
    last = place + len(later)
    most, below, above = _whole([plain["most"], plain["below"], plain["above"]])
    if not (place < below <= last and place < above <= last):
        raise InvalidCertificate(f"the cases of node {place} are not later nodes")
    return Branch(
        columns=_whole(plain["columns"]),
        most=most,
        below=later[last - below],
        above=later[last - above],
    )


def _leaf(plain: dict[str, Any]) -> PriceLeaf:
    return PriceLeaf(
        prices=_pairs(plain.get("prices", ())),
        branch_prices=_whole(plain.get("branch_prices", ())),
        knapsacks=_whole(plain.get("knapsacks", ())),
        job_prices=_pairs(plain.get("job_prices", ())),
    )


def _pairs(values: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((row, price) for row, price in map(_whole, values))


def _whole(values: Sequence[int]) -> tuple[int, ...]:
    """Return ``values``, which must be integers."""
    for value in values:
        if type(value) is not int:
            raise TypeError(f"{value!r} is not an integer")
    return tuple(values)
