"""Profile records as JSON lines: the seconds of a layer kind, with provenance. This needs no JAX."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tessera.estimator.files.userfiles import read_text
from tessera.formulation.base.documents import TABLE_ROW, NotJson, read_json
from tessera.formulation.base.errors import InvalidInput

RecordKey = tuple[str, float, int, str]

METHODS = ("kernels", "wall clock")
"""Methods of measurement. ``kernels`` is the sum of kernel durations on the device, from JAX's
profiler. ``wall clock`` is the time until results are ready, including launches. It is used where
the profiler sees no kernels (on a CPU)."""


class ProfileMismatch(InvalidInput):
    """An error for records of other versions or another device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRecord:
    """Seconds of one layer kind for ``samples`` samples in ``1 / tp`` of the layer, on one device.

    ``backward_s`` does not include a repeated forward pass. ``device_s`` is the cost of measuring:
    elapsed seconds of the one device, including compilation and warm-up.
    """

    kind: str
    samples: float
    tp: int
    dtype: str
    forward_s: float
    backward_s: float
    method: str
    repeats: int
    device_s: float
    device: str
    versions: Mapping[str, str]
    date: str

    def __post_init__(self) -> None:
        """Check the amounts.

        Raises:
            InvalidInput: an amount or the method is wrong; the message names it.
        """
        for name in ("samples", "forward_s", "backward_s", "device_s"):
            amount = getattr(self, name)
            if not math.isfinite(amount) or amount < 0:
                raise InvalidInput(
                    name,
                    f"{amount} in the profile of {self.kind} is negative or not finite; profile it again",
                )
        if self.samples == 0 or self.forward_s == 0 or self.tp < 1:
            raise InvalidInput(
                "profile",
                f"{self.kind}: samples, forward_s and tp must be above 0; profile it again",
            )
        if self.method not in METHODS:
            raise InvalidInput(
                "method", f"unknown method {self.method!r}; use one of {', '.join(METHODS)}"
            )

    @property
    def key(self) -> RecordKey:
        """Return the key of the measurement. One measurement of a kind serves all Cells of a job."""
        return self.kind, float(self.samples), self.tp, self.dtype


def append_records(records: Iterable[ProfileRecord], path: Path) -> None:
    """Append records to a file, one line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(asdict(record)) + "\n" for record in records)


def read_profile_records(
    path: Path, *, versions: Mapping[str, str] | None = None, device: str | None = None
) -> list[ProfileRecord]:
    """Return the records of a file.

    If ``versions`` or ``device`` is given, all records must match it.

    Raises:
        InvalidInput: a line is not a record, or has NaN.
        ProfileMismatch: the records have other versions or another device.
    """
    records = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if line.strip():
            records.append(_record(line, f"{path.name}, line {number}"))
    check_provenance(records, versions=versions, device=device)
    return records


def check_provenance(
    records: Iterable[ProfileRecord],
    *,
    versions: Mapping[str, str] | None = None,
    device: str | None = None,
) -> None:
    """Refuse records of other versions or another device.

    Raises:
        ProfileMismatch: the first such record.
    """
    for record in records:
        if device is not None and record.device != device:
            raise ProfileMismatch(
                "profile",
                f"{record.kind} was measured on {record.device}, not on {device}; profile it on {device}",
            )
        for name, wanted in (versions or {}).items():
            if (was := record.versions.get(name, "unknown")) != wanted:
                raise ProfileMismatch(
                    "profile",
                    f"{record.kind} was measured with {name} {was}, not {wanted}; profile it again, or "
                    "load the file without versions and widen the uncertainty",
                )


def _record(line: str, where: str) -> ProfileRecord:
    try:
        raw: Any = read_json(where, line, TABLE_ROW)
    except NotJson as error:
        raise InvalidInput(where, f"{error.problem}; delete the line or profile again") from error
    names = {f.name for f in fields(ProfileRecord)}
    if not isinstance(raw, dict) or set(raw) != names:
        raise InvalidInput(
            where,
            f"is not a profile record; a record must have the fields {', '.join(sorted(names))}",
        )
    try:
        return ProfileRecord(**raw)
    except TypeError as error:
        raise InvalidInput(where, f"a field has the wrong type ({error}); profile again") from error
