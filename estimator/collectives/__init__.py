"""How long collectives take: from links, or from measured tables; both are an ``estimator.plans.Network``."""

from estimator.collectives.fitting import fit_links
from estimator.collectives.links import LinkNetwork, LinkRates
from estimator.collectives.records import (
    CommRecord,
    Curve,
    Layout,
    curves_of,
    read_curves,
    write_records,
)
from estimator.collectives.tables import TableNetwork, Tables

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
