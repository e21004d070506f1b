"""The connection: pool, time limits, transactions, and the translation of driver errors to ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import psycopg2
import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from tessera.db.schema import embedded
from tessera.db.schema.pgserver import is_embedded
from tessera.db.schema.revision import head_revision
from tessera.db.schema.tables.triggers import NODE_CAPACITY, SCHEMA_FENCE, STATED_SCHEMA
from tessera.formulation.base.errors import (
    InvalidInput,
    NotAllowed,
    NotMigrated,
    TesseraError,
    Unavailable,
)

T = TypeVar("T")

MAX_ATTEMPTS = 5
"""Number of attempts at a transaction that conflicts with others (serialization, deadlock)."""

CONFLICT_STATES = frozenset({"40001", "40P01"})

_WRONG_SCHEMA = frozenset({"42P01", "42703", "42883"})  # no such table, column, function
_FULL = frozenset({"53100"})

_NO_CONNECTION = ("too many clients already", "remaining connection slots", "too many connections")
"""Messages of PostgreSQL, because the driver has no code for errors of connecting."""

KEEPALIVES: Final[dict[str, Any]] = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,
}
"""Settings with which a vanished database is given up after half a minute, not after hours."""

_WRONG_VALUE_CLASSES = ("22", "23")  # data exception, integrity constraint violation


_PING = sa.text("SELECT 1")
_HOLD = sa.text("SELECT pg_try_advisory_lock(hashtextextended(:name, 0))")
_RELEASE = sa.text("SELECT pg_advisory_unlock(hashtextextended(:name, 0))")


class Database:
    """A PostgreSQL database. Safe to share between threads."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine

    @property
    def url(self) -> str:
        """Return the URL in SQLAlchemy's notation, including the password."""
        return self.engine.url.render_as_string(hide_password=False)

    def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Run ``work`` in a transaction, and repeat it a bounded number of times after conflicts.

        Raises:
            Unavailable: the database cannot be reached, or is too busy.
            InvalidInput: a constraint refused a value.
            NotAllowed: jobs would need more of a node than it has.
        """
        return self._attempt(work, sa.Connection.commit)

    def rehearse(self, work: Callable[[sa.Connection], T]) -> T:
        """Run ``work`` in a transaction that sees one moment and is never committed.

        The errors are those of ``write``.
        """
        return self._attempt(work, sa.Connection.rollback, isolation_level="REPEATABLE READ")

    def _attempt(
        self,
        work: Callable[[sa.Connection], T],
        end: Callable[[sa.Connection], None],
        **options: Any,
    ) -> T:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                with self._begin(**options) as connection:
                    result = work(connection)
                    end(connection)
                    return result
            except (DBAPIError, psycopg2.Error, PoolTimeout) as error:
                if sqlstate_of(error) not in CONFLICT_STATES or attempt == MAX_ATTEMPTS:
                    raise self._ours(error) from error
        raise AssertionError("unreachable")

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Yield a connection that sees one moment: REPEATABLE READ, READ ONLY.

        Raises Unavailable.
        """
        try:
            with self._begin(
                isolation_level="REPEATABLE READ", postgresql_readonly=True
            ) as connection:
                yield connection
                connection.commit()
        except (DBAPIError, psycopg2.Error, PoolTimeout) as error:
            raise self._ours(error) from error

    @contextmanager
    def held(self, name: str) -> Iterator[bool]:
        """Try to hold ``name`` among all users of the database; yield whether this succeeded.

        Raises:
            Unavailable: the database cannot be reached.
        """
        key = {"name": name}
        try:
            connection = self._begin(isolation_level="AUTOCOMMIT")
            free = connection.execute(_HOLD, key).scalar_one()
        except (DBAPIError, psycopg2.Error, PoolTimeout) as error:
            raise self._ours(error) from error
        try:
            yield bool(free)
        finally:
            with suppress(DBAPIError, psycopg2.Error):  # without a database nothing is held
                if free:
                    connection.execute(_RELEASE, key)
                connection.close()

    def verify(self, connection: sa.Connection) -> None:
        """Execute the first statement of a transaction, which shows that the connection is alive.

        It replaces a ping of the pool, which would be one more wait in every transaction.
        """
        connection.execute(_PING)

    def _begin(self, **options: Any) -> sa.Connection:
        """Return a connection in a transaction that has executed its first statement.

        Connections that were cut while idle are replaced: the first one that fails removes all
        older ones from the pool.
        """
        for attempt in (1, 2):
            connection = self.engine.connect()
            try:
                connection = connection.execution_options(**options)
                connection.begin()
                self.verify(connection)
            except BaseException as error:
                connection.close()
                cut = isinstance(error, DBAPIError) and error.connection_invalidated
                if not cut or attempt == 2:
                    raise
            else:
                return connection
        raise AssertionError("unreachable")

    def _ours(self, error: DBAPIError | psycopg2.Error | PoolTimeout) -> TesseraError:
        state, place = sqlstate_of(error), _hide_passwords(self.engine.url)
        if _constraint(error) == SCHEMA_FENCE:
            return NotMigrated(_detail(error))
        if state in _WRONG_SCHEMA:
            return NotMigrated(
                f"the schema of {place} belongs to another release; run `tessera migrate`"
            )
        if _constraint(error) == NODE_CAPACITY:
            return NotAllowed(_detail(error))
        if state[:2] in _WRONG_VALUE_CLASSES:
            return InvalidInput("", f"the database refused a value: {_detail(error)}")
        if state in _FULL or "No space left on device" in str(error):
            return Unavailable(
                f"the database at {place} has no space left on its disk; free some ({_detail(error)})"
            )
        if state == "53300" or any(words in str(error) for words in _NO_CONNECTION):
            return Unavailable(
                f"the database at {place} has no connection left; close some, raise its max_connections, or"
                " lower the server's setting store_threads: each of its threads needs a connection"
            )
        if state in ("57014", "55P03", *CONFLICT_STATES) or isinstance(error, PoolTimeout):
            return Unavailable(f"the database at {place} is too busy; try again")
        folder = str(self.engine.url.query.get("host", ""))
        if folder.startswith("/") and is_embedded(Path(folder)):
            return Unavailable(
                f"the embedded database in {folder} cannot be reached or has failed; `tessera up` and"
                f" `tessera serve` start it again if it has ended, so try again ({_detail(error)})"
            )
        return Unavailable(
            f"the database at {place} cannot be reached or has failed; start it, or correct"
            f" TESSERA_DATABASE_URL ({_detail(error)})"
        )


def sqlstate_of(error: DBAPIError | psycopg2.Error | PoolTimeout) -> str:
    """Return the database's five-character code for the error, or "" if it has none."""
    origin = error.orig if isinstance(error, DBAPIError) else error
    return str(getattr(origin, "pgcode", None) or "")


def _constraint(error: DBAPIError | psycopg2.Error | PoolTimeout) -> str:
    """Return the name of the constraint that refused a value, or "" if none did."""
    origin = error.orig if isinstance(error, DBAPIError) else error
    return str(getattr(getattr(origin, "diag", None), "constraint_name", None) or "")


def _detail(error: DBAPIError | psycopg2.Error | PoolTimeout) -> str:
    """Return the first line of the driver's message, which never holds a password."""
    origin = error.orig if isinstance(error, DBAPIError) else error
    lines = str(origin).strip().splitlines()
    return lines[0] if lines else type(origin).__name__


def sqlalchemy_url(url: str) -> sa.URL:
    """Return ``url`` for psycopg2, whatever driver it names.

    Raises:
        InvalidInput: not the URL of a PostgreSQL database.
    """
    try:
        parsed = sa.make_url(url)
    except (ArgumentError, ValueError) as error:
        raise InvalidInput("database URL", "expected postgresql://user@host/name") from error
    if parsed.get_backend_name() not in ("postgresql", "postgres"):
        raise InvalidInput("database URL", f"knows only postgresql://, not {parsed.drivername}://")
    return parsed.set(drivername="postgresql+psycopg2")


def without_password(url: str) -> str:
    """Return a URL of the same database for the same user, without a password.

    "" is returned unchanged.

    Raises:
        InvalidInput: not the URL of a PostgreSQL database.
    """
    if not url:
        return ""
    return _hide_passwords(sqlalchemy_url(url).set(drivername="postgresql"))


def _hide_passwords(url: sa.URL) -> str:
    plain = url.set(password=None).difference_update_query(["password", "sslpassword"])
    return plain.render_as_string()


def read_document(text: str) -> Any:
    """Return a JSON document of a column.

    Most are empty, and a page of 100 jobs has about 800 of them, so those are not parsed.
    """
    if text == "{}":
        return {}
    return [] if text == "[]" else json.loads(text)


def connect_database(
    url: str | None = None,
    *,
    directory: Path | None = None,
    pool_size: int = 10,
    statement_timeout_s: float = 60.0,
    lock_timeout_s: float = 20.0,
) -> Database:
    """Return the database at ``url``, or the embedded one (in ``directory``) if ``url`` is None.

    Connections are made when they are first needed, at most ``pool_size``. A caller waits for a
    connection for as long as for a lock. What ``url`` states, such as ``options=-c search_path=a``
    or ``connect_timeout=3``, replaces what is usual here.

    Raises:
        InvalidInput: not a PostgreSQL URL. Unavailable: the embedded database does not start.
    """
    place = sqlalchemy_url(embedded.start_server(directory) if url is None else url)
    limits = {
        "statement_timeout": statement_timeout_s,
        "lock_timeout": lock_timeout_s,
        "idle_in_transaction_session_timeout": statement_timeout_s,
    }
    options = [f"-c {name}={round(limit * 1000)}" for name, limit in limits.items()]
    options += place.normalized_query.get("options", ())  # a later setting replaces an earlier one
    options.append(f"-c {STATED_SCHEMA}={head_revision()}")
    usual = {"connect_timeout": 10, "application_name": "tessera", **KEEPALIVES}
    arguments = {name: value for name, value in usual.items() if name not in place.query}
    engine = sa.create_engine(
        place,
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=lock_timeout_s,
        connect_args={"options": " ".join(options), **arguments},
        json_deserializer=read_document,
    )
    return Database(engine)
