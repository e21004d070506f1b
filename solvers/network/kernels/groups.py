"""Links that can fill, and groups of jobs that can contend on them."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.solvers.kernels.jit import compile_lazily

ROUNDING = 1e-12
"""Shares that add up to no more than this above 1 do not fill a link."""

Uses: TypeAlias = tuple[Ints, Ints, Floats]
"""use_start (jobs + 1,), and link (uses,) and share (uses,) of each job's links."""


@compile_lazily
def uses_that_matter(uses: Uses, links: int) -> Bools:
    """Return whether each use matters, bool[uses].

    The uses of links that can fill before another link limits their users matter. A link cannot
    fill if the shares of its users add up to at most 1. Another link limits them first if it has
    all of its users, with shares at least as large.
    """
    use_start, link, share = uses
    # Add up the shares on each link, and list the users of those that can fill.
    total = np.zeros(links)
    for u in range(len(link)):
        total[link[u]] += share[u]
    user_start = np.zeros(links + 1, np.int64)
    for u in range(len(link)):
        if total[link[u]] > 1.0 + ROUNDING:
            user_start[link[u] + 1] += 1
    for e in range(links):
        user_start[e + 1] += user_start[e]
    user, part = np.empty(user_start[links], np.int64), np.empty(user_start[links])
    at = user_start[:-1].copy()
    for j in range(len(use_start) - 1):
        for u in range(use_start[j], use_start[j + 1]):
            e = link[u]
            if total[e] > 1.0 + ROUNDING:
                user[at[e]], part[at[e]] = j, share[u]
                at[e] += 1
    # Drop links that another link limits first.
    kept = np.zeros(links, np.bool_)
    for e in range(links):
        kept[e] = total[e] > 1.0 + ROUNDING
    for e in range(links):
        if kept[e]:
            first = user[user_start[e]]
            for u in range(use_start[first], use_start[first + 1]):
                if link[u] != e and kept[link[u]] and _covers(user_start, user, part, link[u], e):
                    kept[e] = False
                    break
    out = np.empty(len(link), np.bool_)
    for u in range(len(link)):
        out[u] = kept[link[u]]
    return out


@compile_lazily
def _covers(user_start: Ints, user: Ints, part: Floats, first: int, second: int) -> bool:
    """Return whether link ``first`` has each user of ``second``, with a share at least as large."""
    at, end = user_start[first], user_start[first + 1]
    if end - at < user_start[second + 1] - user_start[second]:
        return False
    for k in range(user_start[second], user_start[second + 1]):
        while at < end and user[at] < user[k]:
            at += 1
        if at == end or user[at] != user[k] or part[at] < part[k]:
            return False
    return True


@compile_lazily
def group_by_links(use_start: Ints, link: Ints, links: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Return groups of jobs that are joined by links, directly or through others.

    The result is group_start, member, first_link and the new number of each use's link; links are
    numbered by group. Groups are in the order of their first job, and the jobs of a group rise.
    """
    # Join jobs that use the same link (union-find).
    jobs = len(use_start) - 1
    above, seen = np.arange(jobs), np.full(links, -1, np.int64)
    for j in range(jobs):
        for u in range(use_start[j], use_start[j + 1]):
            if seen[link[u]] < 0:
                seen[link[u]] = j
            else:
                first, second = _root(above, seen[link[u]]), _root(above, j)
                above[max(first, second)] = min(first, second)
    # Number the groups by their first jobs, and list their members.
    group, groups = np.empty(jobs, np.int64), 0
    for j in range(jobs):
        root = _root(above, j)
        if root == j:
            group[j] = groups
            groups += 1
        else:
            group[j] = group[root]
    group_start = np.zeros(groups + 1, np.int64)
    for j in range(jobs):
        group_start[group[j] + 1] += 1
    for g in range(groups):
        group_start[g + 1] += group_start[g]
    at, member = group_start[:-1].copy(), np.empty(jobs, np.int64)
    for j in range(jobs):
        member[at[group[j]]] = j
        at[group[j]] += 1
    # Number the links by group.
    first_link, number = np.zeros(groups + 1, np.int64), np.full(links, -1, np.int64)
    renamed, count = np.empty(len(link), np.int64), 0
    for g in range(groups):
        for m in range(group_start[g], group_start[g + 1]):
            for u in range(use_start[member[m]], use_start[member[m] + 1]):
                if number[link[u]] < 0:
                    number[link[u]] = count
                    count += 1
                renamed[u] = number[link[u]]
        first_link[g + 1] = count
    return group_start, member, first_link, renamed


@compile_lazily
def _root(above: Ints, job: int) -> int:
    while above[job] != job:
        above[job] = above[above[job]]
        job = above[job]
    return job
