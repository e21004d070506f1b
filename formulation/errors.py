"""The tree of errors.

    TesseraError
    ├── InvalidInput            a field of a request or file is wrong
    │   ├── RequestIdReused     the request id was used with another body
    │   └── ProblemTooLarge     a number would overflow the solver's integers
    ├── NotFound                the named resource does not exist
    ├── AlreadyExists           the named resource exists already
    ├── Conflict                the caller's view is older than the stored one
    │   ├── StaleEtag           the etag does not match
    │   └── RoundSuperseded     another replica committed this round
    ├── NotAllowed              the resource's state does not allow this
    ├── Unavailable             something Tessera stands on cannot be reached
    │   └── NotMigrated         the database's schema is not the one this release needs
    └── DeadlineTooShort        the caller's deadline leaves no time to decide

Each class is one name and one sentence; what happened is in the message and the attributes.
"""

from __future__ import annotations


class TesseraError(Exception):
    """Base of every error that Tessera raises on purpose."""

    reason = "TESSERA_ERROR"

    def metadata(self) -> dict[str, str]:
        """Return the facts a machine may act on, as flat strings."""
        return {}


class InvalidInput(TesseraError):
    """A field of a request or a file is wrong; the message says what is allowed."""

    reason = "INVALID_INPUT"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field = field
        self.problem = problem


class RequestIdReused(InvalidInput):
    """The request id was used before with another body."""

    reason = "REQUEST_ID_REUSED"


class ProblemTooLarge(InvalidInput):
    """A coefficient of the round would overflow the solver's integers."""

    reason = "PROBLEM_TOO_LARGE"


class NotFound(TesseraError):
    """The named resource does not exist."""

    reason = "NOT_FOUND"

    def __init__(self, resource: str) -> None:
        super().__init__(f"{resource} does not exist")
        self.resource = resource

    def metadata(self) -> dict[str, str]:
        """Name the missing resource."""
        return {"resource": self.resource}


class AlreadyExists(TesseraError):
    """The named resource exists already."""

    reason = "ALREADY_EXISTS"

    def __init__(self, resource: str) -> None:
        super().__init__(f"{resource} exists already; choose another id")
        self.resource = resource

    def metadata(self) -> dict[str, str]:
        """Name the resource."""
        return {"resource": self.resource}


class Conflict(TesseraError):
    """The caller's view is older than the stored one."""

    reason = "CONFLICT"


class StaleEtag(Conflict):
    """The etag does not match the stored one; read again and retry."""

    reason = "STALE_ETAG"


class RoundSuperseded(Conflict):
    """Another replica committed this round first."""

    reason = "ROUND_SUPERSEDED"

    def __init__(self, winner: str) -> None:
        super().__init__(f"the cluster moved on while this round was solved: {winner} won")
        self.winner = winner

    def metadata(self) -> dict[str, str]:
        """Name the round that won."""
        return {"winner": self.winner}


class NotAllowed(TesseraError):
    """The resource's present state does not allow this."""

    reason = "NOT_ALLOWED"


class Unavailable(TesseraError):
    """Something that Tessera stands on cannot be reached."""

    reason = "UNAVAILABLE"


class NotMigrated(Unavailable):
    """The database's schema is not the one that this release needs."""

    reason = "NOT_MIGRATED"


class DeadlineTooShort(TesseraError):
    """The caller's deadline leaves no time to decide and commit."""

    reason = "DEADLINE_TOO_SHORT"
