"""Crux's testbed scenarios: jobs on 12 hosts of 8 A100, with 6 ToRs and 8 aggregation switches.

Our excerpt of the paper gives models and GPU counts. The model sizes, batches and hosts are our
choice. A job's GPUs are given as hosts with indices on each. Hosts 2 i and 2 i + 1 are on ToR i.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from tessera.benchmarks.network.fabrics import TOR_BYTES_PER_S, host_names
from tessera.benchmarks.network.families import GPT, family_traffic
from tessera.formulation.network.flows import NetworkJob
from tessera.formulation.topologies.builders import build_clos, build_testbed
from tessera.formulation.topologies.shapes import PCIE_HOST
from tessera.formulation.topologies.topology import Topology

GPU_TYPE: Final = "a100-80"
ALL_GPUS: Final = tuple(range(8))
LOW, HIGH = ALL_GPUS[:4], ALL_GPUS[4:]
EVEN, ODD = ALL_GPUS[::2], ALL_GPUS[1::2]
"""One GPU of each pair that shares a PCIe switch and a NIC."""

Gang = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TestbedScenario:
    """A set of jobs on the testbed, with Crux's published gains over plain ECMP as text."""

    name: str
    jobs: tuple[tuple[str, str, Gang], ...]  # name, family, GPUs
    paper: str
    nvlink: bool = True  # otherwise the hosts are shapes.PCIE_HOST

    def topology(self) -> Topology:
        """Return the testbed, whose hosts have NVLink or lack it."""
        if self.nvlink:
            return build_testbed()
        return build_clos(
            host_names(12), PCIE_HOST, tors=6, aggregations=8, tor_bytes_per_s=TOR_BYTES_PER_S
        )

    def network_jobs(self, gpt_batch: int | None = None, hidden: bool = True) -> list[NetworkJob]:
        """Return the jobs of the scenario.

        ``gpt_batch`` is the number of sequences per GPU for GPTs. If it is None, GPTs use the 16 of
        their source. Unless ``hidden`` is set, communication begins only after compute has ended.
        """
        result = []
        for name, family, gang in self.jobs:
            batch = gpt_batch if family == GPT else None
            gpus = sum(len(at) for _, at in gang)
            traffic = family_traffic(family, GPU_TYPE, gpus, batch).traffic()
            if not hidden:
                traffic = replace(traffic, start_s=traffic.compute_s)
            named = tuple((f"host-{h}", at) for h, at in gang)
            result.append(NetworkJob(name=name, gang=named, traffic=traffic))
        return result


def _whole(*hosts: int) -> Gang:
    return tuple((host, ALL_GPUS) for host in hosts)


def _part(indices: tuple[int, ...], *hosts: int) -> Gang:
    return tuple((host, indices) for host in hosts)


_GPT: Final = ("gpt", "gpt", _whole(0, 2, 4, 6))
_BERTS: Final = (
    ("bert-1", "bert", _part(LOW, 1, 3)),
    ("bert-2", "bert", _part(LOW, 5, 7)),
    ("bert-3", "bert", _part(HIGH, 1, 3)),
    ("bert-4", "bert", _part(HIGH, 5, 7)),
)
_PATHS: Final = "utilisation +8.3 to +12.9 %; GPT JCT -11 to -25 %; BERT JCT 0 to +3 %"
_PCIE: Final = "utilisation +9.5 to +14.8 %; BERT JCT -7 to -33 %; ResNet JCT +1 to +3 %"


def _pcie(name: str, family: str, *, nvlink: bool = True) -> TestbedScenario:
    """Return a scenario of a BERT and a ResNet on two hosts under one ToR.

    Each job has one GPU of every pair, so they share only PCIe switches and NICs.
    """
    return TestbedScenario(
        name=name,
        paper=_PCIE,
        nvlink=nvlink,
        jobs=(("bert", "bert", _part(EVEN, 0, 1)), ("resnet", family, _part(ODD, 0, 1))),
    )


SCENARIOS: Final = (
    *(
        TestbedScenario(name=f"paths, {n} BERT", jobs=(_GPT, *_BERTS[:n]), paper=_PATHS)
        for n in range(1, 5)
    ),
    TestbedScenario(
        name="four-job mix",
        jobs=(
            ("gpt", "gpt", _whole(0, 2, 4, 6, 8, 10)),
            ("bert-1", "bert", _whole(1, 3)),
            ("bert-2", "bert", _whole(5, 7)),
            ("resnet-1", "resnet", _part(LOW, 9, 11)),
            ("resnet-2", "resnet", _part(HIGH, 9, 11)),
        ),
        paper="utilisation +13.9 %; GPT JCT -18 %; BERT JCT -15 %; ResNet JCT +2 %",
    ),
    _pcie("PCIe, ResNet-50", "resnet"),
    _pcie("PCIe, ResNet-152", "resnet-152"),
    _pcie("PCIe without NVLink, ResNet-50", "resnet", nvlink=False),
    _pcie("PCIe without NVLink, ResNet-152", "resnet-152", nvlink=False),
    TestbedScenario(
        name="PCIe and paths",
        jobs=(
            ("bert", "bert", _part(EVEN, 0, 2, 4, 6)),
            ("resnet-1", "resnet", _part(ODD, 0, 2)),
            ("resnet-2", "resnet", _part(ODD, 4, 6)),
        ),
        paper=_PCIE,
    ),
    TestbedScenario(
        name="co-located",
        jobs=(_GPT, ("bert", "bert", _whole(1, 3))),
        paper="without Crux: GPT's iteration 1.53 s alone, 1.70 s together with BERT; BERT's"
        " throughput -7.7 %;"
        " utilisation -9.5 %",
    ),
)
"""The paper's scenarios, each with the BERT counts and ResNet depths that it leaves open."""
