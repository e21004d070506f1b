"""The types of settings, with the values that they may have."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from tessera.estimator.files.schemas import described_as, number_between, whole_between
from tessera.formulation.base.logs import LOG_FORMATS

MAX_RETAINED_DAYS: Final = 36_500
"""Longest retention in days, a century: the database cannot represent times before its calendar."""

SettingValue = str | int | float | bool

ThreadCount = Annotated[int, whole_between(1, 1000)]
LargeCount = Annotated[int, whole_between(1, 10**6)]
Count = Annotated[int, whole_between(0, 2**31 - 1)]
Limit = Annotated[int, whole_between(1, 2**31 - 1)]
Seconds = Annotated[float, Field(ge=0, lt=1e6)]
PositiveSeconds = Annotated[float, Field(gt=0, lt=1e6)]
SpacingSeconds = Annotated[float, Field(ge=0.1, lt=1e6)]
PeriodSeconds = Annotated[float, Field(ge=1, lt=1e6)]
Factor = Annotated[float, Field(gt=0, le=1e6)]
Hours = Annotated[float, number_between(0.02, 24 * 365)]
Days = Annotated[float, number_between(0.0, MAX_RETAINED_DAYS)]
LogFormat = Annotated[
    str,
    Field(pattern=f"^({'|'.join(LOG_FORMATS)})$"),
    described_as(f"must be {' or '.join(LOG_FORMATS)}"),
]
InstanceName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9._-]{0,100}$"),
    described_as("must be at most 100 letters, digits, '-', '_' or '.'"),
]
