"""The metadata that all tables share, and the columns that they have in common."""

from __future__ import annotations

from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, DOUBLE_PRECISION, TIMESTAMP

NAMING = {
    "pk": "pk_%(table_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
}

metadata = sa.MetaData(naming_convention=NAMING)

Name = sa.Text(collation="C")  # sorts as Python sorts

Moment = TIMESTAMP(timezone=True)


def id_column() -> sa.Column[int]:
    """Return the primary key, which the database counts up."""
    return sa.Column("id", sa.BigInteger, sa.Identity(always=True), primary_key=True)


def reference_column(
    name: str,
    target: str,
    *,
    nullable: bool = False,
    ondelete: str | None = None,
    primary_key: bool = False,
) -> sa.Column[int]:
    """Return a foreign key to ``target``, e.g. ``jobs.id``."""
    key = sa.ForeignKey(target, ondelete=ondelete)
    return sa.Column(name, sa.BigInteger, key, nullable=nullable, primary_key=primary_key)


def count_column(name: str, default: int | None = 0) -> sa.Column[int]:
    """Return a column of whole numbers. If ``default`` is None, a value must be given."""
    default_sql = None if default is None else sa.text(str(default))
    return sa.Column(name, sa.BigInteger, nullable=False, server_default=default_sql)


def real_column(
    name: str, *, nullable: bool = False, default: str | None = None
) -> sa.Column[float]:
    """Return a column of float64. ``default`` is an SQL expression."""
    default_sql = None if default is None else sa.text(default)
    return sa.Column(name, DOUBLE_PRECISION, nullable=nullable, server_default=default_sql)


def flag_column(name: str, *, default: bool = False) -> sa.Column[bool]:
    """Return a column of Booleans."""
    default_sql = sa.true() if default else sa.false()
    return sa.Column(name, sa.Boolean, nullable=False, server_default=default_sql)


def text_column(
    name: str, *, default: str | None = None, primary_key: bool = False
) -> sa.Column[str]:
    """Return a column of texts. If ``default`` is None, a value must be given."""
    default_sql = None if default is None else sa.text(f"'{default}'")
    return sa.Column(
        name, Name, nullable=False, server_default=default_sql, primary_key=primary_key
    )


def names_column(name: str, *, nullable: bool = False) -> sa.Column[list[str]]:
    """Return a column of lists of names."""
    return sa.Column(name, ARRAY(Name), nullable=nullable)


def moment_column(
    name: str, *, nullable: bool = False, required: bool = False
) -> sa.Column[datetime]:
    """Return a column of moments.

    One that may not be NULL is now by default. If it is ``required``, a value must be given.
    """
    default_sql = None if nullable or required else sa.text("now()")
    return sa.Column(name, Moment, nullable=nullable, server_default=default_sql)


def one_of(values: list[str]) -> str:
    """Return the values as an SQL list of literals."""
    return "(" + ", ".join(f"'{value}'" for value in values) + ")"
