"""The tree of errors.

    TesseraError
    ├── InvalidInput            a field of a request or file is wrong
    │   ├── RequestIdReused     the request id was used with another body
    │   ├── ProblemTooLarge     a number would overflow the solver's integers
    │   └── InvalidCertificate  a proof does not show what it claims
    ├── NotFound                the named resource does not exist
    ├── AlreadyExists           the named resource exists already
    ├── Conflict                the caller's view is older than the stored one
    │   ├── StaleEtag           the etag does not match
    │   └── RoundSuperseded     another round was committed first
    ├── NotAllowed              the resource's state does not allow this
    │   ├── InUse               the resource cannot be deleted while others use it
    │   └── NodeSilent          what is asked for is on a node whose agent cannot be asked
    ├── NotAuthenticated        the caller has not proved who it is
    ├── PermissionDenied        the caller's role does not include this
    ├── LimitReached            the server holds as many of these as it may
    ├── Unavailable             a service that Tessera depends on cannot be reached
    │   └── NotMigrated         the database's schema is not the one this release needs
    ├── TooBusy                 the server has taken on as much as it may; try again later
    └── DeadlineTooShort        the caller's deadline leaves no time to decide

Each class is one name and one sentence. The facts of a case are in the message and the attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class TesseraError(Exception):
    """Base of every error that Tessera raises on purpose."""

    reason = "TESSERA_ERROR"

    def metadata(self) -> dict[str, str]:
        """Return the facts that a machine may act on, as flat strings."""
        return {}


class InvalidInput(TesseraError):
    """A field of a request or a file is wrong. The message says what is allowed."""

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


class InvalidCertificate(InvalidInput):
    """The certificate of a round's bound does not prove it."""

    reason = "INVALID_CERTIFICATE"

    def __init__(self, problem: str) -> None:
        super().__init__("certificate", problem)


class NotFound(TesseraError):
    """The named resource does not exist."""

    reason = "NOT_FOUND"

    def __init__(self, resource: str, next_step: str = "") -> None:
        super().__init__(f"{resource} does not exist" + (f"; {next_step}" if next_step else ""))
        self.resource = resource

    def metadata(self) -> dict[str, str]:
        """Name the missing resource."""
        return {"resource": self.resource}


class NoLongerKept(NotFound):
    """The named resource existed, but retention has deleted it."""

    def __init__(self, resource: str, settings: str) -> None:
        """Name the resource, and the settings that say how long such resources are kept."""
        super().__init__(resource)
        self.args = (
            f"{resource} is no longer kept; the servers' settings {settings} limit what is",
        )


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
    """The etag does not match the stored one. The caller should read again and retry."""

    reason = "STALE_ETAG"


class RoundSuperseded(Conflict):
    """Another round was committed first.

    It ``is_last`` if the deadline leaves no time to decide again.
    """

    reason = "ROUND_SUPERSEDED"

    def __init__(self, winner: str, *, is_last: bool = False) -> None:
        super().__init__(
            f"{winner} was committed while this round was being solved"
            + is_last * ", and the deadline leaves no time to decide again; call with a longer one"
        )
        self.winner = winner

    def metadata(self) -> dict[str, str]:
        """Name the round that won."""
        return {"winner": self.winner}


class NotAllowed(TesseraError):
    """The resource's present state does not allow this."""

    reason = "NOT_ALLOWED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """The users of a resource of one kind: their number and the names of the first few."""

    kind: str  # for machines, e.g. "jobs"
    one: str  # for people, e.g. "live job"; `many` is its plural
    many: str
    count: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        """Return the users in words, e.g. ``12 live jobs (a, b, c, ...)``."""
        more = ["..."] if self.count > len(self.names) else []
        noun = self.one if self.count == 1 else self.many
        return f"{self.count:,} {noun} ({', '.join([*self.names, *more])})"


class InUse(NotAllowed):
    """The resource cannot be deleted while others use it."""

    reason = "IN_USE"

    def __init__(self, resource: str, uses: Sequence[Use], advice: str) -> None:
        *first, last = map(str, uses)
        users = f"{', '.join(first)} and {last}" if first else last
        super().__init__(f"{resource} is in use by {users}; {advice}")
        self.resource, self.uses = resource, tuple(uses)

    def metadata(self) -> dict[str, str]:
        """Name the resource, and how many users of each kind it has."""
        return {"resource": self.resource} | {use.kind: str(use.count) for use in self.uses}


class NodeSilent(NotAllowed):
    """The answer is on a node that has no agent, or whose agent has not been heard."""

    reason = "NODE_SILENT"


class NotAuthenticated(TesseraError):
    """The caller has not proved who it is: no token or certificate, or one that proves nothing."""

    reason = "NOT_AUTHENTICATED"


class PermissionDenied(TesseraError):
    """The server knows who the caller is, and its role does not include this."""

    reason = "PERMISSION_DENIED"


class LimitReached(TesseraError):
    """The server or the cluster holds as many of these as it may."""

    reason = "LIMIT_REACHED"


class Unavailable(TesseraError):
    """A service that Tessera depends on cannot be reached."""

    reason = "UNAVAILABLE"


class NotMigrated(Unavailable):
    """The database's schema is not the one that this release needs."""

    reason = "NOT_MIGRATED"


class TooBusy(TesseraError):
    """The server is doing as much work of this kind as it may. The same call may succeed later."""

    reason = "TOO_BUSY"


class DeadlineTooShort(TesseraError):
    """The caller's deadline leaves no time to decide and commit."""

    reason = "DEADLINE_TOO_SHORT"
