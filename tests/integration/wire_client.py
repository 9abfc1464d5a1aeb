"""The smallest client of a worker: pyzmq, msgpack and zstandard, and nothing of ours, so that the worker is held to
proto/README.md and not to its own client. Every reply is checked for what that document says of all of them."""
import itertools

import msgpack
import numpy as np
import zmq
import zstandard

MAGIC = b"\x28\xb5\x2f\xfd"  # of a Zstandard frame
COMPRESSED_FROM = 512  # bytes from which replies are compressed
PATIENCE_MS = 300_000  # a worker under a sanitizer on a busy machine is slow; only one that hangs takes this long
LAST = {"done", "error", "pong", "status", "scores", "tokens", "text", "weights"}

ids = (f"test-{n}" for n in itertools.count())


class Failed(Exception):
    """An `error` reply."""

    def __init__(self, reply):
        super().__init__(reply)
        self.code, self.key, self.message = reply["code"], reply.get("key"), reply["message"]


class Rollout:
    """All replies to a rollout: `accepted`, `samples` in order of (prompt, sample), `batches` as they came, `done`."""

    def __init__(self, replies):
        self.accepted, *middle, self.done = replies
        assert self.accepted["type"] == "accepted" and self.done["type"] == "done"
        assert all(reply["type"] == "samples" for reply in middle)
        self.batches = [reply["samples"] for reply in middle]
        self.samples = sorted(sum(self.batches, []), key=lambda s: (s["prompt"], s["sample"]))
        assert len(self.samples) == self.accepted["samples"] == self.done["samples"]


class Client:
    def __init__(self, endpoint, compress=True, **options):
        """`options`: of the socket, such as rcvhwm=1. `compress`: what every request says."""
        self.compress = compress
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = self.socket.sndtimeo = PATIENCE_MS
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.connect(endpoint)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, type, id=None, zip=False, **keys):
        """Send a request and return its id."""
        id = id or next(ids)
        request = {"type": type, "id": id, **({} if self.compress else {"compress": False}), **keys}
        frame = msgpack.packb(request)
        self.socket.send(zstandard.compress(frame) if zip else frame)
        return id

    def receive(self):
        """The next reply, whichever request it answers."""
        return self.receive_both()[0]

    def receive_both(self):
        """The next reply, and its message as it was encoded."""
        frame, *more = self.socket.recv_multipart()
        assert not more, "a message is one frame"
        compressed = frame[:4] == MAGIC
        if compressed:
            size = zstandard.frame_content_size(frame)  # -1: not declared
            frame = zstandard.decompress(frame)
            assert size == len(frame)
        assert compressed == (self.compress and len(frame) >= COMPRESSED_FROM)
        return msgpack.unpackb(frame), frame

    def replies(self, id):
        """All replies to one request, which must be the only one in flight; raises Failed on an error."""
        got = []
        while not got or got[-1]["type"] not in LAST:
            got.append(self.receive())
            assert got[-1]["id"] == id, got[-1]
            if got[-1]["type"] == "error":
                raise Failed(got[-1])
        return got

    def messages(self, id):
        """The same as they were encoded, to be compared byte by byte."""
        got = []
        while True:
            reply, message = self.receive_both()
            assert reply["id"] == id and reply["type"] != "error", reply
            got.append(message)
            if reply["type"] == "done":
                return got

    def ask(self, type, **keys):
        """One request that has one reply."""
        (reply,) = self.replies(self.send(type, **keys))
        return reply

    def rollout(self, prompts, **keys):
        return Rollout(self.replies(self.send("rollout", prompts=prompts, **keys)))

    def failure(self, type, **keys):
        """The error that a request gets."""
        try:
            got = self.replies(self.send(type, **keys))
        except Failed as failed:
            return failed
        raise AssertionError(f"{type} {keys} was answered with {got[-1]['type']}")


def u32(packed):
    return np.frombuffer(packed, "<u4")


def f32(packed):
    return np.frombuffer(packed, "<f4")


def u8(packed):
    return np.frombuffer(packed, "u1")
