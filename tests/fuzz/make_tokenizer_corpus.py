"""Writes tests/fuzz/corpus/tokenizer_pkl: a tokenizer of 256 bytes and a few merges, and everything that is wrong with one.

python3 tests/fuzz/make_tokenizer_corpus.py
"""
import copyreg, pathlib, pickle, sys, types

OUT = pathlib.Path("tests/fuzz/corpus/tokenizer_pkl")
PATTERN = (r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|"""
           r"""\s*[\r\n]|\s+(?!\S)|\s+""")
SPECIALS = ["<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>", "<|python_start|>",
            "<|python_end|>", "<|output_start|>", "<|output_end|>"]


class Encoding:
    def __init__(self, state): self.state = state
    def __reduce_ex__(self, protocol): return (copyreg.__newobj__, (Encoding,), self.state)


module = types.ModuleType("tiktoken.core")
Encoding.__module__, Encoding.__qualname__ = "tiktoken.core", "Encoding"
module.Encoding = Encoding
sys.modules["tiktoken"], sys.modules["tiktoken.core"] = types.ModuleType("tiktoken"), module


def state(ranks=None, **changes):
    ranks = {bytes([b]): b for b in range(256)} | {b"th": 256, b"the": 257} if ranks is None else ranks
    s = {"name": "rustbpe", "pat_str": PATTERN, "mergeable_ranks": ranks,
         "special_tokens": {name: len(ranks) + i for i, name in enumerate(SPECIALS)}}
    s.update(changes)
    return {k: v for k, v in s.items() if v is not ...}


bytes256 = {bytes([b]): b for b in range(256)}
cases = {
    "good": state(), "good_three_digits": state(pat_str=PATTERN.replace("{1,2}", "{1,3}")), "bare_string": "gpt2",
    "no_name": state(name=...), "no_pattern": state(pat_str=...), "no_ranks": state(mergeable_ranks=...),
    "no_specials": state(special_tokens=...), "extra_key": state(more=1), "other_pattern": state(pat_str=r"\w+"),
    "byte_missing": state({k: v for k, v in bytes256.items() if v != 65} | {b"ab": 65}),
    "rank_twice": state(bytes256 | {b"ab": 255}), "gap": state(bytes256 | {b"ab": 300}),
    "negative_rank": state(bytes256 | {b"ab": -1}), "text_rank": state(bytes256 | {b"ab": "256"}),
    "text_token": state(bytes256 | {"ab": 256}), "empty_token": state(bytes256 | {b"": 256}),
    "special_in_ranks": state(special_tokens={"<|bos|>": 5}), "special_gap": state(special_tokens={"<|bos|>": 999}),
    "special_twice": state(special_tokens={"<|bos|>": 258, "<|user_start|>": 258}),
    "special_of_bytes": state(special_tokens={b"<|bos|>": 258}), "ranks_list": state(mergeable_ranks=[1, 2]),
    "name_number": state(name=7),
}
OUT.mkdir(parents=True, exist_ok=True)
for name, s in cases.items():
    (OUT / name).write_bytes(pickle.dumps(Encoding(s), 4))
good = (OUT / "good").read_bytes()
(OUT / "protocol_5").write_bytes(pickle.dumps(Encoding(state()), 5))
(OUT / "cut").write_bytes(good[:len(good) // 2])
(OUT / "other_global").write_bytes(good.replace(b"tiktoken.core", b"tiktoken.cure", 1))
(OUT / "os_system").write_bytes(b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.")
(OUT / "plain_dict").write_bytes(pickle.dumps(state(), 4))
(OUT / "empty").write_bytes(b"")
