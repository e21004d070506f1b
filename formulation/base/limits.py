"""The limits of the API. The server checks them, and commands before they call it."""

from __future__ import annotations

from typing import Final

MAX_BATCH: Final = 10**9
MAX_ITERATIONS: Final = 10**12
MAX_GPUS: Final = 65_536
MAX_CPUS: Final = 2**24
"""The largest demand of a job in all."""
MAX_NODES: Final = 100_000
"""The largest number of nodes in one call."""
MAX_GPUS_PER_NODE: Final = 64
MAX_CPUS_PER_NODE: Final = 65_536
MAX_MEMORY_BYTES: Final = 2**50
MAX_PRIORITY: Final = 100
MIN_WEIGHT: Final = 1e-6
MAX_WEIGHT: Final = 1e6
"""Outside this range of weights, one job's value would overflow or dominate a round's objective."""
MAX_RETRIES: Final = 1000
MAX_JOBS: Final = 10_000
"""The number of jobs that one SubmitJobs call accepts."""
MAX_SEED: Final = 2**31 - 1
MAX_DEFRAGMENT_EVERY: Final = 10**6
MAX_CHANGES: Final = 10**6
MAX_AVOIDED_NODES: Final = 256
MAX_DOLLARS_PER_HOUR: Final = 1e6
MAX_WATTS: Final = 1e6
"""The largest values of one GPU. A larger value is in a wrong unit."""
MAX_TENANT_WEIGHT: Final = 1e6
MAX_QUOTA: Final = 10**7
"""The largest quota in GPUs, far beyond any cluster."""
MAX_ARCHITECTURE: Final = 65_536
MAX_MICRO_BATCHES: Final = 10**6
MAX_SEQUENCE: Final = 10**7
MAX_STATE_BYTES: Final = 1000.0
MAX_NAMED_HOSTS: Final = 20
"""The largest number of a topology's unmatched hosts and nodes that the server names."""
DTYPES: Final = ("f32", "bf16", "f16")
MAX_DURATION_S: Final = 315_576_000_000
"""Ten thousand years, the most that google.protobuf.Duration can hold."""
MAX_ROWS: Final = 10**9
"""The number of rows of a file or a table, far beyond any real one."""
MAX_SYNTHETIC_JOBS: Final = 10**6
"""The number of jobs that a simulation draws. All are made before it begins."""

JOB_BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "global_batch": (1, MAX_BATCH),
    "iterations": (1, MAX_ITERATIONS),
    "requested_gpus": (1, MAX_GPUS),
    "min_gpus": (0, MAX_GPUS),
    "max_gpus": (0, MAX_GPUS),
    "requested_cpus": (0, MAX_CPUS),
    "priority": (1, MAX_PRIORITY),
    "weight": (MIN_WEIGHT, MAX_WEIGHT),
    "max_retries": (0, MAX_RETRIES),
}
"""The least and the largest value of each number that a user states of a job."""
