"""The database of the settings, which the server and the commands on the database open alike."""

from __future__ import annotations

from pathlib import Path

from tessera.db.schema.engine import Database, connect_database
from tessera.service.server.settings.config import Config


def open_database(config: Config) -> Database:
    """Return the database of the settings. The embedded one is started if necessary.

    It has a connection for each thread that may need one.
    """
    directory = Path(config.database_directory) if config.database_directory else None
    size = config.connections()
    return connect_database(config.database_url or None, directory=directory, pool_size=size)
