"""A ROUTER that plays the worker in a thread, and what it may answer."""
import struct
import threading

import msgpack
import pytest
import zmq

from coppice import wire


class FakeWorker:
    """Answers every request with what `script(request)` yields: dicts, whose id defaults to the request's, or raw frames."""

    def __init__(self, script, endpoint="tcp://127.0.0.1:*"):
        self.script, self.requests = script, []
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.linger = 0
        self.router.bind(endpoint)
        self.endpoint = self.router.last_endpoint.decode().rstrip("\0")
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        while not self.stopping.is_set():
            if not self.router.poll(10):
                continue
            peer, frame = self.router.recv_multipart()
            request = wire.unpack(frame)
            self.requests.append(request)
            for reply in self.script(request) or ():
                if isinstance(reply, dict):
                    reply = msgpack.packb({"id": request["id"], **reply})
                frames = reply if isinstance(reply, list) else [reply]
                self.router.send_multipart([peer, *frames])

    def of(self, kind):
        """The requests of a type."""
        return [q for q in self.requests if q["type"] == kind]

    def close(self):
        if self.stopping.is_set():
            return
        self.stopping.set()
        self.thread.join()
        self.router.close()
        self.context.term()


PONG = {"type": "pong", "version": "0.1.0", "protocol": 1, "model": "m", "weights": [0, "d"], "backend": "cpu",
        "numerics": "bf16", "state": "ready"}
DONE = {"type": "done", "samples": 1, "prompt_tokens": 1, "cached_tokens": 0, "sampled_tokens": 2, "forced_tokens": 1, "seconds": 0.1}


def u32(*values):
    return struct.pack(f"<{len(values)}I", *values)


def sample(prompt=0, index=0, **more):
    return {"prompt": prompt, "sample": index, "seed": 7, "tokens": u32(10, 11, 12), "mask": bytes([1, 0, 1]),
            "logprobs": struct.pack("<3f", -0.5, 1.0, -0.25), "finish": "stop", "stop": 12,
            "tool_calls": [{"at": 0, "tool": "calculator", "ok": True}], "weights": [[0, 0, "d"]], **more}


def samples(*given):
    return {"type": "samples", "samples": list(given)}


def accepted(n=1, **more):
    return {"type": "accepted", "samples": n, "seed": 7, "weights": [0, "d"], "numerics": "bf16", **more}


def all_of(q, text=None):
    """What a worker that is quick answers to a rollout: everything."""
    n = q.get("n", 1)
    given = [sample(p, i, text=text) for p in range(len(q["prompts"])) for i in range(n)]
    return [accepted(len(given)), samples(*given), {**DONE, "samples": len(given)}]


def error(code, message="why", **more):
    return {"type": "error", "code": code, "message": message, **more}


@pytest.fixture
def worker():
    """Starts scripted workers; they end with the test."""
    started = []

    def start(script, **options):
        started.append(FakeWorker(script, **options))
        return started[-1]

    yield start
    for w in started:
        w.close()
