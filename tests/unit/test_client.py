"""The client against a ROUTER that plays the worker in a thread: errors, silence, interleaving, reconnection, the demo."""
import io
import os
import stat
import struct
import subprocess
import sys
import threading
import time

import msgpack
import numpy as np
import pytest
import zmq
import zstandard

import coppice
from coppice import Client, demo, errors, wire
from fake_worker import DONE, PONG, accepted, all_of, error, sample, samples, u32, worker  # noqa: F401


def test_ping_and_status_give_the_reply(worker):
    w = worker(lambda q: [PONG if q["type"] == "ping" else {"type": "status", "rows": 3}])
    with Client(w.endpoint) as client:
        assert client.ping()["model"] == "m"
        assert client.status() == {"rows": 3}


def test_a_rollout_yields_samples_as_they_arrive(worker):
    step = threading.Event()

    def script(q):
        yield accepted(2)
        yield samples(sample(0, 1))
        assert step.wait(10)
        yield samples(sample(0, 0))
        yield DONE

    w = worker(script)
    with Client(w.endpoint) as client:
        rollout = client.rollout(["hi"], n=2)
        arriving = iter(rollout)
        assert next(arriving).sample == 1
        assert rollout.accepted["seed"] == 7 and rollout.done is None
        step.set()
        assert [s.sample for s in arriving] == [0]
        assert rollout.done["sampled_tokens"] == 2
        assert [s.sample for s in rollout.wait()] == [0, 1]  # sorted
        assert [s.sample for s in rollout] == [1, 0]  # again, as they arrived


def test_arrays_are_views_without_a_copy(worker):
    w = worker(lambda q: [accepted(), samples(sample(kept_ids=u32(10, 9, 12), kept_offsets=u32(0, 2, 2, 3))), DONE])
    with Client(w.endpoint) as client:
        (s,) = client.rollout([[1]]).wait()
    assert (s.tokens.dtype, s.mask.dtype, s.logprobs.dtype) == (np.uint32, np.uint8, np.float32)
    assert s.tokens.tolist() == [10, 11, 12] and s.mask.tolist() == [1, 0, 1] and s.logprobs.tolist() == [-0.5, 1.0, -0.25]
    for array in (s.tokens, s.mask, s.logprobs, s.kept_ids):
        assert isinstance(array.base, bytes) and not array.flags.owndata and not array.flags.writeable
    assert [s.kept(t).tolist() for t in range(3)] == [[10, 9], [], [12]]
    assert s.model_logprobs is None and s.text is None
    assert s.tool_calls[0] == (0, "calculator", True) and s.weights[0] == (0, 0, "d")


def test_what_is_sent_is_what_the_protocol_says(worker):
    w = worker(lambda q: [DONE])
    with Client(w.endpoint) as client:
        client.rollout(["text", [1, 2], np.array([3, 4], dtype=np.int64), [{"role": "user", "content": "x"}],
                        {"tokens": [5], "id": "five", "sample": 2, "prefix": np.array([6])}],
                       seed=9, temperature=0.5, stop_tokens=[], logprobs=["model"], id="mine").wait()
    assert w.requests == [{"type": "rollout", "id": "mine", "seed": 9, "temperature": 0.5, "stop_tokens": b"", "logprobs": ["model"],
                           "prompts": [{"text": "text"}, {"tokens": u32(1, 2)}, {"tokens": u32(3, 4)},
                                       {"messages": [{"role": "user", "content": "x"}]},
                                       {"tokens": u32(5), "id": "five", "sample": 2, "prefix": u32(6)}]}]


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], np.zeros((2, 2), int), ["a"]])
def test_ids_that_are_none_are_refused_before_sending(worker, tokens):
    w = worker(lambda q: [])
    with Client(w.endpoint) as client:
        with pytest.raises(ValueError):
            client.rollout([{"tokens": tokens}])
        with pytest.raises(TypeError):
            client.rollout([1, 2, 3])
    assert w.requests == []


def test_long_requests_are_compressed_and_long_replies_expanded(worker):
    def script(q):
        return [zstandard.compress(msgpack.packb({"type": "text", "id": q["id"], "text": "x" * 5000, "bytes": b"x" * 5000}))]

    w = worker(script)
    assert wire.pack({"type": "ping", "id": "x" * 40})[:4] != wire._MAGIC
    assert wire.pack({"tokens": bytes(5000)})[:4] == wire._MAGIC
    with Client(w.endpoint) as client:
        assert client.detokenize(range(5000)).text == "x" * 5000
    assert w.requests[0]["tokens"] == np.arange(5000, dtype="<u4").tobytes()


def test_concurrent_requests_are_told_apart_by_id(worker):
    waiting = []

    def script(q):
        if q["type"] == "ping":
            return [PONG]
        waiting.append(q["id"])
        if len(waiting) < 2:
            return []
        a, b = waiting
        return [{**accepted(), "id": b}, {**accepted(), "id": a}, {**samples(sample(0, 0, text="b")), "id": b},
                {**samples(sample(0, 0, text="a")), "id": a}, {**DONE, "id": b}, {"type": "done", "id": "nobody's"},
                {"type": "error", "code": "internal", "message": "lost", "id": a}]

    w = worker(script)
    with Client(w.endpoint) as client:
        one, two = client.rollout(["a"]), client.rollout(["b"])
        assert client.ping()["model"] == "m"
        with pytest.raises(coppice.InternalError):
            one.wait()
        assert [s.text for s in one.samples] == ["a"]
        assert [s.text for s in two.wait()] == ["b"]


CLASSES = [coppice.BadRequest, coppice.TooLong, coppice.TooLarge, coppice.UnknownType, coppice.Unsupported, coppice.Overloaded,
           coppice.Draining, coppice.Asleep, coppice.NotFound, coppice.DuplicateId, coppice.ModelError, coppice.RequestTimeout,
           coppice.InternalError]


@pytest.mark.parametrize("cls", CLASSES)
def test_errors_are_typed(worker, cls):
    w = worker(lambda q: [{"type": "error", "code": cls.code, "message": "why", "key": "n", "retry_after": 2.0}])
    with Client(w.endpoint) as client:
        with pytest.raises(cls) as e:
            list(client.rollout(["x"]))
        with pytest.raises(cls):
            client.cancel("x")
    assert isinstance(e.value, coppice.CoppiceError) and type(e.value) is cls
    assert (e.value.code, e.value.key, e.value.message, e.value.retry_after) == (cls.code, "n", "why", 2.0)
    assert str(e.value) == "n: why"


def test_a_code_of_the_future_is_still_an_error(worker):
    w = worker(lambda q: [{"type": "error", "code": "on_fire", "message": "hot"}])
    with Client(w.endpoint) as client:
        with pytest.raises(coppice.CoppiceError) as e:
            client.ping()
    assert e.value.code == "on_fire"


def test_an_error_without_id_reaches_who_waits(worker):
    w = worker(lambda q: [{"type": "error", "id": "", "code": "bad_request", "message": "no map"}])
    with Client(w.endpoint) as client:
        with pytest.raises(coppice.BadRequest, match="no map"):
            client.ping()


def test_unknown_keys_and_types_of_replies_are_ignored(worker):
    w = worker(lambda q: [accepted(), {"type": "progress", "tokens": 5}, {**samples(sample(mood="good")), "extra": 1},
                          {**DONE, "cost": 3}])
    with Client(w.endpoint) as client:
        rollout = client.rollout(["x"])
        assert len(rollout.wait()) == 1
        assert rollout.done["cost"] == 3


@pytest.mark.parametrize("reply", [b"", b"\xc1", b"\x01", b"\x28\xb5\x2f\xfd", [b"a", b"b"]])
def test_what_is_no_reply_is_a_protocol_error(worker, reply):
    w = worker(lambda q: [reply])
    with Client(w.endpoint) as client:
        with pytest.raises(coppice.ProtocolError):
            client.ping()


@pytest.mark.parametrize("broken", [{"tokens": b"123"}, {"tokens": None, "mask": None, "finish": None, "weights": [[]]}, {"tokens": "abcd"}])
def test_a_broken_sample_ends_its_rollout_only(worker, broken):
    w = worker(lambda q: [PONG] if q["type"] == "ping" else [accepted(), samples({**sample(), **broken}), DONE])
    with Client(w.endpoint) as client:
        with pytest.raises(coppice.ProtocolError):
            client.rollout(["x"]).wait()
        assert client.ping()["model"] == "m"


def test_a_silent_worker_is_pinged_and_then_given_up(worker):
    w = worker(lambda q: [])
    with Client(w.endpoint, silence=0.2, timeout=0.2) as client:
        rollout = client.rollout(["x"])
        start = time.monotonic()
        with pytest.raises(coppice.Timeout, match="silent"):
            rollout.wait()
        assert 0.75 < time.monotonic() - start < 5
        with pytest.raises(coppice.Timeout):  # a second wait has a silence of its own
            rollout.wait()
        assert time.monotonic() - start > 1.5
    types = [q["type"] for q in w.requests]
    assert types[:4] == ["rollout", "ping", "rollout", "ping"]  # once more over a new connection, and so on
    assert set(types) == {"rollout", "ping"} and len({q["id"] for q in w.requests if q["type"] == "rollout"}) == 1


def test_a_worker_that_answers_pings_is_waited_for(worker):
    pings = []

    def script(q):
        if q["type"] == "rollout":
            pings.append(q["id"])
            return []
        pings.append(q["id"])
        return [PONG] if len(pings) < 5 else [PONG, {**samples(sample()), "id": pings[0]}, {**DONE, "id": pings[0]}]

    w = worker(script)
    with Client(w.endpoint, silence=0.1, timeout=5) as client:
        assert len(client.rollout(["x"]).wait()) == 1
    assert [q["type"] for q in w.requests] == ["rollout"] + ["ping"] * 4


def test_a_wait_may_be_bounded_and_taken_up_again(worker):
    go = threading.Event()

    def script(q):
        assert go.wait(10)
        return [samples(sample()), DONE]

    w = worker(script)
    with Client(w.endpoint) as client:
        rollout = client.rollout(["x"])
        with pytest.raises(coppice.Timeout, match="0.1 s"):
            rollout.wait(timeout=0.1)
        go.set()
        assert len(rollout.wait()) == 1


def test_nobody_there_is_told_as_such():
    with Client("tcp://127.0.0.1:1", silence=0.1, timeout=60) as client:
        for _ in range(2):
            with pytest.raises(coppice.ConnectionLost, match="no worker at tcp://127.0.0.1:1: not connected after 0.1 s"):
                client.ping()
        assert client._links[0].pending == {}


def test_a_worker_that_comes_late_is_found(worker):
    first = worker(lambda q: [])
    first.close()
    with Client(first.endpoint, silence=0.3, timeout=10) as client:
        rollout = client.rollout(["x"])
        with pytest.raises(coppice.ConnectionLost, match="no worker"):
            rollout.wait()
        worker(lambda q: [samples(sample()), DONE], endpoint=first.endpoint)
        for _ in range(30):  # libzmq tries again every now and then
            try:
                assert len(rollout.wait()) == 1
                return
            except coppice.ConnectionLost as e:
                assert "no worker" in e.message
        pytest.fail("the worker was not found")


def test_open_requests_are_sent_again_after_a_reconnect_and_repeats_dropped(worker):
    first = worker(lambda q: [accepted(2), samples(sample(0, 0))])
    with Client(first.endpoint) as client:
        rollout = client.rollout(["x"], n=2, id="again")
        arriving = iter(rollout)
        assert next(arriving).sample == 0
        first.close()
        second = worker(lambda q: [accepted(2), samples(sample(0, 0)), samples(sample(0, 1)), DONE], endpoint=first.endpoint)
        assert [s.sample for s in arriving] == [1]
        assert len(rollout.samples) == 2
    assert second.requests == [{"seed": 7, **first.requests[0]}] and second.requests[0]["id"] == "again"


def test_a_request_is_sent_again_with_the_seed_that_the_worker_drew(worker):
    first = worker(lambda q: [accepted(2), samples(sample(0, 0))])
    with Client(first.endpoint) as client:
        drawn, own = client.rollout(["x"], n=2), client.rollout(["x"], n=2, seed=99)
        assert next(iter(drawn)).sample == next(iter(own)).sample == 0
        first.close()
        second = worker(lambda q: [accepted(2), samples(sample(0, 1)), DONE], endpoint=first.endpoint)
        assert len(drawn.wait()) == len(own.wait()) == 2
    assert [q.get("seed") for q in first.requests] == [None, 99]
    assert [q.pop("seed") for q in second.requests] == [7, 99]
    first.requests[1].pop("seed")
    assert second.requests == first.requests


@pytest.mark.parametrize("change, told", [({"weights": [0, "e"]}, "weights d before, e now"),
                                          ({"numerics": "f32"}, "numerics bf16 before, f32 now"),
                                          ({"weights": [0, "e"], "numerics": "f32"}, "weights d before, e now; numerics bf16 before, f32 now")])
def test_the_samples_of_two_models_are_not_mixed(worker, change, told):
    first = worker(lambda q: [accepted(2), samples(sample(0, 0))])
    with Client(first.endpoint) as client:
        rollout = client.rollout(["x"], n=2, id="mine")
        assert next(iter(rollout)).sample == 0
        first.close()
        second = worker(lambda q: [PONG] if q["type"] == "ping" else [{**accepted(2), **change}, samples(sample(0, 1)), DONE],
                        endpoint=first.endpoint)
        with pytest.raises(coppice.WorkerChanged, match=told) as e:
            rollout.wait()
        assert isinstance(e.value, coppice.ConnectionLost) and len(rollout.samples) == 1
        assert rollout.accepted == {"samples": 2, "seed": 7, "weights": [0, "d"], "numerics": "bf16"}  # of the samples that it has
        assert client.ping()["model"] == "m"  # the others go on
    asked = [(q["type"], q.get("target")) for q in second.requests]
    assert asked[:2] == [("rollout", None), ("cancel", "mine")] and ("ping", None) in asked


def test_what_was_given_up_is_forgotten_before_it_is_repeated(worker):
    """A repetition under its id would else attach to what was cancelled."""

    def other(q):
        if q["type"] == "cancel":
            time.sleep(0.2)
            return [{"type": "done"}, {**DONE, "id": q["target"]}]
        return [accepted(weights=[0, "e"])] if q["type"] == "rollout" else [{"type": "done"}]

    first = worker(lambda q: [accepted(2), samples(sample(0, 0))])
    with Client(first.endpoint) as client:
        rollout = client.rollout(["x"], n=2, id="mine")
        next(iter(rollout))
        first.close()
        second = worker(other, endpoint=first.endpoint)
        with pytest.raises(coppice.WorkerChanged):
            rollout.wait()
        client.rollout(["x"], n=2, id="mine")
        client.ping()
    assert [q["type"] for q in second.requests] == ["rollout", "cancel", "ack", "rollout", "ping"]


def test_prompt_tokens_are_there_however_the_prompt_was_given(worker):
    w = worker(lambda q: [accepted(2), samples(sample(0), sample(1, prompt_tokens=u32(5, 6))), DONE])
    with Client(w.endpoint) as client:
        given, told = client.rollout([[1, 2, 3], "x"]).wait()
    assert given.prompt_tokens.tolist() == [1, 2, 3] and told.prompt_tokens.tolist() == [5, 6]


@pytest.mark.parametrize("prompts, told", [(5, "a value of type int as prompts"), ([1, 2], r"\[\[1, 2, 3\]\]"), (None, "expected a list of prompts"),
                                           ([{"role": "user", "content": "x"}], "for one prompt of messages"),
                                           ({"role": "user", "content": "x"}, "for one prompt of messages")])
def test_prompts_without_their_list_are_told_as_such(worker, prompts, told):
    with Client(worker(lambda q: []).endpoint) as client, pytest.raises(TypeError, match=told):
        client.rollout(prompts)


@pytest.mark.parametrize("n", [0, -1, "8", 2.0])
def test_numbers_that_are_none_are_for_the_worker_to_refuse(worker, n):
    w = worker(lambda q: [error("bad_request", key="n")])
    with Client(w.endpoint) as client, pytest.raises(coppice.BadRequest):
        client.rollout(["x"], n=n, max_tokens=n).wait()
    assert w.requests[0]["n"] == w.requests[0]["max_tokens"] == n


def test_numpy_scalars_are_numbers(worker):
    w = worker(all_of)
    with Client(w.endpoint) as client:
        client.rollout(["x"], n=np.int64(2), temperature=np.float32(0.5), seed=np.uint64(2**64 - 1)).wait()
        with pytest.raises(ValueError, match="less than 2\\^64"):
            client.rollout(["x"], seed=2**64)
        with pytest.raises(TypeError, match="cannot send a value of type object"):
            client.rollout(["x"], seed=object())
    assert [w.requests[0][k] for k in ("n", "temperature", "seed")] == [2, 0.5, 2**64 - 1]


def test_an_empty_id_is_sent_as_such(worker):
    w = worker(all_of)
    with Client(w.endpoint) as client:
        client.rollout(["x"], id="").wait()
    assert w.requests[0]["id"] == ""


@pytest.mark.parametrize("endpoint", ["localhost:5555", "tcp://localhost", "http://localhost:80", "", "ipc://"])
def test_what_is_no_endpoint_is_told_as_such(endpoint):
    with pytest.raises(ValueError, match="expected tcp://HOST:PORT or ipc://PATH"):
        Client(endpoint)


def test_a_list_of_ids_is_no_list_of_sequences(worker):
    with Client(worker(lambda q: []).endpoint) as client, pytest.raises(TypeError, match="for one sequence"):
        client.score([1, 2, 3])


def test_closing_ends_what_is_open(worker):
    w = worker(lambda q: [])
    client = Client(w.endpoint)
    rollout = client.rollout(["x"])
    client.close()
    client.close()
    with pytest.raises(coppice.ConnectionLost):
        rollout.wait()
    with pytest.raises(coppice.ConnectionLost):
        client.ping()


def test_a_client_that_nobody_closes_ends_with_its_last_reference():
    """In a process of its own, which would hang: the context waits for sockets that are garbage like itself."""
    use = "c = Client('tcp://127.0.0.1:1'); c.rollout(['x']); del c; gc.collect(); print('through')"
    result = subprocess.run([sys.executable, "-c", f"import gc; from coppice import Client; gc.disable(); {use}"], timeout=60,
                            capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("through\n", "")


def test_an_id_in_use_is_refused(worker):
    w = worker(lambda q: [])
    with Client(w.endpoint) as client:
        client.rollout(["x"], id="one")
        with pytest.raises(coppice.DuplicateId):
            client.rollout(["x"], id="one")


def test_scores_have_one_row_per_token(worker):
    w = worker(lambda q: [{"type": "scores", "weights": [2, "d"], "numerics": "bf16", "scores": [
        {"logprobs": struct.pack("<2f", 1, -0.5), "top_ids": u32(*[2**32 - 1] * 3, 1, 2, 3), "top_logprobs": bytes(24),
         "next_ids": u32(4, 5, 6), "next_logprobs": bytes(12)}]}])
    with Client(w.endpoint) as client:
        result = client.score([[1, 2]], top=3)
    assert (result.weights, result.numerics) == ((2, "d"), "bf16")
    assert result.scores[0].top_ids.tolist() == [[2**32 - 1] * 3, [1, 2, 3]]
    assert result.scores[0].top_logprobs.shape == (2, 3) and result.scores[0].next_ids.tolist() == [4, 5, 6]
    assert w.requests[0]["sequences"] == [u32(1, 2)]


def test_tokenize_takes_text_or_messages(worker):
    w = worker(lambda q: [{"type": "tokens", "tokens": u32(1, 2) if "text" in q else u32(3)}])
    with Client(w.endpoint) as client:
        assert client.tokenize("ab").tolist() == [1, 2]
        assert client.tokenize([{"role": "user", "content": "x"}]).tolist() == [3]


def test_curve_keeps_strangers_out():
    from zmq.auth.thread import ThreadAuthenticator
    server_public, server_secret = zmq.curve_keypair()
    context = zmq.Context()
    auth = ThreadAuthenticator(context)
    auth.start()
    auth.configure_curve(domain="*", location=zmq.auth.CURVE_ALLOW_ANY)
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.curve_server, router.curve_secretkey, router.curve_publickey = True, server_secret, server_public
    port = router.bind_to_random_port("tcp://127.0.0.1")
    try:
        with Client(f"tcp://127.0.0.1:{port}", server_key=server_public.decode()) as client:
            rollout = client.rollout(["x"])
            assert router.poll(5000)
            peer, frame = router.recv_multipart()
            router.send_multipart([peer, msgpack.packb({**DONE, "id": rollout.id})])
            assert rollout.wait() == []
        with Client(f"tcp://127.0.0.1:{port}", silence=0.2, timeout=0.2) as client:
            with pytest.raises(coppice.ConnectionLost):
                client.ping()
            time.sleep(0.3)  # by now libzmq has given the connection up: nothing may wait for it
            with pytest.raises(coppice.ConnectionLost):
                client.ping(timeout=5)
        with pytest.raises(ValueError):
            Client("tcp://127.0.0.1:1", server_key=server_public, public_key=server_public)
    finally:
        router.close()
        auth.stop()
        context.term()


# ---- The demonstration.


TEXTS = {b"\x01": "First, ", b"\x02": "<|output_start|>69104<|output_end|>", b"\x03": " The answer is 69104."}


def demo_script(q):
    if q["type"] == "ping":
        return [PONG]
    if q["type"] == "detokenize":
        text = "".join(TEXTS[q["tokens"][i:i + 1]] for i in range(0, len(q["tokens"]), 4))
        return [{"type": "text", "text": text, "bytes": text.encode()}]
    replies = [accepted(32)]
    for prompt in range(4):
        for index in range(8):
            tokens = u32(1, 2, 3) if index < 6 else u32(1)
            text = "".join(TEXTS[tokens[i:i + 1]] for i in range(0, len(tokens), 4))
            replies.append(samples(sample(prompt, index, tokens=tokens, mask=bytes([1, 0, 1][:len(tokens) // 4]), text=text)))
    return replies + [DONE]


def test_the_demo_groups_marks_and_counts(worker):
    w = worker(demo_script)
    out = io.StringIO()
    with Client(w.endpoint) as client:
        assert demo.demonstrate(client, demo.Painter(False), 1, out) == 6  # only the first question's answer is 69104
    text = out.getvalue()
    assert "+ 6 x  First, ⟦<|output_start|>69104<|output_end|>⟧ The answer is 69104." in text
    assert text.count("- 2 x  First, ") == 4
    assert "6 of 32 answers right, 80 tokens, 24 of them forced" in text


def test_the_demo_paints_on_request(worker):
    w = worker(demo_script)
    out = io.StringIO()
    with Client(w.endpoint) as client:
        demo.demonstrate(client, demo.Painter(True), 1, out)
    assert "\033[33m<|output_start|>69104<|output_end|>\033[0m" in out.getvalue() and "⟦" not in out.getvalue()


def test_the_demo_uses_a_running_worker(worker, capsys):
    w = worker(demo_script)
    assert demo.main(["--endpoint", w.endpoint, "--color", "never"]) == 1  # 6 of 32 is too few
    assert "6 of 32 answers right" in capsys.readouterr().out


def test_answers_are_the_last_ones_told():
    assert demo.answer("The answer is 1. The answer is 69,104.<|assistant_end|>") == 69104
    assert demo.answer("The answer is 140.0.") == 140
    assert demo.answer("The answer is -3.") == -3
    assert demo.answer("no idea") is None


def program(path, body):
    path.write_text(f"#!{sys.executable}\n{body}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


# A worker that binds, tells where, and ends on SIGTERM with the status in $STATUS.
STAND_IN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(int(os.environ["STATUS"])))
assert sys.argv[1:4] == ["worker", "--model", "M"] and sys.argv[4:6] == ["--bind", "tcp://127.0.0.1:0"], sys.argv
open(sys.argv[sys.argv.index("--endpoint-file") + 1], "w").write("tcp://127.0.0.1:9\\n")
time.sleep(60)
"""


def test_the_demo_starts_and_stops_a_worker(tmp_path, monkeypatch):
    path = program(tmp_path / "coppice", STAND_IN)
    monkeypatch.setenv("STATUS", "0")
    with demo.running_worker(path, "M") as endpoint:
        assert endpoint == "tcp://127.0.0.1:9"
    monkeypatch.setenv("STATUS", "3")
    with pytest.raises(demo.DemoError, match="status 3 after SIGTERM"):
        with demo.running_worker(path, "M"):
            pass


def test_the_demo_shows_why_a_worker_died(tmp_path, capsys):
    path = program(tmp_path / "coppice", 'import sys; sys.exit("no such model: M")')
    assert demo.main(["--worker", path, "--model", "M"]) == 1
    assert "no such model: M" in capsys.readouterr().err
    assert demo.main(["--worker", os.fspath(tmp_path / "none"), "--model", "M"]) == 1
    assert "could not start" in capsys.readouterr().err
