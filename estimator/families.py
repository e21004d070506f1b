"""Work and traffic of an iteration of well-known model families, on any number of GPUs of a type.

Crux (SIGCOMM 2024, section 6) names BERT, GPT, ResNet, NMT, Multi-Interests, variants of them and
two models of its own. The parts of the paper that we have do not state their sizes, batches and
plans. The numbers here are published elsewhere, with their source next to them, or marked as ours.
Nothing is fitted to the measurements of Crux. Batches are those of one GPU, so a larger job trains
a larger batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from tessera.estimator.architectures.published import ADAM_MIXED, MOMENTUM_F32, find_published
from tessera.estimator.architectures.resnet import WideResNet, wide_resnet
from tessera.estimator.architectures.transformer import Transformer, transformer_graph
from tessera.estimator.cells import coarse_for, data_sheet_setting
from tessera.estimator.graph import Graph, balanced_ends
from tessera.estimator.hardware import CATALOGUE, Hardware
from tessera.estimator.memory import States
from tessera.estimator.plans import PricedPlan, Training, shape_of
from tessera.estimator.traffic import gradient_share, traffic_of
from tessera.formulation.errors import InvalidInput
from tessera.formulation.execution_plan import PlanStage
from tessera.formulation.network.traffic import CellTraffic, StageTraffic

HOST_GPUS: Final = 8
"""GPUs of a host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family with the source of its numbers, its overlap and its range of GPUs."""

    name: str
    source: str
    overlap: str
    traffic: Callable[[Hardware, int], CellTraffic]
    least_gpus: int = 1
    most_gpus: int = 512


@cache
def family_traffic(name: str, gpu_type: str, gpus: int) -> CellTraffic:
    """Return one iteration of a family's model on ``gpus`` GPUs of a type (hosts of eight).

    Raises:
        InvalidInput: there is no such family or GPU type, or the family does not run on this number
            of GPUs.
    """
    known = known_families()
    if name not in known:
        raise InvalidInput("family", f"unknown family {name!r}; use one of {', '.join(known)}")
    catalogue = {h.name: h for h in CATALOGUE}
    hardware = catalogue.get(gpu_type)
    if hardware is None:
        raise InvalidInput(
            "gpu_type", f"unknown GPU type {gpu_type!r}; use one of {', '.join(catalogue)}"
        )
    family = known[name]
    if not family.least_gpus <= gpus <= family.most_gpus or (gpus > HOST_GPUS and gpus % HOST_GPUS):
        raise InvalidInput(
            "gpus",
            f"{name} runs on {family.least_gpus} to {family.most_gpus} GPUs, and above {HOST_GPUS}"
            f" only on multiples of {HOST_GPUS}, not on {gpus}",
        )
    return family.traffic(hardware, gpus)


@cache
def known_families() -> Mapping[str, Family]:
    """Return all families by name."""
    listed = (*_dense_families(), _gpt_family(), *_recommenders())
    return MappingProxyType({family.name: family for family in listed})


GRADIENT_OVERLAP: Final = "gradients are sent once the backward pass has begun"


def _dense_families() -> list[Family]:
    """Return the data-parallel families for which we have graphs."""
    return [
        _replicated_family(
            "bert",
            lambda: find_published("bert", "336M").graph,
            batch=12,
            state_bytes=ADAM_MIXED,
            source="BERT-large (Devlin et al. 2019) with its vocabulary padded, 512 tokens; 12 sequences"
            " per GPU (Wang et al., IISWC 2019, Table V)",
        ),
        _replicated_family(
            "bert-base",
            _bert_base,
            batch=32,
            state_bytes=ADAM_MIXED,
            source="BERT-base (Devlin et al. 2019, section 3), 512 tokens; 32 sequences per GPU: ours",
        ),
        _replicated_family(
            "resnet",
            lambda: _resnet(50),
            batch=64,
            state_bytes=MOMENTUM_F32,
            source="ResNet-50 (He et al. 2016), 16 bits; 64 images per GPU (Wang et al., IISWC 2019,"
            " Table V)",
        ),
        _replicated_family(
            "resnet-152",
            lambda: _resnet(152),
            batch=64,
            state_bytes=MOMENTUM_F32,
            source="ResNet-152 (He et al. 2016), 16 bits; 64 images per GPU, as for ResNet-50: ours",
        ),
        _replicated_family(
            "nmt",
            lambda: _nmt("nmt", 1024, 16),
            batch=98,
            state_bytes=ADAM_MIXED,
            source="Transformer, big (Vaswani et al. 2017, Table 3: 213 M parameters); 25,000 tokens on 8"
            " GPUs (section 5.1) as 98 sentences of 32 tokens per GPU",
        ),
        _replicated_family(
            "nmt-base",
            lambda: _nmt("nmt-base", 512, 8),
            batch=98,
            state_bytes=ADAM_MIXED,
            source="Transformer, base (Vaswani et al. 2017, Table 3: 65 M parameters); batch as for nmt",
        ),
        _replicated_family(
            "transformer-nlp",
            lambda: find_published("roberta", "355M").graph,
            batch=8,
            state_bytes=ADAM_MIXED,
            source="RoBERTa-large (Liu et al. 2019) in place of Crux's own transformer; 8,192 sequences"
            " on 1,024 GPUs (its section 5)",
        ),
    ]


def _replicated_family(
    name: str, graph: Callable[[], Graph], *, batch: int, state_bytes: float, source: str
) -> Family:
    def traffic(hardware: Hardware, gpus: int) -> CellTraffic:
        training = Training(global_batch=batch * gpus, micro_batches=1, state_bytes=state_bytes)
        return _stage_traffic(graph(), training, hardware, gpus, tp=1, stages=1)

    return Family(name=name, source=source, overlap=GRADIENT_OVERLAP, traffic=traffic)


@dataclass(frozen=True, slots=True, kw_only=True)
class GptSize:
    """A row of Narayanan et al. (SC 2021), Table 1: a GPT and its training on A100s."""

    gpus: int
    hidden: int
    layers: int
    heads: int
    tp: int
    stages: int
    batch: int  # of all GPUs


GPT_SIZES: Final = (
    GptSize(gpus=32, hidden=2304, layers=24, heads=24, tp=1, stages=1, batch=512),
    GptSize(gpus=64, hidden=3072, layers=30, heads=32, tp=2, stages=1, batch=512),
    GptSize(gpus=128, hidden=4096, layers=36, heads=32, tp=4, stages=1, batch=512),
    GptSize(gpus=256, hidden=6144, layers=40, heads=48, tp=8, stages=1, batch=1024),
    GptSize(gpus=512, hidden=8192, layers=48, heads=64, tp=8, stages=2, batch=1536),
)


def _gpt_family() -> Family:
    return Family(
        name="gpt",
        source="Narayanan et al., SC 2021, Table 1: the largest size that is trained on no more GPUs than"
        " the job has (1.7 to 39 B parameters), with its tensor and pipeline degrees and its batch per GPU;"
        " 2,048 tokens, vocabulary 51,200, checkpointing, one sequence per micro-batch (ours)",
        overlap="none: Megatron-LM, as described there, sums gradients after the last backward pass, and"
        " compute stops for the sums of tensor groups",
        traffic=gpt_traffic,
        least_gpus=8,
    )


def gpt_traffic(hardware: Hardware, gpus: int, gpu_batch: float | None = None) -> CellTraffic:
    """Return an iteration of the GPT for ``gpus`` GPUs.

    ``gpu_batch`` is the number of sequences per GPU. If it is None, it is that of the source.
    Gradients are summed in the 16 bits of the weights.
    """
    size = max((s for s in GPT_SIZES if s.gpus <= gpus), default=GPT_SIZES[0], key=lambda s: s.gpus)
    each = size.batch / size.gpus if gpu_batch is None else gpu_batch
    dp = gpus // (size.tp * size.stages)
    replica = max(1, round(each * gpus / dp))
    training = Training(
        global_batch=replica * dp, micro_batches=replica, state_bytes=ADAM_MIXED, checkpointing=True
    )
    return _after_compute(
        _stage_traffic(_gpt(size), training, hardware, gpus, tp=size.tp, stages=size.stages)
    )


def _stage_traffic(
    graph: Graph, training: Training, hardware: Hardware, gpus: int, *, tp: int, stages: int
) -> CellTraffic:
    """Return an iteration of equal stages whose tensor groups have ``tp`` GPUs of one host each.

    The all-reduces of tensor groups stay on NVLink, which no other job uses, and compute waits for
    them. Their seconds therefore count as compute, and only the bytes that cross hosts count as
    traffic.
    """
    setting = data_sheet_setting(graph, training, hardware, shape_of(gpus, HOST_GPUS), States())
    coarse = coarse_for(graph, stages)
    ends = balanced_ends(coarse.graph.flops, stages).tolist()
    dp = gpus // (tp * stages)
    plan = PricedPlan(
        stages=tuple(
            coarse.fine_stage(PlanStage(start=a, end=b, dp=dp, tp=tp))
            for a, b in zip([0, *ends], ends, strict=False)
        ),
        micro_batches=training.micro_batches,
        iter_time_s=0.0,
        memory_bytes=(0.0,) * stages,
        merged_layers=len(coarse.graph),
    )
    cell_traffic = traffic_of(setting, plan)
    return cell_traffic if tp == 1 else _inside_hosts(cell_traffic, hardware)


def _inside_hosts(traffic: CellTraffic, hardware: Hardware) -> CellTraffic:
    """Return the iteration with the all-reduces of tensor groups as compute, at NVLink bandwidth."""
    tensor_s = max(s.tensor[0] for s in traffic.stages) / hardware.link_bytes_per_s
    quiet = tuple(replace(s, tensor=(0.0, 0)) for s in traffic.stages)
    return replace(traffic, stages=quiet, compute_s=traffic.compute_s + tensor_s)


def _after_compute(traffic: CellTraffic) -> CellTraffic:
    """Return the iteration with its gradients sent after compute has ended."""
    return replace(traffic, start_s=gradient_share(traffic.stages) * traffic.compute_s)


def _bert_base() -> Graph:
    return transformer_graph(
        Transformer(
            name="bert-base",
            layers=12,
            hidden=768,
            heads=12,
            sequence=512,
            vocabulary=30_592,
            token_types=2,
            causal=False,
            norm_first=False,
            head="pretraining",
            head_bias=True,
            dropout=True,
            dtype="f16",
        )
    )


def _resnet(depth: int) -> Graph:
    return wide_resnet(WideResNet(name=f"resnet-{depth}", depth=depth, dtype="f16"))


def _nmt(name: str, hidden: int, heads: int) -> Graph:
    """Return a Transformer of six plus six layers with one vocabulary of 37,000 for both languages."""
    return transformer_graph(
        Transformer(
            name=name,
            layers=6,
            decoder_layers=6,
            hidden=hidden,
            heads=heads,
            sequence=32,
            vocabulary=37_000,
            positions="none",
            activation="relu",
            norm_first=False,
            dropout=True,
            dtype="f16",
        )
    )


def _gpt(size: GptSize) -> Graph:
    return transformer_graph(
        Transformer(
            name=f"gpt {size.hidden}x{size.layers}",
            layers=size.layers,
            hidden=size.hidden,
            heads=size.heads,
            sequence=2048,
            vocabulary=51_200,
            dropout=True,
            dtype="f16",
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommender:
    """A recommendation model: embeddings spread over all GPUs, and small nets that each GPU holds.

    Its published features are amounts per GPU and iteration. Rows of embeddings arrive before
    compute and their gradients leave after it. None of this is hidden, so communication is modelled
    to begin when compute ends.
    """

    flops: float
    touched_bytes: float  # of the GPU's memory
    exchanged_bytes: float  # rows and their gradients, to and from all GPUs
    dense_bytes: float  # gradients of the nets

    def traffic(self, hardware: Hardware, gpus: int) -> CellTraffic:
        """Return an iteration of products and then memory traffic, each at 70 % of its peak."""
        compute_s = (
            self.flops / hardware.flops("tf32") + self.touched_bytes / hardware.memory_bytes_per_s
        ) / REACHED_SHARE
        data = 2 * self.dense_bytes * (gpus - 1) / gpus, 2 * (gpus - 1)
        stage = StageTraffic(
            dp=gpus,
            tp=1,
            ep=gpus,
            data=data if gpus > 1 else (0.0, 0),
            expert=(self.exchanged_bytes / gpus, 2) if gpus > 1 else (0.0, 0),
        )
        return CellTraffic(
            work_flop=self.flops * gpus, compute_s=compute_s, start_s=compute_s, stages=(stage,)
        )


REACHED_SHARE: Final = 0.7
"""Share of peak that products and memory traffic reach (assumed by Wang et al., IISWC 2019)."""

MULTI_INTERESTS: Final = Recommender(
    flops=105.8e9, touched_bytes=100.4e9, exchanged_bytes=122e6, dense_bytes=1.19e6
)
"""Multi-Interests at 2,048 samples per GPU (Wang et al., IISWC 2019, Alibaba-PAI, Tables IV and V).
"""

_CTR_BATCH: Final = 65_536
_CTR_ROWS, _CTR_WIDTH = 26, 128
_CTR_WEIGHTS: Final = sum(
    a * b for net in ((13, 512, 256, 128), (479, 1024, 1024, 512, 256, 1)) for a, b in pairwise(net)
)
CTR: Final = Recommender(
    flops=6 * _CTR_WEIGHTS * _CTR_BATCH,
    touched_bytes=6 * 4 * _CTR_ROWS * _CTR_WIDTH * _CTR_BATCH,
    exchanged_bytes=2 * 2 * _CTR_ROWS * _CTR_WIDTH * _CTR_BATCH,
    dense_bytes=4 * _CTR_WEIGHTS,
)
"""DLRM (Naumov et al. 2019) at the sizes of MLPerf Training: 26 rows of 128, and nets
13-512-256-128 and 479-1024-1024-512-256-1. Ours are the 65,536 samples per GPU (Zheng et al., AAAI
2023, train 128 K on one), rows sent in 16 bits, and six passes over them in 32 bits."""


def _recommenders() -> list[Family]:
    hidden = "none: rows arrive before compute, and their gradients leave after it"
    double = replace(
        MULTI_INTERESTS,
        flops=2 * MULTI_INTERESTS.flops,
        touched_bytes=2 * MULTI_INTERESTS.touched_bytes,
        exchanged_bytes=2 * MULTI_INTERESTS.exchanged_bytes,
    )
    paper = "Wang et al., IISWC 2019 (Alibaba-PAI), Tables IV and V"
    ctr = "DLRM (Naumov et al. 2019) at MLPerf Training's sizes in place of Crux's own click-through model"
    return [
        Family(name=name, source=source, overlap=hidden, traffic=model.traffic, most_gpus=32)
        for name, model, source in (
            ("multi-interests", MULTI_INTERESTS, paper),
            ("multi-interests-2x", double, paper + ", batch doubled: ours"),
            ("ctr", CTR, ctr),
        )
    ]
