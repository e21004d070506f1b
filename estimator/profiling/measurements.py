"""Profiling at all sizes that fit on the device. It can be interrupted at any time and resumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from tessera.estimator.profiling.order import Size, SizeOrder
from tessera.estimator.profiling.records import ProfileMismatch, ProfileRecord, read_profile_records
from tessera.estimator.profiling.stages import StepMaker, kinds_of, profile_stage
from tessera.estimator.profiling.timing import TimingEffort, device_name, library_versions
from tessera.formulation.base.errors import NotAllowed


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLayers:
    """All layers of a step at each size that estimates may use. ``layers`` counts them by kind.

    ``too_large`` are sizes for which the device lacks memory. ``left_out`` are other sizes that
    were not measured, or not enough of them to be used, because ``stop_reason`` ended it. If it is
    "", nothing did.
    """

    records: tuple[ProfileRecord, ...]
    layers: Mapping[str, int]
    too_large: tuple[Size, ...]
    left_out: tuple[Size, ...] = ()
    stop_reason: str = ""


def load_records(path: Path) -> list[ProfileRecord]:
    """Return the records of earlier runs in ``path``, each layer once, without an incomplete line.

    Records of another device or of other versions are moved to another file, because they cannot be
    mixed with new ones.

    Raises:
        InvalidInput: a complete line is not a record.
    """
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        path.write_bytes(whole)
    try:
        records = read_profile_records(path, versions=library_versions(), device=device_name())
    except ProfileMismatch:
        path.replace(path.with_suffix(".elsewhere"))
        return []
    return list({record.key: record for record in records}.values())


def measure_layers(
    source: StepMaker,
    sizes: Sequence[Size],
    *,
    known: Iterable[ProfileRecord],
    date: str,
    report: Callable[[ProfileRecord, int], object],
    effort: TimingEffort | None = None,
    stop_reason: Callable[[], str] = str,
) -> MeasuredLayers:
    """Measure a step's layers at ``sizes``, except those that are among ``known``.

    ``report`` is called with each new record and the total number of records. For each tensor
    degree, a size that exceeds the device's memory and all larger ones are left out. Sizes are in
    the order of :class:`tessera.estimator.profiling.order.SizeOrder`. ``stop_reason`` is called
    before each record. Once it returns a text, measuring ends.

    Raises:
        Untraceable: the step cannot be traced at these sizes.
        NotAllowed: not even the smallest size fits.
    """
    known, order, reason = list(known), SizeOrder(sizes), stop_reason()
    if reason and not known:
        return MeasuredLayers(
            records=(), layers={}, too_large=(), left_out=tuple(sizes), stop_reason=reason
        )
    names = kinds_of(source)
    layers = Counter(names.kind)

    def is_complete(size: Size) -> bool:
        return layers.keys() <= {r.kind for r in known if (r.samples, r.tp) == size}

    for stored in sorted({size for size in sizes if is_complete(size)}):
        order.finish(stored)
    while (size := order.next_size()) is not None and not (reason := stop_reason()):
        try:
            known += profile_stage(
                source,
                *size,
                date=date,
                known=known,
                effort=effort,
                names=names,
                report=lambda record: report(record, len(layers) * len(sizes)),
                stops=lambda: bool(stop_reason()),
            )
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            order.drop(size)
            continue
        if is_complete(size):
            order.finish(size)
    usable = set(order.usable_sizes())
    records = [r for r in known if (r.samples, r.tp) in usable and r.kind in layers]
    if not records and not reason:
        raise NotAllowed(
            f"{source.target} does not fit on {device_name()} even with {min(sizes)[0]} samples, the"
            " fewest requested; profile it with fewer samples or on a larger device"
        )
    return MeasuredLayers(
        records=tuple(sorted(records, key=lambda r: (r.tp, r.samples))),
        layers=layers,
        too_large=tuple(order.too_large()),
        left_out=tuple(order.unusable_sizes()) if reason else (),
        stop_reason=reason,
    )
