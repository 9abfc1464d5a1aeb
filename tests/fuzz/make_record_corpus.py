"""Writes tests/fuzz/corpus/record: python tests/fuzz/make_record_corpus.py (needs msgpack)"""
import pathlib
import re
import struct

import msgpack

CORPUS = pathlib.Path("tests/fuzz/corpus/record")
u32 = lambda *ids: struct.pack(f"<{len(ids)}I", *ids)
f32 = lambda *values: struct.pack(f"<{len(values)}f", *values)

SAMPLE = {"prompt": 3, "sample": 0, "seed": 2**64 - 1, "tokens": u32(66, 10, 1019), "mask": b"\1\0\1", "logprobs": f32(-0.5, 1, -2),
          "model_logprobs": f32(-0.5, 1, -2), "entropy": f32(0, 1, 3), "kept_ids": u32(66, 1019), "kept_offsets": u32(0, 1, 1, 2),
          "finish": "stop", "stop": 1019, "tool_calls": [{"at": 1, "tool": "calculator", "ok": True}], "weights": [[0, 0, "abc"]],
          "text": "a\x1b[31m\n"}
EMPTY = {"prompt": 3, "sample": 2, "seed": 0, "tokens": b"", "mask": b"", "finish": "length", "stop": "END", "tool_calls": [],
         "weights": [], "text": ""}
RECORD = {"line": 3, "prompt_id": "three", "prompt_tokens": u32(65, 66), "input": {"text": "x", "n": [1, None, 0.5, {"deep": False}]},
          "samples": [SAMPLE, EMPTY], "rewards": [0.5, None, -1]}


def put(name, value):
    CORPUS.mkdir(parents=True, exist_ok=True)
    (CORPUS / re.sub(r"\W+", "_", name)).write_bytes(value if isinstance(value, bytes) else msgpack.packb(value))


put("record", RECORD)
put("torn", msgpack.packb(RECORD)[:-2])
put("no samples", dict(RECORD, samples=[]))
put("failure", {"line": 3, "prompt_id": "three", "input": None, "error": "text: \x9b it is not a string"})
put("messages", dict(RECORD, samples=[EMPTY], input={"messages": [{"role": "user\x07", "content": "a\u202eb"}]}))
put("input with binary", dict(RECORD, input={"a": b"b"}))
put("input with numbers as keys", dict(RECORD, input={"a": {1: 2}}))
put("rewards of text", dict(RECORD, rewards=["much"]))
put("reward not a number", dict(RECORD, rewards=[float("nan")]))
for key, values in {"tokens": [b"abc", u32(2**32 - 1, 0, 0), [1, 2, 3]], "mask": [b"\1", b"\1\2\0"], "logprobs": [f32(1), f32(1, 2, float("inf"))],
                    "kept_offsets": [u32(0, 2), u32(0, 2, 1, 2)], "finish": ["end", 1], "stop": [-1, []], "text": [b"a"],
                    "tool_calls": [[1], [{"at": 9, "tool": "c", "ok": True}]], "weights": [[[0, 0]], {}], "sample": [2**40], "seed": ["1"]}.items():
    for i, value in enumerate(values):
        put(f"{key} {i}", dict(RECORD, samples=[dict(SAMPLE, **{key: value})]))
