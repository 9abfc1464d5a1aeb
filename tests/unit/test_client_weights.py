"""The client brings weights, pauses and acknowledges: against a ROUTER that plays the worker."""
import struct
import threading
import time

import numpy as np
import pytest
import xxhash

import coppice
from coppice import Client, weights
from fake_worker import DONE, PONG, accepted, error, sample, samples, u32, worker  # noqa: F401

DIGEST = "0123456789abcdef" * 2


class Store:
    """Takes streams as a worker does: chunks in order, the checksum at the end."""

    def __init__(self, before=lambda q: None):
        self.before, self.version, self.received, self.ids, self.stream = before, 0, [], [], None

    def __call__(self, q):
        told = self.before(q)
        if told is not None:
            return told
        if q["type"] == "ping":
            return [{**PONG, "weights": [self.version, DIGEST]}]
        if q["type"] == "weights":
            self.stream, self.received, self.policy = q, [], q["policy"]
            if "path" in q["source"]:
                self.version = q["version"]
                return [self.in_use(q["id"])]
        elif self.stream is None or q["target"] != self.stream["id"]:
            return [error("not_found")]
        elif q["type"] == "weights_chunk":
            self.received.append(q)
        elif q["type"] == "weights_commit":
            if q["digest"] != self.digest():
                return [{**error("bad_request", "wrong checksum"), "id": id} for id in (self.stream["id"], q["id"])]
            self.version = self.stream["version"]
            return [self.in_use(self.stream["id"]), self.in_use(q["id"])]
        return []

    def in_use(self, id):
        return {"type": "weights", "id": id, "weights": [self.version, DIGEST]}

    def tensors(self):
        whole = {}
        for q in self.received:
            dtype, shape, data = whole.get(q["name"], (q["dtype"], q["shape"], b""))
            assert (q["dtype"], q["shape"], q["offset"]) == (dtype, shape, len(data))
            whole[q["name"]] = dtype, shape, data + q["data"]
        return whole

    def digest(self):
        """As the worker computes it, written down a second time."""
        h = xxhash.xxh3_128()
        for name, (dtype, shape, data) in self.tensors().items():
            h.update(name.encode() + b"\0")
            for v in (["F32", "BF16", "F16", "F64"].index(dtype), len(shape), *shape):
                h.update(struct.pack("<Q", v))
            h.update(data)
        return h.hexdigest()


TENSORS = {"z": np.arange(6, dtype="<f4").reshape(2, 3), "_orig_mod.a.b": ("BF16", (3,), b"\0\x3f\0\x40\0\x41"),
           "B": np.array(2.5, np.float64), "é": np.array([1, 2], ">f2"), "none": np.zeros((0, 4), np.float32)}


def test_a_stream_holds_each_tensor_whole_in_order_of_name(worker):
    store = Store()
    w = worker(store)
    with Client(w.endpoint) as client:
        assert client.update_weights(3, tensors=TENSORS, policy="recompute", chunk_bytes=8) == (3, DIGEST)
    assert list(store.tensors()) == ["B", "a.b", "none", "z", "é"]
    assert store.tensors() == {"B": ("F64", [], struct.pack("<d", 2.5)), "a.b": ("BF16", [3], TENSORS["_orig_mod.a.b"][2]),
                               "none": ("F32", [0, 4], b""), "z": ("F32", [2, 3], TENSORS["z"].tobytes()),
                               "é": ("F16", [2], struct.pack("<2e", 1, 2))}
    assert max(len(q["data"]) for q in store.received) == 8 and len(w.of("weights")) == 1
    assert w.of("weights")[0]["source"] == {"stream": {"tensors": 5, "bytes": 8 + 6 + 24 + 4}}
    assert (w.of("weights")[0]["version"], store.policy) == (3, "recompute")


def test_arrays_that_lie_otherwise_in_memory_are_sent_row_by_row(worker):
    store = Store()
    w = worker(store)
    with Client(w.endpoint) as client:
        client.update_weights(1, tensors={"t": TENSORS["z"].T, "half": TENSORS["z"][:, ::2]})
    assert store.tensors()["t"] == ("F32", [3, 2], struct.pack("<6f", 0, 3, 1, 4, 2, 5))
    assert store.tensors()["half"] == ("F32", [2, 2], struct.pack("<4f", 0, 2, 3, 5))


@pytest.mark.parametrize("tensors, told", [
    ({}, "without a tensor"), ({"a": np.zeros(2, np.int32)}, "int32"), ({"a": ("I8", (1,), b"x")}, "I8"),
    ({"a": ("F32", (2,), b"1234")}, "4 bytes, its shape needs 8"),
    ({"a": np.zeros(1), "_orig_mod.a": np.zeros(1)}, "two tensors"),
])
def test_what_is_no_set_of_weights_is_refused_before_sending(worker, tensors, told):
    w = worker(Store())
    with Client(w.endpoint) as client:
        with pytest.raises(ValueError, match=told):
            client.update_weights(1, tensors=tensors)
        with pytest.raises(ValueError):
            client.update_weights(1)
        with pytest.raises(ValueError):
            client.update_weights(1, path="x", tensors=TENSORS)
    assert w.requests == []


@pytest.mark.parametrize("given, told", [({"path": {"a": 1}}, "a state dict goes into `tensors`"), ({"path": 5}, "expected a str"),
                                         ({"tensors": [("a", 1)]}, "expected a dict")])
def test_what_is_no_path_and_no_state_dict_is_told_as_such(worker, given, told):
    with Client(worker(lambda q: []).endpoint) as client, pytest.raises(TypeError, match=told):
        client.update_weights(1, **given)


def test_a_path_is_for_the_worker_to_read(worker):
    store = Store()
    w = worker(store)
    with Client(w.endpoint) as client:
        assert client.update_weights(2, path="/w/model.pt") == (2, DIGEST)
    assert w.requests == [{"type": "weights", "id": w.requests[0]["id"], "version": 2, "source": {"path": "/w/model.pt"},
                           "policy": "finish"}]


def test_rollouts_go_on_while_weights_are_brought(worker):
    first = []

    def before(q):
        if q["type"] == "rollout":
            first.append(q["id"])
            return [accepted(3), samples(sample(0, 0))]
        if q["type"] == "weights_commit":
            time.sleep(0.3)

    store = Store(before)
    w = worker(store)
    with Client(w.endpoint) as client:
        rollout = client.rollout(["x"], n=3)
        assert next(iter(rollout)).sample == 0
        version, _ = client.update_weights(1, tensors=TENSORS)
        assert version == 1 and rollout.done is None
        store.before = lambda q: [PONG, *({**m, "id": first[0]} for m in (samples(sample(0, 1), sample(0, 2)), DONE))]
        # The replies go to the connection that pings, which is the one of the rollout.
        client.ping()
        assert [s.sample for s in rollout.wait()] == [0, 1, 2]


def test_while_the_worker_is_overloaded_it_is_asked_again(worker):
    refusals = [error("overloaded", retry_after=0.05)] * 2
    store = Store(lambda q: [refusals.pop()] if q["type"] == "weights" and refusals else None)
    w = worker(store)
    with Client(w.endpoint) as client:
        assert client.update_weights(1, tensors=TENSORS)[0] == 1
    assert len(w.of("weights")) == 3 and len({q["id"] for q in w.of("weights")}) == 3


def test_overloaded_for_too_long_is_an_error(worker):
    w = worker(lambda q: [error("overloaded", retry_after=0.1)])
    with Client(w.endpoint) as client:
        with pytest.raises(coppice.Overloaded):
            client.update_weights(1, path="x", timeout=0.35)
    assert 2 <= len(w.requests) <= 4


@pytest.mark.parametrize("code, cls", [("bad_request", coppice.BadRequest), ("model_error", coppice.ModelError),
                                       ("not_found", coppice.NotFound), ("timeout", coppice.RequestTimeout)])
def test_what_the_worker_refuses_is_an_error_at_once(worker, code, cls):
    w = worker(lambda q: [error(code, "no", key="version")] if q["type"] == "weights" else [])
    with Client(w.endpoint) as client:
        with pytest.raises(cls, match="version: no"):
            client.update_weights(1, tensors=TENSORS, chunk_bytes=8)
    assert len(w.of("weights")) == 1


def test_a_worker_that_does_not_switch_is_not_waited_for_for_ever(worker):
    w = worker(lambda q: [PONG] if q["type"] == "ping" else [])
    with Client(w.endpoint, silence=0.1) as client:
        with pytest.raises(coppice.Timeout, match="in use in time"):
            client.update_weights(1, path="x", timeout=0.4)
        assert client.ping()["model"] == "m"


def test_a_connection_lost_in_the_middle_repeats_the_whole_stream(worker):
    some = threading.Event()

    def before(q):
        if q["type"] == "weights_chunk" and q["name"] == "a.b":
            some.set()

    first = worker(Store(before))
    store = Store()

    def replace():
        assert some.wait(10)
        first.close()
        worker(store, endpoint=first.endpoint)

    thread = threading.Thread(target=replace)
    big = {**TENSORS, "z": np.ones((512, 1024), np.float32)}  # too much for what waits in sockets: 2000 frames
    with Client(first.endpoint) as client:
        thread.start()
        assert client.update_weights(1, tensors=big, chunk_bytes=1024, timeout=20) == (1, DIGEST)
        thread.join()
    assert list(store.tensors()) == ["B", "a.b", "none", "z", "é"]
    assert store.tensors()["z"][2] == big["z"].tobytes()


def test_a_reply_that_was_lost_does_not_make_the_update_fail(worker):
    done = threading.Event()

    def lost(q):
        done.set()
        return []

    first = worker(lost)
    again = Store(lambda q: [error("bad_request", "not above", key="version")] if q["type"] == "weights" else None)
    again.version = 5

    def replace():
        assert done.wait(10)
        first.close()
        worker(again, endpoint=first.endpoint)

    thread = threading.Thread(target=replace)
    thread.start()
    with Client(first.endpoint) as client:
        assert client.update_weights(5, path="x", timeout=20) == (5, DIGEST)
    thread.join()


def test_nobody_there_to_take_weights_is_told():
    with Client("tcp://127.0.0.1:1", silence=0.1) as client:
        with pytest.raises(coppice.ConnectionLost, match="no worker"):
            client.update_weights(1, path="x")


def test_pause_and_resume_are_asked_for(worker):
    w = worker(lambda q: [{"type": "done"}])
    with Client(w.endpoint) as client:
        client.pause()
        client.pause(mode="abort")
        client.resume()
    assert [(q["type"], q.get("mode")) for q in w.requests] == [("pause", "finish"), ("pause", "abort"), ("resume", None)]


def test_results_are_acknowledged(worker):
    acked = []

    def script(q):
        if q["type"] == "rollout":
            return [accepted(), samples(sample()), DONE]
        if q["target"] in acked:
            return [error("not_found")]
        acked.append(q["target"])
        return [{"type": "done"}]

    w = worker(script)
    with Client(w.endpoint) as client:
        rollout = client.rollout(["x"], id="one")
        rollout.wait()
        rollout.ack()
        rollout.ack()  # there is nothing left to free, which is as good
        with pytest.raises(coppice.NotFound):
            client.ack("one")
        client.ack("two")
    assert [q["target"] for q in w.of("ack")] == ["one", "one", "one", "two"]


def test_a_rollout_may_wait_for_weights(worker):
    w = worker(lambda q: [error("timeout", "no such weights")])
    with Client(w.endpoint) as client:
        with pytest.raises(coppice.RequestTimeout):
            client.rollout(["x"], min_weights=4, weights_timeout=1.5).wait()
    assert (w.requests[0]["min_weights"], w.requests[0]["weights_timeout"]) == (4, 1.5)


@pytest.mark.parametrize("runs, ours", [([[0, 0, "d"], [1, 1, "e"]], False), ([[0, 0, "d"]], True)])
def test_after_a_restart_weights_that_are_known_do_not_count_as_another_worker(worker, runs, ours):
    """Known by a sample's run, or because this client brought them while the rollout was open."""
    def script(q):
        if q["type"] == "weights":
            return [{"type": "weights", "weights": [1, "e"]}]
        return [accepted(2), samples(sample(0, 0, weights=runs))]

    first = worker(script)
    with Client(first.endpoint) as client:
        rollout = client.rollout(["x"], n=2)
        assert next(iter(rollout)).sample == 0
        if ours:
            client.update_weights(1, path="x")
        first.close()
        worker(lambda q: [accepted(2, weights=[0, "e"]), samples(sample(0, 1)), DONE], endpoint=first.endpoint)
        assert len(rollout.wait()) == 2


def test_torch_is_not_needed_for_what_looks_like_its_tensors():
    """The order and the sizes are known before anything is copied."""
    class Lazy:
        dtype, shape = "torch.bfloat16", (4, 2)

        def detach(self):
            raise AssertionError("nobody asked for the bytes")

    (t,) = weights.tensors_of({"x": Lazy()})
    assert (t.dtype, t.shape, t.n_bytes) == ("BF16", (4, 2), 16)
