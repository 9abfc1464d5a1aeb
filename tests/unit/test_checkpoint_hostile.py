"""`coppice inspect` on files that must be refused, each with its words, and on unusual ones that must be accepted."""
import json
import math
import os
import pathlib
import re
import shutil
import struct
import subprocess

import pytest

import hostile_pt
from pt_writer import CONFIG, Entry, Tensor, archive, entries_of, model, state_dict

COPPICE = os.environ.get("COPPICE", "build/coppice")
MODELS = pathlib.Path("tests/models")


def write(folder, pt, config=CONFIG, step=10, meta=None):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"model_{step:06d}.pt").write_bytes(pt)
    (folder / f"meta_{step:06d}.json").write_text(json.dumps({"step": step, "model_config": config}) if meta is None else meta)
    return folder


def run(path, *options):
    return subprocess.run([COPPICE, "inspect", str(path), "--json", *options], capture_output=True, text=True, timeout=60)


def inspect(path, *options):
    p = run(path, *options)
    assert (p.returncode, p.stderr) == (0, "")
    return json.loads(p.stdout)


def refused(path, words, *options):
    p = run(path, *options)
    assert p.returncode == 1 and p.stdout == "", (p.returncode, p.stdout, p.stderr)
    assert words in p.stderr
    assert p.stderr.startswith("coppice: ") and p.stderr.count("\n") == 1


@pytest.mark.parametrize("case", hostile_pt.ALL)
def test_hostile_file_is_refused(tmp_path, case):
    pt, words = hostile_pt.ALL[case]
    refused(write(tmp_path, pt), words)


def save(tensors, **options):
    return archive(entries_of(tensors), **options)


# ---- Models that are not nanochat's.

FORKS = {
    "router": ({"transformer.h.0.mlp.router.weight": Tensor([4, 8])}, "mixture of experts"),
    "experts": ({"transformer.h.0.mlp.experts.w1": Tensor([4, 8])}, "mixture of experts"),
    "shared expert": ({"transformer.h.0.mlp.shared_expert.w": Tensor([4, 8])}, "mixture of experts"),
    "engram": ({"bigram_embed.embed.weight": Tensor([80, 8])}, "engram"),
    "engram's scalars": ({"bigram_lambdas": Tensor([1])}, "engram"),
    "V1": ({"value_embed_A.weight": Tensor([16, 32]), "value_embed_B.weight": Tensor([8, 32]), "v0_lambdas": Tensor([1])}, "V1"),
    "V2": ({"value_embed.weight": Tensor([16, 8]), "v0_lambdas": Tensor([1])}, "V2"),
    "V3": ({"value_embeds.0.weight": Tensor([16, 8]), "v0_lambdas": Tensor([1])}, "V3"),
    "unknown tensors": ({"transformer.h.0.attn.wr_a": Tensor([8]), "attn_bank": Tensor([8])},
                        '2 tensors that generation A of 1 layers does not have: "attn_bank", "transformer.h.0.attn.wr_a"'),
    "a layer too many": ({"transformer.h.1.attn.c_q.weight": Tensor([8, 8])}, '"transformer.h.1.attn.c_q.weight"'),
    "leading zero": ({"transformer.h.00.attn.c_q.weight": Tensor([8, 8])}, '"transformer.h.00.attn.c_q.weight"'),
    "Hugging Face names": ({"model.embed_tokens.weight": Tensor([16, 8])}, "Hugging Face"),
    "lambdas, but one": ({"resid_lambdas": Tensor([1])}, '1 tensors are missing, the first is "x0_lambdas"'),
    "lambdas of another length": ({"resid_lambdas": Tensor([2]), "x0_lambdas": Tensor([1])}, '"resid_lambdas" is 2, where model_config makes it 1'),
    "smear without backout": ({"smear_gate.weight": Tensor([1, 8]), "smear_lambda": Tensor([1])}, "only 2 of them are there"),
    "value embeddings without gates": ({"value_embeds.0.weight": Tensor([16, 8])}, "value embeddings without gates"),
    "gates of 16 channels": ({"transformer.h.0.attn.ve_gate.weight": Tensor([2, 16])}, "gates of 16 channels"),
    "fewer rows than ids": ({"transformer.wte.weight": Tensor([8, 8])}, "8 rows, fewer than vocab_size 16"),
    "rows that differ": ({"lm_head.weight": Tensor([64, 8])}, '"lm_head.weight" is 64 x 8, where model_config makes it 16 x 8'),
    "another width": ({"transformer.h.0.mlp.c_fc.weight": Tensor([16, 8])}, '"transformer.h.0.mlp.c_fc.weight" is 16 x 8'),
    "a scalar": ({"transformer.h.0.attn.c_q.weight": Tensor([])}, "is a scalar, where"),
}


@pytest.mark.parametrize("case", FORKS)
def test_fork_is_refused_by_name(tmp_path, case):
    extra, words = FORKS[case]
    refused(write(tmp_path, save({**model(), **extra})), words)


def test_missing_tensors_are_named(tmp_path):
    t = model()
    del t["transformer.h.0.attn.c_k.weight"], t["lm_head.weight"]
    refused(write(tmp_path, save(t)), '2 tensors are missing, the first is "lm_head.weight"')


@pytest.mark.parametrize("rows", [16, 64])
def test_a_missing_embedding_is_missing_and_no_wrong_head(tmp_path, rows):
    t = model(rows=rows)
    del t["transformer.wte.weight"]
    refused(write(tmp_path, save(t)), '1 tensors are missing, the first is "transformer.wte.weight"')


def test_more_tensors_than_any_model_has_are_refused_at_once(tmp_path):
    """Those that are no nanochat tensors, so that 8192 of them get past the reader and are counted as unknown."""
    def names(n):
        return {f"t{i}": Tensor([1], "BFloat16", key="0", numel=8192, data=None if i else b"\0" * 16384) for i in range(n)}
    refused(write(tmp_path / "most", save(names(8192))), "8192 tensors that generation A")
    refused(write(tmp_path / "more", save(names(8193))), "names 8193 tensors, more than 8192: not a state dict")


def test_smear_with_gates_of_32_channels_is_a_fork(tmp_path):
    config = {**CONFIG, "n_embd": 32}
    t = model("F", dim=32)
    t["transformer.h.0.attn.ve_gate.weight"] = Tensor([2, 32])
    refused(write(tmp_path, save(t), config), "gates of 32 channels with smear")


def test_value_embeddings_on_the_wrong_layers_are_refused(tmp_path):
    t = model("E", n_layers=2, dim=16)
    t["value_embeds.0.weight"] = t.pop("value_embeds.1.weight")
    refused(write(tmp_path, save(t), {**CONFIG, "n_layer": 2, "n_embd": 16}), '"value_embeds.0.weight"; missing value_embeds.1.weight')


def test_a_model_narrower_than_its_gates_is_refused(tmp_path):
    refused(write(tmp_path, save(model("E"))), "12 channels do not fit a model of width 8")
    t = {**model("F", dim=16)}
    refused(write(tmp_path / "f", save(t), {**CONFIG, "n_embd": 16}), "does not fit a model of width 16")


@pytest.mark.parametrize("value", [b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff", b"\1\0\x80\x7f"])
@pytest.mark.parametrize("tensor", ["resid_lambdas", "x0_lambdas", "smear_lambda", "backout_lambda"])
def test_scalars_that_are_not_finite_are_refused(tmp_path, tensor, value):
    t = model("F", dim=24)
    t[tensor] = Tensor([1], data=value)
    refused(write(tmp_path, save(t), {**CONFIG, "n_embd": 24}), f'"{tensor}" holds a number that is not finite')


def test_the_largest_finite_scalar_is_accepted(tmp_path):
    t = {**model("B"), "resid_lambdas": Tensor([1], data=b"\xff\xff\x7f\x7f")}
    assert inspect(write(tmp_path, save(t)))["arch"]["generation"] == "B"


# ---- The configuration.

CONFIGS = {
    "no n_kv_head": ({"n_kv_head": None}, "lacks n_kv_head"),
    "a float": ({"n_layer": 1.0}, "n_layer is not a whole number"),
    "a bool": ({"n_layer": True}, "n_layer is not a whole number"),
    "a string": ({"n_layer": "1"}, "n_layer is not a whole number"),
    "zero": ({"n_layer": 0}, "n_layer is 0, not within 1 and 256"),
    "negative": ({"n_embd": -8}, "n_embd is -8"),
    "absurd layers": ({"n_layer": 10**9}, "n_layer is 1000000000"),
    "absurd width": ({"n_embd": 2**40}, "n_embd is 1099511627776"),
    "absurd vocabulary": ({"vocab_size": 2**31}, "vocab_size is 2147483648"),
    "absurd sequence": ({"sequence_len": 2**30}, "sequence_len is 1073741824"),
    "width and heads": ({"n_head": 3}, "n_embd 8 is not a multiple of n_head 3"),
    "heads and KV heads": ({"n_head": 4, "n_kv_head": 3}, "n_head 4 is not a multiple of n_kv_head 3"),
    "odd heads": ({"n_head": 8}, "odd width, 1"),
    "experts": ({"num_experts": 8}, "mixtures of experts"),
    "top_k": ({"top_k": 2}, "mixtures of experts"),
    "unknown keys": ({"rope_theta": 1, "moe": 2}, 'keys that nanochat never wrote: "rope_theta", "moe"'),
    "pattern of other letters": ({"window_pattern": "SXL"}, "window_pattern is not made of S and L"),
    "empty pattern": ({"window_pattern": ""}, "window_pattern is not made of S and L"),
    "pattern that is no string": ({"window_pattern": 5}, "window_pattern is not made of S and L"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_config_is_refused(tmp_path, case):
    changes, words = CONFIGS[case]
    config = {k: v for k, v in {**CONFIG, **changes}.items() if v is not None}
    refused(write(tmp_path, hostile_pt.GOOD, config), words)


METAS = {
    "empty": ("", "is not JSON"),
    "cut off": ('{"model_config": {', "is not JSON"),
    "duplicate keys": ('{"model_config": {}, "model_config": {}}', "duplicate object key"),
    "no object": ("[1]", "has no model_config"),
    "no config": ('{"step": 1}', "has no model_config"),
    "deep": ("[" * 100000, "is not JSON"),
    "NaN as a dimension": (json.dumps({"model_config": {**CONFIG, "n_layer": math.nan}}), "n_layer is not a whole number"),
    "not a number at all": ('{"model_config": Nan}', "is not JSON"),
    "a byte more than 1 MB": (json.dumps({"model_config": CONFIG}).ljust((1 << 20) + 1), "a meta file of 1048577 bytes, more than 1048576"),
}


@pytest.mark.parametrize("case", METAS)
def test_meta_is_refused(tmp_path, case):
    meta, words = METAS[case]
    refused(write(tmp_path, hostile_pt.GOOD, meta=meta), words)


def test_a_meta_of_1_mb_is_accepted(tmp_path):
    inspect(write(tmp_path, hostile_pt.GOOD, meta=json.dumps({"model_config": CONFIG}).ljust(1 << 20)))


def test_missing_meta_is_named(tmp_path):
    write(tmp_path, hostile_pt.GOOD)
    (tmp_path / "meta_000010.json").unlink()
    refused(tmp_path, "meta_000010.json")


def test_nan_and_infinity_in_meta_are_accepted(tmp_path):
    meta = {"model_config": CONFIG, "val_bpb": None, "a": math.nan, "b": [math.inf, -math.inf], 'NaN "': "Infinity \\ NaN"}
    text = json.dumps(meta, indent=2)
    assert ": NaN" in text and "-Infinity" in text
    inspect(write(tmp_path, hostile_pt.GOOD, meta=text))


def test_nan_within_a_string_is_left_alone(tmp_path):
    """Replaced after the escaped quote, the first key would become the second."""
    meta = {"model_config": CONFIG, '"NaN': 1, '"null': 2}
    inspect(write(tmp_path, hostile_pt.GOOD, meta=json.dumps(meta)))


# ---- Unusual files that are good.

def good(tmp_path, pt, config=CONFIG, generation="A"):
    found = inspect(write(tmp_path, pt, config))
    assert found["arch"]["generation"] == generation
    return {t["name"]: t for t in found["tensors"]}


def test_without_zip64(tmp_path):
    good(tmp_path, save(model(), zip64=False))


def test_zip64_in_every_entry(tmp_path):
    entries = entries_of(model())
    for e in entries:
        e.zip64 = True
    good(tmp_path, archive(entries, narrow=(0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)))


def test_archive_with_a_comment(tmp_path):
    good(tmp_path, save(model(), comment=b"made by hand"))


def test_without_byteorder(tmp_path):
    good(tmp_path, archive(entries_of(model(), byteorder=None)))


def test_another_root_folder(tmp_path):
    good(tmp_path, archive(entries_of(model(), root="archive")))


def test_sparse_file_of_5_gib(tmp_path):
    """Data that lies above 4 GiB, where only the zip64 fields can say so."""
    folder = write(tmp_path, b"")
    gap = 5 << 30
    entries = entries_of(model())
    small = archive(entries[:-1])
    # The last entry moves behind the gap: its header is written there, the directory after it.
    path, data = entries[-1].path, entries[-1].data
    body = small[: small.index(b"PK\1\2")]
    header = struct.pack("<IHHHHHIIIHH", 0x04034B50, 0, 0x0808, 0, 0, 0, 0, 0, 0, len(path), 0) + path + data
    entries[-1] = Entry(path, data, local={"at": gap})
    tail_at = gap + len(header)
    whole = archive(entries, directory=tail_at, narrow=(0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF))
    directory = whole[len(body):]
    end64 = directory.index(b"PK\6\6")
    locator = directory.index(b"PK\6\7")
    directory = directory[: locator + 8] + struct.pack("<Q", tail_at + end64) + directory[locator + 16 :]
    with open(folder / "model_000010.pt", "wb") as f:
        f.write(body)
        f.seek(gap)
        f.write(header + directory)
    inspect(folder)


def test_ordered_dict_with_metadata_and_memo(tmp_path):
    od = b"ccollections\nOrderedDict\n"
    pickle = state_dict(model(), b"\x80\x02" + od + b"q\0)Rq\1(", b"u}" + b"X\x09\0\0\0_metadata" + od + b")Rsb.")
    good(tmp_path, archive(entries_of(model(), pickle)))


def test_protocol_4(tmp_path):
    """What pickle_protocol=4 gives: frames, short strings, STACK_GLOBAL and MEMOIZE."""
    pickle = state_dict(model())
    pickle = re.sub(rb"c(collections|torch|torch\._utils)\n(\w+)\n", lambda m: b"".join(b"\x8c" + bytes([len(g)]) + g for g in m.groups()) + b"\x93\x94", pickle)
    pickle = b"\x80\x04\x95" + (len(pickle) - 2).to_bytes(8, "little") + pickle[2:]
    good(tmp_path, archive(entries_of(model(), pickle)))


def test_prefix_of_compiled_models_is_stripped_once(tmp_path):
    t = good(tmp_path, save({"_orig_mod." + k: v for k, v in model().items()}))
    assert "lm_head.weight" in t
    twice = {"_orig_mod._orig_mod." + k: v for k, v in model().items()}
    refused(write(tmp_path / "twice", save(twice)), '"_orig_mod.lm_head.weight"')


def test_parameters_instead_of_tensors(tmp_path):
    t = model()
    pickle = state_dict(t)
    one = t["lm_head.weight"].pickled("1")
    hooks = b"ccollections\nOrderedDict\n)R"
    assert pickle.count(one) == 1
    wrapped = b"ctorch._utils\n_rebuild_parameter\n(" + one + b"\x88" + hooks + b"tR"
    good(tmp_path, archive(entries_of(t, pickle.replace(one, wrapped))))


def test_two_tensors_in_one_storage(tmp_path):
    t = model()
    both = {"key": "0", "numel": 256}
    t["transformer.wte.weight"] = Tensor([16, 8], "BFloat16", data=b"\0" * 512, **both)
    t["lm_head.weight"] = Tensor([16, 8], "BFloat16", offset=128, data=None, **both)
    good(tmp_path, save(t))
    t["lm_head.weight"].parts["offset"] = 129
    refused(write(tmp_path / "beyond", save(t)), "reaches beyond its storage")


def test_strides_of_dimensions_of_size_1_do_not_matter(tmp_path):
    t = model("F", dim=24)
    t["smear_gate.weight"] = Tensor([1, 24], strides=[999, 1])
    good(tmp_path, save(t), {**CONFIG, "n_embd": 24}, "F")


@pytest.mark.parametrize("kind, dtype", [("Half", "F16"), ("Double", "F64"), ("BFloat16", "BF16"), ("Float", "F32")])
def test_floating_types(tmp_path, kind, dtype):
    t = model("B")
    t["resid_lambdas"] = t["x0_lambdas"] = Tensor([1], kind)
    t["lm_head.weight"] = Tensor([16, 8], kind)
    assert good(tmp_path, save(t), generation="B")["lm_head.weight"]["dtype"] == dtype


def test_grouped_query_heads(tmp_path):
    good(tmp_path, save(model(kv_heads=1)), {**CONFIG, "n_kv_head": 1})


def test_rows_beyond_the_vocabulary(tmp_path):
    found = inspect(write(tmp_path, save(model(rows=64))))
    assert (found["arch"]["rows"], found["arch"]["vocab"]) == (64, 16)
    assert not any("rows stored" in note for note in found["assumed"])
    found = inspect(write(tmp_path / "odd", save(model(rows=17))))
    assert any("17 rows stored for a vocabulary of 16" in note for note in found["assumed"])


# ---- What is assumed.

def test_softcap_of_generation_d(tmp_path):
    config = {**CONFIG, "n_embd": 32, "window_pattern": "SSSL"}
    pt = save(model("D", dim=32))
    assert inspect(write(tmp_path, pt, config))["arch"]["softcap"] == 15
    meta = {"model_config": config, "max_seq_len": 32, "user_config": {"adam_beta1": 0.8, "eval_tokens": 41943040}}
    evidence = write(tmp_path / "week", pt, meta=json.dumps(meta))
    found = inspect(evidence)
    assert found["arch"]["softcap"] == 20 and any("softcap 20" in note for note in found["assumed"])
    assert inspect(evidence, "--softcap", "15")["arch"]["softcap"] == 15
    meta["user_config"]["eval_tokens"] = 20971520
    assert inspect(write(tmp_path / "before", pt, meta=json.dumps(meta)))["arch"]["softcap"] == 15


def test_missing_window_pattern(tmp_path):
    config = {**CONFIG, "n_embd": 24, "n_layer": 2}
    folder = write(tmp_path, save(model("F", n_layers=2, dim=24)), config)
    found = inspect(folder)
    assert found["arch"]["windows"] == [32, 32] and any("no window_pattern" in note for note in found["assumed"])
    assert inspect(folder, "--window-pattern", "S")["arch"]["windows"] == [128, 32]
    assert inspect(write(tmp_path / "b", save(model("B"))))["arch"]["windows"] == [None]


def test_long_patterns_and_small_letters(tmp_path):
    config = {**CONFIG, "n_layer": 3, "window_pattern": "sl" * 300}
    assert inspect(write(tmp_path, save(model("B", n_layers=3)), config))["arch"]["windows"] == [16, 32, 32]


# ---- Directories.

def test_newest_step_and_step(tmp_path):
    for step in (5, 999999, 1000000):
        write(tmp_path, hostile_pt.GOOD, step=step)
    for junk in ("model_002000000_backup.pt", "x_model_3000000.pt", "model_.pt", "model_4000000.pt.tmp", "model_" + "9" * 30 + ".pt"):
        (tmp_path / junk).write_bytes(b"")
    assert inspect(tmp_path)["step"] == 1000000
    assert inspect(tmp_path, "--step", "5")["step"] == 5
    refused(tmp_path, "could not find step 6", "--step", "6")
    assert inspect(tmp_path / "model_999999.pt")["step"] == 999999


def test_base_directory_and_its_tokenizer(tmp_path):
    for source, tag, step in (("base_checkpoints", "d12", 1), ("chatsft_checkpoints", "d4", 2), ("chatsft_checkpoints", "d12", 3),
                              ("chatsft_checkpoints", "d12_x", 4), ("chatsft_checkpoints", "other", 5)):
        write(tmp_path / source / tag, hostile_pt.GOOD, step=step)
    (tmp_path / "chatsft_checkpoints" / "d99").mkdir()  # without a model
    (tmp_path / "tokenizer").mkdir()
    shutil.copy(MODELS / "gen-A" / "tokenizer.pkl", tmp_path / "tokenizer")
    p = run(tmp_path)
    assert p.returncode == 1 and "has 1024 tokens, the model 16" in p.stderr
    found = json.loads(p.stdout)
    assert found["step"] == 3 and found["tokenizer"]["path"].endswith("/tokenizer/tokenizer.pkl")
    assert any("chatsft_checkpoints taken, of 2" in note for note in found["assumed"])
    assert any("model d12 taken, of 4" in note for note in found["assumed"])
    assert json.loads(run(tmp_path / "base_checkpoints").stdout)["step"] == 1
    assert json.loads(run(tmp_path / "chatsft_checkpoints" / "d4").stdout)["step"] == 2


def test_tags_without_a_depth_go_by_time(tmp_path):
    for i, tag in enumerate(("b", "a", "c")):
        os.utime(write(tmp_path / tag, hostile_pt.GOOD, step=i + 1), (1000, 1000 if tag == "c" else 2000))
    assert inspect(tmp_path)["step"] == 2  # of the two newest, the first by name


def test_tokenizer_beside_the_model_and_by_option(tmp_path):
    shutil.copytree(MODELS / "gen-A", tmp_path / "m")
    assert inspect(tmp_path / "m")["tokenizer"]["special"]["<|bos|>"] == 1015
    (tmp_path / "m" / "tokenizer.pkl").rename(tmp_path / "tokenizer.pkl")
    assert inspect(tmp_path / "m")["tokenizer"] == {"path": None}
    for path in (tmp_path, tmp_path / "tokenizer.pkl"):
        assert inspect(tmp_path / "m", "--tokenizer", str(path))["tokenizer"]["vocab"] == 1024
    refused(tmp_path / "m", "could not find a tokenizer at", "--tokenizer", str(tmp_path / "nowhere"))


OTHERS = {
    "config.json": "Hugging Face models",
    "model-00001-of-00002.safetensors": "Hugging Face models",
    "model.safetensors.index.json": "Hugging Face models",
    "model.gguf": "GGUF files are not supported yet",
    "model.tar": "unpack the archive first",
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_are_refused_by_name(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    refused(tmp_path, OTHERS[name])
    refused(tmp_path / name, OTHERS[name])


def test_not_a_regular_file(tmp_path):
    write(tmp_path, b"")
    (tmp_path / "model_000010.pt").unlink()
    os.mkfifo(tmp_path / "model_000010.pt")
    refused(tmp_path, "is not a regular file")
    (tmp_path / "model_000010.pt").unlink()
    (tmp_path / "model_000010.pt").mkdir()
    refused(tmp_path, "is not a regular file")


def test_rows_that_fit(tmp_path):
    found = inspect(write(tmp_path, hostile_pt.GOOD), "--kv-memory", "1M")["kv"]
    # One layer of 2 x 4 values, K and V: 32 bytes a token in bf16; 320 tokens of context are 5 pages of 64.
    assert found == {"bytes_per_token": {"bf16": 32, "f32": 64}, "rows_that_fit": {"bf16": 102, "f32": 51},
                     "memory": 1 << 20, "page_tokens": 64, "context_pages": 5}


def test_text_form(tmp_path):
    p = subprocess.run([COPPICE, "inspect", "tests/models/calc-d4"], capture_output=True, text=True, timeout=60)
    assert p.returncode == 0
    for words in ("nanochat, generation F", "1,114,194 in 35 tensors", "3 x 128, 512", "<|bos|>             1015",
                  "transformer.h.*.mlp.c_fc.weight", "rows that fit", "assumed"):
        assert words in p.stdout
