"""SQL on the resources of hosts, from their table in ``formulation``."""

from __future__ import annotations

from tessera.formulation.base.resources import HOST_NAMES


def list_host(template: str, separator: str = ", ") -> str:
    """Return SQL with ``template`` for each resource of hosts, whose name replaces each ``@``.

    For example, ``list_host("e.@")`` lists their columns of the table ``e``.
    """
    return separator.join(template.replace("@", name) for name in HOST_NAMES)


NODE_HOST = list_host("coalesce(n.@, n.reported_@)")
"""What a node (n) states of each resource, or else what its agent found. NULL if nobody knows."""
