"""The environment of a job's processes, which marks their traffic.

It is set once, because queue pairs keep their class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tessera.formulation.answer.network.tags import TagSettings, check_tag
from tessera.formulation.base.errors import InvalidInput

ECT0 = 2
"""ECN bits that declare an ECN-capable transport, as in NCCL_IB_TC=106 for DSCP 26."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """The settings that are passed to jobs' libraries.

    ``queue_pairs`` is the number per connection; 0 leaves NCCL's default. ``ucx`` and ``hccl`` add
    the same settings for these libraries. HCCL requires multiples of 4, so it gets no ECN bits.

    Without ``marks``, traffic stays in its present class. A fabric that already maps by DSCP, and
    does not know these marks, could carry it in a worse one.
    """

    marks: bool = True
    ecn: int = ECT0
    queue_pairs: int = 0
    ucx: bool = False
    hccl: bool = False

    def __post_init__(self) -> None:
        """Refuse values that the libraries would refuse."""
        if not 0 <= self.ecn <= 3:
            raise InvalidInput("ecn", f"must be 0 to 3, not {self.ecn}")
        if not 0 <= self.queue_pairs <= 128:
            raise InvalidInput("queue_pairs", f"must be 0 to 128, not {self.queue_pairs}")


def traffic_class(tag: int, ecn: int) -> int:
    """Return the IP header's ToS byte: six bits DSCP, two bits ECN."""
    return check_tag(tag, "tag") * 4 + ecn


def marking_environment(
    job: str, settings: TagSettings, launch: LaunchSettings | None = None
) -> dict[str, str]:
    """Return the variables that mark the traffic of ``job``.

    The result is empty if the job has no tag or is not marked. NCCL reads NCCL_IB_TC into the traffic
    class (RoCE) and NCCL_IB_SL into the service level (InfiniBand).

    Both are set: if ``ncclConfig_t.trafficClass`` is used and NCCL_IB_SL is not, NCCL also writes
    the class into the four bits of the service level (nccl 2.30.7, net_ib). The service level is
    the priority at launch and stays the same for the job's life, because nothing maps it again.
    """
    launch = launch or LaunchSettings()
    tag = settings.tags.get(job)
    if tag is None or not launch.marks:
        return {}
    priority = settings.priorities[tag]
    variables = {
        "NCCL_IB_TC": traffic_class(tag, launch.ecn),
        "NCCL_IB_SL": priority,
        "NCCL_IB_FIFO_TC": traffic_class(settings.control_tag, launch.ecn),
    }
    if launch.queue_pairs:
        variables["NCCL_IB_QPS_PER_CONNECTION"] = launch.queue_pairs
    if launch.ucx:
        variables |= {"UCX_IB_TRAFFIC_CLASS": traffic_class(tag, launch.ecn), "UCX_IB_SL": priority}
    if launch.hccl:
        variables |= {"HCCL_RDMA_TC": traffic_class(tag, 0), "HCCL_RDMA_SL": priority}
    return {name: str(value) for name, value in variables.items()}


def find_overridden_marks(
    job: str, settings: TagSettings, forced: Mapping[str, int]
) -> tuple[str, ...]:
    """Return a sentence for each RDMA device whose forced traffic class hides a job's mark."""
    tag = settings.tags.get(job)
    if tag is None:
        return ()
    return tuple(
        f"{device} forces traffic class {value}, so the traffic of job {job} does not carry DSCP tag {tag}"
        for device, value in forced.items()
        if value >> 2 != tag
    )
