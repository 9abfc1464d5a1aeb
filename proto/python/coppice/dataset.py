"""Reading what `coppice generate -o DIR` writes.

    for record in coppice.read_dataset("samples"):
        for sample in record.samples:
            train(record.prompt_tokens, sample.tokens, sample.mask)
"""
from __future__ import annotations

import json
import pathlib
from dataclasses import dataclass
from typing import Any, BinaryIO, Dict, Iterator, List, Mapping, Optional, Union

import msgpack
import numpy as np
import zstandard

from . import wire
from .errors import ProtocolError
from .sample import Sample

_CHUNK = 1 << 18  # bytes read at once


@dataclass(frozen=True, eq=False)
class Record:
    """What was generated for a line of the input: samples, or an error."""

    line: int  #: of the whole input, from 0
    prompt_id: str  #: the line's `id`, or its number
    input: Optional[Dict[str, Any]]  #: the line; None where it was no JSON object
    prompt_tokens: Optional[np.ndarray]  #: [P] u32; None with an error
    samples: List[Sample]  #: those that were kept, in order of index
    rewards: Optional[List[Optional[float]]]  #: by index of the sample, kept or not; None: nothing was judged
    error: Optional[str] = None  #: why there are no samples

    @classmethod
    def from_map(cls, m: Mapping[str, Any]) -> "Record":
        """From a map of a shard; keys that this version does not know are ignored."""
        try:
            return cls(line=m["line"], prompt_id=m["prompt_id"], input=m["input"],
                       prompt_tokens=wire.array(m.get("prompt_tokens"), "<u4"),
                       samples=[Sample.from_wire(s) for s in m.get("samples", ())], rewards=m.get("rewards"),
                       error=m.get("error"))
        except (KeyError, TypeError) as e:
            raise ProtocolError(f"cannot read a record: {e!r}") from None


def _frames(file: BinaryIO) -> Iterator[bytes]:
    """The content of each frame; ValueError where the last one is torn."""
    rest = b""
    while rest or (rest := file.read(_CHUNK)):
        frame, parts = zstandard.ZstdDecompressor().decompressobj(), []
        while True:
            parts.append(frame.decompress(rest))
            if frame.eof:
                break
            rest = file.read(_CHUNK)
            if not rest:
                raise ValueError("it ends within a frame")
        rest = frame.unused_data
        yield b"".join(parts)


def read_shard(path: Union[str, pathlib.Path]) -> Iterator[Record]:
    """The records of one shard.  Raises ProtocolError where it is damaged, or ends within a frame."""
    with open(path, "rb") as file:
        try:
            for frame in _frames(file):
                unpacker = msgpack.Unpacker(raw=False, max_buffer_size=len(frame) + 1)
                unpacker.feed(frame)
                for m in unpacker:
                    yield Record.from_map(m)
        except (zstandard.ZstdError, ValueError, msgpack.UnpackException) as e:
            raise ProtocolError(f"cannot read {path}: {e}") from None


def read_dataset(folder: Union[str, pathlib.Path]) -> Iterator[Record]:
    """The records of a complete data set, in order of line.

    Raises FileNotFoundError without a manifest, ValueError where the set is not complete (start the same command again)."""
    folder = pathlib.Path(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    if manifest["state"] != "complete":
        raise ValueError(f"{folder} is not complete: start the command that writes it again, or read its shards one by one")
    for shard in manifest["shards"]:
        yield from read_shard(folder / shard["file"])
