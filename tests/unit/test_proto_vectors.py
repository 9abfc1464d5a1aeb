"""The Python package against the shared vectors (tests/vectors)."""
import json
import pathlib
import re

import msgpack
import numpy as np
import pytest

from coppice import Sample, Scores, errors, wire
from coppice.client import prompt_map

VECTORS = pathlib.Path(__file__).parent.parent / "vectors"


def rows(name):
    lines = (VECTORS / name).read_text(encoding="utf-8").splitlines()
    return [pytest.param(row, id=row["name"]) for row in map(json.loads, lines)]


REQUESTS = rows("requests.jsonl")
GOOD = [p for p in REQUESTS if "request" in p.values[0]]
BAD = [p for p in REQUESTS if "error" in p.values[0]]
# What no reader of MessagePack and Zstandard may accept, as opposed to what only a worker refuses.
BROKEN = [p for p in BAD if p.values[0]["error"]["id"] == "" and not p.values[0]["error"]["key"]
          and "--max-message" not in p.values[0]["error"]["says"]]


# Integers that are strings in the JSON where they pass 2^53.
BIG = ("seed", "min_weights", "version", "offset")


def ids_of(value):
    """Token ids on the wire, in either form."""
    return wire.array(value, "<u4").tolist() if isinstance(value, bytes) else value


@pytest.mark.parametrize("row", GOOD)
def test_accepted_requests_unpack_to_the_same_fields(row):
    message, wanted = wire.unpack(bytes.fromhex(row["hex"])), row["request"]
    for key, value in message.items():
        if key == "prompts":
            continue
        if key in ("tokens", "stop_tokens"):
            value = ids_of(value)
        if key == "sequences":
            value = [ids_of(s) for s in value]
        if key == "logprobs":
            value = sorted(value, reverse=True)
        if key == "data":
            value = value.hex()
        expected = wanted[key]
        if key == "source" and "stream" in expected:
            expected = {"stream": {k: int(v) for k, v in expected["stream"].items()}}
        assert value == (int(expected) if key in BIG else expected), key
    for prompt, fields in zip(message.get("prompts", ()), wanted.get("prompts", ())):
        for key, value in prompt.items():
            value = ids_of(value) if key in ("tokens", "prefix") else value
            assert value == (int(fields[key]) if key == "seed" else fields[key]), key


@pytest.mark.parametrize("row", [p for p in GOOD if p.values[0]["request"]["type"] == "rollout"])
def test_prompts_pack_to_the_same_meaning(row):
    for fields in row["request"]["prompts"]:
        given = {k: int(v) if k == "seed" else v for k, v in fields.items() if v is not None}
        packed = prompt_map(given)
        assert {k: ids_of(v) if k in ("tokens", "prefix") else v for k, v in packed.items()} == given
        assert msgpack.unpackb(msgpack.packb(packed)) == packed


@pytest.mark.parametrize("row", BAD)
def test_every_expected_code_has_its_exception(row):
    error = errors.from_reply({"type": "error", "message": "m", **row["error"]})
    assert type(error) is not errors.CoppiceError
    assert (error.code, error.key) == (row["error"]["code"], row["error"]["key"])


@pytest.mark.parametrize("row", BROKEN)
def test_broken_frames_are_refused(row):
    with pytest.raises(errors.ProtocolError):
        wire.unpack(bytes.fromhex(row["hex"]))


def plain(value):
    """Arrays and tuples as lists, for comparing with JSON."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [v._asdict() if hasattr(v, "tool") else plain(v) for v in value]
    return value


def check_sample(m, wanted):
    sample = Sample.from_wire(m)
    for key in Sample.__dataclass_fields__:
        expected = int(wanted["seed"]) if key == "seed" else wanted.get(key)
        assert plain(getattr(sample, key)) == expected, key


@pytest.mark.parametrize("row", rows("replies.jsonl"))
def test_replies_read_as_the_vectors_say(row):
    reply, wanted = wire.unpack(bytes.fromhex(row["hex"])), row["value"]
    assert (reply.pop("type"), reply.pop("id")) == (row["reply"], row["id"])
    if row["reply"] == "samples":
        assert len(reply["samples"]) == len(wanted)
        for m, w in zip(reply["samples"], wanted):
            check_sample(m, w)
    elif row["reply"] == "scores":
        scores = Scores.from_wire(reply, wanted["top"])
        assert (list(scores.weights), scores.numerics) == (wanted["weights"], wanted["numerics"])
        for score, w in zip(scores.scores, wanted["scores"]):
            for key, value in w.items():
                assert getattr(score, key).ravel().tolist() == value, key
    elif row["reply"] == "error":
        error = errors.from_reply(reply)
        assert (error.code, error.message, error.key, error.retry_after) == tuple(
            wanted.get(k) for k in ("code", "message", "key", "retry_after"))
    else:
        for key, value in (wanted or {}).items():
            got = ids_of(reply[key]) if key == "tokens" else reply[key].hex() if key == "bytes" else reply[key]
            assert got == (int(value) if key == "seed" else value), key
        assert set(reply) == set(wanted or {})


def readme_examples():
    """The hex of each indented example in proto/README.md, its lines joined where one starts further right."""
    text = (VECTORS.parent.parent / "proto" / "README.md").read_text(encoding="utf-8")
    examples = []
    for block in re.findall(r"^```\n(.*?)^```", text, re.M | re.S):
        for line in block.splitlines():
            digits = re.match(r" *((?:[0-9A-F]{2})+ )+ *", line + " ").group().replace(" ", "")
            if line.startswith(" "):
                examples[-1] += digits
            else:
                examples.append(digits)
    return [e.lower() for e in examples]


def test_the_examples_of_the_specification_are_vectors():
    known = [p.values[0]["hex"] for p in REQUESTS + rows("replies.jsonl")]
    examples = readme_examples()
    assert len(examples) == 10
    for example in examples:
        whole = example[0] == "8"
        assert example in known if whole else example[:8] == wire._MAGIC.hex() or ids_of(wire.msgpack.unpackb(
            bytes.fromhex(example))) == [5, 2**32 - 1], example
