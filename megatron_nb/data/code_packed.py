"""The private tests of LiveCodeBench: base64 of zlib of a pickle of one JSON text, read without ever running a pickle.

A pickle is a program. The one that holds a text needs a handful of its instructions; they are interpreted here, and every
other one is refused before anything has been done. What is packed small and unpacks large is refused at a bound.
"""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import zlib
from typing import Any

MAX_BYTES = 256 << 20  # unpacked
TEXTS = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}
HARMLESS = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP"}  # they mark and remember, and make nothing


def packed_json(text: str, max_bytes: int = MAX_BYTES) -> Any:
    """The JSON value behind base64(zlib(pickle(text))). ValueError for anything else, such as a pickle that would do things."""
    try:
        squeezed = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"it is neither JSON nor base64 ({error})") from error
    opened = zlib.decompressobj()
    try:
        pickled = opened.decompress(squeezed, max_bytes)
    except zlib.error as error:
        raise ValueError(f"it is base64, but not of zlib ({error})") from error
    if opened.unconsumed_tail:
        raise ValueError(f"{len(squeezed)} bytes unpack to more than {max_bytes}: no test file is that large")
    if not opened.eof:
        raise ValueError(f"its {len(squeezed)} packed bytes are cut off")
    return json.loads(pickled_text(pickled))


def pickled_text(pickled: bytes) -> str:
    """The one text (or bytes of UTF-8) that a pickle holds. ValueError when it holds or does anything else."""
    found: list[str | bytes] = []
    for operation, value, place in pickletools.genops(pickled):
        if operation.name in TEXTS:
            found.append(value)
        elif operation.name not in HARMLESS:
            raise ValueError(f"its pickle has the instruction {operation.name} at byte {place}: one that holds a text has not")
    if len(found) != 1:
        raise ValueError(f"its pickle holds {len(found)} texts: one JSON text is expected")
    return found[0].decode() if isinstance(found[0], bytes) else found[0]
