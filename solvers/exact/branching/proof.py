"""The certificate of a search tree: exact prices of its leaves, checked against the whole problem.

What the search left out by its loss at the first prices could become attractive at the prices of a
leaf. So the tree hangs below two more branches. The first says that no job runs on the columns that
do become attractive, and the second that the jobs which would rather wait do run. Their other cases
are bounded at the first prices, where these losses are large.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from tessera.formulation.answer.certificates import Branch, Certificate, CertificateNode, PriceLeaf
from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.round.problem import Problem
from tessera.solvers.exact.branching.joining import JoinedCore, find_classes
from tessera.solvers.exact.prices import PricedProblem, leaf_prices, price_scale, whole_prices
from tessera.solvers.kernels.branching import INNER, MOST_DEPTH, SearchTree
from tessera.solvers.kernels.leaves import bound_leaves

MOST_EVALUATIONS: Final = 300_000_000
"""Columns times leaves that are evaluated for a certificate: about a second."""
_SAFE: Final = 2.0**55
"""Limit of what all rows cost, over the denominator: no sum then overflows."""


def certify_tree(
    problem: Problem,
    priced: PricedProblem,
    core: JoinedCore,
    tree: SearchTree,
    nodes: int,
) -> Certificate | None:
    """Return the certificate of the search, or None if its numbers or its size are too large.

    Its bound is exact. It may be slightly above what the search computed.
    """
    scale = price_scale(problem)
    leaves = np.flatnonzero(tree.state[:nodes] != INNER)
    prices = whole_prices(problem, tree.prices[leaves], scale)
    first = whole_prices(problem, priced.prices, scale)
    sold = np.vstack((prices, first)) @ problem.capacity.astype(np.float64)
    too_large = sold.max(initial=0.0) > _SAFE
    if too_large or len(leaves) * len(problem.cell) > MOST_EVALUATIONS:
        return None
    whole = prices.astype(np.int64)
    bound, drop, idle = (np.zeros(len(leaves), dtype=np.int64) for _ in range(3))
    path = np.zeros((len(leaves), MOST_DEPTH), dtype=np.int64)
    dropped = np.zeros(len(problem.cell), dtype=np.bool_)
    idles = np.zeros(len(problem.jobs), dtype=np.bool_)
    bound_leaves(
        core.program,
        tree,
        leaves,
        whole,
        scale,
        core.around,
        dropped,
        idles,
        bound,
        drop,
        idle,
        path,
    )
    tree_of = _TreeBuilder(core, tree, leaves, whole, path)
    tails = _Tails(problem, first, scale, dropped, idles)
    before = [
        tuple(price for price, has in ((d, dropped.any()), (i, idles.any())) if has)
        for d, i in zip(drop.tolist(), idle.tolist(), strict=True)
    ]
    root, outside = tails.around(tree_of.build(before))
    best = max(int(bound.max(initial=np.iinfo(np.int64).min)) // scale, outside)
    return Certificate(bound=best, denominator=scale, root=root)


class _TreeBuilder:
    """The nodes of a certificate, from those of the search."""

    def __init__(
        self, core: JoinedCore, tree: SearchTree, leaves: Ints, prices: Ints, path: Ints
    ) -> None:
        self._core, self._tree = core, tree
        self._leaves, self._prices, self._path = leaves, prices, path

    def build(self, before: list[tuple[int, ...]]) -> CertificateNode:
        """Return the root. ``before`` has the prices of the branches above it, for each leaf."""
        tree, columns = self._tree, self._core.columns
        built: dict[int, CertificateNode] = {}
        for at, node in enumerate(self._leaves.tolist()):
            own = self._path[at, : self._depth(node)][::-1]
            built[node] = PriceLeaf(
                prices=leaf_prices(self._prices[at].tolist()),
                branch_prices=(*before[at], *own.tolist()),
            )
        # Children have higher numbers than their parents, and come in pairs.
        for node in range(max(built), 0, -1):
            if tree.above[node]:
                parent = int(tree.parent[node])
                built[parent] = Branch(
                    columns=(int(columns[tree.column[node]]),),
                    most=int(tree.most[node]),
                    below=built[node - 1],
                    above=built[node],
                )
        return built[0]

    def _depth(self, node: int) -> int:
        depth = 0
        while self._tree.parent[node] >= 0:
            node, depth = int(self._tree.parent[node]), depth + 1
        return depth


class _Tails:
    """The cases that the search left out: they lose much at the first prices."""

    def __init__(
        self, problem: Problem, prices: Floats, scale: int, dropped: Bools, idles: Bools
    ) -> None:
        self._problem, self._scale = problem, scale
        # Identical jobs have the same marks.
        marked = idles.copy()
        marked[problem.column_job[dropped]] = True
        first, label = find_classes(problem, marked)
        self._size = np.bincount(label[label >= 0], minlength=len(first))
        of_first = np.zeros(len(problem.jobs), dtype=np.bool_)
        of_first[first] = True
        self._dropped = np.flatnonzero(dropped & of_first[problem.column_job])
        self._idles = np.flatnonzero(idles & of_first)
        self._class_of = label
        self._prices = prices.astype(np.int64)
        cost = np.bincount(
            problem.usage_column,
            weights=prices[problem.row] * problem.amount,
            minlength=len(problem.cell),
        )
        self._margin = problem.value * scale - cost.astype(np.int64)
        self._best = _best_margins(problem, self._margin)

    def around(self, root: CertificateNode) -> tuple[CertificateNode, int]:
        """Return the tree with ``root`` inside, and the bound of the cases outside of it."""
        total = int(self._best.sum()) + sum(
            int(p) * row.capacity for p, row in zip(self._prices, self._problem.rows, strict=True)
        )
        prices, outside = leaf_prices(self._prices.tolist()), -math.inf
        above = (0,) if len(self._dropped) else ()
        if len(self._idles):
            jobs = self._idles.tolist()
            short = int(self._best[self._idles].min())
            outside = max(outside, total - short)
            columns = [c for j in jobs for c in self._problem.columns_of(j)]
            most = int(self._size[self._class_of[self._idles]].sum()) - 1
            leaf = PriceLeaf(prices=prices, branch_prices=(*above, max(short, 0)))
            root = Branch(columns=tuple(columns), most=most, below=leaf, above=root)
        if len(self._dropped):
            owner = self._problem.column_job[self._dropped]
            short = int((self._best[owner] - self._margin[self._dropped]).min())
            outside = max(outside, total - short)
            leaf = PriceLeaf(prices=prices, branch_prices=(max(short, 0),))
            root = Branch(columns=tuple(self._dropped.tolist()), most=0, below=root, above=leaf)
        return root, math.floor(outside / self._scale) if outside > -math.inf else -(2**63)


def _best_margins(problem: Problem, margin: Ints) -> Ints:
    """Return the best margin of each job, int64[jobs]; at least 0 if it may wait."""
    best = np.where(problem.must_run, np.iinfo(np.int64).min, 0)
    np.maximum.at(best, problem.column_job, margin)
    return best
