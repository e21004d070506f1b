"""The variables of a shell, and what bash makes of the words that use them.

While a word is expanded, control characters stand for what bash knows of it: characters that a
quotation protects, ends of quotations and of elements, and unknown parts (``\\0``, a number, ``\\0``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, TypeAlias

from tessera.estimator.stated.shell.commands import end_of, end_of_use, split_words
from tessera.formulation.errors import InvalidInput

MAX_CHARACTERS: Final = 1_000_000
"""Largest number of characters of a script's words, with what they are replaced by."""

Value: TypeAlias = str | list[str]
"""The value of a variable: a text or a list of texts."""

ASSUMED: Final = "\1"
"""The end of a word that holds only while a variable of the environment is not set."""
_SPECIAL, _PROTECTED = " \t\n*?[", "\2\3\4\5\6\7"
_PROTECTION: Final = str.maketrans(_SPECIAL, _PROTECTED)
_ELEMENT, _END, _MAGIC = "\x08", "\x0e", "\x0f"
"""The ends of an element, of a quotation, and of a brace or tilde that bash replaces."""
_NO_PROTECTION: Final = str.maketrans(_PROTECTED + _ELEMENT, f"{_SPECIAL} ", _END + _MAGIC)
CONTROL: Final = re.compile("[\0-\x08\x0e\x0f]")
_MARK: Final = re.compile("\0([0-9]+)\0")

ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)(?:(\+?)=(\(?)|\[)")
"""The beginning of an assignment: the name, ``+`` and the bracket of a list, if they are there."""
NAME: Final = re.compile(r"[A-Za-z_]\w*")
_PLAIN: Final = re.compile(r"[\w./:,@%+=-]+")
_VALUE: Final = re.compile(
    r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*|[1-9][0-9]*)(?:\[([@*])\]|(:?-)(.*))?\})", re.DOTALL
)
_CHANGE: Final = re.compile(r"\+\+|--|<<=|>>=|(?<![=!<>])=(?![=~])")
"""A mark of an expression that sets a variable."""
_GLOB: Final = re.compile(rf"[*?{_MAGIC}]|\[.*\]", re.DOTALL)
_INTEGER: Final = "(?:0|[1-9][0-9]{0,17})"
_NUMBER: Final = re.compile(rf"{_INTEGER}{ASSUMED}?")
_EXPRESSION: Final = re.compile(rf"{_INTEGER}(?:[-+*/]{_INTEGER}){{0,20}}")
_PRODUCT: Final = re.compile(r"([+-]?)([^+-]+)")
_FACTOR: Final = re.compile(r"([*/]?)([0-9]+)")
_OPTION: Final = re.compile(r"(?<![\w-])--[\w-]*[$`]?")
_USED: Final = re.compile(r"\$\{?[#!]?([A-Za-z_]\w*|[0-9@*])")
_FROM_OUTSIDE: Final = re.compile(
    r"(?:SLURM|PBS|LSB|OMPI|PMI|PMIX|SGE|PET|TORCHELASTIC|KUBERNETES|FLUX|COBALT|MLP|ARNOLD"
    r"|CUDA_VISIBLE)_?\w*|WORLD_SIZE|RANK|LOCAL_RANK|NODE_RANK|MASTER_ADDR|MASTER_PORT|HOSTNAME|HOME"
    r"|USER|PATH|SHELL|TMPDIR|HOSTFILE|NHOSTS|NNODES_FROM_ENV"
)
"""Variables that a scheduler, a launcher or the system sets."""
_OF_BASH: Final = re.compile(
    r"_|BASH\w*|S?RANDOM|(?:EPOCH)?SECONDS|EPOCHREALTIME|LINENO|E?UID|PPID|GROUPS|DIRSTACK|FUNCNAME"
    r"|PIPESTATUS|(?:OLD)?PWD|REPLY|OPTARG|OPTERR|OPTIND|SHELLOPTS|COPROC"
)
"""Variables that bash itself sets."""


class ShellWord(str):
    """A word of a command, with what is unknown in it.

    ``unknown`` names the first unknown part and its line, or is "". ``lone`` is set if the word may
    stand for any number of words, and ``options`` are the arguments that may be among these.
    ``assumed`` is set if the word holds only while variables of the environment are not set.
    """

    unknown: str = ""
    lone: bool = False
    assumed: bool = False
    options: frozenset[str] = frozenset()

    def part(self, text: str) -> ShellWord:
        """Return a part of this word, which is unknown and assumed like the whole."""
        word = ShellWord(text)
        word.unknown, word.assumed = self.unknown, self.assumed
        return word


class Variables:
    """The variables of a shell, as far as they are known.

    ``assumed`` are the variables that are taken as not set.
    """

    def __init__(self, field: str) -> None:
        self.assumed: dict[str, None] = {}
        self._field = field
        self._values: dict[str, Value] = {}
        self._unsettled: dict[str, int] = {}
        """Variables that are unknown to the end, with the line of the reason."""
        self._is_entered = False
        """Whether what is not read may have set any variable."""
        self._wildcard_line = 0
        """The line of something that may set any variable at any time, or 0."""
        self._marks: list[tuple[str, int]] = []
        """The unknown parts of texts: their source and line."""
        self._sources: dict[str, list[str]] = {}
        """All that variables are set to, as it is written."""
        self._left = MAX_CHARACTERS

    def mark(self, source: str, line: int) -> str:
        """Return a text that stands for something unknown."""
        self._marks.append((self._reveal(source), line))
        return f"\0{len(self._marks) - 1}\0"

    def set(self, name: str, source: str, value: Value) -> None:
        """Give a variable a value."""
        self._sources.setdefault(name, []).append(source)
        self._values[name] = value

    def unsettle(self, names: Iterable[str], line: int, source: str = "") -> None:
        """Take variables as unknown to the end, since a run decides whether they are set."""
        for name in names:
            self._charge(source)
            self._unsettled.setdefault(name, line)
            self._sources.setdefault(name, []).append(source)

    def forget(self, line: int, *, for_ever: bool) -> None:
        """Take all variables as unknown that are set until now, or at any time."""
        self._is_entered = True
        self._wildcard_line = line if for_ever else self._wildcard_line
        self._values.clear()

    def note_changes(self, expression: str, line: int) -> None:
        """Take the variables as unknown that an arithmetic expression may set."""
        if _CHANGE.search(expression):
            self.unsettle(NAME.findall(expression), line)

    def value(self, name: str) -> Value | None:
        """Return the value of a variable, or None if the script does not set it."""
        if self._wildcard_line or name in self._unsettled or _OF_BASH.fullmatch(name):
            return self.mark(f"${name}", self._unsettled.get(name, self._wildcard_line))
        return self._values.get(name)

    def listed(self) -> list[str]:
        """Return the words of all variables that begin with an argument, or may do so."""
        words: list[str] = []
        for value in map(self.value, self._values):
            fields = (value if isinstance(value, str) else " ".join(value or [])).split()
            if any(field.startswith("--") or self.word(field).options for field in fields[:1]):
                words += fields
        return words

    def new_value(self, match: re.Match[str], word: str, line: int) -> Value:
        """Return the value that an assignment gives to a variable."""
        unknown = self.mark(f"${match[1]}", line)
        old = self.value(match[1])
        if match[3]:
            elements = split_words(word[match.end() : -1])
            added = [text for element in elements for text in self.fields(element, line)]
            if any(element.startswith("[") for element in elements):
                return unknown
            kept = old if isinstance(old, list) else [unknown if old is None else old]
            return [*kept, *added] if match[2] else added
        text = self._expand(word[match.end() :], line)
        if match[2] is None or isinstance(old, list) or _MAGIC in text:
            return unknown
        return (unknown if old is None else old) * bool(match[2]) + _decode(text)

    def fields(self, word: str, line: int) -> list[str]:
        """Return the words into which a word expands."""
        return [
            self.mark(_decode(text), line) if _GLOB.search(text) else _decode(text)
            for text in re.findall(rf"[^ \t\n{_ELEMENT}]+", self._expand(word, line))
        ]

    def word(self, text: str) -> ShellWord:
        """Return an expanded text as a word of a command."""
        word = ShellWord(plain_text(self._reveal(text)))
        word.assumed = ASSUMED in text
        if mark := _MARK.search(text):
            source, line = self._marks[int(mark[1])]
            word.unknown = f"{source if len(source) <= 60 else f'{source[:57]}...'} (line {line})"
            word.lone = not _MARK.sub("", plain_text(text))
            word.options = self._options(word)
        return word

    def _expand(self, text: str, line: int, *, quoted: bool = False, escaped: str = "") -> str:
        """Return what a text expands to, with control characters for what its quotations do."""
        pieces: list[str] = []
        at = 0
        while at < len(text):
            plain, char, following = _PLAIN.match(text, at), text[at], text[at + 1 : at + 2]
            stop = at + 1
            if plain is not None:
                stop = plain.end()
                pieces.append(plain[0])
            elif char == "\\":
                stop = at + 2
                kept = "\\" if quoted and following not in f'$`"\\\n{escaped}' else ""
                pieces.append("" if following == "\n" else _quote(kept + following))
            elif char == "'" and not quoted:
                stop = text.index("'", at + 1) + 1
                pieces.append(_quote(text[at + 1 : stop - 1]))
            elif char == '"':
                stop = end_of(text, at + 1, '"', quoted=True) + 1
                inner = self._expand(text[at + 1 : stop - 1], line, quoted=True)
                pieces.append(inner or _END * ("[@]" not in text[at:stop]))
            elif char in "$`" and (quoted or following != '"'):
                stop = end_of_use(text, at, quoted=quoted)
                pieces.append(self._expand_use(text[at:stop], line, quoted))
            elif char != "$":
                pieces.append(_quote(char) if quoted else char + _MAGIC * (char in "{~"))
            at = stop
        self._charge("".join(pieces))
        return "".join(pieces)

    def _expand_use(self, source: str, line: int, quoted: bool) -> str:
        """Return what a use of a variable, an expression or a command's output expands to."""
        unknown = self.mark(source, line)
        match = _VALUE.fullmatch(source)
        if source == "$":
            return _quote(source)
        if source.startswith("$((") and source.endswith("))"):
            return self._result(source[3:-2], line) or unknown
        if match is None:
            self.note_changes(source if source.startswith("${") else "", line)
            return unknown
        name, of_all, operation = match[1] or match[2], match[3], match[4]
        value = self.value(name)
        if (not quoted or of_all == "*") and "IFS" in self._sources:
            return unknown
        if value is None and (not operation or self._is_entered or _FROM_OUTSIDE.fullmatch(name)):
            return unknown
        if operation and (isinstance(value, list) or (value and not _MARK.sub("", value))):
            return unknown
        if value is None or (operation == ":-" and not value):
            text = self._expand(match[5], line, quoted=quoted, escaped="}") + _END * quoted
            if value is not None:
                return text
            self.assumed[name] = None
            return re.sub(rf"[^ \t\n{_ELEMENT}]+", rf"\g<0>{ASSUMED}", text)
        elements = [value] if isinstance(value, str) else value if of_all else value[:1] or [""]
        if not quoted:
            return _ELEMENT.join(elements)
        return _ELEMENT.join(map(_quote, [" ".join(elements)] if of_all == "*" else elements))

    def _result(self, expression: str, line: int) -> str:
        """Return the value of an arithmetic expression, or "" if it is not a plain one."""
        self.note_changes(expression, line)

        def read(name: re.Match[str]) -> str:
            value = self.value(name[0])
            return value if isinstance(value, str) and _NUMBER.fullmatch(value) else name[0]

        text = _decode(self._expand(expression, line, quoted=True))
        text = re.sub(rf"(?<!\w){NAME.pattern}", read, text)
        plain = re.sub(r"\s*([-+*/])\s*", r"\1", plain_text(text).strip())
        if not _EXPRESSION.fullmatch(plain):
            return ""
        total = 0
        for sign, product in _PRODUCT.findall(plain):
            value = 1
            for operator, digits in _FACTOR.findall(product):
                number = int(digits)
                if operator == "/" and number:
                    value //= number
                elif operator != "/" and value * number < 2**63:
                    value *= number
                else:
                    return ""
            total += -value if sign == "-" else value
        return f"{total}{ASSUMED * (ASSUMED in text)}" if abs(total) < 2**31 else ""

    def _options(self, source: str) -> frozenset[str]:
        """Return the arguments that occur in a text, or where variables that it uses are set."""
        options: set[str] = set()
        left, seen = [source], set[str]()
        while left:
            source = left.pop()
            self._charge(source)
            options |= {*_OPTION.findall(source)}
            names = {*_USED.findall(source)} | ({*self._sources} if "${!" in source else set())
            left += [text for name in names - seen for text in self._sources.get(name, [])]
            seen |= names
        return frozenset(options)

    def _reveal(self, text: str) -> str:
        """Return a text with the sources of its unknown parts."""
        return _MARK.sub(lambda mark: self._marks[int(mark[1])][0], text)

    def _charge(self, text: str) -> None:
        """Refuse a script whose words become too long."""
        self._left -= len(text) + 1
        if self._left < 0:
            raise InvalidInput(self._field, f"has words of more than {MAX_CHARACTERS:,} characters")


def plain_text(text: str) -> str:
    """Return a text without the marks of what is assumed."""
    return text.replace(ASSUMED, "")


def _quote(text: str) -> str:
    return text.translate(_PROTECTION) + _END


def _decode(text: str) -> str:
    return text.translate(_NO_PROTECTION)
