"""The fixtures of tests that run the command line against a server."""

from tests.support.command_line import address, fleet, tessera

__all__ = ["address", "fleet", "tessera"]
