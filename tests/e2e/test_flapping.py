"""Jobs that want the same GPUs do not suspend each other in turn on a server."""

from __future__ import annotations

from typing import Any, Final

from tessera.benchmarks.schedulers.server_streams import run_on_server
from tessera.benchmarks.schedulers.streams import GpuPool, StreamDraft
from tessera.solvers.rounds.options import RoundOptions
from tests.support.database import a_database

SMALL_JOBS: Final = 16
LASTING_S: Final = 180.0
"""Seconds of training of each job, which its agent replays in six."""


def test_a_gang_of_all_gpus_and_the_small_jobs_on_them_start_once_and_end(server_url: str) -> None:
    draft = StreamDraft(
        GpuPool(gpu_type="h100", nodes=2),
        GpuPool(nodes=4, node_gpus=4),
        GpuPool(gpu_type="v100", nodes=2),
    )
    request: dict[str, Any] = {"requested_gpu_type": "h100", "allowed_gpu_types": ("h100",)}
    for _ in range(SMALL_JOBS):
        draft.add(0.0, 1, LASTING_S, **request)
    draft.add(60.0, 16, LASTING_S, role="gang", **request)
    with a_database(server_url) as database:
        run = run_on_server({"flap": draft.finish()}, RoundOptions(), database.url)["flap"]
    assert run.state == ["succeeded"] * (SMALL_JOBS + 1)
    assert run.restarts == 0
    assert run.unpromised_jobs == 0
    (gang,) = [i for i, name in enumerate(run.names) if name.startswith("gang")]
    assert run.start_s[gang] >= max(run.end_s[:gang] + run.end_s[gang + 1 :])
