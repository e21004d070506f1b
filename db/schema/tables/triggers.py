"""The names by which the schema's triggers tell programs what they refuse.

The triggers are part of the migrations alone. They refuse what no constraint of one row can:
transitions of jobs that the lifecycle does not have, nodes whose jobs need more than they have,
changes of the audit log, and writes of programs of other releases.
"""

from __future__ import annotations

from typing import Final

NODE_CAPACITY: Final = "node_capacity"
"""The name by which errors say that a node's jobs would need more than it has."""

SCHEMA_FENCE: Final = "schema_fence"
"""The name by which errors say that a program of another release wrote, and that of each trigger."""

STATED_SCHEMA: Final = "tessera.schema"
"""The setting in which each connection states the schema that its program writes to."""

MIGRATION: Final = "migration"
"""The stated schema of a migration, which writes to all of them."""
