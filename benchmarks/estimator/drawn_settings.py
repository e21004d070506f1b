"""Random small jobs on a few GPUs, on which about half of the plans do not fit into memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from tessera.benchmarks.estimator.listed_stages import PlanList, list_divisions, list_switches
from tessera.estimator.architectures.moe import MixtureOfExperts, mixture_graph
from tessera.estimator.architectures.resnet import WideResNet, wide_resnet
from tessera.estimator.architectures.transformer import Transformer, transformer_graph
from tessera.estimator.cells import Setting, data_sheet_setting
from tessera.estimator.graph import Graph, join_layers
from tessera.estimator.hardware import A10, A40, A100, A100_80, H100, V100
from tessera.estimator.memory import States
from tessera.estimator.plans import Training, shapes_of

HARDWARE: Final = (A100, V100, A40, A10, H100, A100_80)
MAX_LAYERS: Final = 6
MAX_GPUS: Final = 8
MAX_BATCH: Final = 16
MAX_BLOCKS: Final = 12
_SAMPLES: Final = 60
"""Number of drawn plans whose memory decides how much a GPU has."""


def draw_setting(rng: np.random.Generator) -> Setting:
    """Return a random job of 2 to 6 layers and 1 to 16 samples on 1 to 8 GPUs."""
    hardware = HARDWARE[rng.integers(len(HARDWARE))]
    shapes = shapes_of(int(rng.integers(1, MAX_GPUS + 1)), hardware.gpus_per_node)
    batch = int(rng.integers(1, MAX_BATCH + 1))
    training = Training(
        global_batch=batch,
        state_bytes=float(rng.choice([8.0, 16.0])),
        checkpointing=bool(rng.integers(2)),
    ).within(int(rng.integers(1, batch + 1)))
    setting = data_sheet_setting(
        _draw_graph(rng),
        training,
        hardware,
        shapes[rng.integers(len(shapes))],
        States(zero=int(rng.integers(4))),
    )
    needs = _drawn_needs(setting, rng)
    if not needs:
        return draw_setting(rng)  # the samples cannot be divided among the GPUs
    memory_bytes = int(np.median(needs) / setting.runtime.room.usable)
    small_hardware = replace(hardware, memory_bytes=memory_bytes)
    return data_sheet_setting(
        setting.graph, training, small_hardware, setting.shape, setting.runtime.states
    )


def _draw_graph(rng: np.random.Generator) -> Graph:
    """Return a random model, whose neighbouring layers are joined at random."""
    kind = rng.integers(3)
    if kind == 0:
        channels = int(rng.choice([64, 160, 320]))
        graph = wide_resnet(WideResNet(name="resnet", channels=channels, width=2))
    else:
        heads = int(rng.choice([2, 4, 6, 8, 12]))
        sizes = Transformer(
            name="transformer",
            layers=int(rng.integers(1, MAX_BLOCKS + 1)),
            hidden=heads * int(rng.choice([64, 128, 256])),
            heads=heads,
            sequence=int(rng.choice([256, 1024, 4096])),
            vocabulary=int(rng.choice([8_000, 32_000, 128_000])),
            flash=bool(rng.integers(2)),
            dtype=str(rng.choice(["f16", "bf16"])),
        )
        graph = transformer_graph(sizes) if kind == 1 else _with_experts(sizes, rng)
    count = int(rng.integers(2, min(MAX_LAYERS, len(graph)) + 1))
    ends = np.sort(rng.choice(np.arange(1, len(graph)), count - 1, replace=False))
    return join_layers(graph, np.append(ends, len(graph)).astype(np.int64))


def _with_experts(sizes: Transformer, rng: np.random.Generator) -> Graph:
    return mixture_graph(
        MixtureOfExperts(
            name="experts",
            layers=sizes.layers,
            hidden=sizes.hidden,
            heads=sizes.heads,
            sequence=sizes.sequence,
            vocabulary=sizes.vocabulary,
            flash=sizes.flash,
            dtype=sizes.dtype,
            experts=int(rng.choice([2, 4, 8, 12])),
            every=int(rng.integers(1, 3)),
        )
    )


def _drawn_needs(setting: Setting, rng: np.random.Generator) -> list[float]:
    """Return the memory that random plans need on their fullest GPU."""
    degrees = range(1, min(len(setting.graph), setting.shape.gpus) + 1)
    lists = [stages for degree in degrees for stages in list_divisions(setting, degree)]
    switches = list(list_switches(setting))
    needs = []
    for _ in range(_SAMPLES):
        stage_lists = lists[rng.integers(len(lists))]
        plans = PlanList(
            setting, stage_lists, stage_lists.candidates, *switches[rng.integers(len(switches))]
        )
        price = plans.price(int(rng.integers(len(plans.rows)))) if len(plans.rows) else None
        if price is not None:
            needs.append(max(price.memory_bytes))
    return needs
