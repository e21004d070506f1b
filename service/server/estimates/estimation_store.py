"""The part of the store that automatic estimates use. A rehearsal has the same, but keeps nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from tessera.db.store.store import Connection
from tessera.formulation.records.estimates import EstimationInputs

P = ParamSpec("P")
T = TypeVar("T")


class EstimationStore(Protocol):
    """The transactions of ``tessera.db.store.store.Store`` that automatic estimates use."""

    def estimation(self, cluster: str) -> EstimationInputs:
        """Return everything that a cluster's estimates are computed from. Raises NotFound."""
        ...

    def read(
        self,
        function: Callable[Concatenate[Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call ``function`` in a transaction that sees one moment, and return its result."""
        ...

    def change(
        self,
        function: Callable[Concatenate[Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call ``function`` in a transaction, and return its result."""
        ...
