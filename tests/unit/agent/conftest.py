"""Fixtures of the tests of agents."""

from tests.support.programs import bench
from tests.support.tuning import tuner

__all__ = ["bench", "tuner"]
