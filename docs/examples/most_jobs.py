"""An objective of one's own: as many jobs as possible run.

    tessera simulate --policy 'ilp:most_jobs:running then throughput'
    tessera solve round.json --objective 'most_jobs:running then throughput'

The current folder or PYTHONPATH must have this file.
"""

from __future__ import annotations

import numpy as np

from tessera.formulation.round.draft import Draft
from tessera.formulation.round.objectives.values import ColumnValues


def running(draft: Draft) -> ColumnValues:
    """Return the weight of a column's job, whatever the column."""
    gross = draft.weight[draft.job]
    price = np.where(draft.starts, gross * draft.restart_share[draft.job], 0.0)
    return ColumnValues(gross=gross, price=price, unit="jobs")
