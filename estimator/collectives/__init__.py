"""Times of collectives from links or from measured tables, as an ``estimator.plans.Network``."""

from tessera.estimator.collectives.fitting import fit_links
from tessera.estimator.collectives.links import LinkNetwork, LinkRates
from tessera.estimator.collectives.records import (
    CommRecord,
    Curve,
    Layout,
    curves_of,
    read_curves,
    write_records,
)
from tessera.estimator.collectives.tables import TableNetwork, Tables

__all__ = [
    "CommRecord",
    "Curve",
    "Layout",
    "LinkNetwork",
    "LinkRates",
    "TableNetwork",
    "Tables",
    "curves_of",
    "fit_links",
    "read_curves",
    "write_records",
]
