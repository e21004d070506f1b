"""The fixtures of tests that run the command line, agents or programs, and of a small disk."""

from tests.support.agent_server import make_agent, server
from tests.support.command_line import address, fleet, tessera
from tests.support.programs import bench
from tests.support.small_disk import small_disk

__all__ = ["address", "bench", "fleet", "make_agent", "server", "small_disk", "tessera"]
