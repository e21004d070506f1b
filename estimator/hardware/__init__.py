"""A catalogue of GPU types and their nodes.

Users add their own types in files (:mod:`tessera.estimator.hardware.files`).
"""

from tessera.estimator.hardware.catalogue import (
    A10,
    A40,
    A100,
    A100_80,
    A800,
    ALL,
    B200,
    CATALOGUE,
    H100,
    H200,
    L20,
    MI300X,
    V100,
    V100_16,
)
from tessera.estimator.hardware.types import GIB, Hardware, Link

__all__ = [
    "A10",
    "A40",
    "A100",
    "A100_80",
    "A800",
    "ALL",
    "B200",
    "CATALOGUE",
    "GIB",
    "H100",
    "H200",
    "L20",
    "MI300X",
    "V100",
    "V100_16",
    "Hardware",
    "Link",
]
