"""The standing policies of clusters' rounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from tessera.formulation.records.policies import PolicyRecord


class PolicyWriter(Protocol):
    """Changes of policies in one transaction.

    If a version is None, it matches any stored version.
    """

    def set_policy(
        self,
        cluster: str,
        options: Mapping[str, Any] | None,
        *,
        set_by: str,
        message: str,
        version: int | None,
    ) -> PolicyRecord:
        """Add a version of the standing policy with ``options``, and ask for a round.

        If ``options`` is None, it is the policy of the server's settings.

        Raises:
            NotFound: the cluster.
            StaleEtag: ``version`` is given, and the newest version is another one.
        """
        ...


class PolicyStore(Protocol):
    """The part of a store that keeps the versions of standing policies."""

    def newest_policy(self, cluster: str) -> PolicyRecord | None:
        """Return the newest version of the standing policy, or None if none was set.

        A missing cluster has none.
        """
        ...

    def get_policy(self, cluster: str, version: int) -> PolicyRecord:
        """Return a version of the standing policy. Raises NotFound (the cluster or the version)."""
        ...

    def list_policies(self, cluster: str, before: int, limit: int) -> list[PolicyRecord]:
        """Return versions below ``before`` (0: all), newest first. Raises NotFound (the cluster)."""
        ...
