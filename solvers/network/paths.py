"""The choice of one of the equal-cost paths for each bundle (Crux 4.1).

Jobs choose in descending order of intensity, and their bundles in descending order of bytes. Each
bundle takes the candidate that is least congested at that moment. The paper does not define
congestion. Here it is the duty (M / B) / T that is offered to a candidate's links by everything
placed so far, including this bundle. Candidates are compared by the largest duty of their links,
and then by the sum. On links of one speed, the ranking is the same as without this bundle; of two
idle links, the faster one is preferred.
"""

from __future__ import annotations

import numpy as np

from tessera.formulation.answer.network.contention import Contention
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats, Ints, concatenate_ranges
from tessera.solvers.kernels.jit import as_fixed_array
from tessera.solvers.network.kernels.paths import place_bundles


def select_paths(contention: Contention, order: Ints) -> Ints:
    """Return the candidate of each bundle, int64[B], if jobs choose in ``order``.

    Raises:
        InvalidInput: ``order`` does not name each job once.
    """
    c = contention
    jobs = len(c.jobs)
    if len(order) != jobs or (np.bincount(order, minlength=jobs) != 1).any():
        raise InvalidInput("order", f"must name each of the {jobs} jobs once")
    period_s = np.maximum(c.compute_s, c.start_s + least_comm_s(c))
    turn = _turns(c, order)
    rate = as_fixed_array(c.bundle_bytes / period_s[c.bundle_job])
    paths = (
        as_fixed_array(c.candidate_start),
        as_fixed_array(c.candidate),
        as_fixed_array(c.path_start),
        as_fixed_array(c.path_link),
        as_fixed_array(1 / c.link_bytes_per_s),
    )
    load = _fixed_load(c, period_s)
    chosen = np.zeros(len(rate), dtype=np.int64)
    place_bundles(as_fixed_array(turn), rate, paths, load, chosen)
    return chosen


def least_comm_s(contention: Contention) -> Floats:
    """Return the least that t_j can be for any choice of paths, seconds, (J,); 0 without traffic.

    It is the larger of two times: that of the job's fixed links, and that of one of its bundles
    alone on its best candidate. Bundles of a job that share a link make t longer.
    """
    c = contention
    inverse = 1 / c.link_bytes_per_s
    key, which = np.unique(c.fixed_job * len(inverse) + c.fixed_link, return_inverse=True)
    sent = np.bincount(which, weights=c.fixed_bytes, minlength=len(key))
    comm_s = np.zeros(len(c.jobs))
    np.maximum.at(comm_s, key // len(inverse), sent * inverse[key % len(inverse)])
    delay_s = np.zeros(len(c.jobs))
    if len(c.bundle_bytes):
        slowest = np.zeros(len(c.path_delay_s))
        paths = np.repeat(np.arange(len(slowest)), np.diff(c.path_start))
        np.maximum.at(slowest, paths, inverse[c.path_link])
        first = c.candidate_start[:-1]
        alone_s = c.bundle_bytes * np.minimum.reduceat(slowest[c.candidate], first)
        np.maximum.at(comm_s, c.bundle_job, alone_s)
        waits_s = c.bundle_messages * np.minimum.reduceat(c.path_delay_s[c.candidate], first)
        np.maximum.at(delay_s, c.bundle_job, waits_s)
    total: Floats = comm_s + c.fixed_delay_s + delay_s
    return total


def _turns(c: Contention, order: Ints) -> Ints:
    """Return the bundles in the order in which they choose."""
    counts = np.diff(c.bundle_start)[order]
    turn = concatenate_ranges(c.bundle_start[order], counts)
    place = np.repeat(np.arange(len(order)), counts)
    turns: Ints = turn[np.lexsort((-c.bundle_bytes[turn], place))]
    return turns


def _fixed_load(c: Contention, period_s: Floats) -> Floats:
    duty = c.fixed_bytes / c.link_bytes_per_s[c.fixed_link] / period_s[c.fixed_job]
    load = np.bincount(c.fixed_link, duty, minlength=len(c.link_bytes_per_s))
    return load.astype(np.float64)
