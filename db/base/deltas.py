"""Bytes stored as their difference from other bytes: exact, and small if the two are similar.

Zstandard compresses the bytes with the base as its dictionary. Nothing depends on the meaning of the
bytes: if the two texts differ much, the result is only larger.
"""

from __future__ import annotations

from typing import Final

from zstandard import (
    DICT_TYPE_RAWCONTENT,
    ZstdCompressionDict,
    ZstdCompressionParameters,
    ZstdCompressor,
    ZstdDecompressor,
)

_LEVEL: Final = 6


def encode_delta(base: bytes, text: bytes) -> bytes:
    """Return the bytes from which ``decode_delta`` restores ``text``, given ``base``."""
    parameters = ZstdCompressionParameters.from_level(
        _LEVEL, source_size=len(text), dict_size=len(base), enable_ldm=True
    )
    return ZstdCompressor(dict_data=_dictionary(base), compression_params=parameters).compress(text)


def decode_delta(base: bytes, encoded: bytes) -> bytes:
    """Return the text that ``encode_delta`` encoded with ``base``."""
    return ZstdDecompressor(dict_data=_dictionary(base)).decompress(encoded)


def _dictionary(base: bytes) -> ZstdCompressionDict:
    return ZstdCompressionDict(base, DICT_TYPE_RAWCONTENT)
