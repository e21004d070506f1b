"""A topology with the document that describes it. A document is read once and cached."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tessera.formulation.base.cancellation import never_cancelled
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.state.topologies.document import build_topology
from tessera.formulation.state.topologies.topology import Topology

MAX_CACHED_TOPOLOGIES: Final = 8
"""Topologies that are cached: those of a server's clusters, and of replayed rounds.

A topology of 20,000 hosts takes seconds to read, and every snapshot of its cluster holds it.
"""

_LATEST: Final[OrderedDict[str, DescribedTopology]] = OrderedDict()
"""Cached topologies by document, the latest last.

A version could not be the key: a network that is described again after its deletion begins at 1.
"""
_LOCK: Final = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedTopology:
    """A topology, and the JSON that describes it, which is stored, sent and compared.

    The document is kept unchanged, because it cannot be derived from the topology: a few numbers in
    it become thousands of links.
    """

    document: str
    topology: Topology = field(compare=False, repr=False)


def decode_topology(
    text: str, cancelled: Callable[[], bool] = never_cancelled
) -> DescribedTopology:
    """Return the topology that a JSON document describes. A recent document gives the same object.

    Raises:
        InvalidInput: the document does not describe a topology. The error names the field by its
            path.
        DeadlineTooShort: the call was cancelled.
    """
    with _LOCK:
        if (found := _LATEST.get(text)) is not None:
            _LATEST.move_to_end(text)
            return found
    try:
        plain = json.loads(text)
    except (RecursionError, TypeError, ValueError) as error:
        raise InvalidInput("topology", f"is not JSON: {error}") from error
    found = DescribedTopology(document=text, topology=build_topology(plain, cancelled))
    with _LOCK:  # not held while reading, because other threads need theirs meanwhile
        found = _LATEST.setdefault(text, found)
        while len(_LATEST) > MAX_CACHED_TOPOLOGIES:
            _LATEST.popitem(last=False)
    return found
