"""Packing rows: what the nodes of a GPU type can hold, as coupling rows of the problem.

GPU rows count. A node of 8 GPUs cannot hold two shares of 5, although 16 GPUs may be free. A packing
row gives each size of a share a weight, such that no node can hold more than a known weight. So it
holds for every placement, and its price says what fragmentation costs (Eq. 3b of
``docs/mathematics.md``).
"""

from tessera.formulation.round.packing.rows import PackingWeights, packing_rows
from tessera.formulation.round.packing.shapes import ShapeClasses, classify_shapes

__all__ = ["PackingWeights", "ShapeClasses", "classify_shapes", "packing_rows"]
