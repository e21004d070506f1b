"""The formats of raw traces by name, and a reader for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import tzinfo
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from tessera.simulator.traces.raw import acme, helios, pai, philly, sacct
from tessera.simulator.traces.raw.jobs import zone_of
from tessera.simulator.traces.raw.rows import DroppedRows
from tessera.simulator.traces.trace import DurationJob

RawReader: TypeAlias = Callable[[Path, tzinfo, DroppedRows], Iterator[DurationJob]]


class RawFormat(StrEnum):
    """A format of raw traces."""

    PHILLY = "philly"
    HELIOS = "helios"
    PAI = "pai"
    ACME = "acme"
    SACCT = "sacct"


class _Format(NamedTuple):
    """A reader with the zone of times that state none."""

    read: RawReader
    zone: str


_FORMATS: Final[Mapping[RawFormat, _Format]] = {
    RawFormat.PHILLY: _Format(philly.read_philly, philly.ZONE),
    RawFormat.HELIOS: _Format(helios.read_helios, helios.ZONE),
    RawFormat.PAI: _Format(pai.read_pai, pai.ZONE),
    RawFormat.ACME: _Format(acme.read_acme, acme.ZONE),
    RawFormat.SACCT: _Format(sacct.read_sacct, sacct.ZONE),
}


def read_raw(
    path: Path,
    form: RawFormat,
    dropped: DroppedRows,
    *,
    time_zone: str = "",
    limit: int | None = None,
) -> Iterator[DurationJob]:
    """Yield the first ``limit`` jobs of a raw trace, in the order of the file.

    ``path`` is a file, or for PAI the folder of its tables. Arrivals are in seconds since 1970, or on
    the clock of the trace for PAI. Times that state no zone are in ``time_zone``; "" is the format's
    usual one. ``dropped`` gets the rows that are not among the jobs.

    Raises:
        InvalidInput: the first 20 mistakes, with their lines, or an unknown zone.
        OSError: a file cannot be read.
    """
    known = _FORMATS[form]
    return islice(known.read(path, zone_of(time_zone or known.zone), dropped), limit)
