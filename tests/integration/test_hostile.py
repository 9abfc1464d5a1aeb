"""What a worker does with those who do not keep to the protocol: each gets its error, and nobody else notices.

Beside every test a well-behaved client has a rollout in flight, whose bits must be those that it had before."""
import random
import socket
import struct

import msgpack
import pytest
import zmq
import zstandard

from wire_client import MAGIC, Rollout

MAX_MESSAGE = 1 << 20
PROMPT = {"tokens": [1016, 5, 6, 7]}
GOOD = {"type": "rollout", "id": "good", "prompts": [PROMPT], "max_tokens": 4}


@pytest.fixture(scope="module")
def worker(start_worker):
    return start_worker("--max-message", str(MAX_MESSAGE))


BYSTANDER = {"n": 2, "seed": 17, "temperature": 1.5, "max_tokens": 24, "stop_tokens": [], "logprobs": ["sampling", "model"],
             "prompts": [PROMPT, {"messages": [{"role": "user", "content": "What is 7 * 8?"}]}]}


@pytest.fixture(scope="module")
def undisturbed(worker):
    with worker.client() as c:
        return c.rollout(**BYSTANDER).samples


@pytest.fixture(autouse=True)
def bystander(worker, undisturbed):
    with worker.client() as c:
        id = c.send("rollout", **BYSTANDER)
        accepted = c.receive()
        assert accepted["type"] == "accepted", accepted
        yield
        assert Rollout([accepted] + c.replies(id)).samples == undisturbed
        assert c.ask("ping")["state"] == "ready" and worker.process.poll() is None


def error_to(client, *frames):
    """The error that a message gets which may be none."""
    client.socket.send_multipart(frames)
    reply = client.receive()
    assert reply["type"] == "error" and reply["message"], reply
    return reply


def expect_no_message(client, *frames):
    """Bytes that hold no message: who sent them cannot be told."""
    reply = error_to(client, *frames)
    assert (reply["code"], reply["id"]) == ("bad_request", "") and "key" not in reply, reply


def pack(*values):
    return b"".join(map(msgpack.packb, values))


def zstd_frame(declared, *blocks):
    """A Zstandard frame of runs (length, byte), which says that its content is `declared` bytes, or does not say."""
    if declared is None:
        frame = MAGIC + b"\x00\x50"  # a window of 1 MiB
    else:
        frame = MAGIC + b"\xe0" + struct.pack("<Q", declared)
    for i, (n, byte) in enumerate(blocks):
        frame += struct.pack("<I", n << 3 | 1 << 1 | (i == len(blocks) - 1))[:3] + bytes([byte])
    return frame


def peak_bytes(worker):
    """The most memory that the worker has had."""
    with open(f"/proc/{worker.process.pid}/status", encoding="ascii") as f:
        (line,) = [line for line in f if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


# ---- Frames.


def test_a_message_is_one_frame_and_not_empty(client):
    good = msgpack.packb(GOOD)
    for frames in ([b""], [b"", good], [good, b""], [good, good], [b""] * 100):
        expect_no_message(client, *frames)


def test_truncated_messages(client):
    for whole in (msgpack.packb(GOOD), zstandard.compress(msgpack.packb(GOOD))):
        for n in range(len(whole)):
            expect_no_message(client, whole[:n])


def test_messages_with_more_behind_them(client):
    good, other = msgpack.packb(GOOD), msgpack.packb({"type": "ping", "id": "p"})
    zipped = zstandard.compress(good)
    for more in (b"\0", other, zipped):
        expect_no_message(client, good + more)
        expect_no_message(client, zipped + more)
    expect_no_message(client, zstandard.compress(good + other))
    expect_no_message(client, zstandard.compress(zipped))


def test_a_message_over_the_limit(client):
    head, n = pack("type", "ping", "id", "big", "x"), MAX_MESSAGE
    padding = b"\xdb" + struct.pack(">I", n - len(head) - 6)
    at_limit = b"\x83" + head + padding + b"a" * (n - len(head) - 6)
    assert len(at_limit) == n
    assert error_to(client, at_limit)["key"] == "x"  # it was read
    expect_no_message(client, at_limit + b"a")
    expect_no_message(client, zstandard.compress(at_limit + b"a"))


def test_a_frame_over_twice_the_limit_costs_the_connection(client):
    monitor = client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    monitor.rcvtimeo = client.socket.rcvtimeo
    client.socket.send(bytes(2 * MAX_MESSAGE + 1))
    monitor.recv_multipart()  # raises if nothing comes
    client.socket.disable_monitor()


@pytest.mark.parametrize("frame", [
    zstd_frame(2**63, (1, 0x80)), zstd_frame(2**40, (1, 0x80)), zstd_frame(MAX_MESSAGE + 1, (1, 0x80)),
    zstd_frame(None, *[(1 << 17, 0x80)] * 4096),  # half a gigabyte of it
    zstd_frame(1, *[(1 << 17, 0x80)] * 4096), zstd_frame(0, (1, 0x80)), zstd_frame(2, (1, 0x80)),
    MAGIC + b"\x00\xf8" + b"\x0b\x00\x00\x80",  # a window of 2 TiB
], ids=["2^63", "2^40", "limit+1", "undeclared", "too-short", "none", "too-long", "window"])
def test_zip_bombs(client, worker, frame):
    before = peak_bytes(worker)
    expect_no_message(client, frame)
    assert peak_bytes(worker) - before < 64 * MAX_MESSAGE


def test_a_small_message_that_would_unpack_to_much(client, worker):
    """An element of one byte becomes one of 24."""
    before = peak_bytes(worker)
    many = msgpack.packb({**GOOD, "prompts": [{"tokens": [0] * (MAX_MESSAGE - 200)}]})
    for frame in (many, zstandard.compress(many)):
        reply = error_to(client, frame)
        assert (reply["code"], reply["id"], reply["key"]) == ("bad_request", "good", "prompts[0].tokens")
    assert peak_bytes(worker) - before < 64 * MAX_MESSAGE


def test_broken_zstandard(client):
    good = zstandard.ZstdCompressor(write_checksum=True).compress(msgpack.packb(GOOD))
    expect_no_message(client, good[:-1] + bytes([good[-1] ^ 1]))  # the checksum
    expect_no_message(client, MAGIC)
    expect_no_message(client, MAGIC + b"\xff" * 40)
    expect_no_message(client, b"\x50\x2a\x4d\x18\x04\0\0\0abcd")  # a frame to be skipped
    words = [msgpack.packb({**GOOD, "id": str(i)}) for i in range(2000)]
    dictionary = zstandard.train_dictionary(4096, words)
    expect_no_message(client, zstandard.ZstdCompressor(dict_data=dictionary).compress(words[0]))


def test_random_bytes(client):
    rng = random.Random(1)
    for _ in range(300):
        frame = rng.randbytes(rng.randrange(1, 200))
        expect_no_message(client, frame)
        expect_no_message(client, bytes([0x80 | frame[0] & 15]) + b"\xa4type" + frame)
        expect_no_message(client, MAGIC + frame)


def test_every_message_with_a_byte_changed_is_answered_once(client):
    rng = random.Random(2)
    good = msgpack.packb({"type": "tokenize", "id": "m", "messages": [{"role": "user", "content": "1 + 1"}]})
    for frame in (good, zstandard.compress(good)):
        for at in range(len(frame)):
            changed = frame[:at] + bytes([frame[at] ^ rng.randrange(1, 256)]) + frame[at + 1:]
            client.socket.send(changed)
            assert client.receive()["type"] in ("tokens", "error")


# ---- MessagePack.


def test_what_is_no_map(client):
    for frame in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
                  b"\xc1", b"\xc0", b"\x05", b"\x90", b"\x91\x80", msgpack.packb("ping"), b"\x91" * 100_000):
        expect_no_message(client, frame)
        expect_no_message(client, zstandard.compress(frame))


def test_counts_without_their_bytes(client):
    head = b"\x83" + pack("type", "rollout", "id", "c", "prompts")
    for count in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdf\x80\0\0\0", b"\xc6\xff\xff\xff\xff", b"\xdc\xff\xff"):
        expect_no_message(client, head + count)


def test_nesting_bombs(client):
    for depth in (16, 17, 1000, 500_000):
        reply = error_to(client, b"\x83" + pack("type", "ping", "id", "deep", "x") + b"\x91" * depth + b"\xc0")
        assert (reply["code"], reply["id"]) == ("bad_request", "deep") and reply["key"].startswith("x[0][0]")
    reply = error_to(client, b"\x83" + pack("type", "ping", "id", "deep", "x") + b"\x81\xa1y" * 100_000 + b"\xc0")
    assert reply["code"] == "bad_request" and reply["key"].startswith("x.y.y")


@pytest.mark.parametrize("body, key", [
    (b"\x83" + pack("type", "ping", "id", "r", "id", "s"), "id"),
    (b"\x83" + pack("type", "ping", "id", "r", "type", "ping"), "type"),
    (b"\x83" + pack("type", "rollout", "id", "r", "prompts") + b"\x91\x82" + pack("tokens", [1], "tokens", [2]), "prompts[0].tokens"),
    (b"\x83" + pack("type", "ping", "id", "r") + b"\x05\x05", None),
    (b"\x83" + pack("type", "ping", "id", "r", "x") + b"\xc7\x01\x05\x00", "x"),
    (b"\x83" + pack("type", "ping", "id", "r", "x") + b"\xd6\xff\0\0\0\0", "x"),
    (b"\x83" + pack("type", "ping", "id", "r", "x") + b"\xa1\xff", "x"),
    (b"\x83" + pack("type", "ping", "id", "r", "x") + b"\xa3\xed\xa0\x80", "x"),
    (b"\xde\x00\x42" + pack("type", "ping", "id", "r", *[x for i in range(64) for x in (f"k{i}", i)]), None),
], ids=["id twice", "type twice", "tokens twice", "int key", "ext", "timestamp", "utf-8", "surrogate", "66 keys"])
def test_rules_that_a_whole_message_breaks(client, body, key):
    reply = error_to(client, body)
    assert (reply["code"], reply["id"], reply.get("key")) == ("bad_request", "r", key)


# ---- Keys and values.


def test_ids_that_are_none(client):
    for keys in ({}, {"id": ""}, {"id": "x" * 129}, {"id": 5}, {"id": None}, {"id": b"x"}, {"id": ["x"]}):
        reply = error_to(client, msgpack.packb({"type": "ping", **keys}))
        assert (reply["code"], reply["id"], reply["key"]) == ("bad_request", "", "id")


NOT_UNSIGNED = [None, -1, 1.0, "1", True, b"\x01", [], {}, 2**32]
NOT_BOOL = [None, 0, 1, "true", [], {}]
NOT_TEXT = [None, 5, b"x", [], {}]
NOT_IDS = [None, 5, "x", {}, b"abc", [-1], [2**32], [1.0], ["1"], [None], [[1]]]
NOT_REAL = [None, "1", True, [], {}, float("nan"), float("inf"), -float("inf"), -0.5]

WRONG = {
    "rollout": {
        "prompts": [None, 5, "x", {}, [], [5], [None], [[]], [{}], [{"tokens": [1]}] * 4097],
        "n": [0, 4097, *NOT_UNSIGNED], "max_tokens": [0, *NOT_UNSIGNED], "min_tokens": [257, *NOT_UNSIGNED],
        "seed": [None, -1, 1.0, "1", True], "top_k": NOT_UNSIGNED, "temperature": [1e-9, 101, *NOT_REAL],
        "top_p": [1.5, *NOT_REAL], "min_p": [1.5, *NOT_REAL], "stop_tokens": [*NOT_IDS, [1024], [2**32 - 1]],
        "tools": [None, 5, "calculator", {}, [5], [None]], "logprobs": [None, "model", ["both"], ["model", "model"], [5]],
        "entropy": NOT_BOOL, "kept": [True, *NOT_BOOL], "text": NOT_BOOL, "compress": NOT_BOOL,
        "deliver": [None, 5, "token", ["sample"]], "timeout": [0, 0.0005, 2e9, *NOT_REAL],
    },
    "score": {"sequences": [None, 5, {}, [], b"", [[]], [b""], *([x] for x in NOT_IDS), [[1024]]], "top": [21, *NOT_UNSIGNED],
              "temperature": [1e-9, 101, *NOT_REAL]},
    "tokenize": {"text": NOT_TEXT, "messages": [None, 5, "x", {}, [], [5]]},
    "detokenize": {"tokens": [*NOT_IDS, [1024]]},
    "cancel": {"target": ["", "x" * 129, *NOT_TEXT]},
}
ENOUGH = {"rollout": {"prompts": [PROMPT]}, "score": {"sequences": [[1]]}}


@pytest.mark.parametrize("type, key", [(type, key) for type, keys in WRONG.items() for key in keys])
def test_wrong_values_of_every_key(client, type, key):
    for value in WRONG[type][key]:
        failed = client.failure(type, **{**ENOUGH.get(type, {}), key: value})
        assert failed.code == "bad_request" and failed.key.split("[")[0] == key, (value, failed)


@pytest.mark.parametrize("key, values", [
    ("tokens", [*NOT_IDS, [], b"", [1024], [1, 2**32 - 1]]), ("text", NOT_TEXT), ("id", [*NOT_TEXT, "x" * 1025]),
    ("seed", [None, -1, 1.0, "1"]), ("sample", NOT_UNSIGNED), ("prefix", [*NOT_IDS, [1] * 257, [1024]]),
    ("messages", [None, 5, "x", {}, []]),
])
def test_wrong_values_of_every_key_of_a_prompt(client, key, values):
    for value in values:
        prompt = {key: value} if key in ("text", "messages") else {**PROMPT, "sample": 0, key: value}
        failed = client.failure("rollout", prompts=[PROMPT, prompt])
        assert failed.code == "bad_request" and failed.key.split("[")[:2] == ["prompts", f"1].{key}"], (value, failed)


@pytest.mark.parametrize("messages, key", [
    ([5], "[0]"), ([{}], "[0].role"), ([{"role": "user"}], "[0].content"), ([{"content": "x"}], "[0].role"),
    ([{"role": "wizard", "content": "x"}], "[0].role"), ([{"role": 5, "content": "x"}], "[0].role"),
    ([{"role": "user", "content": 5}], "[0].content"), ([{"role": "user", "content": [5]}], "[0].content[0]"),
    ([{"role": "user", "content": [{"type": "image", "text": "x"}]}], "[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "[0].content[0].text"),
    ([{"role": "user", "content": "x", "name": "y"}], "[0].name"),
    ([{"role": "user", "content": [{"type": "text", "text": "x", "url": "y"}]}], "[0].content[0].url"),
])
def test_wrong_messages(client, messages, key):
    for type, keys, path in (("rollout", {"prompts": [{"messages": messages}]}, "prompts[0].messages"),
                             ("tokenize", {"messages": messages}, "messages")):
        failed = client.failure(type, **keys)
        assert (failed.code, failed.key) == ("bad_request", path + key)


@pytest.mark.parametrize("type, keys, key", [
    ("rollout", {"prompts": [PROMPT], "temprature": 1}, "temprature"),
    ("rollout", {"prompts": [{**PROMPT, "wieght": 1}]}, "prompts[0].wieght"),
    ("rollout", {"prompts": [PROMPT], "": 1}, ""),
    ("ping", {"prompts": [PROMPT]}, "prompts"), ("status", {"verbose": True}, "verbose"),
    ("cancel", {"target": "x", "why": "y"}, "why"), ("score", {"sequences": [[1]], "n": 1}, "n"),
    ("tokenize", {"text": "x", "bos": True}, "bos"), ("detokenize", {"tokens": [1], "text": True}, "text"),
    ("ping", {"k" * 5000: 1}, "k" * 64 + "..."), ("ping", {"a\nb": 1}, "a?b"),
])
def test_unknown_keys_are_named(client, type, keys, key):
    failed = client.failure(type, **keys)
    assert (failed.code, failed.key or "") == ("bad_request", key)


@pytest.mark.parametrize("type, keys, key", [
    ("rollout", {}, "prompts"), ("score", {}, "sequences"), ("tokenize", {}, None), ("detokenize", {}, "tokens"),
    ("cancel", {}, "target"), ("rollout", {"prompts": [{}]}, "prompts[0]"),
    ("rollout", {"prompts": [{"tokens": [1], "text": "x"}]}, "prompts[0]"), ("tokenize", {"text": "x", "messages": []}, "messages"),
    ("rollout", {"prompts": [PROMPT] * 17, "n": 4096}, "n"),
    ("rollout", {"prompts": [{**PROMPT, "sample": 0}], "n": 2}, "prompts[0].sample"),
    ("rollout", {"prompts": [{**PROMPT, "prefix": [1]}]}, "prompts[0].prefix"),
    ("rollout", {"prompts": [PROMPT], "kept": True, "top_k": 1025}, "kept"),
])
def test_what_does_not_fit_together(client, type, keys, key):
    failed = client.failure(type, **keys)
    assert (failed.code, failed.key) == ("bad_request", key)


def test_types_that_are_none(client):
    for value, code in ((5, "bad_request"), (None, "bad_request"), (["ping"], "bad_request"), ("", "unknown_type"),
                        ("Ping", "unknown_type"), ("ping\0", "unknown_type"), ("x" * 100_000, "unknown_type")):
        failed = client.failure(value)
        assert (failed.code, failed.key) == (code, "type") and len(failed.message) < 1000


def test_prompts_longer_than_the_context(client):
    failed = client.failure("rollout", prompts=[PROMPT, {"tokens": bytes(4 * 5120)}])
    assert (failed.code, failed.key) == ("too_long", "prompts[1].tokens")
    for key, value in (("text", "word " * 10_000), ("messages", [{"role": "user", "content": "word " * 10_000}])):
        failed = client.failure("rollout", prompts=[{key: value}])
        assert (failed.code, failed.key) == ("too_long", f"prompts[0].{key}")


# ---- Clients that are gone, or do not listen.


def test_bytes_that_are_no_zeromq(worker):
    port = int(worker.endpoint.rsplit(":", 1)[1])
    greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + bytes(48)
    huge = greeting + b"\x06" + struct.pack(">Q", 2**62)
    for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", greeting[:20], greeting, huge, random.Random(3).randbytes(1000)):
        with socket.create_connection(("127.0.0.1", port)) as s:
            s.sendall(sent)


def test_a_client_that_vanishes_leaves_nothing_behind(client, worker):
    with worker.client() as gone:
        gone.send("rollout", prompts=[PROMPT], n=32, max_tokens=50, stop_tokens=[])
        assert gone.receive()["type"] == "accepted"
    with worker.client() as gone:
        gone.socket.linger = 10_000  # what it sends arrives; it does not wait for answers
        for _ in range(20):
            gone.send("rollout", prompts=[PROMPT], n=4, max_tokens=20, stop_tokens=[])
            gone.send("score", sequences=[[1, 2, 3]] * 10, top=20)
            gone.send("tokenize", text="word " * 1000)
    status = client.ask("status")
    while status["rows"] or status["queued"] or status["pages_used"]:
        status = client.ask("status")


def test_a_client_that_does_not_read_loses_nothing_and_holds_up_nobody(client, worker):
    """More and larger answers than sockets hold: the worker has to keep them."""
    special = client.ask("tokenize", messages=[{"role": "user", "content": ""}])["tokens"][:4]  # one token, many bytes
    expected = client.ask("detokenize", tokens=special * 800)["text"]
    assert len(expected) > 4000
    with worker.client(compress=False, rcvhwm=1, rcvbuf=4096) as slow:
        sent = [slow.send("detokenize", tokens=special * 800) for _ in range(3000)]
        rollout = slow.send("rollout", prompts=[PROMPT], n=256, max_tokens=4, stop_tokens=[], seed=1)
        client.rollout([PROMPT], n=4, max_tokens=20)
        for id in sent:
            reply = slow.receive()
            assert (reply["id"], reply["text"]) == (id, expected)
        assert Rollout(slow.replies(rollout)).samples == client.rollout([PROMPT], n=256, max_tokens=4, stop_tokens=[], seed=1).samples


def test_a_score_at_temperature_0_is_refused(client):
    failed = client.failure("score", sequences=[[1, 2]], temperature=0)
    assert (failed.code, failed.key) == ("bad_request", "temperature")
