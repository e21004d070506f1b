"""Secrets that a job states where everyone who sees the job would see them.

A job's variables and the words of its commands are stored and shown as they are. A secret there is
refused. It is recognized by its form (``secrets.holds_secret``), or by the name of its variable or option.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.secrets import holds_secret, is_random

MIN_KEY_CHARS: Final = 16
"""Characters from which a random text under a name such as ``SORT_KEY`` is a secret."""

_NAMES: Final = re.compile(
    r"PASSWORD|PASSWD|PASSPHRASE|SECRET(?!ARY)|CREDENTIAL"
    r"|(?:API|ACCESS|PRIVATE|ENCRYPTION|SIGNING|AUTH|ACCOUNT|STORAGE|SSH|MASTER)_?KEY$"
)
_TOKEN: Final = re.compile(r"(?:^|_)(?:TOKEN|PASS)$|_PWD$")
_WORD_TOKEN: Final = re.compile(
    r"(?:^|_)(?:PAD|EOS|BOS|UNK|SEP|CLS|MASK|STOP|END|START|SPECIAL|IMAGE|VIDEO|AUDIO|PLACEHOLDER|INITIALIZER|TRIGGER"
    r"|NEWLINE|MAX|MIN|NUM|N|PER|EACH|NEXT|LAST|NEW)_TOKEN$"
)
"""Names of tokens that a model reads."""
_KEY: Final = re.compile(r"(?:^|_)KEY$")
_OTHER_NAMES: Final = re.compile(
    r"_(?:FILE|PATH|DIR|NAME|ID|URL|URI|LENGTH|LEN|SIZE|TYPE|COUNT|ENABLED|HELPER|STORE|MANAGER|ENV|VAR)$"
    r"|^GOOGLE_APPLICATION_CREDENTIALS$"  # the path of a file
)
"""Ends of names of what is known of a secret without being one, such as ``MASTER_KEY_FILE``."""
_OTHER_VALUES: Final = re.compile(
    r"|true|false|yes|no|on|off|none|null|[01]|(?:~|\.{1,2})?/\S*|[$`].*|<[^>]*>|\[[A-Z_]+\]",
    re.IGNORECASE | re.DOTALL,
)
_AWS_KEY: Final = re.compile(r"[A-Za-z0-9/+]{40}")
"""A secret key of AWS. One of 64 begins as a path does."""
_CALL: Final = re.compile(r"[A-Za-z_][\w.]*\(.*")
"""A value that a program computes."""
_NUMBER: Final = re.compile(r"-?[0-9.]+")
_ASSIGNMENT: Final = re.compile(
    r"(?<![A-Za-z0-9_-])-{0,2}([A-Za-z_][A-Za-z0-9_-]*)=(\"[^\"]*\"|'[^']*'|[^\s;&|\"']*)"
)
_OPTION: Final = re.compile(r"--?([A-Za-z_][A-Za-z0-9_-]*)")
_OPTION_IN_TEXT: Final = re.compile(
    r"(?<!\S)--?([A-Za-z_][A-Za-z0-9_-]*)\s+(\"[^\"]*\"|'[^']*'|[^\s;&|\"'-][^\s;&|\"']*)"
)
"""An option with its value in the text of a script."""
_MEMBER: Final = re.compile(r"\"([A-Za-z_][A-Za-z0-9_-]*)\"\s*:\s*\"([^\"]*)\"")
"""A member of an object in JSON."""
_HEADER: Final = re.compile(
    r"\bauthorization:\s*(?:bearer|basic|token)\s+([^\s\"']+)", re.IGNORECASE
)
"""A header of HTTP that proves who calls."""


def states_secret(name: str, value: str) -> bool:
    """Return whether the value of a variable or an option of this name is a secret."""
    if holds_secret(value):
        return True
    upper = name.upper().replace("-", "_")
    if upper.endswith("SECRET_ACCESS_KEY") and _AWS_KEY.fullmatch(value):
        return True
    if _OTHER_NAMES.search(upper) or _OTHER_VALUES.fullmatch(value) or _CALL.fullmatch(value):
        return False
    if _NAMES.search(upper):
        return True
    if _TOKEN.search(upper):
        return not (_WORD_TOKEN.search(upper) or _NUMBER.fullmatch(value))
    if not _KEY.search(upper) or len(value) < MIN_KEY_CHARS:
        return False
    words = sum(len(part) for part in re.split(r"[\W_]", value) if part.isalpha())
    return is_random(value) and 2 * words < len(value)


def refuse_variables(environment: Mapping[str, str], field: str, secrets_field: str) -> None:
    """Refuse secrets among variables. Raises InvalidInput, which does not repeat a value."""
    for name, value in environment.items():
        if states_secret(name, value) or any(states_secret(*pair) for pair in _stated([value], 0)):
            raise InvalidInput(
                f"{field}[{name}]",
                "looks like a secret, and everyone who sees the job would see it; put it into a file of"
                f" the nodes, and name that file in {secrets_field} ({name}=FILE)",
            )


def refuse_words(words: Sequence[str], field: str, secrets_field: str) -> None:
    """Refuse secrets among the words of a command. Raises InvalidInput, which repeats no word."""
    for index, word in enumerate(words):
        if holds_secret(word) or any(states_secret(*pair) for pair in _stated(words, index)):
            raise InvalidInput(
                f"{field}[{index}]",
                "looks like a secret, and everyone who sees the job would see it; put it into a file of"
                f" the nodes, name that file in {secrets_field} (VARIABLE=FILE), and let the program read"
                " the variable",
            )


def _stated(words: Sequence[str], index: int) -> Iterator[tuple[str, str]]:
    """Yield what a word assigns, as ``--token=X`` and ``TOKEN=X`` do, and what it is to an option.

    A word may be the text of a script, with options of its own, or JSON.
    """
    word = words[index]
    for form in (_ASSIGNMENT, _OPTION_IN_TEXT, _MEMBER):
        for name, value in form.findall(word):
            yield name, value.strip("\"'")
    for value in _HEADER.findall(word):
        yield "TOKEN", value
    option = _OPTION.fullmatch(words[index - 1]) if index else None
    if option and not word.startswith("-"):
        yield option[1], word
