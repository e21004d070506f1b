"""Settings as text without secrets."""

from __future__ import annotations

import re

from tessera.service.server.settings.values import SettingValue


def without_password(url: str) -> str:
    """Return ``url`` with every password in it masked."""
    masked = re.sub(r"(//[^/:@]*):.*@", r"\1:***@", url)
    return re.sub(r"(password=)[^&\s]*", r"\1***", masked)


def format_toml(value: SettingValue) -> str:
    """Return a setting's value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    return repr(value)
