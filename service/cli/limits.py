"""What the API takes, so that a number beyond is refused by the name of the option or key that holds it.

The server checks for itself; a test holds the two together. They are repeated here because the server's
modules take longer to load than a command should.
"""

from __future__ import annotations

from typing import Final

MAX_BATCH: Final = 10**9
MAX_ITERATIONS: Final = 10**12
MAX_GPUS: Final = 65_536
MAX_GPUS_A_NODE: Final = 64
MAX_MEMORY_BYTES: Final = 2**50
MAX_PRIORITY: Final = 100
MIN_WEIGHT: Final = 1e-6
MAX_WEIGHT: Final = 1e6
MAX_RETRIES: Final = 1000
MAX_JOBS: Final = 10_000
"""Jobs that one SubmitJobs call takes."""
MAX_SEED: Final = 2**31 - 1
MAX_DEFRAGMENT_EVERY: Final = 10**6
MAX_CHANGES: Final = 10**6
MAX_FAIRNESS_LEVELS: Final = 64
MAX_AVOIDED: Final = 256
MAX_DOLLARS_PER_HOUR: Final = 1e6
MAX_WATTS: Final = 1e6
MAX_TENANT_WEIGHT: Final = 1e6
MAX_QUOTA: Final = 10**7
MAX_ARCHITECTURE: Final = 65_536
MAX_MICRO_BATCHES: Final = 10**6
MAX_SEQUENCE: Final = 10**7
MAX_STATE_BYTES: Final = 1000.0
HOSTS_NAMED: Final = 20
"""Hosts and nodes that do not fit, of a topology; the server names no more."""
DTYPES: Final = ("f32", "bf16", "f16")
MAX_DURATION_S: Final = 315_576_000_000
"""Ten thousand years: what google.protobuf.Duration can hold."""
MAX_ROWS: Final = 10**9
"""Of a file or a table; far beyond any."""
