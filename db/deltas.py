"""Bytes stored as their difference from other bytes: exact, and small if the two are similar.

The text is cut at each ``]``, so that a column of canonical JSON is a separate part. Each part is
cut into pieces. A piece is compressed with the bytes at the same place of the base as its
dictionary. Nothing depends on the meaning of the bytes: if the two texts differ much, the result is
only larger.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Final

PIECE_BYTES: Final = 8 << 10
"""Length of a piece. Its place in the base, with 12 KiB before and after it, fits deflate's window
of 32 KiB.
"""

BEFORE_BYTES: Final = 12 << 10
AFTER_BYTES: Final = 20 << 10
"""Bytes of the base before and after the start of a piece's place, which form its dictionary. Text
may have moved by up to 12 KiB.
"""

_LEVEL: Final = 6
_SEPARATOR: Final = b"]"
_LENGTH: Final = struct.Struct("<I")
_RAW: Final = -15  # zlib's window of 32 KiB, without a header


def encode_delta(base: bytes, text: bytes) -> bytes:
    """Return the bytes from which ``decode_delta`` restores ``text``, given ``base``."""
    old, new = _parts(base, text)
    encoded = [_LENGTH.pack(len(new))]
    for before, after in zip(old, new, strict=True):
        encoded.append(_LENGTH.pack(len(after)))
        if before == after:
            # A flag byte of 0 marks an unchanged part.
            encoded.append(b"\x00")
            continue
        encoded.append(b"\x01")
        for start, dictionary in _dictionaries(before, len(after)):
            packed = _compressor(dictionary)
            piece = packed.compress(after[start : start + PIECE_BYTES]) + packed.flush()
            encoded += [_LENGTH.pack(len(piece)), piece]
    return b"".join(encoded)


def decode_delta(base: bytes, encoded: bytes) -> bytes:
    """Return the text that ``encode_delta`` encoded with ``base``."""
    (count,) = _LENGTH.unpack_from(encoded)
    old = base.split(_SEPARATOR)
    if len(old) != count:
        old = [base]
    parts, at = [], _LENGTH.size
    for before in old:
        (length,) = _LENGTH.unpack_from(encoded, at)
        differs, at = encoded[at + _LENGTH.size], at + _LENGTH.size + 1
        if not differs:
            parts.append(before)
            continue
        pieces = []
        for _, dictionary in _dictionaries(before, length):
            (size,) = _LENGTH.unpack_from(encoded, at)
            at += _LENGTH.size
            pieces.append(_decompressor(dictionary).decompress(encoded[at : at + size]))
            at += size
        parts.append(b"".join(pieces))
    return _SEPARATOR.join(parts)


def _parts(base: bytes, text: bytes) -> tuple[list[bytes], list[bytes]]:
    """Return the matching parts of both texts, or both whole if their numbers of parts differ."""
    old, new = base.split(_SEPARATOR), text.split(_SEPARATOR)
    return (old, new) if len(old) == len(new) else ([base], [text])


def _dictionaries(before: bytes, length: int) -> Iterator[tuple[int, bytes]]:
    """Yield the start of each piece of a part of ``length`` bytes, and the dictionary for it."""
    for start in range(0, length, PIECE_BYTES):
        place = start * len(before) // length
        yield start, before[max(0, place - BEFORE_BYTES) : place + AFTER_BYTES]


def _compressor(dictionary: bytes) -> zlib._Compress:
    if not dictionary:
        return zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW)
    return zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW, zdict=dictionary)


def _decompressor(dictionary: bytes) -> zlib._Decompress:
    return zlib.decompressobj(_RAW, zdict=dictionary) if dictionary else zlib.decompressobj(_RAW)
