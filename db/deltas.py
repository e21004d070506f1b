"""Bytes stored as their difference from other bytes: exact, and small where the two are alike.

The text is cut at each ``]``, so that a column of canonical JSON is a part of its own, and each part into
pieces. A piece is compressed with the bytes at the same place of the base as its dictionary. Nothing depends
on what the bytes mean: where the two texts are not alike, the result is only larger.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Final

PIECE_BYTES: Final = 8 << 10
"""Length of a piece. With what lies around its place in the base it fits deflate's window of 32 KiB."""

BEFORE_BYTES: Final = 12 << 10
AFTER_BYTES: Final = 20 << 10
"""Bytes of the base before and after a piece's place that are its dictionary: text may have moved by that."""

_LEVEL: Final = 6
_SEPARATOR: Final = b"]"
_LENGTH: Final = struct.Struct("<I")
_RAW: Final = -15  # zlib's window of 32 KiB, without a header


def encode_delta(base: bytes, text: bytes) -> bytes:
    """Return what ``decode_delta`` needs to make ``text`` from ``base``."""
    old, new = _parts(base, text)
    encoded = [_LENGTH.pack(len(new))]
    for before, after in zip(old, new, strict=True):
        encoded.append(_LENGTH.pack(len(after)))
        if before == after:
            encoded.append(b"\x00")
            continue
        encoded.append(b"\x01")
        for start, dictionary in _dictionaries(before, len(after)):
            packed = _compressor(dictionary)
            piece = packed.compress(after[start : start + PIECE_BYTES]) + packed.flush()
            encoded += [_LENGTH.pack(len(piece)), piece]
    return b"".join(encoded)


def decode_delta(base: bytes, encoded: bytes) -> bytes:
    """Return the text that ``encode_delta`` was given with ``base``."""
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
    """Return the parts of both texts that lie at the same place; each whole where they differ in number."""
    old, new = base.split(_SEPARATOR), text.split(_SEPARATOR)
    return (old, new) if len(old) == len(new) else ([base], [text])


def _dictionaries(before: bytes, length: int) -> Iterator[tuple[int, bytes]]:
    """Yield where each piece of a part of ``length`` bytes starts, and the dictionary for it."""
    for start in range(0, length, PIECE_BYTES):
        place = start * len(before) // length
        yield start, before[max(0, place - BEFORE_BYTES) : place + AFTER_BYTES]


def _compressor(dictionary: bytes) -> zlib._Compress:
    if not dictionary:
        return zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW)
    return zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW, zdict=dictionary)


def _decompressor(dictionary: bytes) -> zlib._Decompress:
    return zlib.decompressobj(_RAW, zdict=dictionary) if dictionary else zlib.decompressobj(_RAW)
