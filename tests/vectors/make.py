"""Writes the wire vectors: requests.jsonl, replies.jsonl, and the fuzz corpus of requests.

    python tests/vectors/make.py

The bytes come from the msgpack and zstandard packages and from hand-written hex, the expectations from this file, never from
the code under test.  README.md beside it explains the fields.  Needs what tests/requirements.txt names.
"""
import json
import pathlib
import struct

import msgpack
import zstandard

HERE = pathlib.Path(__file__).parent
CORPUS = HERE.parent / "fuzz" / "corpus" / "request"
LIMIT = 64 << 20
MAGIC = bytes.fromhex("28b52ffd")


def ids(*tokens):
    return struct.pack(f"<{len(tokens)}I", *tokens)


def f32(*numbers):
    return struct.pack(f"<{len(numbers)}f", *numbers)


def pack(message):
    return msgpack.packb(message, use_bin_type=True)


def compress(data, **options):
    return zstandard.ZstdCompressor(**options).compress(data)


# ---- Requests that are accepted.  `request` is the decoded struct with every field spelled out.

requests = []


def frame_of(message):
    """message: a dict, or the bytes.  Long ones are compressed, to keep the files small."""
    frame = message if isinstance(message, bytes) else pack(message)
    return frame if len(frame) <= 2048 or frame[:4] == MAGIC else compress(frame)


def good(name, message, type, /, **fields):
    frame = frame_of(message)
    expected = {"type": type, "id": fields.pop("id", "r"), "compress": fields.pop("compress", True), **fields}
    requests.append({"name": name, "hex": frame.hex(), "request": expected})


def prompt(**fields):
    return {"tokens": None, "text": None, "messages": None, "id": None, "seed": None, "sample": None, "enough": None,
            "prefix": None, **fields}


def rollout(prompts, **fields):
    return {"prompts": prompts, "n": 1, "seed": None, "max_tokens": 256, "min_tokens": 0, "temperature": 1.0, "top_k": 0,
            "top_p": 1.0, "min_p": 0.0, "stop_tokens": None, "stop": [], "tools": None, "logprobs": ["sampling"],
            "entropy": False, "kept": False, "text": False, "deliver": "sample", "timeout": None,
            "min_weights": 0, "weights_timeout": 600.0, **fields}


def ask(**fields):
    return {"type": "rollout", "id": "r", "prompts": [{"tokens": ids(5)}], **fields}


def ask1(**fields):
    return ask(prompts=[{"tokens": ids(5), **fields}])


ONE = [prompt(tokens=[5])]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": [{"type": "text", "text": "It is "}, {"type": "python", "text": "2+2"},
                                          {"type": "python_output", "text": "4"}]},
        {"role": "user", "content": ""}]

good("ping", {"type": "ping", "id": "r"}, "ping")
good("ping in any order of keys", {"id": "r", "type": "ping"}, "ping")
good("ping compressed", compress(pack({"type": "ping", "id": "r"})), "ping")
good("ping compressed without its size", compress(pack({"type": "ping", "id": "r"}), write_content_size=False), "ping")
good("ping compressed with a checksum", compress(pack({"type": "ping", "id": "r"}), write_checksum=True), "ping")
good("ping with an id of 128 bytes", {"type": "ping", "id": "é" * 64}, "ping", id="é" * 64)
good("ping that wants no compression", {"type": "ping", "id": "r", "compress": False}, "ping", compress=False)
good("ping with a str32 id", bytes.fromhex("82 a4 74797065 a4 70696e67 a2 6964 db 00000001 72"), "ping")
good("ping in a map32", bytes.fromhex("df 00000002 a4 74797065 a4 70696e67 a2 6964 a1 72"), "ping")
good("status", {"type": "status", "id": "r"}, "status")
good("cancel", {"type": "cancel", "id": "r", "target": "other"}, "cancel", target="other")
good("score", {"type": "score", "id": "r", "sequences": [ids(1, 2), [3]]}, "score", sequences=[[1, 2], [3]], top=0,
     temperature=1.0)
good("score with everything", {"type": "score", "id": "r", "sequences": [ids(7)], "top": 20, "temperature": 0.001}, "score",
     sequences=[[7]], top=20, temperature=0.001)
good("score with temperature 100", {"type": "score", "id": "r", "sequences": [ids(7)], "temperature": 100}, "score",
     sequences=[[7]], top=0, temperature=100.0)
good("tokenize text", {"type": "tokenize", "id": "r", "text": "héllo"}, "tokenize", tokens=None, text="héllo", messages=None)
good("tokenize empty text", {"type": "tokenize", "id": "r", "text": ""}, "tokenize", tokens=None, text="", messages=None)
good("tokenize messages", {"type": "tokenize", "id": "r", "messages": CHAT}, "tokenize", tokens=None, text=None, messages=CHAT)
good("detokenize", {"type": "detokenize", "id": "r", "tokens": ids(0, 4294967295)}, "detokenize", tokens=[0, 4294967295])
good("detokenize nothing", {"type": "detokenize", "id": "r", "tokens": b""}, "detokenize", tokens=[])
good("rollout with defaults", ask(), "rollout", **rollout(ONE))
good("rollout of ids in every integer encoding",
     bytes.fromhex("83 a4 74797065 a7 726f6c6c6f7574 a2 6964 a1 72 a7 70726f6d707473 91 81 a6 746f6b656e73 "
                   "9a 05 cc05 cd0005 ce00000005 cf0000000000000005 d005 d10005 d200000005 d30000000000000005 ceffffffff"),
     "rollout", **rollout([prompt(tokens=[5] * 9 + [4294967295])]))
good("rollout of text", ask(prompts=[{"text": "Once"}]), "rollout", **rollout([prompt(text="Once")]))
good("rollout of text with a NUL", ask(prompts=[{"text": "a\0b"}]), "rollout", **rollout([prompt(text="a\0b")]))
good("rollout of messages", ask(prompts=[{"messages": CHAT}]), "rollout", **rollout([prompt(messages=CHAT)]))
good("rollout of a message without parts", ask(prompts=[{"messages": [{"role": "assistant", "content": []},
     {"role": "user", "content": "x"}]}]), "rollout",
     **rollout([prompt(messages=[{"role": "assistant", "content": []}, {"role": "user", "content": "x"}])]))
good("rollout with every key",
     {"type": "rollout", "id": "r", "prompts": [{"tokens": ids(1, 2, 3), "id": "line 7", "seed": 2**64 - 1, "enough": 3}], "n": 4,
      "seed": 2**53 + 1, "max_tokens": 32, "min_tokens": 32, "temperature": 0.5, "top_k": 1024, "top_p": 0.25, "min_p": 1,
      "stop_tokens": ids(9), "stop": ["\n\n", "é"], "tools": ["calculator"], "logprobs": ["model", "sampling"],
      "entropy": True, "kept": True,
      "text": True, "deliver": "request", "timeout": 90, "min_weights": 2**64 - 1, "weights_timeout": 0.001, "compress": False},
     "rollout", compress=False,
     **rollout([prompt(tokens=[1, 2, 3], id="line 7", seed="18446744073709551615", enough=3)], n=4, seed="9007199254740993",
               max_tokens=32, min_tokens=32, temperature=0.5, top_k=1024, top_p=0.25, min_p=1.0, stop_tokens=[9],
               stop=["\n\n", "é"], tools=["calculator"], logprobs=["sampling", "model"], entropy=True, kept=True, text=True,
               deliver="request", timeout=90.0, min_weights="18446744073709551615", weights_timeout=0.001))
good("rollout with empty lists", ask(stop_tokens=[], stop=[], tools=[], logprobs=[]), "rollout",
     **rollout(ONE, stop_tokens=[], tools=[], logprobs=[]))
good("rollout of one sample index", ask1(sample=4294967295), "rollout", **rollout([prompt(tokens=[5], sample=4294967295)]))
good("rollout that continues a prefix", ask1(sample=3, prefix=ids(8, 9)), "rollout",
     **rollout([prompt(tokens=[5], sample=3, prefix=[8, 9])]))
good("rollout that continues an empty prefix", ask1(sample=0, prefix=[]), "rollout",
     **rollout([prompt(tokens=[5], sample=0, prefix=[])]))
good("rollout with a prefix as long as max_tokens", {**ask1(sample=0, prefix=ids(1, 2)), "max_tokens": 2}, "rollout",
     **rollout([prompt(tokens=[5], sample=0, prefix=[1, 2])], max_tokens=2))
good("as many stop strings as may be, one as long as may be", ask(stop=["é" * 128] + ["x"] * 15), "rollout",
     **rollout(ONE, stop=["é" * 128] + ["x"] * 15))
good("a stop string that holds a NUL", ask(stop=["a\0"]), "rollout", **rollout(ONE, stop=["a\0"]))
good("entropy", ask(entropy=True), "rollout", **rollout(ONE, entropy=True))
good("enough 1", ask1(enough=1), "rollout", **rollout([prompt(tokens=[5], enough=1)]))
good("enough 4096", ask1(enough=4096), "rollout", **rollout([prompt(tokens=[5], enough=4096)]))
good("temperature 0", ask(temperature=0), "rollout", **rollout(ONE, temperature=0.0))
good("temperature -0.0 is 0", ask(temperature=-0.0), "rollout", **rollout(ONE, temperature=0.0))
good("temperature 100", ask(temperature=100), "rollout", **rollout(ONE, temperature=100.0))
good("temperature 0.001", ask(temperature=0.001), "rollout", **rollout(ONE, temperature=0.001))
good("temperature as float32", pack({**ask(), "temperature": 0}).replace(b"\xabtemperature\x00",
     b"\xabtemperature\xca\x3f\x00\x00\x00"), "rollout", **rollout(ONE, temperature=0.5))
good("top_p 0", ask(top_p=0), "rollout", **rollout(ONE, top_p=0.0))
good("a prompt's empty id", ask1(id=""), "rollout", **rollout([prompt(tokens=[5], id="")]))
good("a prompt's id of 1024 bytes", ask1(id="x" * 1024), "rollout", **rollout([prompt(tokens=[5], id="x" * 1024)]))
good("deliver prompt", ask(deliver="prompt"), "rollout", **rollout(ONE, deliver="prompt"))
good("as many samples as may be", ask(n=4096, prompts=[{"tokens": [5]}] * 16), "rollout", **rollout(ONE * 16, n=4096))
good("rollout that waits for weights", ask(min_weights=3, weights_timeout=1e9), "rollout",
     **rollout(ONE, min_weights=3, weights_timeout=1e9))
good("ack", {"type": "ack", "id": "r", "target": "other"}, "ack", target="other")
good("pause", {"type": "pause", "id": "r"}, "pause", mode="finish")
for m in ("finish", "keep", "abort"):
    good(f"pause that says {m}", {"type": "pause", "id": "r", "mode": m}, "pause", mode=m)
good("resume", {"type": "resume", "id": "r"}, "resume")

# XXH3-128 of the tensor that chunk() gives: its name, NUL, then as u64 the dtype 1, rank 1, dim 2, then its bytes.
DIGEST = "2384df2cfc79624982ca1802e9c6fb90"


def weights(**fields):
    return {"type": "weights", "id": "w", "version": 1, "source": {"path": "p.pt"}, **fields}


def chunk(**fields):
    return {"type": "weights_chunk", "id": "r", "target": "w", "name": "a", "dtype": "BF16", "shape": [2], "offset": 0,
            "data": bytes.fromhex("803f0040"), **fields}


def commit(**fields):
    return {"type": "weights_commit", "id": "r", "target": "w", "digest": DIGEST, **fields}


def good_weights(name, message, **fields):
    good(name, message, "weights", **{"id": "w", "version": 1, "source": {"path": "p.pt"}, "policy": "finish", **fields})


def good_chunk(name, message, /, **fields):
    good(name, message, "weights_chunk", **{"target": "w", "name": "a", "dtype": "BF16", "shape": [2], "offset": 0,
                                            "data": "803f0040", **fields})


good_weights("weights of a path", weights())
good_weights("weights of a path of 4096 bytes", weights(source={"path": "é" * 2048}), source={"path": "é" * 2048})
good_weights("weights of a stream", weights(source={"stream": {"tensors": 1, "bytes": 4}}),
             source={"stream": {"tensors": 1, "bytes": 4}})
good_weights("weights of the shortest stream", weights(source={"stream": {"tensors": 1, "bytes": 1}}),
             source={"stream": {"tensors": 1, "bytes": 1}})
good_weights("weights with every key", {"compress": False, "policy": "recompute", "version": 2**64 - 1, "id": "w", "type": "weights",
             "source": {"stream": {"bytes": 2**64 - 1, "tensors": 2**63}}}, compress=False, policy="recompute",
             version=str(2**64 - 1), source={"stream": {"tensors": str(2**63), "bytes": str(2**64 - 1)}})
for m in ("finish", "keep", "abort"):
    good_weights(f"weights that say {m}", weights(policy=m), policy=m)
good_chunk("a chunk that is a whole tensor", chunk())
good_chunk("a chunk with its keys in another order", dict(reversed(chunk().items())))
good_chunk("a chunk of a single number", chunk(dtype="F64", shape=[], data=bytes(8)), dtype="F64", shape=[], data="00" * 8)
good_chunk("the last element of a tensor", chunk(dtype="F32", shape=[3, 2], offset=20, data=b"\0\0\x80\x3f"), dtype="F32",
           shape=[3, 2], offset=20, data="0000803f")
good_chunk("a chunk in the middle", chunk(dtype="F16", shape=[1, 2, 1, 3], offset=4), dtype="F16", shape=[1, 2, 1, 3], offset=4)
good_chunk("a chunk of nothing", chunk(data=b""), data="")
good_chunk("a chunk of nothing at the end", chunk(offset=4, data=b""), offset=4, data="")
good_chunk("a chunk of the largest tensor", chunk(shape=[2**31, 2**31 - 1], offset=2**63 - 2**32 - 4), shape=[2**31, 2**31 - 1],
           offset=str(2**63 - 2**32 - 4))
good_chunk("a chunk whose name has 1024 bytes", chunk(name="é" * 512), name="é" * 512)
good("weights_commit", commit(), "weights_commit", target="w", digest=DIGEST)

# ---- Requests that are refused.


def bad(name, message, code, key, says, id="r", compress=True):
    frame = frame_of(message)
    requests.append({"name": name, "hex": frame.hex(),
                     "error": {"code": code, "key": key, "id": id, "compress": compress, "says": says}})


def bad_frame(name, frame, says):
    bad(name, bytes.fromhex(frame) if isinstance(frame, str) else frame, "bad_request", "", says, id="")


PING = pack({"type": "ping", "id": "r"})
FRAME = compress(PING)

# Frames that are no message.
bad_frame("nothing", "", "too early")
bad_frame("a number", "01", "no map")
bad_frame("an array", "93 01 02 03", "no map")
bad_frame("text", b"GET / HTTP/1.1\r\n\r\n", "no map")
bad_frame("byte C1", "81 c1 01", "C1")
bad_frame("bytes after the map", PING + b"\0", "more follows")
bad_frame("two messages", PING + PING, "more follows")
bad_frame("an array32 of 4294967295", "dd ffffffff", "too early")
bad_frame("a map32 of 4294967295", "df ffffffff", "too early")
bad_frame("a map16 of 65535", "de ffff", "too early")
bad_frame("a str32 of 4294967295", "81 db ffffffff", "too early")
bad_frame("a bin32 of 4294967295", "81 a1 61 c6 ffffffff", "too early")
bad_frame("an ext32 of 4294967295", "81 a1 61 c9 ffffffff 01", "too early")
bad_frame("a count without its bytes", "81 a1 61 dd ffff", "too early")
bad_frame("a float without its bytes", "81 a1 61 cb 0000", "too early")
for n in (1, 2, 6, 9, 12, 14):
    bad_frame(f"ping cut to {n} bytes", PING[:n], "too early")
bad_frame("a map cut after the id", pack({"id": "r"}).replace(b"\x81", b"\x82"), "too early")
bad_frame("100000 open arrays", b"\x81\xa1a" + b"\x91" * 100000, "too early")

# Zstandard.
bad_frame("zstd: only the magic", "28b52ffd", "Zstandard")
bad_frame("zstd: cut", FRAME[:-3], "Zstandard")
bad_frame("zstd: trailing byte", FRAME + b"\0", "follow")
bad_frame("zstd: two frames", FRAME + FRAME, "follow")
bad_frame("zstd: skippable frame after", FRAME + bytes.fromhex("502a4d18 01000000 00"), "follow")
bad_frame("zstd: skippable frame before", bytes.fromhex("5f2a4d18 01000000 00") + FRAME, "skippable")
bad_frame("zstd: broken checksum", compress(PING, write_checksum=True)[:-1] + b"\x5a", "Zstandard")
bad_frame("zstd: declares a terabyte", "28b52ffd e0 0000000000010000 010000", "--max-message")
bad_frame("zstd: declares one byte more than the limit", compress(bytes(LIMIT + 1)), "--max-message")
bad_frame("zstd: declares more than it holds", "28b52ffd 20 10 010000", "Zstandard")
bad_frame("zstd: declares less than it holds", "28b52ffd 20 01 190000 010203", "Zstandard")
bad_frame("zstd: undeclared, past the limit", compress(bytes(LIMIT + 1), write_content_size=False), "--max-message")
bad_frame("zstd: undeclared, a window of 2 GiB", "28b52ffd 00 a8 010000", "Zstandard")
bad_frame("zstd: needs a dictionary", "28b52ffd 21 07 01 090000 81", "dictionary")
bad_frame("zstd: holds nothing", compress(b""), "too early")
bad_frame("zstd: holds a zstd frame", compress(FRAME), "no map")

# Structure that MessagePack allows and the protocol does not.  The id is still told.
DEEP = b"\x83\xa4type\xa4ping\xa2id\xa1r\xa1a"


def nest(depth):
    return DEEP + b"\x91" * (depth - 2) + b"\x90"


bad("nested 17 deep", nest(17), "bad_request", "a" + "[0]" * 15, "16 deep")
bad("nested 16 deep is well-formed", nest(16), "bad_request", "a", "unknown key")
bad("nested 100000 deep, then the id", b"\x82\xa1a" + b"\x91" * 100000 + b"\x01\xa2id\xa1r", "bad_request", "a" + "[0]" * 15,
    "16 deep")
bad("a key twice", b"\x84\xa4type\xa4ping\xa2id\xa1r\xa1n\x01\xa1n\x02", "bad_request", "n", "twice")
bad("a key twice, below", pack({"type": "rollout", "id": "r"}).replace(b"\x82", b"\x83") + b"\xa7prompts\x92\x81\xa4text\xa1a\x82\xa4text\xa1a\xa4text\xa1b",
    "bad_request", "prompts[1].text", "twice")
bad("the id twice", b"\x83\xa2id\xa1r\xa4type\xa4ping\xa2id\xa1s", "bad_request", "id", "twice")
bad("a key that is no str", b"\x83\x01\x02\xa4type\xa4ping\xa2id\xa1r", "bad_request", "", "keys must be str")
bad("a key that is bin", b"\x83\xc4\x01n\x02\xa4type\xa4ping\xa2id\xa1r", "bad_request", "", "keys must be str")
bad("a fixext", b"\x83\xa1n\xd4\x01\x02\xa4type\xa4ping\xa2id\xa1r", "bad_request", "n", "ext types")
bad("an ext after other elements", b"\x83\xa1n\x95\x01\x90\x80\xa1x\xd4\x01\x02\xa4type\xa4ping\xa2id\xa1r",
    "bad_request", "n[4]", "ext types")
bad("a timestamp", b"\x83\xa1n\xd6\xff\x00\x00\x00\x01\xa4type\xa4ping\xa2id\xa1r", "bad_request", "n", "ext types")
bad("a str that is no UTF-8", b"\x83\xa4text\xa2\xc3\x28\xa4type\xa8tokenize\xa2id\xa1r", "bad_request", "text", "UTF-8")
bad("a str with a surrogate", b"\x83\xa4text\xa3\xed\xa0\x80\xa4type\xa8tokenize\xa2id\xa1r", "bad_request", "text", "UTF-8")
bad("a str with an overlong form", b"\x83\xa4text\xa2\xc0\x80\xa4type\xa8tokenize\xa2id\xa1r", "bad_request", "text", "UTF-8")
bad("a str above U+10FFFF", b"\x83\xa4text\xa4\xf4\x90\x80\x80\xa4type\xa8tokenize\xa2id\xa1r", "bad_request", "text", "UTF-8")
bad("a str cut in a character", b"\x83\xa4text\xa2\xe2\x82\xa4type\xa8tokenize\xa2id\xa1r", "bad_request", "text", "UTF-8")
bad("a key that is no UTF-8", b"\x83\xa1\xff\x01\xa4type\xa4ping\xa2id\xa1r", "bad_request", "", "UTF-8")
bad("65 keys", {"type": "ping", "id": "r", **{f"k{i}": 0 for i in range(63)}}, "bad_request", "", "at most 64 keys")
bad("12 million ids as integers", compress(pack({"type": "rollout", "id": "r"}).replace(b"\x82", b"\x83") +
    b"\xa7prompts\x91\x81\xa6tokens\xdd" + struct.pack(">I", 12_000_000) + bytes(12_000_000)), "bad_request",
    "prompts[0].tokens", "as bin")

# id and type.
bad("no id", {"type": "ping"}, "bad_request", "id", "missing", id="")
bad("an empty id", {"type": "ping", "id": ""}, "bad_request", "id", "1 to 128", id="")
bad("an id of 129 bytes", {"type": "ping", "id": "x" * 129}, "bad_request", "id", "1 to 128", id="")
bad("an id that is a number", {"type": "ping", "id": 7}, "bad_request", "id", "expected a str", id="")
bad("an id that is bin", {"type": "ping", "id": b"r"}, "bad_request", "id", "expected a str", id="")
bad("no type", {"id": "r"}, "bad_request", "type", "missing")
bad("a type that is a number", {"id": "r", "type": 1}, "bad_request", "type", "expected a str")
bad("a type that nobody knows", {"id": "r", "type": "rolout"}, "unknown_type", "type", "rolout")
bad("an empty type", {"id": "r", "type": ""}, "unknown_type", "type", "unknown type")
for t in ("sleep", "wake"):
    bad(f"{t} is not built", {"type": t, "id": "r", "target": "x"}, "unsupported", "type", t)
bad("compress that is no bool", {"type": "ping", "id": "r", "compress": 0}, "bad_request", "compress", "bool")
bad("an error that is not to be compressed", {"type": "ping", "id": "r", "compress": False, "x": 1}, "bad_request", "x",
    "unknown key", compress=False)
bad("nil where a value is due", ask(n=None), "bad_request", "n", "nil")

# Keys.
bad("a typo", ask(temprature=1), "bad_request", "temprature", "unknown key")
bad("a typo in a prompt", ask1(sed=1), "bad_request", "prompts[0].sed", "unknown key")
bad("a typo in ping", {"type": "ping", "id": "r", "now": True}, "bad_request", "now", "unknown key")
bad("a prompt's key at the top", ask(tokens=[1]), "bad_request", "tokens", "unknown key")
bad("a key of 300 bytes", ask(**{"k" * 300: 1}), "bad_request", "k" * 64 + "...", "unknown key")
bad("a key with a newline", ask(**{"a\nb": 1}), "bad_request", "a?b", "unknown key")
bad("a model to roll out is not built", ask(model="m"), "unsupported", "model", "model")
bad("a model to score is not built", {"type": "score", "id": "r", "sequences": [[1]], "model": "m"}, "unsupported", "model",
    "model")
bad("entropy that is no bool", ask(entropy=1), "bad_request", "entropy", "bool")

# Ranges of rollout.
bad("no prompts key", {"type": "rollout", "id": "r"}, "bad_request", "prompts", "missing")
bad("no prompts", ask(prompts=[]), "bad_request", "prompts", "1 to 4096")
bad("prompts that are a map", ask(prompts={}), "bad_request", "prompts", "expected an array")
bad("4097 prompts", ask(prompts=[{"text": ""}] * 4097), "bad_request", "prompts", "1 to 4096")
bad("a prompt that is a str", ask(prompts=["hi"]), "bad_request", "prompts[0]",
    "type str: expected a map with one of tokens, text, messages")
bad("n 0", ask(n=0), "bad_request", "n", "1 to 4096")
bad("n 4097", ask(n=4097), "bad_request", "n", "1 to 4096")
bad("n -1", ask(n=-1), "bad_request", "n", "-1")
bad("n 2^64-1", ask(n=2**64 - 1), "bad_request", "n", "1 to 4096")
bad("n 1.0", ask(n=1.0), "bad_request", "n", "float")
bad("n true", ask(n=True), "bad_request", "n", "bool")
bad("too many samples", ask(n=4096, prompts=[{"tokens": [5]}] * 17), "bad_request", "n", "65536")
bad("seed -1", ask(seed=-1), "bad_request", "seed", "0 or more")
bad("seed 1.5", ask(seed=1.5), "bad_request", "seed", "float")
bad("max_tokens 0", ask(max_tokens=0), "bad_request", "max_tokens", "expected 1 to")
bad("max_tokens 2^32", ask(max_tokens=2**32), "bad_request", "max_tokens", "expected 1 to")
bad("min_tokens above max_tokens", ask(max_tokens=8, min_tokens=9), "bad_request", "min_tokens", "at most max_tokens")
bad("min_tokens above the default", ask(min_tokens=257), "bad_request", "min_tokens", "at most max_tokens")
nan, inf = float("nan"), float("inf")
for v in (-1, -0.5, 0.0009, 1e-300, 100.5, nan, inf, -inf):
    bad(f"temperature {v}", ask(temperature=v), "bad_request", "temperature", "expected 0 (argmax), or 0.001 to 100")
bad("temperature as str", ask(temperature="1"), "bad_request", "temperature", "expected a number")
for k in ("top_p", "min_p"):
    for v in (-0.1, 1.5, 2, nan):
        bad(f"{k} {v}", ask(**{k: v}), "bad_request", k, "expected 0 to 1")
bad("top_k -1", ask(top_k=-1), "bad_request", "top_k", "0 or more")
bad("stop_tokens that are a number", ask(stop_tokens=1), "bad_request", "stop_tokens", "token ids")
bad("stop_tokens below 0", ask(stop_tokens=[1, -2]), "bad_request", "stop_tokens[1]", "-2")
bad("stop that is a str", ask(stop="x"), "bad_request", "stop", "expected an array")
bad("17 stop strings", ask(stop=["x"] * 17), "bad_request", "stop", "0 to 16")
bad("an empty stop string", ask(stop=["x", ""]), "bad_request", "stop[1]", "1 to 256")
bad("a stop string of 257 bytes", ask(stop=["x" * 257]), "bad_request", "stop[0]", "1 to 256")
bad("a stop string that is bin", ask(stop=[b"x"]), "bad_request", "stop[0]", "expected a str")
for v in (0, 4097):
    bad(f"enough {v}", ask1(enough=v), "bad_request", "prompts[0].enough", "1 to 4096")
bad("enough that is no integer", ask1(enough=1.0), "bad_request", "prompts[0].enough", "float")
bad("tools that are a str", ask(tools="calculator"), "bad_request", "tools", "expected an array")
bad("tools that are numbers", ask(tools=[1]), "bad_request", "tools[0]", "expected a str")
bad("logprobs true", ask(logprobs=True), "bad_request", "logprobs", "expected an array")
bad("logprobs of an unknown kind", ask(logprobs=["sampling", "all"]), "bad_request", "logprobs[1]", "sampling, model")
bad("logprobs twice", ask(logprobs=["model", "model"]), "bad_request", "logprobs[1]", "twice")
bad("kept without top_k", ask(kept=True), "bad_request", "kept", "top_k 0")
bad("kept with top_k 1025", ask(kept=True, top_k=1025), "bad_request", "kept", "1 to 1024")
bad("text that is no bool", ask(text="yes"), "bad_request", "text", "bool")
bad("deliver of an unknown way", ask(deliver="token"), "bad_request", "deliver", "sample, prompt, request")

for v in (0, 0.0, 0.0009, -1, 1.1e9, nan, inf, -inf):
    bad(f"timeout {v}", ask(timeout=v), "bad_request", "timeout", "expected 0.001 to 1e+09")
    bad(f"weights_timeout {v}", ask(weights_timeout=v), "bad_request", "weights_timeout", "expected 0.001 to 1e+09")
bad("timeout as str", ask(timeout="1"), "bad_request", "timeout", "expected a number")
bad("weights_timeout as str", ask(weights_timeout="1"), "bad_request", "weights_timeout", "expected a number")
bad("min_weights -1", ask(min_weights=-1), "bad_request", "min_weights", "-1: expected an integer of 0 or more")
bad("min_weights 1.0", ask(min_weights=1.0), "bad_request", "min_weights", "float")

# Prompts.
bad("a prompt of nothing", ask(prompts=[{}]), "bad_request", "prompts[0]", "exactly one")
bad("a prompt of two things", ask1(text="x"), "bad_request", "prompts[0]", "exactly one")
bad("an empty prompt", ask(prompts=[{"tokens": ids(1)}, {"tokens": b""}]), "bad_request", "prompts[1].tokens", "at least one token")
bad("an empty prompt as array", ask(prompts=[{"tokens": []}]), "bad_request", "prompts[0].tokens", "at least one token")
bad("ids of 6 bytes", ask(prompts=[{"tokens": ids(1)}] * 3 + [{"tokens": b"123456"}]), "bad_request", "prompts[3].tokens",
    "multiple of 4")
bad("ids as str", ask(prompts=[{"tokens": "1234"}]), "bad_request", "prompts[0].tokens", "packed u32")
bad("an id below 0", ask(prompts=[{"tokens": [1, 2, -3]}]), "bad_request", "prompts[0].tokens[2]", "-3")
bad("an id of 2^32", ask(prompts=[{"tokens": [2**32]}]), "bad_request", "prompts[0].tokens[0]", "4294967296")
bad("an id of 1.0", ask(prompts=[{"tokens": [1.0]}]), "bad_request", "prompts[0].tokens[0]", "float")
bad("a prompt's id of 1025 bytes", ask1(id="x" * 1025), "bad_request", "prompts[0].id", "0 to 1024")
bad("a prompt's id that is a number", ask1(id=7), "bad_request", "prompts[0].id", "expected a str")
bad("a prompt's text that is bin", ask(prompts=[{"text": b"x"}]), "bad_request", "prompts[0].text", "expected a str")
bad("one sample with n 2", {**ask1(sample=0), "n": 2}, "bad_request", "prompts[0].sample", "n 1")
bad("a sample index of 2^32", ask1(sample=2**32), "bad_request", "prompts[0].sample", "0 to 4294967295")
bad("a prefix without its sample", ask1(prefix=ids(1)), "bad_request", "prompts[0].prefix", "sample")
bad("a prefix longer than max_tokens", {**ask1(sample=0, prefix=ids(1, 2)), "max_tokens": 1}, "bad_request",
    "prompts[0].prefix", "max_tokens")


def chat(*messages):
    return ask(prompts=[{"messages": list(messages)}])


USER = {"role": "user", "content": "x"}
bad("no messages", chat(), "bad_request", "prompts[0].messages", "at least 1")
bad("a message that is a str", chat("hi"), "bad_request", "prompts[0].messages[0]", "expected a map")
bad("an unknown role", chat(USER, {"role": "tool", "content": "x"}), "bad_request", "prompts[0].messages[1].role",
    "system, user, assistant")
bad("a role that is a number", chat({"role": 1, "content": "x"}), "bad_request", "prompts[0].messages[0].role", "expected a str")
bad("no role", chat({"content": "x"}), "bad_request", "prompts[0].messages[0].role", "missing")
bad("no content", chat({"role": "user"}), "bad_request", "prompts[0].messages[0].content", "missing")
bad("content that is a number", chat({"role": "user", "content": 1}), "bad_request", "prompts[0].messages[0].content",
    "array of parts")
bad("a message's unknown key", chat({**USER, "name": "x"}), "bad_request", "prompts[0].messages[0].name", "unknown key")
bad("a part of an unknown type", chat({"role": "assistant", "content": [{"type": "image", "text": ""}]}, USER), "bad_request",
    "prompts[0].messages[0].content[0].type", "text, python, python_output")
bad("a part without text", chat({"role": "assistant", "content": [{"type": "text"}]}, USER), "bad_request",
    "prompts[0].messages[0].content[0].text", "missing")
bad("a part without type", chat({"role": "assistant", "content": [{"text": ""}]}, USER), "bad_request",
    "prompts[0].messages[0].content[0].type", "missing")
bad("a part that is a str", chat({"role": "assistant", "content": ["x"]}, USER), "bad_request",
    "prompts[0].messages[0].content[0]", "expected a map")
bad("an assistant's last message", chat(USER, {"role": "assistant", "content": "x"}), "bad_request",
    "prompts[0].messages[1].role", "the user's")

# The other types.
bad("cancel without target", {"type": "cancel", "id": "r"}, "bad_request", "target", "missing")
bad("cancel of an empty target", {"type": "cancel", "id": "r", "target": ""}, "bad_request", "target", "1 to 128")
bad("score without sequences", {"type": "score", "id": "r"}, "bad_request", "sequences", "missing")
bad("score of no sequences", {"type": "score", "id": "r", "sequences": []}, "bad_request", "sequences", "1 to 4096")
bad("score of an empty sequence", {"type": "score", "id": "r", "sequences": [[1], b""]}, "bad_request", "sequences[1]",
    "at least one token")
bad("score with top 21", {"type": "score", "id": "r", "sequences": [[1]], "top": 21}, "bad_request", "top", "0 to 20")
for v in (0, 0.0001, 101, nan):
    bad(f"score with temperature {v}", {"type": "score", "id": "r", "sequences": [[1]], "temperature": v}, "bad_request",
        "temperature", "0.001 to 100")
bad("tokenize nothing", {"type": "tokenize", "id": "r"}, "bad_request", "", "exactly one")
bad("tokenize two things", {"type": "tokenize", "id": "r", "text": "", "messages": [USER]}, "bad_request", "", "exactly one")
bad("tokenize tokens", {"type": "tokenize", "id": "r", "tokens": [1]}, "bad_request", "tokens", "unknown key")
bad("detokenize without tokens", {"type": "detokenize", "id": "r"}, "bad_request", "tokens", "missing")
bad("ack without target", {"type": "ack", "id": "r"}, "bad_request", "target", "missing")
bad("ack of a target of 129 bytes", {"type": "ack", "id": "r", "target": "x" * 129}, "bad_request", "target", "1 to 128")
bad("ack of two targets", {"type": "ack", "id": "r", "target": ["a", "b"]}, "bad_request", "target", "expected a str")
bad("pause in an unknown mode", {"type": "pause", "id": "r", "mode": "recompute"}, "bad_request", "mode",
    "expected one of finish, keep, abort")
bad("pause in a mode that is no str", {"type": "pause", "id": "r", "mode": 0}, "bad_request", "mode", "expected a str")
bad("pause of a target", {"type": "pause", "id": "r", "target": "x"}, "bad_request", "target", "unknown key")
bad("resume in a mode", {"type": "resume", "id": "r", "mode": "keep"}, "bad_request", "mode", "unknown key")


def bad_weights(name, key, says, code="bad_request", without=None, **fields):
    message = {k: v for k, v in weights(**fields).items() if k != without}
    bad(name, message, code, key, says, id="w")


def bad_chunk(name, key, says, /, without=None, **fields):
    bad(name, {k: v for k, v in chunk(**fields).items() if k != without}, "bad_request", key, says)


# Weights.
bad_weights("weights without version", "version", "missing", without="version")
bad_weights("weights without source", "source", "missing", without="source")
bad_weights("weights of version 0", "version", "cannot accept 0: expected 1 or more", version=0)
bad_weights("weights of version -1", "version", "-1", version=-1)
bad_weights("weights of version 1.0", "version", "float", version=1.0)
bad_weights("weights of a source that is a str", "source", "expected a map", source="p.pt")
bad_weights("weights of no source", "source", "none of", source={})
bad_weights("weights of two sources", "source", "several of", source={"path": "p", "stream": {"tensors": 1, "bytes": 1}})
bad_weights("weights of an unknown source", "source.url", "expected path, stream", source={"url": "x"})
bad_weights("weights of an empty path", "source.path", "1 to 4096", source={"path": ""})
bad_weights("weights of a path of 4097 bytes", "source.path", "1 to 4096", source={"path": "x" * 4097})
bad_weights("weights of a path with a NUL", "source.path", "NUL at byte 1", source={"path": "p\0.pt"})
bad_weights("weights of a path that ends with a NUL", "source.path", "NUL at byte 1", source={"path": "p\0"})
bad_weights("weights of a path that is bin", "source.path", "expected a str", source={"path": b"p"})
bad_weights("weights of a stream that is true", "source.stream", "expected a map", source={"stream": True})
bad_weights("weights of a stream of unknown length", "source.stream.tensors", "missing", source={"stream": {}})
bad_weights("weights of a stream without tensors", "source.stream.tensors", "missing", source={"stream": {"bytes": 8}})
bad_weights("weights of a stream without bytes", "source.stream.bytes", "missing", source={"stream": {"tensors": 1}})
bad_weights("weights of a stream of 0 tensors", "source.stream.tensors", "1 or more", source={"stream": {"tensors": 0, "bytes": 8}})
bad_weights("weights of a stream of 0 bytes", "source.stream.bytes", "1 or more", source={"stream": {"tensors": 1, "bytes": 0}})
bad_weights("weights of a stream with a digest", "source.stream.digest", "expected tensors, bytes",
            source={"stream": {"tensors": 1, "bytes": 8, "digest": DIGEST}})
bad_weights("weights with an unknown policy", "policy", "expected one of finish, keep, recompute, abort", policy="wait")
bad_weights("weights with a policy that is a number", "policy", "expected a str", policy=1)
bad_weights("weights with a model", "model", "model", code="unsupported", model="m")
bad_weights("weights with a digest", "digest", "expected type, id, compress, version, source, policy", digest=DIGEST)

# Chunks.
for k in ("target", "name", "dtype", "shape", "offset", "data"):
    bad_chunk(f"a chunk without {k}", k, f'missing key "{k}"', without=k)
bad_chunk("a chunk of an empty target", "target", "1 to 128", target="")
bad_chunk("a chunk without a name", "name", "1 to 1024", name="")
bad_chunk("a chunk whose name has 1025 bytes", "name", "1 to 1024", name="x" * 1025)
bad_chunk("a chunk whose name has a NUL", "name", "NUL at byte 0", name="\0a")
for v in ("bf16", "torch.bfloat16", "I32"):
    bad_chunk(f"a chunk of dtype {v}", "dtype", "expected one of F32, BF16, F16, F64", dtype=v)
bad_chunk("a chunk of dtype 1", "dtype", "expected a str", dtype=1)
bad_chunk("a chunk whose shape is a number", "shape", "expected an array", shape=2)
bad_chunk("a chunk of 5 dims", "shape", "5 elements: expected 0 to 4", shape=[1, 1, 1, 1, 2])
bad_chunk("a chunk of a dim below 0", "shape[0]", "-2", shape=[-2])
bad_chunk("a chunk of a dim 2.0", "shape[1]", "float", shape=[1, 2.0])
bad_chunk("a chunk of a tensor without elements", "shape[1]", "cannot accept 0", shape=[2, 0], data=b"")
bad_chunk("a chunk of no elements and too many", "shape[2]", "cannot accept 0", shape=[2**63, 2**63, 0], data=b"")
bad_chunk("a chunk of a tensor of 2^63 bytes", "shape", "4294967296 items of 2147483648 bytes (dim 1)", shape=[2**30, 2**32])
bad_chunk("a chunk of a tensor whose bytes wrap to a few", "shape", "less than 2^63", shape=[2**62 + 1, 2, 2, 1])
bad_chunk("a chunk of a dim of 2^64-1", "shape", "18446744073709551615 items of 2 bytes (dim 0)", shape=[2**64 - 1])
for d, n, size in (("F32", 4, 4), ("BF16", 2, 2), ("F16", 2, 2), ("F64", 8, 8)):
    bad_chunk(f"a chunk of {d} at a wrong offset", "offset", f"cannot accept {n - 1}: expected a multiple of {n}", dtype=d,
              shape=[4], offset=n - 1, data=b"")
    bad_chunk(f"a chunk of {d} with half an element", "data", f"cannot accept {n + n // 2} bytes: expected a multiple of {n}",
              dtype=d, shape=[4], data=bytes(n + n // 2))
bad_chunk("a chunk at an offset below 0", "offset", "-2", offset=-2)
bad_chunk("a chunk at an offset that is no integer", "offset", "float", offset=0.0)
bad_chunk("a chunk behind its tensor", "offset", "cannot accept 6: expected at most 4", offset=6, data=b"")
bad_chunk("a chunk at the last offset of all", "offset", "expected at most 4", offset=2**64 - 2)
bad_chunk("a chunk that passes the end", "data", "4 bytes at offset 2: expected at most 2, the tensor has 4", offset=2)
bad_chunk("a chunk that is too long", "data", "6 bytes at offset 0: expected at most 4", data=bytes(6))
bad_chunk("a chunk that is longer than a single number", "data", "4 bytes at offset 0: expected at most 2", shape=[])
bad_chunk("a chunk whose data is a str", "data", "type str: expected bin", data="abcd")
bad_chunk("a chunk whose data is an array", "data", "type array: expected bin", data=[1.0, 2.0])
bad_chunk("a chunk with a digest", "digest", "expected type, id, compress, target, name, dtype, shape, offset, data", digest=DIGEST)

# Commits.
bad("a commit without target", {"type": "weights_commit", "id": "r", "digest": DIGEST}, "bad_request", "target", "missing")
bad("a commit without digest", {"type": "weights_commit", "id": "r", "target": "w"}, "bad_request", "digest", "missing")
bad("a commit of an empty target", commit(target=""), "bad_request", "target", "1 to 128")
for name, v in (("31 digits", DIGEST[:-1]), ("33 digits", DIGEST + "0"), ("capitals", DIGEST.upper()), ("no digits", ""),
                ("a g", DIGEST[:-1] + "g"), ("a NUL", DIGEST[:-1] + "\0"), ("a NUL after it", DIGEST + "\0")):
    bad(f"a commit whose digest has {name}", commit(digest=v), "bad_request", "digest", "expected 32 lower-case hex digits")
bad("a commit whose digest is bin", commit(digest=bytes(16)), "bad_request", "digest", "expected a str")
bad("a commit with a version", commit(version=1), "bad_request", "version", "expected type, id, compress, target, digest")

# ---- Replies.  `value` is the struct; `message` the bare bytes; arrays of numbers are JSON arrays in `value`.

replies = []
W = [3, "0123456789abcdef0123456789abcdef"]


def reply(name, type, value, body, id="r"):
    replies.append({"name": name, "reply": type, "id": id, "value": value, "hex": pack({"type": type, "id": id, **body}).hex()})


pong = {"version": "0.1.0", "protocol": 1, "model": "calc-d4", "weights": W, "backend": "cpu", "numerics": "bf16", "state": "ready"}
reply("pong", "pong", pong, pong)
counts = {k: i for i, k in enumerate(("rows", "queued", "pages_total", "pages_used", "pages_cached", "pages_free",
                                      "pages_shared", "requests", "samples", "prompt_tokens", "prefilled_tokens",
                                      "cached_tokens", "sampled_tokens", "forced_tokens", "preemptions", "steps"))}
counts["steps"] = 2**40
status = {**counts, "weights": W, "seconds": 1.5}
reply("status", "status", status, status)
accepted = {"samples": 8, "seed": 2**63, "weights": W, "numerics": "bf16"}
reply("accepted", "accepted", {**accepted, "seed": str(2**63)}, accepted)
done = {"samples": 8, "prompt_tokens": 5, "cached_tokens": 0, "sampled_tokens": 700, "forced_tokens": 12, "seconds": 0.25}
reply("done of a rollout", "done", done, done)
reply("done of a cancel", "done", None, {})
reply("weights", "weights", {"weights": W}, {"weights": W}, id="w")
reply("error", "error", {"code": "bad_request", "message": "cannot accept 0: expected 1 to 4096", "key": "n"},
      {"code": "bad_request", "message": "cannot accept 0: expected 1 to 4096", "key": "n"})
reply("error without id or key", "error", {"code": "bad_request", "message": "no map"}, {"code": "bad_request", "message": "no map"},
      id="")
reply("error to be tried again", "error", {"code": "overloaded", "message": "1000 requests wait", "retry_after": 2.5},
      {"code": "overloaded", "message": "1000 requests wait", "retry_after": 2.5})
reply("tokens", "tokens", {"tokens": [0, 7, 4294967295]}, {"tokens": ids(0, 7, 4294967295)})
reply("text", "text", {"text": "a\ufffd", "bytes": "61ff"}, {"text": "a\ufffd", "bytes": b"a\xff"})
reply("scores", "scores", {"scores": [{"logprobs": [1.0, -0.5]}, {"logprobs": [1.0]}], "top": 0, "weights": W, "numerics": "f32"},
      {"scores": [{"logprobs": f32(1, -0.5)}, {"logprobs": f32(1)}], "weights": W, "numerics": "f32"})
reply("scores with the best two", "scores",
      {"scores": [{"logprobs": [1.0], "top_ids": [4294967295, 4294967295], "top_logprobs": [1.0, 1.0], "next_ids": [4, 2],
                   "next_logprobs": [-0.25, -2.0]}], "top": 2, "weights": W, "numerics": "f32"},
      {"scores": [{"logprobs": f32(1), "top_ids": ids(4294967295, 4294967295), "top_logprobs": f32(1, 1), "next_ids": ids(4, 2),
                   "next_logprobs": f32(-0.25, -2)}], "weights": W, "numerics": "f32"})
bare = {"prompt": 0, "sample": 1, "seed": "42", "tokens": [], "mask": [], "finish": "cancelled", "tool_calls": [], "weights": []}
bare_wire = {"prompt": 0, "sample": 1, "seed": 42, "tokens": b"", "mask": b"", "finish": "cancelled", "tool_calls": [], "weights": []}
full = {"prompt": 2, "sample": 7, "prompt_id": "line 7", "seed": str(2**64 - 1), "prompt_tokens": [1, 2], "tokens": [10, 11, 12],
        "mask": [1, 0, 1], "logprobs": [-0.5, 1.0, -0.25], "model_logprobs": [-0.75, 1.0, -0.125],
        "entropy": [0.5, 1.0, 0.0], "kept_ids": [10, 9, 12],
        "kept_offsets": [0, 2, 2, 3], "finish": "stop", "stop": 12, "tool_calls": [{"at": 0, "tool": "calculator", "ok": True}],
        "weights": [[0, 3, W[1]], [2, 4, "f" * 32]], "text": "4\ufffd"}
full_wire = {**full, "seed": 2**64 - 1, "prompt_tokens": ids(1, 2), "tokens": ids(10, 11, 12), "mask": bytes([1, 0, 1]),
             "logprobs": f32(-0.5, 1, -0.25), "model_logprobs": f32(-0.75, 1, -0.125), "entropy": f32(0.5, 1, 0),
             "kept_ids": ids(10, 9, 12), "kept_offsets": ids(0, 2, 2, 3)}
reply("samples", "samples", [full, bare], {"samples": [full_wire, bare_wire]})
ended = {"finish": "stop", "stop": "é\n", "tool_calls": [], "weights": []}  # keys in the order of the table
reply("a sample that a string ended", "samples", [{**bare, **ended}],
      {"samples": [{**{k: v for k, v in bare_wire.items() if k not in ended}, **ended}]})
empty = {**bare, "prompt_id": "", "logprobs": [], "entropy": [], "kept_ids": [], "kept_offsets": [0], "text": ""}
reply("an empty sample with all arrays", "samples", [empty],
      {"samples": [{"prompt": 0, "sample": 1, "prompt_id": "", "seed": 42, "tokens": b"", "mask": b"", "logprobs": b"",
                    "entropy": b"", "kept_ids": b"", "kept_offsets": ids(0), "finish": "cancelled", "tool_calls": [], "weights": [], "text": ""}]})

# ---- Files.


def write(name, rows):
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (HERE / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def main():
    write("requests.jsonl", requests)
    write("replies.jsonl", replies)
    CORPUS.mkdir(parents=True, exist_ok=True)
    for old in CORPUS.glob("*"):
        old.unlink()
    # Every accepted one, and of the refused those that break the structure; all of them small.
    for row in requests:
        frame = bytes.fromhex(row["hex"])
        if len(frame) <= 128 and ("request" in row or not row["error"]["key"]) or "12 million" in row["name"]:
            name = "".join(c if c.isalnum() else "_" for c in row["name"])
            (CORPUS / name).write_bytes(frame)
    print(len(requests), "requests,", len(replies), "replies,", len(list(CORPUS.glob("*"))), "corpus files")


main()
