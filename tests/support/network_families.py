"""Work and traffic of an iteration of the testbed's models, on any number of GPUs of a type.

Crux (SIGCOMM 2024, section 6) names BERT, GPT and ResNet. The parts of the paper that we have do not
state their sizes, batches and plans. The numbers here are published elsewhere, with their source
next to them, or marked as ours. Nothing is fitted to the measurements of Crux. Batches are those of
one GPU, so a larger job trains a larger batch. Each GPU holds the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Final

from tessera.estimator.architectures.published import ADAM_MIXED, MOMENTUM_F32, find_published
from tessera.estimator.architectures.resnet import WideResNet, wide_resnet
from tessera.estimator.architectures.transformer import Transformer, transformer_graph
from tessera.estimator.cells import data_sheet_setting
from tessera.estimator.graph import Graph
from tessera.estimator.hardware import CATALOGUE
from tessera.estimator.memory import States
from tessera.estimator.plans import Training, shape_of
from tessera.estimator.traffic import traffic_of
from tessera.formulation.job.execution_plan import ExecutionPlan, PlanStage, Precision
from tessera.formulation.state.traffic import CellTraffic

HOST_GPUS: Final = 8
"""GPUs of a host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family: its graph, the samples of a GPU, and how its states are stored.

    If it ``overlaps``, gradients are sent once the backward pass has begun. Otherwise they are sent
    after compute has ended, and activations are computed again.
    """

    graph: Callable[[], Graph]
    gpu_batch: int
    state_bytes: float
    overlaps: bool = True


GPT: Final = "gpt"
FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        # BERT-large (Devlin et al. 2019) with its vocabulary padded, 512 tokens; 12 sequences a GPU
        # (Wang et al., IISWC 2019, Table V).
        "bert": Family(
            graph=lambda: find_published("bert", "336M").graph,
            gpu_batch=12,
            state_bytes=ADAM_MIXED,
        ),
        # ResNet-50 (He et al. 2016), 16 bits; 64 images a GPU (Wang et al., IISWC 2019, Table V).
        "resnet": Family(graph=lambda: _resnet(50), gpu_batch=64, state_bytes=MOMENTUM_F32),
        # ResNet-152 (He et al. 2016), 16 bits; 64 images a GPU as for ResNet-50: ours.
        "resnet-152": Family(graph=lambda: _resnet(152), gpu_batch=64, state_bytes=MOMENTUM_F32),
        # Narayanan et al., SC 2021, Table 1: the GPT of 1.7 B parameters, which is trained on 32
        # GPUs; 2,048 tokens, vocabulary 51,200, checkpointing, one sequence in a micro-batch (ours).
        # Megatron-LM, as described there, sums gradients after the last backward pass.
        GPT: Family(graph=lambda: _gpt(), gpu_batch=16, state_bytes=ADAM_MIXED, overlaps=False),
    }
)


@cache
def family_traffic(
    name: str, gpu_type: str, gpus: int, gpu_batch: int | None = None
) -> CellTraffic:
    """Return one iteration of a family's model on ``gpus`` GPUs of a type (hosts of eight).

    ``gpu_batch`` is the number of samples of a GPU. If it is None, it is that of the source.
    """
    family = FAMILIES[name]
    hardware = next(h for h in CATALOGUE if h.name == gpu_type)
    samples = family.gpu_batch if gpu_batch is None else gpu_batch
    training = Training(
        global_batch=samples * gpus,
        micro_batches=1 if family.overlaps else samples,
        state_bytes=family.state_bytes,
        checkpointing=not family.overlaps,
    )
    setting = data_sheet_setting(
        family.graph(), training, hardware, shape_of(gpus, HOST_GPUS), States()
    )
    plan = ExecutionPlan(
        stages=(PlanStage(start=0, end=len(setting.graph), dp=gpus),),
        micro_batch=training.micro_batch,
        accumulation=training.micro_batches,
        recomputation=training.recomputation,
        precision=Precision(setting.graph.dtype),
    )
    traffic = traffic_of(setting, plan)
    if traffic is None:
        raise AssertionError("no plan here divides sequences")
    return traffic if family.overlaps else replace(traffic, start_s=traffic.compute_s)


def _resnet(depth: int) -> Graph:
    return wide_resnet(WideResNet(name=f"resnet-{depth}", depth=depth, dtype="f16"))


def _gpt() -> Graph:
    return transformer_graph(
        Transformer(
            name=GPT,
            layers=24,
            hidden=2304,
            heads=24,
            sequence=2048,
            vocabulary=51_200,
            dropout=True,
            dtype="f16",
        )
    )
