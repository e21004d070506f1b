"""The calibration of bands: past forecasts against what then happened.

The score of a past forecast says where in the distribution of its sampled futures the event lay.
Quantiles of the scores tell which quantiles of a new distribution make a band with the stated
coverage (distributional conformal prediction: Chernozhukov, Wuethrich and Zhu, PNAS 2021).

An event that has not happened yet only says that its score is larger than that of the present. Such
scores are censored, not left out, for otherwise slow jobs would be missing. Their quantiles are those
of Kaplan and Meier's estimate (JASA 1958).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Bools, Floats
from tessera.formulation.records.forecasts import EVENTS, FINISH, START
from tessera.formulation.records.spreads import PastSpread, Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """The scores between which events lie with the stated coverage, and their median."""

    low: float
    median: float
    high: float

    def times(self, spread: Spread) -> tuple[float, float, float]:
        """Return the band of a forecast: low, median and high, in seconds from it."""
        low_s, median_s, high_s = spread.times_of((self.low, self.median, self.high))
        return low_s, median_s, high_s


PRIOR: Final[Mapping[str, tuple[float, float]]] = {START: (0.32, 0.76), FINISH: (0.34, 0.69)}
"""The location and scale of a logistic distribution of scores, by event, before there is a history.

It has the 10 % and 90 % quantiles of the scores in the traces of ``tessera bench eta``, under
first-come, first-served and under the default policy, with seeds 101 to 104. Nothing is reported on
those.
"""
PRIOR_STEPS: Final = 20
"""The scores that stand for that distribution, at equal steps."""
PRIOR_WEIGHT: Final = 60.0
"""The number of past forecasts that the scores of that distribution count as."""


def prior_scores(event: str) -> list[float]:
    """Return scores of an event that are equally likely before there is a history."""
    location, scale = PRIOR[event]
    place = (np.arange(PRIOR_STEPS) + 0.5) / PRIOR_STEPS
    scores: Floats = location + scale * np.log(place / (1.0 - place))
    return [float(score) for score in scores]


def learn_corrections(
    past: Mapping[str, Sequence[PastSpread]], coverage: float
) -> dict[str, Correction]:
    """Return the correction of each event for bands of the given ``coverage``."""
    return {
        event: learn_correction(past.get(event, ()), coverage, prior_scores(event), PRIOR_WEIGHT)
        for event in EVENTS
    }


def learn_correction(
    past: Sequence[PastSpread],
    coverage: float,
    prior: Sequence[float],
    prior_weight: float,
) -> Correction:
    """Return the correction for bands of the given ``coverage``, from forecasts of the past.

    ``prior`` are scores that are equally likely before there is a history. Together they count as
    much as ``prior_weight`` past forecasts.

    Raises:
        InvalidInput: the coverage does not lie between 0 and 1.
    """
    if not 0 < coverage < 1:
        raise InvalidInput("coverage", "must lie between 0 and 1")
    score = np.array([*(one.spread.score(one.after_s) for one in past), *prior])
    happened = np.array([*(one.happened for one in past), *(True for _ in prior)], dtype=np.bool_)
    weight = np.array([1.0] * len(past) + [prior_weight / max(1, len(prior))] * len(prior))
    tail = (1.0 - coverage) / 2.0
    low, median, high = censored_quantiles(score, happened, weight, (tail, 0.5, 1.0 - tail))
    return Correction(low=low, median=median, high=high)


def censored_quantiles(
    values: Floats, happened: Bools, weight: Floats, shares: Sequence[float]
) -> list[float]:
    """Return quantiles of ``values`` (float64[n]), some of which are only known to be larger.

    Those are the ones where ``happened`` (bool[n]) is false. The estimate is that of Kaplan and
    Meier, with weights (float64[n]). A quantile beyond what is known is the largest value.
    """
    if not len(values):
        return [0.0 for _ in shares]
    order = np.lexsort(
        (~happened, values)
    )  # what happened at a value comes before what was cut there
    values, happened, weight = values[order], happened[order], weight[order]
    left = np.cumsum(weight[::-1])[::-1]
    survival = np.cumprod(np.where(happened, 1.0 - weight / left, 1.0))
    reached = 1.0 - survival
    places = [int(np.searchsorted(reached, share - 1e-12)) for share in shares]
    return [float(values[min(place, len(values) - 1)]) for place in places]
