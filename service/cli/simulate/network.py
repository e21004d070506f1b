"""The network that simulated jobs share: a topology of the cluster's nodes, and its mechanisms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from tessera.formulation.errors import InvalidInput
from tessera.formulation.policy import NETWORK_LEVELS
from tessera.formulation.topologies.document import assumptions, build_topology
from tessera.formulation.topologies.topology import Topology
from tessera.service.cli.render import count_noun
from tessera.service.cli.topology import read_document
from tessera.simulator.network.sending import Sending
from tessera.simulator.network.slowdowns import Contended
from tessera.simulator.scenario import Scenario
from tessera.solvers.network.mechanisms import mechanism, names

DEFAULT: Final = "crux-full"
NOBODY: Final = "none"
"""The name that takes the place of a mechanism: jobs are on no network, for comparison."""
NAMED: Final = 3
"""The number of nodes, hosts and reasons that a message names."""

_NAMELESS: Final = ("clos", "double-sided", "torus")
"""Kinds of topologies whose hosts default to the cluster's nodes in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """The command line's options for a network."""

    file: str
    mechanisms: tuple[str, ...]
    levels: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Network:
    """A wiring on a simulated cluster.

    The traffic of jobs is computed once for all runs and kept here.
    """

    wiring: Wiring
    topology: Topology
    sending: Sending
    notes: tuple[str, ...]

    def contended(self, name: str, seed: int, clock: Callable[[], float]) -> Contended | None:
        """Return a run's contention under the named mechanism, or None without a network."""
        if name == NOBODY:
            return None
        plan = partial(mechanism(name).plan, levels=self.wiring.levels, seed=seed)
        return Contended(self.sending, plan, clock=clock)

    def told(self) -> dict[str, Any]:
        """Return the facts that determined the network."""
        return {
            "topology": self.wiring.file,
            "hosts": len(self.topology.hosts),
            "links": len(self.topology.links),
            "networks": list(self.wiring.mechanisms),
            "network_levels": self.wiring.levels,
        }

    def warnings(self) -> list[str]:
        """Return warnings after a run: the jobs that met nobody, and the reasons."""
        s, found = self.sending, list(self.notes)
        if s.unknown:
            found.append(
                f"what {count_noun(len(s.unknown), 'job')} send is not known, so they meet nobody on the"
                f" network: {_reasons(s.unknown.values())}"
            )
        if s.outside:
            found.append(
                f"{count_noun(len(s.outside), 'job')} met nobody while they ran where the topology does not"
                f" reach: {_reasons(s.outside.values())}"
            )
        if s.misfit:
            found.append(
                f"the traffic of {count_noun(len(s.misfit), 'job')} does not fit the iterations that are"
                f" profiled, and is taken as it is: {_listed(sorted(s.misfit))}"
            )
        return found


def wiring_of(topology: str | None, mechanisms: Sequence[str], levels: int | None) -> Wiring | None:
    """Return the wiring of the options, or None without a network. Raises InvalidInput."""
    if topology is None:
        if mechanisms or levels is not None:
            option = "--network" if mechanisms else "--network-levels"
            raise InvalidInput(option, "belongs to --topology FILE")
        return None
    known = (*names(), NOBODY)
    if strange := [name for name in mechanisms if name not in known]:
        raise InvalidInput("--network", f"unknown {strange[0]!r}; choose from {', '.join(known)}")
    return Wiring(
        file=topology,
        mechanisms=tuple(dict.fromkeys(mechanisms)) or (DEFAULT,),
        levels=NETWORK_LEVELS if levels is None else levels,
    )


def network_of(wiring: Wiring, scenario: Scenario) -> Network:
    """Return the network of the scenario's nodes.

    Raises:
        InvalidInput: the file cannot be read or holds no topology, or none of its hosts is a node
            of the cluster.
    """
    nodes = {node.name: node.gpus for node in scenario.nodes}
    document, _ = read_document(wiring.file)
    if (
        isinstance(document, dict)
        and document.get("kind") in _NAMELESS
        and not {"hosts", "nodes"} & document.keys()
    ):
        document = document | {"nodes": list(nodes)}
    try:
        topology = build_topology(document)
    except InvalidInput as wrong:
        raise InvalidInput(wiring.file, str(wrong)) from wrong
    gpus_there = {host: len(topology.gpus_of(i)) for i, host in enumerate(topology.hosts)}
    if not nodes.keys() & gpus_there.keys():
        raise InvalidInput(
            wiring.file,
            f"none of its hosts ({_listed(list(gpus_there))}) is a node of the cluster"
            f" ({_listed(list(nodes))}): name hosts as nodes, or, in a file of the kind"
            f" {', '.join(_NAMELESS)}, leave them out, and they are the cluster's nodes",
        )
    notes = list(assumptions(document))
    if lacking := [name for name in nodes if name not in gpus_there]:
        notes.append(
            f"{len(lacking):,} of {len(nodes):,} nodes are not in the topology, and jobs on them meet nobody:"
            f" {_listed(lacking)}"
        )
    if smaller := [name for name, gpus in nodes.items() if 0 < gpus_there.get(name, 0) < gpus]:
        notes.append(
            f"{len(smaller):,} of {len(nodes):,} nodes have more GPUs than in the topology, and jobs on these"
            f" meet nobody: {_listed(smaller)}"
        )
    return Network(
        wiring=wiring, topology=topology, sending=Sending(scenario, topology), notes=tuple(notes)
    )


def _listed(texts: Sequence[str], by: str = ", ") -> str:
    return by.join(texts[:NAMED]) + (f"{by}..." if len(texts) > NAMED else "")


def _reasons(texts: Iterable[str]) -> str:
    """Return the reasons, those of the most jobs first."""
    return _listed([reason for reason, _ in Counter(texts).most_common()], "; ")
