"""The network that simulated jobs share: its topology and the mechanisms that plan it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.round.policy import NETWORK_LEVELS
from tessera.formulation.state.topologies.document import build_topology, list_assumptions
from tessera.formulation.state.topologies.topology import Topology
from tessera.service.cli.clusters.topology import read_document
from tessera.service.cli.render import count_noun
from tessera.simulator.network.slowdowns import ContentionSlowdowns
from tessera.simulator.network.traffic_source import TrafficSource
from tessera.simulator.scenario import Scenario
from tessera.solvers.network.mechanisms import make_mechanism, mechanism_names

DEFAULT_MECHANISM: Final = "crux-full"
NO_MECHANISM: Final = "none"
"""The name that stands for no mechanism: jobs share no network. It is for comparison."""
MAX_NAMES_SHOWN: Final = 3
"""The maximum number of nodes, hosts or reasons that a message names."""

_KINDS_WITHOUT_HOSTS: Final = ("clos", "double-sided", "torus")
"""Kinds of topologies whose hosts default to the cluster's nodes in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """The command line's options for a network."""

    file: str
    mechanisms: tuple[str, ...]
    levels: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedNetwork:
    """A wiring on a simulated cluster.

    The traffic of jobs is computed once for all runs and kept here.
    """

    wiring: NetworkOptions
    topology: Topology
    sending: TrafficSource
    notes: tuple[str, ...]

    def contended(
        self, name: str, seed: int, clock: Callable[[], float]
    ) -> ContentionSlowdowns | None:
        """Return a run's contention under the named mechanism, or None without a network."""
        if name == NO_MECHANISM:
            return None
        plan = partial(make_mechanism(name).plan, levels=self.wiring.levels, seed=seed)
        return ContentionSlowdowns(self.sending, plan, clock=clock)

    def facts(self) -> dict[str, Any]:
        """Return the facts that determined the network."""
        return {
            "topology": self.wiring.file,
            "hosts": len(self.topology.hosts),
            "links": len(self.topology.links),
            "networks": list(self.wiring.mechanisms),
            "network_levels": self.wiring.levels,
        }

    def warnings(self) -> list[str]:
        """Return warnings after a run: the jobs without contention, and the reasons."""
        s, texts = self.sending, list(self.notes)
        if s.unknown:
            texts.append(
                f"the traffic of {count_noun(len(s.unknown), 'job')} is not known, so it caused no"
                " contention:"
                f" {_reasons(s.unknown.values())}"
            )
        if s.outside:
            texts.append(
                f"{count_noun(len(s.outside), 'job')} had no contention while running outside the topology:"
                f" {_reasons(s.outside.values())}"
            )
        if s.misfit:
            texts.append(
                f"the traffic of {count_noun(len(s.misfit), 'job')} does not fit the profiled"
                " iteration times, and"
                f" is used unchanged: {_listed(sorted(s.misfit))}"
            )
        return texts


def read_network_options(
    topology: str | None, mechanisms: Sequence[str], levels: int | None
) -> NetworkOptions | None:
    """Return the wiring of the options, or None without a network. Raises InvalidInput."""
    if topology is None:
        if mechanisms or levels is not None:
            option = "--network" if mechanisms else "--network-levels"
            raise InvalidInput(option, "needs --topology FILE")
        return None
    known = (*mechanism_names(), NO_MECHANISM)
    if strange := [name for name in mechanisms if name not in known]:
        raise InvalidInput(
            "--network", f"unknown mechanism {strange[0]!r}; choose from {', '.join(known)}"
        )
    return NetworkOptions(
        file=topology,
        mechanisms=tuple(dict.fromkeys(mechanisms)) or (DEFAULT_MECHANISM,),
        levels=NETWORK_LEVELS if levels is None else levels,
    )


def network_of(wiring: NetworkOptions, scenario: Scenario) -> SharedNetwork:
    """Return the network of the scenario's nodes.

    Raises:
        InvalidInput: the file cannot be read or is not a topology, or no host is a node of the
            cluster.
    """
    nodes = {node.name: node.gpus for node in scenario.nodes}
    document, _ = read_document(wiring.file)
    if (
        isinstance(document, dict)
        and document.get("kind") in _KINDS_WITHOUT_HOSTS
        and not {"hosts", "nodes"} & document.keys()
    ):
        document = document | {"nodes": list(nodes)}
    try:
        topology = build_topology(document)
    except InvalidInput as wrong:
        raise InvalidInput(wiring.file, str(wrong)) from wrong
    host_gpus = {host: len(topology.gpus_of(i)) for i, host in enumerate(topology.hosts)}
    if not nodes.keys() & host_gpus.keys():
        raise InvalidInput(
            wiring.file,
            f"has no host ({_listed(list(host_gpus))}) that is a node of the cluster"
            f" ({_listed(list(nodes))}); give hosts the names of nodes, or omit the hosts, which a"
            " file of the"
            f" kind {', '.join(_KINDS_WITHOUT_HOSTS)} then takes from the cluster",
        )
    notes = list(list_assumptions(document))
    if lacking := [name for name in nodes if name not in host_gpus]:
        notes.append(
            f"{len(lacking):,} of {len(nodes):,} nodes are not in the topology, so jobs on them have no"
            f" contention: {_listed(lacking)}"
        )
    if smaller := [name for name, gpus in nodes.items() if 0 < host_gpus.get(name, 0) < gpus]:
        notes.append(
            f"{len(smaller):,} of {len(nodes):,} nodes have more GPUs than in the topology, and jobs on those"
            f" GPUs have no contention: {_listed(smaller)}"
        )
    return SharedNetwork(
        wiring=wiring,
        topology=topology,
        sending=TrafficSource(scenario, topology),
        notes=tuple(notes),
    )


def _listed(texts: Sequence[str], separator: str = ", ") -> str:
    return separator.join(texts[:MAX_NAMES_SHOWN]) + (
        f"{separator}..." if len(texts) > MAX_NAMES_SHOWN else ""
    )


def _reasons(texts: Iterable[str]) -> str:
    """Return the reasons, those of the largest number of jobs first."""
    return _listed([reason for reason, _ in Counter(texts).most_common()], "; ")
