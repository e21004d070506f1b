"""Published training runs that state their execution plan, with their measured iteration times.

The sources are Korthikanti et al. (MLSys 2023), Tables 3 and 5; torchtitan's report of December 2024
(``benchmarks/llama3_h100_202412_torchtitan.md``), the rows with ``torch.compile``; and MosaicML's
training benchmarks (llm-foundry, ``scripts/train/benchmarking/README.md``), the H100 rows of 13B
parameters and more in bf16, and all rows in fp8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from tessera.estimator.architectures.transformer import Transformer
from tessera.estimator.hardware import GIB, H100, Hardware
from tessera.estimator.hardware.catalogue import A100_80
from tessera.estimator.stated.statement import Division, StatedPlan
from tessera.formulation.execution_plan import Precision, Recomputation, Schedule, ZeroStage


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """A run with its plan. ``memory_bytes`` is the measured peak, or 0 if it was not published."""

    group: str
    name: str
    model: Transformer
    hardware: Hardware
    gpus: int
    batch: int
    stated: StatedPlan
    seconds: float
    memory_bytes: float = 0.0


H100_DGX: Final = replace(H100, name="h100-dgx", network_bytes_per_s=400e9)
"""An H100 with eight ports of 400 Gb/s in a node, as MosaicML's cluster has."""
H100_96: Final = replace(H100_DGX, name="h100-96", memory_bytes=96 * GIB, memory_bytes_per_s=2400e9)
"""The H100 of torchtitan's report. It also limits power to 500 W, which no data sheet rates."""


def published_runs() -> Iterator[PublishedRun]:
    """Yield all runs."""
    yield from _korthikanti()
    yield from _torchtitan()
    yield from _mosaic()


def _korthikanti() -> Iterator[PublishedRun]:
    """Yield both rows of each model: full recomputation, and selective with sequence parallelism."""
    rows = (
        # name, hidden, layers, heads, pp, chunks, micro-batch, batch, full s, selective s
        ("22B", 6144, 48, 64, 1, 1, 4, 4, 1.42, 1.10),
        ("175B", 12288, 96, 96, 8, 3, 1, 64, 18.13, 13.75),
        ("530B", 20480, 105, 128, 35, 3, 1, 280, 49.05, 37.83),
        ("1T", 25600, 128, 160, 64, 1, 1, 512, 94.42, 71.49),
    )
    for name, hidden, layers, heads, pp, chunks, micro, batch, *times in rows:
        model = Transformer(
            name=name,
            hidden=hidden,
            layers=layers,
            heads=heads,
            sequence=2048,
            vocabulary=51200,
            dropout=True,
        )
        for kind, seconds in zip((Recomputation.FULL, Recomputation.SELECTIVE), times, strict=True):
            stated = StatedPlan(
                tp=8,
                pp=pp,
                chunks=chunks,
                micro_batch=micro,
                sp=kind is Recomputation.SELECTIVE,
                recomputation=kind,
                precision=Precision.BF16,
                zero=ZeroStage.NONE,
                division=Division.EQUAL,
            )
            yield PublishedRun(
                group="Megatron-LM",
                name=f"{name} {kind}",
                model=model,
                hardware=A100_80,
                gpus=8 * pp,
                batch=batch,
                stated=stated,
                seconds=seconds,
            )


_LLAMA: Final[dict[str, dict[str, Any]]] = {
    "8B": {"hidden": 4096, "layers": 32, "heads": 32, "intermediate": 14336},
    "70B": {"hidden": 8192, "layers": 80, "heads": 64, "intermediate": 28672},
    "405B": {"hidden": 16384, "layers": 126, "heads": 128, "intermediate": 53248},
}


def _llama(name: str, sequence: int) -> Transformer:
    return Transformer(
        name=f"llama {name}",
        sequence=sequence,
        vocabulary=128256,
        kv_heads=8,
        gated=True,
        activation="silu",
        norm="rms",
        positions="rotary",
        bias=False,
        tied=False,
        flash=True,
        **_LLAMA[name],
    )


def _torchtitan() -> Iterator[PublishedRun]:
    """Yield the rows with ``torch.compile``, whose tokens per second are those of one GPU."""
    selective, full = Recomputation.SELECTIVE, Recomputation.FULL
    bf16, fp8 = Precision.BF16, Precision.FP8
    rows: tuple[tuple[str, int, int, int, int, int, int, int, Any, Any, float, float], ...] = (
        # model, sequence, GPUs, tp, pp, cp, chunks, local batch, recomputation, precision, tokens, GiB
        ("8B", 8192, 8, 1, 1, 1, 1, 2, selective, bf16, 6667, 77.0),
        ("8B", 8192, 8, 1, 1, 1, 1, 2, selective, fp8, 8532, 76.8),
        ("8B", 32768, 8, 1, 1, 1, 1, 1, full, fp8, 3890, 83.9),
        ("8B", 65536, 8, 1, 1, 2, 1, 1, full, fp8, 2540, 84.2),
        ("8B", 131072, 8, 1, 1, 4, 1, 1, full, fp8, 1071, 84.0),
        ("8B", 262144, 8, 1, 1, 8, 1, 1, full, fp8, 548, 84.5),
        ("8B", 8192, 128, 1, 1, 1, 1, 2, selective, bf16, 6514, 62.0),
        ("8B", 8192, 128, 1, 1, 1, 1, 2, selective, fp8, 8380, 61.8),
        ("70B", 8192, 256, 8, 1, 1, 1, 16, full, fp8, 829, 71.9),
        ("405B", 8192, 512, 8, 8, 1, 1, 32, full, fp8, 100, 82.5),
        ("405B", 8192, 512, 8, 8, 1, 2, 32, full, fp8, 128, 72.7),
        ("405B", 32768, 512, 8, 8, 1, 1, 8, full, fp8, 76, 75.3),
        ("405B", 65536, 512, 8, 8, 2, 1, 8, full, fp8, 47, 75.9),
        ("405B", 131072, 512, 8, 8, 4, 1, 8, full, fp8, 31, 77.1),
        ("405B", 262144, 512, 8, 8, 8, 1, 8, full, fp8, 16, 84.9),
    )
    for name, sequence, gpus, tp, pp, cp, chunks, local, kind, precision, tokens, gib in rows:
        dp = gpus // (tp * pp * cp)
        stated = StatedPlan(
            tp=tp,
            pp=pp,
            cp=cp,
            chunks=chunks,
            schedule=Schedule.INTERLEAVED if chunks > 1 else None,
            sp=tp > 1,
            micro_batch=local if pp == 1 else 1,
            zero=ZeroStage.PARAMETERS if pp == 1 else ZeroStage.GRADIENTS,
            recomputation=kind,
            precision=precision,
            division=Division.SPREAD,
            embedding_blocks=1,
            head_blocks=1,
        )
        yield PublishedRun(
            group="torchtitan",
            name=f"{name} s{sequence} x{gpus} tp{tp} pp{pp} cp{cp} v{chunks} {precision}",
            model=_llama(name, sequence),
            hardware=H100_96,
            gpus=gpus,
            batch=local * dp,
            stated=stated,
            seconds=local * dp * sequence / (tokens * gpus),
            memory_bytes=gib * GIB,
        )


_MPT: Final[dict[str, tuple[int, int, int]]] = {
    "70b": (8192, 80, 64),
    "30b": (7168, 48, 56),
    "13b": (5120, 40, 40),
    "3b": (2560, 32, 20),
    "1b": (2048, 24, 16),
    "350m": (1024, 24, 16),
}
"""Hidden size, layers and heads."""

_MOSAIC_ROWS: Final[tuple[tuple[str, int, int, int, int, int, bool, bool], ...]] = (
    # model, sequence, GPUs, micro-batch, accumulation, tokens/s, checkpointing, fp8
    ("70b", 2048, 64, 8, 4, 66523, True, False),
    ("70b", 2048, 32, 2, 16, 28242, True, False),
    ("30b", 8192, 8, 1, 21, 11072, True, False),
    ("30b", 4096, 8, 1, 21, 14419, True, False),
    ("30b", 2048, 32, 14, 3, 73860, True, False),
    ("30b", 2048, 16, 10, 3, 36209, True, False),
    ("30b", 2048, 8, 3, 21, 16022, True, False),
    ("30b", 1024, 8, 6, 21, 16672, True, False),
    ("13b", 32768, 8, 1, 3, 15812, True, False),
    ("13b", 16384, 8, 3, 3, 23881, True, False),
    ("13b", 4096, 8, 10, 3, 37740, True, False),
    ("13b", 2048, 64, 2, 1, 307209, False, False),
    ("13b", 2048, 32, 2, 1, 153960, False, False),
    ("13b", 2048, 16, 2, 1, 76280, False, False),
    ("13b", 2048, 8, 2, 1, 38336, False, False),
    ("13b", 1024, 8, 40, 3, 44019, True, False),
    ("3b", 32768, 8, 3, 6, 46853, True, True),
    ("3b", 8192, 8, 3, 6, 153174, False, True),
    ("3b", 2048, 8, 10, 6, 244692, False, True),
    ("3b", 512, 8, 40, 6, 292217, False, True),
    ("1b", 32768, 8, 1, 4, 100643, False, True),
    ("1b", 8192, 8, 2, 4, 256087, False, True),
    ("1b", 512, 8, 56, 4, 562523, False, True),
    ("350m", 32768, 8, 1, 4, 195516, False, True),
    ("350m", 16384, 8, 2, 4, 343435, False, True),
    ("350m", 512, 8, 56, 4, 1235360, False, True),
)


def _mosaic() -> Iterator[PublishedRun]:
    for name, sequence, gpus, micro, count, tokens_per_s, checkpointing, fp8 in _MOSAIC_ROWS:
        hidden, layers, heads = _MPT[name]
        model = Transformer(
            name=f"mpt {name}",
            hidden=hidden,
            layers=layers,
            heads=heads,
            sequence=sequence,
            vocabulary=50368,
            bias=False,
            flash=True,
        )
        batch = micro * count * gpus
        stated = StatedPlan(
            micro_batch=micro,
            zero=ZeroStage.PARAMETERS,
            recomputation=Recomputation.FULL if checkpointing else Recomputation.NONE,
            precision=Precision.FP8 if fp8 else Precision.BF16,
        )
        yield PublishedRun(
            group="MosaicML fp8" if fp8 else "MosaicML",
            name=f"{name} s{sequence} x{gpus}",
            model=model,
            hardware=H100_DGX,
            gpus=gpus,
            batch=batch,
            stated=stated,
            seconds=batch * sequence / tokens_per_s,
        )
