"""The fixtures of tests that run the command line against a server, and of a small disk."""

from tests.support.command_line import address, fleet, tessera
from tests.support.small_disk import small_disk

__all__ = ["address", "fleet", "small_disk", "tessera"]
