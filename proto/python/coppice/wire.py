"""Frames: MessagePack maps, compressed where that pays, with arrays of numbers as packed little-endian bytes."""
from __future__ import annotations

from typing import Any, Dict, Iterable, Mapping, Optional, Union

import msgpack
import numpy as np
import zstandard

from .errors import ProtocolError

PROTOCOL = 1
COMPRESS_BYTES = 512
_MAGIC = b"\x28\xb5\x2f\xfd"

Tokens = Union[np.ndarray, Iterable[int]]


def _plain(value: Any) -> Any:
    """The Python number that a numpy scalar stands for: what msgpack asks for where it does not know a value."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, int):
        raise ValueError(f"cannot send {value}: expected an integer of -2^63 or more and less than 2^64")
    raise TypeError(f"cannot send a value of type {type(value).__name__}: expected numbers, strings, lists and dicts")


def pack(message: Mapping[str, Any], compress: bool = True) -> bytes:
    """The frame of a message.  compress: if it is long; not worth the time for weights."""
    frame = msgpack.packb(message, use_bin_type=True, default=_plain)
    return zstandard.compress(frame) if compress and len(frame) >= COMPRESS_BYTES else frame


def _expand(frame: bytes) -> bytes:
    """The content of exactly one Zstandard frame, whether it declares its size or not."""
    stream = zstandard.ZstdDecompressor().decompressobj()
    content = stream.decompress(frame)
    if not stream.eof or stream.unused_data:
        raise ValueError("expected exactly one whole Zstandard frame")
    return content


def unpack(frame: bytes) -> Dict[str, Any]:
    """The message of a frame.  Raises ProtocolError if there is none."""
    try:
        if frame[:4] == _MAGIC:
            frame = _expand(frame)
        message = msgpack.unpackb(frame, raw=False)
    except (zstandard.ZstdError, ValueError, msgpack.UnpackException) as e:
        raise ProtocolError(f"cannot read a frame of {len(frame)} bytes: {e}") from None
    if not isinstance(message, dict):
        raise ProtocolError(f"cannot read a message of type {type(message).__name__}: expected a map")
    return message


def pack_tokens(tokens: Tokens) -> bytes:
    """Token ids as packed u32.  Raises ValueError for anything else than a one-dimensional array of such."""
    ids = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens))
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"cannot use an array of {ids.dtype}, shape {ids.shape}, as token ids: expected integers in one dimension")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > 0xFFFFFFFF):
        raise ValueError(f"cannot use ids from {ids.min()} to {ids.max()} as token ids: expected 0 to 4294967295")
    return ids.astype("<u4").tobytes()


def array(data: Optional[bytes], dtype: str) -> Optional[np.ndarray]:
    """A read-only view of packed numbers, without a copy; None stays None."""
    if data is None:
        return None
    try:
        return np.frombuffer(data, dtype)
    except (ValueError, TypeError) as e:
        raise ProtocolError(f"cannot read an array of {dtype}: {e}") from None
