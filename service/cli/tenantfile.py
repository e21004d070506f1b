"""Tenants' settings as YAML, in a file of their own or in a cluster's; see ``service/cli/README.md``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tessera.formulation.errors import InvalidInput
from tessera.service.cli import limits
from tessera.service.cli.yamlfile import Mapping, documents
from tessera.v1.tenants_pb2 import Tenant

KEYS: Final = ("weight", "quotas", "borrow_gpus", "keeps_idle_quota")
SHOWN_KEYS: Final = ("next_page_token",)
"""Keys that `tessera tenants list -o yaml` prints besides; they are not read."""

ANY: Final = "any"
"""In ``quotas``: GPUs of any type."""


def read_tenants(text: str, source: str) -> tuple[Tenant, ...]:
    """Return the tenants of a file, named by their ids, or by full names as `tenants list` prints them.

    Raises:
        InvalidInput: names the file, the place and the key, and says what is allowed.
    """
    found = documents(text, source)
    if len(found) != 1:
        raise InvalidInput(source, f"must hold one document with tenants, not {len(found)}")
    tenants = tuple(tenants_of(Mapping(source, found[0], ("tenants",), SHOWN_KEYS)))
    if not tenants:
        raise InvalidInput(source, "holds no tenants; name them, e.g. tenants: {nlp: {weight: 2}}")
    return tenants


def tenants_of(top: Mapping) -> Iterator[Tenant]:
    """Yield the tenants under the key ``tenants``; none where it is absent."""
    value = top.raw("tenants")
    if value is None:
        return
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        yield from _shown_tenants(top)
        return
    if not isinstance(value, dict):
        raise InvalidInput(
            top.at("tenants"), "must map tenants to settings, e.g. {nlp: {weight: 2}}"
        )
    for name, settings in value.items():
        yield _tenant(str(name), Mapping(f"{top.at('tenants')}: {name}", settings or {}, KEYS))


def _shown_tenants(top: Mapping) -> Iterator[Tenant]:
    """Yield tenants as `tenants list -o yaml` prints them: a list of mappings with names."""
    seen: set[str] = set()
    for where, item in top.items("tenants"):
        settings = Mapping(where, item, ("name", *KEYS))
        name = settings.text("name")
        if not name:
            raise InvalidInput(where, "needs 'name'")
        if name in seen:
            raise InvalidInput(settings.at("name"), f"the tenant {name} occurs twice")
        seen.add(name)
        yield _tenant(name, settings)


def _tenant(name: str, settings: Mapping) -> Tenant:
    found = Tenant(name=name, keeps_idle_quota=settings.flag("keeps_idle_quota"))
    if "weight" in settings:
        found.weight = settings.real("weight", 0.0, limits.MAX_TENANT_WEIGHT)
    if "borrow_gpus" in settings:
        found.borrow_gpus = settings.whole("borrow_gpus", 0, limits.MAX_QUOTA)
    quotas = settings.raw("quotas")
    if quotas is not None and not isinstance(quotas, dict):
        raise InvalidInput(
            settings.at("quotas"), f"must map GPU types to GPUs, e.g. {{a100: 8, {ANY}: 16}}"
        )
    if quotas:
        entry = Mapping(settings.at("quotas"), quotas, list(quotas))
        for kind in quotas:
            gpus = entry.whole(kind, 0, limits.MAX_QUOTA)
            found.quotas["" if kind in (ANY, "") else str(kind)] = gpus
    return found
