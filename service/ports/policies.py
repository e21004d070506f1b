"""The standing policies of clusters' rounds, and their shadows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from tessera.formulation.records.policies import PolicyRecord, ShadowRecord, ShadowRound


class PolicyWriter(Protocol):
    """Changes of policies and shadows in one transaction.

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

    def set_shadow(
        self, cluster: str, options: Mapping[str, Any], *, set_by: str, message: str
    ) -> ShadowRecord:
        """Set the cluster's shadow in place of an earlier one, whose rounds are deleted.

        Raises:
            NotFound: the cluster.
        """
        ...

    def drop_shadow(self, cluster: str, *, allow_missing: bool = False) -> None:
        """Delete the cluster's shadow with its rounds.

        Raises:
            NotFound: the cluster, or the shadow unless ``allow_missing``.
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


class ShadowStore(Protocol):
    """The part of a store that keeps shadows with their rounds."""

    def find_shadow(self, cluster: str) -> ShadowRecord | None:
        """Return the cluster's shadow, or None if it has none. A missing cluster has none."""
        ...

    def list_shadow_rounds(self, cluster: str, window_s: float) -> list[ShadowRound]:
        """Return the rounds of the cluster's shadow in the last ``window_s`` s, newest first.

        Raises:
            NotFound: the cluster, or its shadow.
        """
        ...

    def add_shadow_round(self, key: int, decided: ShadowRound) -> None:
        """Store a round of the shadow ``key``, unless the shadow is gone."""
        ...
