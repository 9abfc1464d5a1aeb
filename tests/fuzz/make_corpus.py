"""Writes tests/fuzz/corpus/pt and corpus/pickle: python tests/fuzz/make_corpus.py"""
import pathlib
import pickle
import re
import sys

sys.path.insert(0, "tests/unit")
import hostile_pt  # noqa: E402
from pt_writer import Entry, Tensor, archive, entries_of, model, state_dict  # noqa: E402

CORPUS = pathlib.Path("tests/fuzz/corpus")


def put(kind, name, data):
    path = CORPUS / kind / re.sub(r"\W+", "_", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    assert len(data) < 8192, (name, len(data))
    path.write_bytes(data)


# A small tensor or two is as good to a fuzzer as a model, and is mutated much faster.
SMALL = {"a": Tensor([2, 3], "BFloat16"), "_orig_mod.b": Tensor([1]), "c": Tensor([4], "Double")}

for name in ("no end record", "two end records", "locator outside", "end records disagree", "absurd count", "directory wraps",
             "compressed", "encrypted", "duplicate names", "name that climbs", "two roots", "local name differs", "size wraps",
             "header wraps", "zip64 field too short", "overlapping entries", "no data.pkl", "missing storage", "big-endian",
             "legacy torch", "tar", "gguf", "safetensors"):
    put("pt", "zip " + name, hostile_pt.ZIP[name][0])
for name in ("sizes overflow", "negative stride", "offset too large", "numel too large", "integers", "overlapping tensors"):
    put("pt", "tensor " + name, hostile_pt.TENSOR[name][0])
put("pt", "model", hostile_pt.GOOD)
put("pt", "small", archive(entries_of(SMALL)))
put("pt", "small without zip64", archive(entries_of(SMALL), zip64=False))
put("pt", "small with zip64 entries", archive([Entry(e.path, e.data, zip64=True) for e in entries_of(SMALL)]))
put("pt", "small without byteorder", archive(entries_of(SMALL, byteorder=None)))
put("pt", "empty", b"")


class Encoding:
    """Pickles as tiktoken's does."""


Encoding.__module__, Encoding.__qualname__ = "tiktoken.core", "Encoding"
tokenizer = Encoding()
tokenizer.__dict__ = {"name": "rustbpe", "pat_str": "x+", "mergeable_ranks": {bytes([i]): i for i in range(20)},
                      "special_tokens": {"<|bos|>": 20}}
module = type(sys)("tiktoken.core")
module.Encoding = Encoding
sys.modules["tiktoken"], sys.modules["tiktoken.core"] = type(sys)("tiktoken"), module
VALUES = {"tokenizer": tokenizer, "scalars": (None, True, -1, 300, 70000, 2**40, 2**70, 1.5, "t\u00e9xt", b"\xff" * 3),
          "containers": [{"a": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)]}, {}], "long string": "x" * 300}
for name, value in VALUES.items():
    for protocol in (2, 3, 4, 5):
        if not (name == "tokenizer" and protocol == 2):
            put("pickle", f"{name} {protocol}", pickle.dumps(value, protocol))
shared = [1]
put("pickle", "shared", pickle.dumps([shared, shared, {"k": shared}], 4))
recursive = []
recursive.append(recursive)
put("pickle", "recursive", pickle.dumps(recursive, 4))
put("pickle", "state dict", state_dict(SMALL))
put("pickle", "doubling", b"\x80\x04)\x94" + b"".join(b"h" + bytes([i]) + b"\x86\x94" for i in range(50)) + b".")
for name in ("os.system", "INST", "no STOP", "a list", "key is bytes", "nested dicts"):
    data = hostile_pt.PICKLE[name][0]
    at = data.index(b"\x80\x02")
    put("pickle", name, data[at : data.index(b"PK\7\10", at)])
put("pickle", "deep", b"\x80\x02" + b"]" * 100 + b"a" * 99 + b".")
put("pickle", "marks", b"\x80\x02" + b"(" * 300 + b".")
put("pickle", "memo", b"\x80\x02Nr\xff\xff\xff\xff.")
put("pickle", "text beyond the end", b"\x80\x04\x8e" + b"\xff" * 8 + b".")
