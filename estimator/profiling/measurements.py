"""Profiling at all sizes that fit on the device. It can be interrupted at any time and resumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from tessera.estimator.profiling.records import ProfileMismatch, ProfileRecord, read_profile_records
from tessera.estimator.profiling.stages import StepMaker, kinds_of, profile_stage
from tessera.estimator.profiling.timing import TimingEffort, device_name, library_versions
from tessera.formulation.errors import NotAllowed

Size = tuple[int, int]
"""Samples on one device, with a tensor degree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLayers:
    """All layers of a step at each size that fits on the device. ``layers`` counts them by kind."""

    records: tuple[ProfileRecord, ...]
    layers: Mapping[str, int]
    too_large: tuple[Size, ...]


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
) -> MeasuredLayers:
    """Measure a step's layers at ``sizes``, except those that are among ``known``.

    ``report`` is called with each new record and the total number of records. For each tensor
    degree, the first size that exceeds the device's memory and all larger ones are left out.

    Raises:
        Untraceable: the step cannot be traced at these sizes.
        NotAllowed: not even the smallest size fits.
    """
    known, names = list(known), kinds_of(source)
    layers = Counter(names.kind)
    records: list[ProfileRecord] = []
    too_large: list[Size] = []
    for samples, tp in sorted(sizes, key=lambda size: size[::-1]):
        if any(degree == tp for _, degree in too_large):
            too_large.append((samples, tp))
            continue
        try:
            new = profile_stage(
                source,
                samples,
                tp,
                date=date,
                known=known,
                effort=effort,
                names=names,
                report=lambda record: report(record, len(layers) * len(sizes)),
            )
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            too_large.append((samples, tp))
            continue
        known += new
        records += [r for r in known if (r.samples, r.tp) == (samples, tp) and r.kind in layers]
    if not records:
        raise NotAllowed(
            f"{source.target} does not fit on {device_name()} even with {min(sizes)[0]} samples, the"
            " fewest requested; profile it with fewer samples or on a larger device"
        )
    return MeasuredLayers(records=tuple(records), layers=layers, too_large=tuple(too_large))
