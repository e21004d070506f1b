"""All settings of the server, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tessera.estimator.files.schemas import check_value, entry_of
from tessera.service.server.settings.access import AccessSettings
from tessera.service.server.settings.capacity import CapacitySettings
from tessera.service.server.settings.estimates import EstimateSettings
from tessera.service.server.settings.printing import format_toml, without_password
from tessera.service.server.settings.rounds import RoundSettings
from tessera.service.server.settings.storage import StorageSettings
from tessera.service.server.settings.streams import StreamSettings
from tessera.service.server.settings.values import SettingValue
from tessera.service.server.settings.webhooks import WebhookSettings
from tessera.solvers.plugins import load_plugins


@dataclass(frozen=True, kw_only=True)
class Config(  # the fields of the last base come first
    StreamSettings,
    StorageSettings,
    EstimateSettings,
    RoundSettings,
    CapacitySettings,
    WebhookSettings,
    AccessSettings,
):
    """The server's settings. They can be printed: ``str`` and ``repr`` show no secret."""

    def __post_init__(self) -> None:
        """Refuse values that have no meaning or would expose the server by accident."""
        check_value(entry_of(Config), "", {f.name: getattr(self, f.name) for f in fields(self)})
        load_plugins(self.plugins)  # the policy may name them
        self.agent_timing()
        self.round_options()
        self.estimate_multiples()
        self.profiling()
        self.tls_files()
        self.oidc()
        self.webhook_options()
        self.require_safe_address()

    def __str__(self) -> str:
        """Return the settings as TOML, without secrets."""
        return "".join(f"{f.name} = {format_toml(self.shown(f.name))}\n" for f in fields(self))

    def shown(self, name: str) -> SettingValue:
        """Return the value of a setting without its secrets."""
        value: SettingValue = getattr(self, name)
        return without_password(str(value)) if name == "database_url" else value
