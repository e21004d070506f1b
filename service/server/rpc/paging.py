"""Pages of a list (AIP-158), with opaque tokens that only continue the list they were given for."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import Message

from tessera.formulation.base.errors import InvalidInput
from tessera.service.fields import message_digest

DEFAULT_SIZE: Final = 100
MAX_TOKEN: Final = 1000
_PAGE_FIELDS: Final = ("page_size", "page_token")


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A request for ``size`` items after ``cursor``.

    If the cursor is "", the page is the first one.
    """

    size: int
    cursor: str
    binding: str  # a digest of the request without its page fields

    @property
    def number(self) -> int:
        """Return the cursor of a list whose cursors are numbers. 0 is the start."""
        return int(self.cursor or 0)

    def token(self, cursor: str | int) -> str:
        """Return the token of the page after ``cursor``.

        It is "" if the cursor is "" or 0, at the end.
        """
        if not cursor:
            return ""
        text = json.dumps([str(cursor), self.binding], separators=(",", ":"))
        return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def page_of(
    request: Message, size: int, token: str, *, most: int, counts: bool = False
) -> PageRequest:
    """Return the page that ``request`` asks for.

    ``most`` limits the size. ``counts`` says that the cursor is a number.

    Raises:
        InvalidInput: a negative size, or a token of another list.
    """
    if size < 0:
        raise InvalidInput("page_size", "must be 0 (the server chooses) or more")
    binding = message_digest(request, without=_PAGE_FIELDS)[:16]
    cursor = _cursor(token, binding, counts=counts) if token else ""
    return PageRequest(min(size or DEFAULT_SIZE, most), cursor, binding)


def _cursor(token: str, binding: str, *, counts: bool) -> str:
    """Return the cursor inside ``token``, which must have been given for the same list."""
    alien = InvalidInput("page_token", "was not given for this list; start again without it")
    if len(token) > MAX_TOKEN:
        raise alien
    try:
        found = json.loads(base64.b64decode(token + "=" * (-len(token) % 4), b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError):
        raise alien from None
    match found:
        case [str(cursor), str(bound)] if bound == binding and cursor:
            if counts and not (cursor.isascii() and cursor.isdigit() and len(cursor) <= 18):
                raise alien
            return cursor
    raise alien
