"""What can go wrong, one class per code of the protocol."""
from __future__ import annotations

from typing import Any, Mapping, Optional


class CoppiceError(Exception):
    """Base of all errors here.

    code         the protocol's code, such as "bad_request"
    message      what was wrong and what would be right
    key          path of the offending key, such as "prompts[3].tokens", or None
    retry_after  seconds after which to try again (with "overloaded"), or None
    """

    code = "internal"

    def __init__(self, message: str, key: Optional[str] = None, retry_after: Optional[float] = None,
                 code: Optional[str] = None) -> None:
        super().__init__(f"{key}: {message}" if key else message)
        self.message = message
        self.key = key
        self.retry_after = retry_after
        if code is not None:
            self.code = code


class BadRequest(CoppiceError):
    """A type, key, value or stated limit of the request is wrong."""

    code = "bad_request"


class TooLong(CoppiceError):
    """A prompt or sequence does not fit the context."""

    code = "too_long"


class TooLarge(CoppiceError):
    """One row needs more pages than the worker's pool has."""

    code = "too_large"


class UnknownType(CoppiceError):
    """The worker knows no such type of request."""

    code = "unknown_type"


class Unsupported(CoppiceError):
    """The protocol has it, this worker does not."""

    code = "unsupported"


class Overloaded(CoppiceError):
    """Too much waits already: try again after `retry_after` seconds."""

    code = "overloaded"


class Draining(CoppiceError):
    """The worker is on its way out and takes nothing new."""

    code = "draining"


class Asleep(CoppiceError):
    """The worker has given its memory back for now."""

    code = "asleep"


class NotFound(CoppiceError):
    """No such target or model."""

    code = "not_found"


class DuplicateId(CoppiceError):
    """The worker knows a rollout with this id that asks for something else, or this client has one in flight."""

    code = "duplicate_id"


class ModelError(CoppiceError):
    """The model computed no valid number."""

    code = "model_error"


class RequestTimeout(CoppiceError):
    """The worker gave up on the request in time."""

    code = "timeout"


class InternalError(CoppiceError):
    """The worker failed; not the request's fault."""

    code = "internal"


class ConnectionLost(CoppiceError):
    """There is no worker at the other end (any more), or the client is closed."""

    code = "connection_lost"


class Timeout(ConnectionLost):
    """The worker was silent and did not answer a ping, or a wait took longer than allowed."""

    code = "silent"


class WorkerChanged(ConnectionLost):
    """After a reconnect the worker has other numerics, or weights that no sample was made with and that this client did not
    bring: its samples do not belong to those that had arrived."""

    code = "worker_changed"


class WorkersDiffer(ConnectionLost):
    """The workers of one client have different weights or numerics: their samples do not belong together."""

    code = "workers_differ"


class ProtocolError(CoppiceError):
    """The other end sent something that is no reply of this protocol."""

    code = "protocol"


_BY_CODE = {c.code: c for c in (BadRequest, TooLong, TooLarge, UnknownType, Unsupported, Overloaded, Draining, Asleep,
                                NotFound, DuplicateId, ModelError, RequestTimeout, InternalError)}


def from_reply(reply: Mapping[str, Any]) -> CoppiceError:
    """The exception for an `error` reply; a code that this version does not know gives a plain CoppiceError."""
    code = str(reply.get("code", "internal"))
    return _BY_CODE.get(code, CoppiceError)(str(reply.get("message", "")), reply.get("key"), reply.get("retry_after"), code)
