"""Weights on their way to workers: what is sent, in which order, and the checksum over it."""
from __future__ import annotations

import struct
import time
import uuid
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np
import xxhash

from . import errors, wire
from .link import Link, Whole

if TYPE_CHECKING:
    from .client import Client

CHUNK_BYTES = 4 << 20  # of a `weights_chunk`; a multiple of every element's size
DTYPES = {"F32": (0, 4), "BF16": (1, 2), "F16": (2, 2), "F64": (3, 8)}  # the digest's code, bytes of an element
_BY_NAME = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
_LITTLE = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}

Version = Tuple[int, str]


class Tensor(NamedTuple):
    """A tensor to be sent.  Its bytes are fetched only when its turn comes, so that one copy at a time is in memory."""

    name: str
    dtype: str  #: "F32", "BF16", "F16" or "F64"
    shape: Tuple[int, ...]
    source: Any

    @property
    def n_bytes(self) -> int:
        n = DTYPES[self.dtype][1]
        for dim in self.shape:
            n *= dim
        return n

    def bytes(self) -> memoryview:
        """Row-major and little-endian."""
        source = self.source
        if isinstance(source, tuple):
            return memoryview(source[2]).cast("B")
        if _is_torch(source):
            import torch  # only who has such tensors needs it
            source = source.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
        else:
            source = np.ascontiguousarray(source)
            if self.dtype in _LITTLE:
                source = source.astype(_LITTLE[self.dtype], copy=False)
            source = source.reshape(-1).view(np.uint8)
        return memoryview(source).cast("B")


def _is_torch(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch" or hasattr(value, "detach")


def _tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, tuple):
        dtype, shape, data = value
        if dtype not in DTYPES:
            raise ValueError(f'cannot send "{name}" of type {dtype}: expected {", ".join(DTYPES)}')
        tensor = Tensor(name, dtype, tuple(int(n) for n in shape), (dtype, shape, data))
        if memoryview(data).nbytes != tensor.n_bytes:
            raise ValueError(f'cannot send "{name}": {memoryview(data).nbytes} bytes, its shape needs {tensor.n_bytes}')
        return tensor
    if not _is_torch(value):
        value = np.asarray(value)
    dtype = _BY_NAME.get(str(value.dtype).rpartition(".")[2] if _is_torch(value) else value.dtype.name)
    if dtype is None:
        raise ValueError(f'cannot send "{name}" of type {value.dtype}: expected float32, bfloat16, float16 or float64')
    return Tensor(name, dtype, tuple(int(n) for n in value.shape), value)


def tensors_of(mapping: Mapping[str, Any]) -> List[Tensor]:
    """The tensors of a state dict in the order of a stream: by the bytes of their names, without torch.compile's prefix.

    mapping  name -> a numpy array (also of ml_dtypes' bfloat16), a torch tensor on any device, or a tuple (dtype name such as
             "BF16", shape, bytes: little-endian, row-major)
    """
    if not isinstance(mapping, Mapping):
        raise TypeError(f"cannot send a {type(mapping).__name__} as weights: expected a dict of name -> tensor, as of state_dict()")
    tensors = [_tensor(name.removeprefix("_orig_mod."), value) for name, value in mapping.items()]
    if not tensors:
        raise ValueError("cannot send a set of weights without a tensor")
    tensors.sort(key=lambda t: t.name.encode())
    for a, b in zip(tensors, tensors[1:]):
        if a.name == b.name:
            raise ValueError(f'cannot send two tensors called "{a.name}"')
    return tensors


class TensorsDigest:
    """XXH3-128 over name, NUL, then as little-endian u64 the type, the rank and the dims, then the bytes, of one tensor
    after another."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def begin(self, t: Tensor) -> None:
        self._hash.update(t.name.encode() + b"\0")
        self._hash.update(struct.pack(f"<{2 + len(t.shape)}Q", DTYPES[t.dtype][0], len(t.shape), *t.shape))

    def data(self, piece: memoryview) -> None:
        self._hash.update(piece)

    def hex(self) -> str:
        return self._hash.hexdigest()


def chunks(tensors: Sequence[Tensor], digest: TensorsDigest, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Dict[str, Any]]:
    """The chunks of a stream, without type, id and target.  What was yielded is in the digest."""
    for t in tensors:
        data = t.bytes()
        digest.begin(t)
        for offset in range(0, max(1, data.nbytes), chunk_bytes):
            piece = data[offset:offset + chunk_bytes]
            digest.data(piece)
            yield {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "offset": offset, "data": piece}


class _Try:
    """One attempt to bring weights to one worker, over a connection of its own: frames wait for room there, not in memory,
    rollouts go on meanwhile, and what a lost connection leaves undone is given up as a whole."""

    def __init__(self, link: Link, message: Mapping[str, Any]) -> None:
        self.link = link
        self.id = str(uuid.uuid4())
        self.request = Whole(wire.pack({**message, "id": self.id}))
        link.start(self.id, self.request)

    @property
    def ended(self) -> bool:
        return self.request.finished


class Update:
    """Weights for all workers of a client: each is tried until it has them, refuses them, or time is up.

    The workers get a stream side by side, so that each tensor is fetched once for all of them.
    """

    def __init__(self, client: "Client", version: int, policy: str, path: Optional[str], tensors: Optional[List[Tensor]],
                 chunk_bytes: int) -> None:
        self._client, self._version, self._tensors, self._chunk_bytes = client, version, tensors, chunk_bytes
        if tensors is None:
            source: Dict[str, Any] = {"path": path}
        else:
            source = {"stream": {"tensors": len(tensors), "bytes": sum(t.n_bytes for t in tensors)}}
        self._message = {"type": "weights", "version": version, "source": source, "policy": policy}
        self.in_use: Dict[str, Version] = {}  # by endpoint
        self.failed: Dict[str, errors.CoppiceError] = {}
        self._lost: Set[str] = set()  # endpoints whose connection was lost before the reply, at least once

    def run(self, endpoints: Sequence[str], end: float) -> None:
        """Fill `in_use` and `failed`, the latter also for those that are not through by `end`."""
        todo = list(endpoints)
        while todo:
            tries = [_Try(self._client._open_link(endpoint), self._message) for endpoint in todo]
            try:
                if self._tensors is not None:
                    self._send_stream(tries, end)
                self._client._pump_until(lambda: all(t.ended for t in tries), end)
                todo, pause = self._judge(tries)
            finally:
                for t in tries:
                    self._client._drop_link(t.link)
            if todo and time.monotonic() + pause >= end:
                for t in tries:
                    if t.link.endpoint in todo:
                        self.failed[t.link.endpoint] = t.request.error
                return
            if todo:
                self._client._pump_until(lambda: False, time.monotonic() + pause)

    def _send_stream(self, tries: Sequence[_Try], end: float) -> None:
        digest = TensorsDigest()
        n = 0
        for chunk in chunks(self._tensors, digest, self._chunk_bytes):
            for t in tries:
                self._send(t, {"type": "weights_chunk", "id": f"{t.id}/{n}", "target": t.id, **chunk}, end)
            n += 1
            self._client._pump_now()
            if all(t.ended for t in tries):
                return  # refused, or lost: no use in sending the rest
        for t in tries:
            self._send(t, {"type": "weights_commit", "id": f"{t.id}/commit", "target": t.id, "digest": digest.hex()}, end)

    def _send(self, t: _Try, message: Mapping[str, Any], end: float) -> None:
        if t.ended:
            return
        frame = wire.pack(message, compress=False)
        while not t.ended and not t.link.try_send(frame, 0.05):
            self._client._pump_now()
            if time.monotonic() >= end:
                t.request.fail(errors.Timeout(f"the worker at {t.link.endpoint} did not take the weights in time"))

    def _judge(self, tries: Sequence[_Try]) -> Tuple[List[str], float]:
        """Who has to be tried again, and after how many seconds."""
        again, pause = [], 0.0
        for t in tries:
            endpoint, error = t.link.endpoint, t.request.error
            if t.request.reply is not None:
                version, digest = t.request.reply["weights"][:2]
                self.in_use[endpoint] = (version, digest)
            elif error is None:  # time is up
                t.request.fail(errors.Timeout(f"the worker at {endpoint} did not have the weights in use in time"))
                again.append(endpoint)
            elif isinstance(error, errors.Overloaded):
                again.append(endpoint)
                pause = max(pause, error.retry_after or 1.0)
            elif isinstance(error, errors.ConnectionLost) and t.link.was_connected:
                again.append(endpoint)
                pause = max(pause, 0.1)
                self._lost.add(endpoint)
            elif isinstance(error, errors.BadRequest) and error.key == "version" and endpoint in self._lost:
                self._after_a_loss(endpoint, error)
            else:
                self.failed[endpoint] = error
        return again, pause

    def _after_a_loss(self, endpoint: str, error: errors.CoppiceError) -> None:
        """The version is taken: by the attempt whose reply was lost, perhaps."""
        link = self._client._open_link(endpoint)
        try:
            version, digest = self._client._ask_over(link, {"type": "ping"})["weights"][:2]
            if version == self._version:
                self.in_use[endpoint] = (version, digest)
            else:
                self.failed[endpoint] = error
        except errors.CoppiceError as e:
            self.failed[endpoint] = e
        finally:
            self._client._drop_link(link)
