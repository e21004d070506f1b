"""Tenants' settings in YAML, in a file of their own or in a cluster file.

``docs/command-line.md`` describes the format.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, RootModel

from tessera.estimator.files.schemas import (
    STRICT,
    check_value,
    described_as,
    number_between,
    whole_between,
)
from tessera.formulation.base import limits
from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli.entries import FileEntry, Text
from tessera.service.cli.names import ANY_TYPE
from tessera.service.cli.yamlfile import read_documents, text_of
from tessera.v1.tenants_pb2 import Tenant

_Gpus = Annotated[
    int,
    whole_between(0, limits.MAX_QUOTA),
    BeforeValidator(lambda value: 0 if value is None else value),
]


class TenantEntry(FileEntry):
    """The settings of a tenant."""

    weight: Annotated[float, number_between(0.0, limits.MAX_TENANT_WEIGHT)] | None = None
    quotas: Annotated[
        dict[Text, _Gpus],
        described_as(f"must map GPU types to GPUs, e.g. {{a100: 8, {ANY_TYPE}: 16}}"),
    ] = Field(default_factory=dict)
    borrow_gpus: Annotated[int, whole_between(0, limits.MAX_QUOTA)] | None = None
    keeps_idle_quota: bool = False
    parent: Text = ""


class PrintedTenant(TenantEntry):
    """A tenant as printed by `tenants list -o yaml`."""

    name: Text


class _PrintedTenants(RootModel[list[PrintedTenant]]):
    model_config = STRICT


class TenantsFile(FileEntry):
    """A file of tenants."""

    shown: ClassVar = ("next_page_token",)  # of `tessera tenants list -o yaml`; it is ignored

    tenants: object = None


def read_tenants(text: str, source: str) -> tuple[Tenant, ...]:
    """Return the tenants of a file. Their names are ids, or full names as `tenants list` prints.

    Raises:
        InvalidInput: names the file, the place and the key, and says what is allowed.
    """
    contents = read_documents(text, source)
    if len(contents) != 1:
        raise InvalidInput(source, f"must contain one document with tenants, not {len(contents)}")
    top = check_value(TenantsFile, source, contents[0])
    tenants = tuple(tenants_of(f"{source}: tenants", top.tenants))
    if not tenants:
        raise InvalidInput(
            source, "contains no tenants; name some, e.g. tenants: {nlp: {weight: 2}}"
        )
    return tenants


def tenants_of(where: str, value: object) -> Iterator[Tenant]:
    """Yield the tenants under the key ``tenants``, or none if ``value`` is None."""
    if value is None:
        return
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        yield from _printed_tenants(where, value)
        return
    if not isinstance(value, dict):
        raise InvalidInput(where, "must map tenants to their settings, e.g. {nlp: {weight: 2}}")
    for key, settings in value.items():
        name = str(text_of(key))
        yield _tenant(name, check_value(TenantEntry, f"{where}: {name}", settings or {}))


def _printed_tenants(where: str, items: list[object]) -> Iterator[Tenant]:
    """Yield tenants as printed by `tenants list -o yaml`: a list of mappings with names."""
    seen: set[str] = set()
    for index, tenant in enumerate(check_value(_PrintedTenants, where, items).root):
        if not tenant.name:
            raise InvalidInput(f"{where}[{index}]", "needs a 'name'")
        if tenant.name in seen:
            raise InvalidInput(f"{where}[{index}]: name", f"the tenant {tenant.name} occurs twice")
        seen.add(tenant.name)
        yield _tenant(tenant.name, tenant)


def _tenant(name: str, settings: TenantEntry) -> Tenant:
    return Tenant(
        name=name,
        weight=settings.weight,
        quotas={
            "" if kind in (ANY_TYPE, "") else kind: gpus for kind, gpus in settings.quotas.items()
        },
        borrow_gpus=settings.borrow_gpus,
        keeps_idle_quota=settings.keeps_idle_quota,
        parent=settings.parent,
    )
