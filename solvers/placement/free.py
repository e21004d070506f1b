"""The free GPUs of a cluster, and the best place in them for a gang of a given layout.

If nodes state CPU cores or host memory, these are counted in addition to the GPUs. Callers then
give a job's total demand (``demand``). If it is None, only GPUs are counted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tessera.formulation.base.resources import Capacity, Demand
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.placement.blocks import block_signature, block_waste, carve_share

Spots = tuple[tuple[int, int], ...]
"""The GPUs of a gang as (node, mask), by rising node."""

_BREAKS_A_WHOLE_NODE = 1 << 40
"""Added to the cost of a share that takes part of a wholly free node; more than any waste."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A shape: ``count`` nodes with ``each`` GPUs, and ``rest`` GPUs on one more node if it is not 0.

    If ``whole``, the ``count`` nodes have exactly ``each`` GPUs and are taken whole. If ``mixed``,
    the gang takes whole nodes of any sizes, largest first, and then what is left on one node;
    ``rest`` is then the total.
    """

    count: int
    each: int
    rest: int
    whole: bool = False
    mixed: bool = False

    @property
    def nodes(self) -> int:
        """Return the number of nodes; if ``mixed``, the least number."""
        return self.count + (self.rest > 0)


def list_layouts(gpus: int, sizes: tuple[int, ...], fewest: int = 1) -> list[Layout]:
    """Return the layouts of ``gpus`` GPUs on ``fewest`` or more nodes of these sizes.

    ``sizes`` is given largest first. Layouts with fewer nodes come first. They are: one share;
    whole nodes of one size and a remainder; equal shares on ``fewest`` nodes; whole nodes of mixed
    sizes; and equal power-of-two shares, larger first.
    """
    if not sizes:
        return []
    top = sizes[0]
    by_nodes = [Layout(0, 0, gpus)] if gpus <= top else []
    for size in sizes:
        if gpus > size:
            by_nodes.append(Layout(gpus // size, size, gpus % size, whole=True))
    equal = []
    share = 1 << max(0, (top - 1).bit_length() - 1)  # the largest power of two below the node size
    while share:
        if gpus % share == 0 and gpus > share:
            equal.append(Layout(gpus // share, share, 0))
        share //= 2
    even = spread_evenly(gpus, fewest) if 1 < fewest <= gpus else None
    if even and even.each < top and even not in equal:  # else it is there already
        by_nodes.append(even)
    by_nodes.sort(key=lambda layout: layout.nodes)
    if len(sizes) > 1 and gpus > top:
        by_nodes.append(Layout(0, 0, gpus, mixed=True))
    return [layout for layout in by_nodes + equal if layout.mixed or layout.nodes >= fewest]


def spread_evenly(gpus: int, nodes: int) -> Layout:
    """Return the layout of ``gpus`` GPUs in equal shares on ``nodes`` nodes.

    If the count does not divide, one share differs, e.g. 5 is 3 + 2.
    """
    each = -(-gpus // nodes)
    if gpus % nodes == 0:
        return Layout(nodes, each, 0)
    each -= (nodes - 1) * each >= gpus  # a smaller last share would be empty, so it is larger
    return Layout(nodes - 1, each, gpus - (nodes - 1) * each)


Buckets = dict[tuple[int, tuple[int, ...]], list[int]]
"""A map from (node size, sizes of its free blocks) to the nodes that have these, rising."""


class FreeGpus:
    """The free GPUs of the schedulable nodes, as one mask per node.

    The nodes of one type are bucketed by block sizes. Jobs that keep their GPUs are seated first
    and need no buckets, so the buckets of a type are made when they are first needed.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        nodes = snapshot.nodes
        self._rack_name = nodes.rack
        self.size: list[int] = nodes.gpus.tolist()
        self.gpu_type: list[int] = nodes.gpu_type.tolist()
        self.usable: list[bool] = nodes.schedulable.tolist()
        whole = np.where(nodes.schedulable, nodes.gpus, 0).tolist()
        self.mask = [(1 << size) - 1 for size in whole]
        types = range(len(snapshot.gpu_types))
        self.of_type: list[list[int]] = [
            np.flatnonzero(nodes.schedulable & (nodes.gpu_type == kind)).tolist() for kind in types
        ]
        self.total: list[int] = snapshot.schedulable_gpus().tolist()  # free GPUs
        self._left: dict[int, Capacity] = {  # of the nodes that state more than GPUs
            node: nodes.capacity(node)
            for node in np.flatnonzero(nodes.schedulable & nodes.states_more()).tolist()
        }
        self._made: list[Buckets | None] = [None for _ in types]
        self._layouts: dict[tuple[int, int, int], list[Layout]] = {}

    @cached_property
    def rack(self) -> list[int]:
        """Return the rack of each node, numbered by the order of the racks' names."""
        racks = {name: code for code, name in enumerate(sorted(set(self._rack_name)))}
        return [racks[name] for name in self._rack_name]

    @cached_property
    def sizes(self) -> list[tuple[int, ...]]:
        """Return the sizes of the nodes of each type, largest first."""
        return [
            tuple(sorted({self.size[node] for node in of_type}, reverse=True))
            for of_type in self.of_type
        ]

    @property
    def counts_more(self) -> bool:
        """Return whether some node states more than its GPUs."""
        return bool(self._left)

    def left(self, node: int) -> Capacity | None:
        """Return the capacity that is left on ``node``, or None if it states only its GPUs."""
        return self._left.get(node)

    def fits(self, node: int, share: Demand) -> bool:
        """Return whether ``node`` has enough of everything left for ``share``.

        GPUs are compared by number only. ``carve_share`` decides which of them a share takes, and whether
        they form blocks.
        """
        left = self._left.get(node)
        return share.gpus <= self.mask[node].bit_count() if left is None else left.fits(share)

    def hold(self, spots: Spots, demand: Demand) -> bool:
        """Return whether the nodes of ``spots`` have enough left for shares of ``demand``.

        The GPUs of ``spots`` must be free.
        """
        return all(self.fits(node, demand.on_node(mask.bit_count())) for node, mask in spots)

    def _charge(self, spots: Spots, demand: Demand) -> None:
        for node, mask in spots:
            left, share = self._left.get(node), demand.on_node(mask.bit_count())
            if left is not None:
                if not left.fits(share):
                    raise AssertionError(f"node {node} lacks what its jobs need")
                self._left[node] = left.minus(share)

    def _buckets(self, gpu_type: int) -> Buckets:
        """Return the nodes of a type by their free blocks.

        Nodes without free GPUs are in no bucket.
        """
        made = self._made[gpu_type]
        if made is None:
            made = self._made[gpu_type] = {}
            for node in self.of_type[gpu_type]:
                mask = self.mask[node]
                if mask:
                    made.setdefault((self.size[node], block_signature(mask)), []).append(node)
        return made

    def _set(self, node: int, mask: int) -> None:
        """Make ``mask`` the free GPUs of ``node``."""
        kind, size, before = self.gpu_type[node], self.size[node], self.mask[node]
        buckets = self._made[kind]
        if buckets is not None and before:
            key = (size, block_signature(before))
            bucket = buckets[key]
            del bucket[bisect_left(bucket, node)]
            if not bucket:
                del buckets[key]
        if buckets is not None and mask:
            insort(buckets.setdefault((size, block_signature(mask)), []), node)
        self.mask[node] = mask
        self.total[kind] += mask.bit_count() - before.bit_count()

    def take(self, spots: Spots, demand: Demand | None = None) -> None:
        """Take these GPUs, which must be free, and the other resources that shares of ``demand`` need."""
        if demand is not None:
            self._charge(spots, demand)
        for node, mask in spots:
            before, kind = self.mask[node], self.gpu_type[node]
            if mask & ~before:
                raise AssertionError(f"GPUs of node {node} are given out twice")
            if self._made[kind] is None:  # there are no buckets to update
                self.mask[node] = before ^ mask
                self.total[kind] -= mask.bit_count()
            else:
                self._set(node, before ^ mask)

    def take_if_free(
        self, spots: Spots, gpu_type: int, gpus: int, demand: Demand | None = None
    ) -> bool:
        """Take these GPUs, with the rest of ``demand``, if all are free. Return whether they were taken.

        They must be ``gpus`` GPUs of this type.
        """
        masks, kinds, count = self.mask, self.gpu_type, 0
        for node, mask in spots:
            if masks[node] & mask != mask or kinds[node] != gpu_type:
                return False
            count += mask.bit_count()
        if count != gpus:
            return False
        if demand is not None:
            if not self.hold(spots, demand):
                return False
            self._charge(spots, demand)
        if self._made[gpu_type] is None:  # there are no buckets to update
            for node, mask in spots:
                masks[node] ^= mask
            self.total[gpu_type] -= gpus
        else:
            self.take(spots)
        return True

    def give(self, spots: Spots, demand: Demand | None = None) -> None:
        """Give these GPUs back, and the other resources that were taken with them."""
        for node, mask in spots:
            self._set(node, self.mask[node] | mask)
        if demand is not None:
            for node, mask in spots:
                left = self._left.get(node)
                if left is not None:
                    self._left[node] = left.plus(demand.on_node(mask.bit_count()))

    def are_free(self, spots: Spots, demand: Demand | None = None) -> bool:
        """Return whether these GPUs and the rest of ``demand`` are free on schedulable nodes."""
        return all(self.mask[node] & mask == mask for node, mask in spots) and (
            demand is None or self.hold(spots, demand)
        )

    def layouts(self, gpu_type: int, gpus: int, fewest: int = 1) -> list[Layout]:
        """Return the layouts of ``gpus`` GPUs of this type on ``fewest`` or more nodes.

        Layouts with fewer nodes come first.
        """
        key = (gpu_type, gpus, fewest)
        if key not in self._layouts:
            self._layouts[key] = list_layouts(gpus, self.sizes[gpu_type], fewest)
        return self._layouts[key]

    def find(
        self,
        gpu_type: int,
        layout: Layout,
        near: Mapping[int, int],
        *,
        aligned: bool = True,
        avoid: frozenset[int] = frozenset(),
        demand: Demand | None = None,
    ) -> Spots | None:
        """Return the best free GPUs of this layout: one rack first, then the tightest fit.

        ``near`` maps the nodes on which the job already runs to its GPUs there; these are
        preferred. Nodes in ``avoid`` are not used, nor are nodes that do not have enough left for
        their share of ``demand``. Return None if the layout does not fit.
        """
        if layout.nodes > len(self.of_type[gpu_type]):
            return None
        if avoid:
            near = {node: mask for node, mask in near.items() if node not in avoid}
        if layout.mixed:
            return self._find_mixed(gpu_type, layout.rest, near, avoid, demand)
        if layout.count == 0:
            spot = self._share(
                gpu_type, layout.rest, near, aligned=aligned, without=avoid, demand=demand
            )
            return (spot,) if spot else None
        fallback: list[int] | None = None
        for nodes in self._choices(gpu_type, layout, near, aligned, avoid, demand):
            if not layout.rest:
                return self._spots(nodes, layout, near, aligned)
            racks = frozenset(self.rack[node] for node in nodes)
            rest = self._share(
                gpu_type,
                layout.rest,
                near,
                aligned=aligned,
                without=avoid.union(nodes),
                racks=racks,
                demand=demand,
            )
            if rest:
                return tuple(sorted((*self._spots(nodes, layout, near, aligned), rest)))
            fallback = fallback or nodes
        if fallback is None:
            return None
        rest = self._share(
            gpu_type,
            layout.rest,
            near,
            aligned=aligned,
            without=avoid.union(fallback),
            demand=demand,
        )
        return (
            tuple(sorted((*self._spots(fallback, layout, near, aligned), rest))) if rest else None
        )

    def _find_mixed(
        self,
        gpu_type: int,
        gpus: int,
        near: Mapping[int, int],
        avoid: frozenset[int],
        demand: Demand | None,
    ) -> Spots | None:
        """Take whole free nodes, largest first, and then the rest on one more node."""
        nodes: list[int] = []
        for size in self.sizes[gpu_type]:
            bucket = self._buckets(gpu_type).get((size, block_signature((1 << size) - 1)), [])
            chosen = sorted(
                self._with_room(bucket, size, avoid, demand),
                key=lambda node: (node not in near, self.rack[node], node),
            )
            chosen = chosen[: gpus // size]
            nodes += chosen
            gpus -= size * len(chosen)
        whole = [(node, self.mask[node]) for node in nodes]
        if gpus:
            rest = self._share(gpu_type, gpus, near, without=avoid.union(nodes), demand=demand)
            if rest is None:
                return None
            whole.append(rest)
        return tuple(sorted(whole))

    def _with_room(
        self, bucket: list[int], gpus: int, avoid: frozenset[int], demand: Demand | None
    ) -> list[int]:
        """Return the nodes of ``bucket`` outside ``avoid`` with all that ``gpus`` GPUs need."""
        if demand is None:
            return bucket if not avoid else [node for node in bucket if node not in avoid]
        share = demand.on_node(gpus)
        return [node for node in bucket if node not in avoid and self.fits(node, share)]

    def _cost(self, node: int, gpus: int, taken: int) -> int:
        """Return the waste of a share of ``gpus`` on ``node``.

        It is the same on its whole bucket.
        """
        mask = self.mask[node]
        breaks = gpus < self.size[node] == mask.bit_count()
        return block_waste(mask, taken) + (_BREAKS_A_WHOLE_NODE if breaks else 0)

    def _take_on(self, node: int, gpus: int, near: Mapping[int, int], aligned: bool) -> int:
        """Return the mask of a share on ``node``: the job's own GPUs there if they suffice."""
        mask = self.mask[node]
        own = carve_share(mask & near[node], gpus, aligned) if node in near else 0
        return own or carve_share(mask, gpus, aligned)

    def _share(
        self,
        gpu_type: int,
        gpus: int,
        near: Mapping[int, int],
        *,
        aligned: bool = True,
        without: frozenset[int] = frozenset(),
        racks: frozenset[int] | None = None,
        demand: Demand | None = None,
    ) -> tuple[int, int] | None:
        """Return the (node, mask) where a share of ``gpus`` fits tightest, or None.

        On equal terms, a node that the job already uses is preferred.
        """
        share = None if demand is None else demand.on_node(gpus)

        def allowed(node: int) -> bool:
            return (
                node not in without
                and (racks is None or self.rack[node] in racks)
                and (share is None or self.fits(node, share))
            )

        best: tuple[int, int, int] | None = None  # cost, free GPUs, node
        for node in near:
            if self.usable[node] and self.gpu_type[node] == gpu_type and allowed(node):
                taken = carve_share(self.mask[node], gpus, aligned)
                key = (self._cost(node, gpus, taken), self.mask[node].bit_count(), node)
                if taken and (best is None or key < best):
                    best = key
        if best is None:
            for bucket in self._buckets(gpu_type).values():
                taken = carve_share(self.mask[bucket[0]], gpus, aligned)
                if not taken:
                    continue
                cost, free = self._cost(bucket[0], gpus, taken), self.mask[bucket[0]].bit_count()
                if best is not None and (cost, free) > best[:2]:
                    continue
                node = next(filter(allowed, bucket), -1)
                if node >= 0 and (best is None or (cost, free, node) < best):
                    best = (cost, free, node)
        return (best[2], self._take_on(best[2], gpus, near, aligned)) if best else None

    def _spots(
        self, nodes: list[int], layout: Layout, near: Mapping[int, int], aligned: bool
    ) -> Spots:
        return tuple((n, self._take_on(n, layout.each, near, aligned)) for n in sorted(nodes))

    def _choices(
        self,
        gpu_type: int,
        layout: Layout,
        near: Mapping[int, int],
        aligned: bool,
        avoid: frozenset[int],
        demand: Demand | None,
    ) -> Iterator[list[int]]:
        """Yield sets of nodes for the equal shares of ``layout``: single racks, then several."""
        each, want = layout.each, layout.count
        racks: dict[int, list[tuple[bool, int, int]]] = {}  # rack -> (not own, cost, node)
        for (size, _), bucket in self._buckets(gpu_type).items():
            first = self.mask[bucket[0]]
            if layout.whole and not size == each == first.bit_count():
                continue
            taken = carve_share(first, each, aligned)
            if taken:
                cost = self._cost(bucket[0], each, taken)
                for node in self._with_room(bucket, each, avoid, demand):
                    racks.setdefault(self.rack[node], []).append((node not in near, cost, node))
        if sum(map(len, racks.values())) < want:
            return
        for offers in racks.values():
            offers.sort()

        def fit(offers: list[tuple[bool, int, int]]) -> tuple[int, int, int, int]:
            head = offers[:want]
            own = sum(not other for other, _, _ in head)
            return (-own, sum(cost for _, cost, _ in head), len(offers), head[0][2])

        # Try one rack at a time, the best fit first.
        for offers in sorted((o for o in racks.values() if len(o) >= want), key=fit):
            yield [node for _, _, node in offers[:want]]
        chosen: list[int] = []
        left = sorted(racks.values(), key=lambda o: (-len(o), fit(o)))
        # Take the fullest racks, then the tightest rack that holds the rest.
        while len(chosen) < want:
            missing = want - len(chosen)
            offers = min((o for o in left if len(o) >= missing), key=len, default=left[0])
            left.remove(offers)
            chosen += [node for _, _, node in offers[:missing]]
        yield chosen
