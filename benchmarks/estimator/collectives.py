"""The accuracy of predicted collectives, for sizes and layouts held back from measured tables.

Data: ``arena/comm.csv``, with 47,582 times in 261 tables. A table holds a primitive on a group
layout on a machine of a GPU type and network. Rows marked degenerate sent nothing and are dropped.
The error of a row is abs(predicted / measured - 1).

* **Sizes**: for each seed, 30 % of the sizes of each table are drawn and held back. They are
  predicted from the rest of their table. Most sizes are 4 to 16 MiB apart up to 1 GiB, where
  neighbours are near. The error on sizes under 16 MiB, which are an octave apart, is therefore also
  given (``collectives_small_sizes_error``).
* **Layouts**: each table in turn is held back as a whole and predicted from the other 260. Links
  are fitted without it. The weights of the kriging start equal and are tuned only on the tables of
  other GPU types and networks. Other primitives on the same layout remain known.
  ``collectives_new_layouts_error`` holds them back too, and ``collectives_unseen_gpu_error`` holds
  back all tables of the GPU type. This part does not depend on seeds.
* **Above**: tables are cut at 64 MiB, and larger sizes are predicted (``collectives_above_error``).

``collectives_median_error`` is the median over the rows of sizes and of layouts, where each part
has half of the weight. The baselines are:

* the Arena artifact's rule on the same tables: linear in the number of elements, the smallest time
  below, and whole multiples of the largest above. It has no answer for a layout that was not
  measured.
* links at data sheet rates (``collectives_sheet_*``),
* the fitted links without kriging.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from tessera.benchmarks.estimator.section import EstimatorSection
from tessera.estimator.collectives import (
    Curve,
    Layout,
    LinkNetwork,
    LinkRates,
    TableNetwork,
    Tables,
)
from tessera.estimator.collectives.fitting import TableKind, fit_kinds, groups_of
from tessera.estimator.collectives.kriging import SimilarityWeights, tune_weights
from tessera.estimator.collectives.records import read_curves
from tessera.estimator.collectives.tables import log_distances
from tessera.estimator.hardware import A10, CATALOGUE, Hardware
from tessera.estimator.plans import Primitive
from tessera.formulation.base.tables import Bools, Floats
from tessera.simulator.figures import Figure

HELD_BACK_SHARE: Final = 0.3
SMALL_BYTES: Final = 16 * 2**20
CUT_BYTES: Final = 64 * 2**20
EQUAL: Final = SimilarityWeights(
    primitive=0.5,
    gpu_type=0.5,
    machine_nodes=0.5,
    machine_gpus=0.5,
    size=0.5,
    nodes=0.5,
    node_groups=0.5,
    crossing=0.5,
    noise=0.1,
    common=1.0,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TablePredictions:
    """The held-back rows of one table, with the errors of their predictions."""

    layout: Layout
    payload_bytes: Floats
    ours: Floats
    artifact: Floats | None = None
    sheet: Floats
    links: Floats | None = None
    sd: Floats | None = None  # claimed, of the logarithm


def run_collective_section(
    data: Path, seeds: Sequence[int], *, stride: int = 1
) -> EstimatorSection:
    """Return the figures and rows of the protocol. ``data`` is the folder of ``comm.csv``.

    Only each ``stride``-th table is held back as a whole. All tables are known to its prediction.
    """
    curves = read_curves(data / "comm.csv")
    likeness = {system: _tuned_without(curves, system) for system in _systems(curves)}
    sizes = [judged for seed in seeds for judged in _sizes(curves, seed)]
    held = curves[::stride]
    layouts = _layouts(held, curves, likeness, lambda held, other: held == other)
    new = _layouts(held, curves, likeness, _same_place)
    unseen = _unseen(curves, likeness)
    above = _above(curves)
    figures: dict[str, Figure] = {
        "collectives_median_error": _half_each(_all(sizes, "ours"), _all(layouts, "ours")),
        **_figures("collectives_sizes", sizes),
        **_figures("collectives_layouts", layouts),
        "collectives_small_sizes_error": _small_error(sizes),
        "collectives_new_layouts_error": float(np.median(_all(new, "ours"))),
        "collectives_unseen_gpu_error": float(np.median(_all(unseen, "ours"))),
        "collectives_above_error": float(np.median(_all(above, "ours"))),
        "collectives_above_error_artifact": float(np.median(_all(above, "artifact"))),
        "collectives_layouts_error_links": float(np.median(_all(layouts, "links"))),
        "collectives_sheet_sizes_error": float(np.median(_all(sizes, "sheet"))),
        "collectives_sheet_layouts_error": float(np.median(_all(layouts, "sheet"))),
        "collectives_sizes_error_artifact": float(np.median(_all(sizes, "artifact"))),
        "collectives_layouts_within_one_sd": _within(layouts, 1.0),
        "collectives_layouts_within_two_sd": _within(layouts, 2.0),
        "collectives_seeds": len(seeds),
    }
    parts = {"sizes": sizes, "layouts": layouts, "new layouts": new, "unseen gpu": unseen}
    rows = [row for part, judged in parts.items() for row in _rows(part, judged)]
    return EstimatorSection(figures=figures, rows=rows)


def _sizes(curves: Sequence[Curve], seed: int) -> list[TablePredictions]:
    rng = np.random.default_rng(seed)
    held = [_drawn(rng, len(curve.seconds)) for curve in curves]
    kept = [_part(curve, ~mask) for curve, mask in zip(curves, held, strict=True)]
    tables = Tables.of(kept)
    return [
        _judged(tables, _part(curve, mask), rest)
        for curve, mask, rest in zip(curves, held, kept, strict=True)
    ]


def _above(curves: Sequence[Curve]) -> list[TablePredictions]:
    small = [curve.payload_bytes <= CUT_BYTES for curve in curves]
    kept = [_part(curve, mask) for curve, mask in zip(curves, small, strict=True)]
    tables = Tables.of(kept)
    return [
        _judged(tables, _part(curve, ~mask), rest)
        for curve, mask, rest in zip(curves, small, kept, strict=True)
        if not mask.all()
    ]


def _layouts(
    held: Sequence[Curve],
    curves: Sequence[Curve],
    likeness: dict[tuple[str, str], SimilarityWeights],
    together: Callable[[Layout, Layout], bool],
) -> list[TablePredictions]:
    """Predict each held-back table from all ``curves`` that are not held back together with it."""
    result = []
    for curve in held:
        rest = [c for c in curves if not together(curve.layout, c.layout)]
        result.append(_judged(Tables.of(rest, likeness[_system(curve.layout)]), curve))
    return result


def _unseen(
    curves: Sequence[Curve], likeness: dict[tuple[str, str], SimilarityWeights]
) -> list[TablePredictions]:
    result = []
    for gpu_type, network in sorted(likeness):
        rest = Tables.of(
            [c for c in curves if c.layout.gpu_type != gpu_type], likeness[gpu_type, network]
        )
        own = [c for c in curves if _system(c.layout) == (gpu_type, network)]
        result += [_judged(rest, curve) for curve in own]
    return result


def _same_place(a: Layout, b: Layout) -> bool:
    return replace(a, primitive=b.primitive) == b


def _tuned_without(curves: Sequence[Curve], system: tuple[str, str]) -> SimilarityWeights:
    """Return weights tuned on the tables of other systems, starting from equal weights."""
    others = [curve for curve in curves if _system(curve.layout) != system]
    values = log_distances(others, fit_kinds(others))
    return tune_weights([curve.layout for curve in others], values, EQUAL)


def _judged(tables: Tables, curve: Curve, rest: Curve | None = None) -> TablePredictions:
    """Return the errors of predictions of ``curve``. ``rest`` is the known part of its table."""
    layout, payload = curve.layout, curve.payload_bytes
    hardware = _hardware(layout.gpu_type)
    groups = groups_of([layout] * len(payload))
    ours = TableNetwork(
        tables=tables, hardware=hardware, shape=layout.machine, network=layout.network
    )
    sends = layout.primitive is Primitive.SEND
    kind = TableKind(gpu_type=layout.gpu_type, network=layout.network, sends=sends)
    rates = tables.fits.of(kind, LinkRates.of(hardware))

    def off(predicted_s: Floats) -> Floats:
        return np.abs(predicted_s / curve.seconds - 1)

    def by_links(rates: LinkRates) -> Floats:
        network = LinkNetwork(hardware=hardware, shape=layout.machine, rates=rates)
        return off(network.seconds(layout.primitive, payload, groups))

    return TablePredictions(
        layout=layout,
        payload_bytes=payload,
        ours=off(ours.seconds(layout.primitive, payload, groups)),
        sheet=by_links(LinkRates.of(hardware)),
        links=by_links(rates),
        artifact=off(artifact_s(rest, payload)) if rest is not None else None,
        sd=ours.uncertainty(layout.primitive, payload, groups),
    )


def artifact_s(known: Curve, payload_bytes: Floats) -> Floats:
    """Return the seconds predicted by the Arena artifact's rule from one table, shape (K,)."""
    sizes, seconds = known.payload_bytes, known.seconds
    whole, rest = np.divmod(payload_bytes, sizes[-1])
    within = np.where(rest > 0, np.interp(rest, sizes, seconds), 0.0)
    return np.asarray(whole * seconds[-1] + within, dtype=np.float64)


def _drawn(rng: np.random.Generator, count: int) -> Bools:
    mask = np.zeros(count, dtype=np.bool_)
    mask[rng.choice(count, max(1, int(HELD_BACK_SHARE * count)), replace=False)] = True
    return mask


def _part(curve: Curve, mask: Bools) -> Curve:
    return replace(curve, payload_bytes=curve.payload_bytes[mask], seconds=curve.seconds[mask])


def _hardware(gpu_type: str) -> Hardware:
    """Return the hardware of a GPU type. The tables' P100, not in the catalogue, is a PCIe GPU."""
    return next((h for h in CATALOGUE if h.name == gpu_type), replace(A10, name=gpu_type))


def _system(layout: Layout) -> tuple[str, str]:
    return layout.gpu_type, layout.network


def _systems(curves: Sequence[Curve]) -> list[tuple[str, str]]:
    return sorted({_system(curve.layout) for curve in curves})


def _all(judged: Iterable[TablePredictions], method: str) -> Floats:
    return np.concatenate([getattr(j, method) for j in judged])


def _figures(name: str, judged: Sequence[TablePredictions]) -> dict[str, Figure]:
    errors = _all(judged, "ours")
    tables = [float(np.median(j.ours)) for j in judged]
    return {
        f"{name}_error": float(np.median(errors)),
        f"{name}_error_p90": float(np.percentile(errors, 90)),
        f"{name}_error_median_table": float(np.median(tables)),
        f"{name}_rows": len(errors),
    }


def _small_error(judged: Sequence[TablePredictions]) -> float:
    small = [j.ours[j.payload_bytes < SMALL_BYTES] for j in judged]
    return float(np.median(np.concatenate(small)))


def _half_each(a: Floats, b: Floats) -> float:
    """Return the median over both arrays, each with half of the weight."""
    errors = np.concatenate([a, b])
    weight = np.concatenate([np.full(len(a), 0.5 / len(a)), np.full(len(b), 0.5 / len(b))])
    order = errors.argsort()
    return float(errors[order][np.searchsorted(weight[order].cumsum(), 0.5)])


def _within(judged: Sequence[TablePredictions], sds: float) -> float:
    """Return the share of rows whose error is within ``sds`` claimed standard deviations."""
    return float(np.mean(_all(judged, "ours") <= np.expm1(sds * _all(judged, "sd"))))


def _rows(part: str, judged: Sequence[TablePredictions]) -> list[dict[str, Figure | str]]:
    groups: dict[tuple[str, str, str], list[TablePredictions]] = defaultdict(list)
    for j in judged:
        groups[(*_system(j.layout), j.layout.primitive.value)].append(j)
    rows: list[dict[str, Figure | str]] = []
    for (gpu_type, network, primitive), own in sorted(groups.items()):
        errors = _all(own, "ours")
        rows.append(
            {
                "section": "collectives",
                "part": part,
                "gpu_type": gpu_type,
                "network": network,
                "primitive": primitive,
                "rows": len(errors),
                "median_error": float(np.median(errors)),
                "p90_error": float(np.percentile(errors, 90)),
                "sheet_median_error": float(np.median(_all(own, "sheet"))),
            }
        )
    return rows
