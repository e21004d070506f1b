"""The resources of hosts in messages, as tables show them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from tessera.formulation.base.resources import HOST_NAMES, REPORTED_PREFIX, HostResource
from tessera.service.cli.render import format_number

NOT_STATED = "not stated"
"""An amount of a node that nobody knows. It limits nothing."""


def stated_host(message: Message) -> dict[str, Any]:
    """Return the amounts that a message of a node states, by the name of the resource."""
    return {name: getattr(message, name) for name in HOST_NAMES if message.HasField(name)}


def show_amount(resource: HostResource, amount: int) -> str:
    """Return an amount as it is shown, e.g. ``64 GiB``."""
    if resource.unit == 1:
        return str(amount)
    return f"{format_number(amount / resource.unit)} {resource.unit_noun.partition(' ')[0]}"


def show_needs(resource: HostResource) -> Callable[[Message], str]:
    """Return the text of a column: what a Cell needs of a resource, or "" for nothing."""

    def show(cell: Message) -> str:
        amount = getattr(cell, resource.name)
        return show_amount(resource, amount) if amount else ""

    return show


def show_capacity(resource: HostResource) -> Callable[[Message], str]:
    """Return the text of a column: what a node states of a resource, or else what its agent found."""

    def show(node: Message) -> str:
        for prefix, remark in (("", ""), (REPORTED_PREFIX, " (found)")):
            name = prefix + resource.name
            if node.HasField(name):
                return show_amount(resource, getattr(node, name)) + remark
        return NOT_STATED

    return show
