"""`coppice show` and `coppice export`: samples to look at, from JSON Lines, shards and folders."""
import copy
import json
import os
import pty
import re
import signal
import subprocess

import msgpack
import numpy as np
import pytest
import zstandard

from conftest import SANITIZER_REPORTS

COPPICE = os.environ.get("COPPICE", "build/coppice")
MODEL = "tests/models/calc-d4"
PROMPTS = [{"messages": [{"role": "user", "content": "What is 7*8?"}], "id": "product", "note": {"deep": [1, None, 0.5]}},
           {"messages": [{"role": "user", "content": "How many r are in strawberry?"}], "seed": str(2**63 + 1), "x": 1},
           {"text": "Three"}]


def coppice(*args, data=b"", env=None, **kwargs):
    p = subprocess.run([COPPICE, *map(str, args)], input=data, capture_output=True, timeout=300, env=env, **kwargs)
    err = p.stderr.decode(errors="replace")
    assert not any(report in err for report in SANITIZER_REPORTS), err
    return p.returncode, p.stdout.decode(), err


def show(path, *options, **kwargs):
    rc, out, err = coppice("show", path, *options, **kwargs)
    assert rc == 0, err
    return out


def jsonl(objects):
    return "".join(json.dumps(o) + "\n" for o in objects)


def generate(to):
    rc, out, err = coppice("generate", "--model", MODEL, "-i", "-", "-o", to, "-n", "4", "--seed", "5", "--temperature", "2.5",
                           "--top-k", "50", "--max-tokens", "40", "--logprobs", "sampling,model", "--entropy", "--kept", "--text",
                           data=jsonl(PROMPTS).encode())
    assert rc == 0, err
    return out


@pytest.fixture(scope="module")
def printed():
    """What `generate -o -` prints for PROMPTS with everything on, in order of prompt and sample, as text."""
    out = generate("-")
    return sorted(out.splitlines(keepends=True), key=lambda line: (json.loads(line)["prompt"], json.loads(line)["sample"]))


@pytest.fixture(scope="module")
def samples(printed):
    return [json.loads(line) for line in printed]


def record_of(group):
    """The record that a shard has for a prompt's JSON objects."""
    packed = {"tokens": "<u4", "mask": "u1", "logprobs": "<f4", "model_logprobs": "<f4", "entropy": "<f4", "kept_ids": "<u4",
              "kept_offsets": "<u4"}
    of_record = {"prompt_id", "prompt_tokens", "input", "reward"}
    encode = lambda key, v: np.array(v, packed[key]).tobytes() if key in packed else int(v) if key == "seed" else v
    first = group[0]
    record = {"line": first["prompt"], "prompt_id": first["prompt_id"],
              "prompt_tokens": np.array(first["prompt_tokens"], "<u4").tobytes(), "input": first.get("input"),
              "samples": [{k: encode(k, v) for k, v in s.items() if k not in of_record} for s in group]}
    if any("reward" in s for s in group):
        record["rewards"] = [next((s.get("reward") for s in group if s["sample"] == i), None)
                             for i in range(1 + max(s["sample"] for s in group))]
    return record


def records_of(samples):
    lines = sorted({s["prompt"] for s in samples})
    return [record_of([s for s in samples if s["prompt"] == line]) for line in lines]


def frame(*records):
    compressor = zstandard.ZstdCompressor(write_checksum=True, write_content_size=True)
    return compressor.compress(b"".join(map(msgpack.packb, records)))


def shard(path, records):
    path.write_bytes(b"".join(frame(r) for r in records))
    return path


def folder(path, shards, state="complete", growing=b"", about=None):
    """A data set of shards, each a list of records."""
    path.mkdir()
    entries, keys = [], ("records", "errors", "samples", "sampled_tokens", "forced_tokens")
    for i, records in enumerate(shards):
        name = f"shard-{i:05}.zst"
        shard(path / name, records)
        masks = b"".join(s["mask"] for r in records for s in r.get("samples", []))
        entries.append({"file": name, "bytes": (path / name).stat().st_size, "xxh128": "0" * 32, "records": len(records),
                        "errors": sum("error" in r for r in records), "samples": sum(len(r.get("samples", [])) for r in records),
                        "sampled_tokens": masks.count(1), "forced_tokens": masks.count(0), "first_line": records[0]["line"],
                        "last_line": records[-1]["line"]})
    if growing:
        (path / f"shard-{len(shards):05}.zst").write_bytes(growing)
    (path / "manifest.json").write_text(json.dumps(
        {"format": "coppice.shards", "version": 1, "state": state, "parameters": {}, "about": about or {}, "shards": entries,
         "totals": {k: sum(e[k] for e in entries) for k in keys}}))
    return path


# ---- export


def test_export_prints_what_generate_prints(samples, printed, tmp_path):
    path = shard(tmp_path / "one.zst", records_of(samples))
    rc, out, err = coppice("export", path, "--to", "jsonl")
    assert (rc, err) == (0, "") and out == "".join(printed)
    with open(path, "rb") as f:  # a file and a pipe on stdin
        assert subprocess.run([COPPICE, "export", "-", "--to", "jsonl"], stdin=f, capture_output=True).stdout.decode() == out
    assert coppice("export", "-", "--to", "jsonl", data=path.read_bytes())[1] == out
    assert coppice("export", "-", "--to", "jsonl", data=out.encode())[1] == out  # JSON Lines are taken too


def test_a_folder_of_generate_is_exported_and_shown(printed, tmp_path):
    generate(tmp_path / "made")
    assert coppice("export", tmp_path / "made", "--to", "jsonl") == (0, "".join(printed), "")
    assert show(tmp_path / "made") == show("-", "--model", MODEL, data="".join(printed).encode())


def test_export_knows_rewards_and_failures(samples, tmp_path):
    rewarded = [dict(s, reward=s["sample"] / 2) for s in samples if s["prompt"] == 0 and s["sample"] != 1]
    bad = {"line": 9, "prompt_id": "9", "input": None, "error": "text: it is not a string"}
    rc, out, err = coppice("export", shard(tmp_path / "one.zst", [record_of(rewarded), bad]), "--to", "jsonl")
    objects = [json.loads(line) for line in out.splitlines()]
    assert rc == 0 and [o.get("reward") for o in objects] == [0.0, 1.0, 1.5, None]
    assert objects[-1] == {"line": 9, "error": "text: it is not a string", "prompt_id": "9"}


def test_export_of_a_folder_that_grows(samples, printed, tmp_path):
    first, second, third = records_of(samples)
    whole = folder(tmp_path / "whole", [[first, second], [third]])
    assert coppice("export", whole, "--to", "jsonl") == (0, "".join(printed), "")
    torn = frame(third)[:-3]
    running = folder(tmp_path / "running", [[first]], state="running", growing=frame(second) + torn)
    rc, out, err = coppice("export", running, "--to", "jsonl")
    assert rc == 0 and "not complete" in err and out == "".join(printed[:8])
    rc, out, err = coppice("show", running)
    assert rc == 0 and "not complete" in err and heads(out)[-1][0] == 1


@pytest.mark.parametrize("tail", [b"\0" * 5000, b"noise and more noise", b"(\xb5/\xfd" + b"\xff" * 300])
def test_what_a_crash_left_behind_a_growing_shard_is_not_there(samples, printed, tmp_path, tail):
    first, second, third = records_of(samples)
    running = folder(tmp_path / "running", [[first]], state="running", growing=frame(second) + tail)
    rc, out, err = coppice("export", running, "--to", "jsonl")
    assert rc == 0 and "not complete" in err and out == "".join(printed[:8])
    assert coppice("show", running)[0] == 0
    damaged = folder(tmp_path / "damaged", [[first]], state="running", growing=frame(second) + tail + frame(third))
    for command in ("export", "show"):  # no crash leaves that
        rc, _, err = coppice(command, damaged)
        assert rc == 1 and "shard-00001.zst" in err and f"frame at byte {len(frame(second))}" in err
    shard(tmp_path / "one.zst", [first])
    (tmp_path / "one.zst").write_bytes(frame(first) + tail)  # nor is that growing
    assert coppice("export", tmp_path / "one.zst")[0] == 1


def test_an_empty_set_tells_whether_it_is_complete(tmp_path):
    for state in ("running", "complete"):
        for command in ("export", "show"):
            rc, out, err = coppice(command, folder(tmp_path / f"{state}-{command}", [], state=state))
            assert (rc, out) == (0, "") and ("not complete" in err) == (state == "running")
            assert ("nothing to show" in err) == (command == "show")


def test_export_adds_text(samples, printed, tmp_path):
    bare = [{k: v for k, v in s.items() if k != "text"} for s in samples]
    rc, out, _ = coppice("export", shard(tmp_path / "one.zst", records_of(bare)), "--to", "jsonl", "--text", "--model", MODEL)
    assert rc == 0 and [json.loads(line)["text"] for line in out.splitlines()] == [s["text"] for s in samples]


def test_export_writes_a_file_and_never_over_one(samples, printed, tmp_path):
    path, to = shard(tmp_path / "one.zst", records_of(samples)), tmp_path / "out.jsonl"
    assert coppice("export", path, "--to", "jsonl", "-o", to) == (0, "", "")
    assert to.read_text() == "".join(printed)
    rc, _, err = coppice("export", path, "--to", "jsonl", "-o", to)
    assert rc == 1 and "exists" in err and to.read_text() == "".join(printed)


def test_export_tells_that_it_could_not_write(samples, tmp_path):
    path = shard(tmp_path / "one.zst", records_of(samples))
    with open("/dev/full", "wb") as full:
        p = subprocess.run([COPPICE, "export", path, "--to", "jsonl"], stdout=full, stderr=subprocess.PIPE)
    assert p.returncode == 1 and b"No space left" in p.stderr


def into_closed_pipe(*args):
    """What a command does whose reader went away before it wrote."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    p = subprocess.run([COPPICE, *map(str, args)], stdout=write_end, stderr=subprocess.PIPE)
    os.close(write_end)
    return p.returncode, p.stderr


def test_a_reader_may_go_away(samples, file, tmp_path):
    path = shard(tmp_path / "one.zst", records_of(samples))
    assert into_closed_pipe("export", path, "--to", "jsonl") == (-signal.SIGPIPE, b"")
    assert into_closed_pipe("show", file) == (-signal.SIGPIPE, b"")


def test_show_tells_that_it_could_not_write(file):
    with open("/dev/full", "wb") as full:
        p = subprocess.run([COPPICE, "show", file], stdout=full, stderr=subprocess.PIPE)
    assert p.returncode == 1 and b"No space left" in p.stderr


def test_export_refuses_what_is_no_data_set(samples, tmp_path):
    broken = record_of([s for s in samples if s["prompt"] == 1])
    broken["samples"][2]["mask"] = b"\1"
    path, to = shard(tmp_path / "broken.zst", [broken]), tmp_path / "out.jsonl"
    rc, _, err = coppice("export", path, "--to", "jsonl", "-o", to)
    assert rc == 1 and "line 1, sample 2" in err and '"mask"' in err
    assert not to.exists()  # half a file is none
    (tmp_path / "noise").write_bytes(b"(\xb5/\xfd" + bytes(range(256)))
    for path, word in [(tmp_path / "noise", "noise"), (tmp_path / "none", "No such file"), (tmp_path, "manifest")]:
        rc, out, err = coppice("export", path, "--to", "jsonl")
        assert rc == 1 and out == "" and word in err
    assert coppice("export", tmp_path / "broken.zst", "--to", "csv")[0] == 2
    rc, out, err = coppice("export", tmp_path / "broken.zst", "--text")
    assert rc == 1 and out == "" and "--text needs a tokenizer" in err


def test_export_leaves_out_what_is_judged_lower(samples, tmp_path):
    record = record_of([s for s in samples if s["prompt"] == 1])
    n = len(record["samples"])
    record["rewards"] = [None, 0.25, *range(2, n)]
    path = shard(tmp_path / "judged.zst", [record, {"line": 9, "prompt_id": "9", "input": None, "error": "no"}])
    rc, out, _ = coppice("export", path, "--min-reward", "0.25")
    assert rc == 0 and [json.loads(line)["reward"] for line in out.splitlines()] == [0.25, *range(2, n)]
    rc, out, _ = coppice("export", path, "--min-reward", "2")
    assert rc == 0 and len(out.splitlines()) == n - 2


# ---- show


@pytest.fixture(scope="module")
def file(printed, tmp_path_factory):
    path = tmp_path_factory.mktemp("show") / "samples.jsonl"
    path.write_text("".join(printed))
    return path


def heads(out):
    """(line, sample) of everything shown."""
    line, found = None, []
    for text in out.splitlines():
        if m := re.match(r"line (\d+)", text):
            line = int(m[1])
        elif m := re.match(r"  sample +(\d+)  ", text):
            found.append((line, int(m[1])))
    return found


def sample_object(**changes):
    return {"prompt": 0, "prompt_id": "0", "sample": 0, "seed": 1, "prompt_tokens": [65], "tokens": [66, 67], "mask": [1, 0],
            "finish": "length", "tool_calls": [], "weights": [[0, 0, "x"]], **changes}


def test_show_groups_by_prompt_and_marks_forced_tokens(samples, file, tmp_path):
    out = show(file, "--model", MODEL)
    assert heads(out) == [(s["prompt"], s["sample"]) for s in samples]
    assert 'line 0 "product": ' in out and "<|user_start|>What is 7*8?<|user_end|>" in out
    for s in samples:  # without its marks the text is the sample's
        assert s["text"].replace("\n", "\n    ") in out.replace("⟦", "").replace("⟧", "") or "\ufffd" in s["text"] or "\r" in s["text"]
    answered = next(s for s in samples if s["tool_calls"] and s["tool_calls"][0]["ok"])
    result = re.search(r"<\|output_start\|>.*?<\|output_end\|>", answered["text"])[0]
    assert f"⟦{result}⟧" in out
    assert show(shard(tmp_path / "one.zst", records_of(samples)), "--model", MODEL) == out
    assert show("-", "--model", MODEL, data=file.read_bytes()) == out


def test_show_heads_sum_up_a_sample(samples, file):
    s = next(s for s in samples if s["tool_calls"] and s["tool_calls"][0]["ok"] and s["finish"] == "stop")
    head = next(line for line in show(file, "--prompt", s["prompt"], "--sample", s["sample"]).splitlines() if "  sample " in line)
    drawn = [p for p, m in zip(s["logprobs"], s["mask"]) if m]
    assert f"{len(s['tokens'])} tokens ({len(drawn)} sampled, {len(s['tokens']) - len(drawn)} forced)" in head
    total, mean = map(float, re.search(r"log-prob +(\S+) \(mean +(\S+)\)", head).groups())
    assert total == pytest.approx(sum(drawn), abs=1e-3) and mean == pytest.approx(sum(drawn) / len(drawn), abs=1e-4)
    assert "1 tool call" in head and f"at token {s['stop']}" in head and "reward" not in head
    assert "reward 0.5" in show("-", data=jsonl([dict(s, reward=0.5)]).encode())


def test_show_colours_spans_instead_of_marking_them(file):
    out = show(file, "--model", MODEL, "--color=always")
    sampled, forced = "\x1b[36m", "\x1b[33m"
    assert "⟦" not in out and f"{forced}<|output_start|>" in out and f"<|output_end|>\x1b[0m{sampled}" in out
    plain = show(file, "--model", MODEL, "--color=never")
    assert re.sub(r"\x1b\[\d*m", "", out) == plain.replace("⟦", "").replace("⟧", "")
    assert show(file, "--model", MODEL) == plain  # a pipe is no terminal
    lines = sample_object(tokens=list(b"a\nbc"), mask=[1, 1, 1, 0])  # a colour ends before a line feed and begins anew
    assert f"\n    {sampled}a\x1b[0m\n    {sampled}b\x1b[0m{forced}c\x1b[0m\n" in show("-", "--model", MODEL, "--color=always",
                                                                                       data=jsonl([lines]).encode())


def on_terminal(*args, **env):
    """stdout of a command that writes to a terminal."""
    leader, follower = pty.openpty()
    p = subprocess.Popen([COPPICE, *map(str, args)], stdout=follower, stderr=subprocess.PIPE,
                         env={**os.environ, "TERM": "xterm", **env})
    os.close(follower)
    out = b""
    try:
        while block := os.read(leader, 4096):
            out += block
    except OSError:  # that is how a terminal ends
        pass
    os.close(leader)
    return out.decode(), p.communicate()[1].decode()


def test_show_on_a_terminal_has_colours_and_a_limit(tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text(jsonl(sample_object(prompt=i, prompt_id=str(i)) for i in range(25)))
    out, err = on_terminal("show", path, NO_COLOR="")
    assert "\x1b[" in out and out.count("sample 0") == 20 and "--limit" in err
    assert "\x1b[" not in on_terminal("show", path, NO_COLOR="1")[0]
    assert "\x1b[" not in on_terminal("show", path, NO_COLOR="", TERM="dumb")[0]
    assert "\x1b[" in on_terminal("show", path, "--color=always", NO_COLOR="1")[0]
    assert on_terminal("show", path, "--limit", "0")[0].count("sample 0") == 25
    assert show(path).count("sample 0") == 25
    assert show(path, "--limit", "3").count("sample 0") == 3


def test_show_filters(samples, file):
    where = lambda *options: heads(show(file, *options))
    expected = lambda keep: [(s["prompt"], s["sample"]) for s in samples if keep(s)]
    failed = lambda s: any(not c["ok"] for c in s["tool_calls"])
    for options, keep in [(["--finish", "stop"], lambda s: s["finish"] == "stop"), (["--finish", "length"], lambda s: s["finish"] == "length"),
                          (["--tool-calls"], lambda s: s["tool_calls"]), (["--failed-tools"], failed),
                          (["--prompt", "product"], lambda s: s["prompt"] == 0), (["--prompt", "1"], lambda s: s["prompt"] == 1),
                          (["--sample", "2"], lambda s: s["sample"] == 2),
                          (["--sample", "2", "--prompt", "2"], lambda s: s["prompt"] == s["sample"] == 2)]:
        chosen = expected(keep)
        assert 0 < len(chosen) < len(samples), options
        assert where(*options) == chosen, options
    rc, out, err = coppice("show", file, "--prompt", "nobody")
    assert (rc, out) == (0, "") and "nothing to show" in err


def test_show_the_best_of_each_prompt():
    rewards = [[0, 1, 1], [None, None, None], [-2, None, -1]]
    lines = [sample_object(prompt=p, prompt_id=str(p), sample=i, **({} if r is None else {"reward": r}))
             for p, of_prompt in enumerate(rewards) for i, r in enumerate(of_prompt)]
    assert heads(show("-", "--best", data=jsonl(lines).encode())) == [(0, 1), (2, 2)]


def test_show_tells_errors(samples, tmp_path):
    bad = {"line": 9, "prompt_id": "nine", "input": None, "error": "text: it is not a string"}
    path = shard(tmp_path / "one.zst", [*records_of(samples), bad])
    assert 'line 9 "nine": text: it is not a string' in show(path)
    assert show(path, "--errors") == 'line 9 "nine": text: it is not a string\n\n'
    assert show(path, "--prompt", "9") == show(path, "--prompt", "nine") == show(path, "--errors")
    assert "not a string" not in show(path, "--finish", "stop")


def test_show_token_by_token(samples, file):
    s = next(s for s in samples if 0 in s["mask"])
    out = show(file, "--logprobs", "--model", MODEL, "--prompt", s["prompt"], "--sample", s["sample"])
    found = list(re.finditer(r"^ +(\d+) +(\d+) +(\S+) +(\S+) +(\S+)  (⟦?\".*\"⟧?)$", out, re.M))
    rows = [m.groups() for m in found]
    assert len({m.start(6) - m.start() for m in found}) == 1  # aligned
    assert [int(r[1]) for r in rows] == s["tokens"] and [int(r[0]) for r in rows] == list(range(len(rows)))
    for row, mask, *numbers in zip(rows, s["mask"], s["logprobs"], s["model_logprobs"], s["entropy"]):
        if mask:
            assert [float(x) for x in row[2:5]] == pytest.approx(numbers, abs=6e-5) and row[5][0] == '"'
        else:
            assert row[2:5] == ("forced",) * 3 and row[5][0] == "⟦"


# ---- the tokenizer


def test_show_without_a_tokenizer(samples, file):
    out = show(file)  # the samples' own text
    assert "The answer is" in out and "⟦" not in out
    bare = jsonl({k: v for k, v in s.items() if k not in ("text", "input")} for s in samples)
    rc, out, err = coppice("show", "-", data=bare.encode())
    assert rc == 0 and "--model" in err and " ".join(map(str, samples[0]["prompt_tokens"])) in out
    forced = next(s for s in samples if 0 in s["mask"])
    ids = " ".join(str(t) for t, m in zip(forced["tokens"], forced["mask"]) if not m)
    assert f"⟦{ids}⟧" in out
    words = dict(samples[0], input={"messages": [{"role": "user", "content": "What is 7*8?"}]})
    out = show("-", data=jsonl([words, dict(words, prompt=1, input={"text": "Say it"})]).encode())
    assert '"user"\n  What is 7*8?' in out and "\n  Say it\n" in out


def test_show_takes_the_tokenizer_that_the_manifest_names(samples, tmp_path):
    bare = [{k: v for k, v in s.items() if k != "text"} for s in samples]
    named = folder(tmp_path / "named", [records_of(bare)], about={"model": os.path.abspath(MODEL)})
    assert "<|user_start|>What is 7*8?" in show(named)
    gone = folder(tmp_path / "gone", [records_of(bare)], about={"model": str(tmp_path / "moved")})
    assert "<|user_start|>" not in show(gone)
    assert show(gone, "--tokenizer", MODEL) == show(named)
    rc, _, err = coppice("show", named, "--model", tmp_path / "moved")
    assert rc == 1 and "moved" in err


def test_show_refuses_ids_that_the_tokenizer_lacks(samples):
    rc, _, err = coppice("show", "-", "--model", MODEL, data=jsonl([sample_object(tokens=[66, 5000])]).encode())
    assert rc == 1 and "tokens[1]" in err and "1023" in err


def test_a_character_may_lie_across_tokens_of_one_kind():
    whole, cut = sample_object(tokens=[0xC3, 0xA9], mask=[1, 1]), sample_object(tokens=[0xC3, 0xA9])
    assert "\n    é\n" in show("-", "--model", MODEL, data=jsonl([whole]).encode())
    assert "\n    \ufffd⟦\ufffd⟧\n" in show("-", "--model", MODEL, data=jsonl([cut]).encode())
    assert "\n    \x1b[36mé\x1b[0m\n" in show("-", "--model", MODEL, "--color=always", data=jsonl([whole]).encode())
    assert r'"\xc3"' in show("-", "--model", MODEL, "--logprobs", data=jsonl([cut]).encode())


# ---- hostile content

NASTY = "a\x1b]0;owned\x07\x1b[31mb\r\x08\x7f\x00\x9b1mc\u202egnp\u2066\u2028\nd\te"
ALLOWED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def test_hostile_text_cannot_drive_the_terminal():
    nasty_ids = list(NASTY.encode())
    lines = [sample_object(prompt_id=NASTY, text=NASTY, stop=NASTY, finish=NASTY, prompt_tokens=nasty_ids, tokens=nasty_ids,
                           mask=[int(i % 3 != 0) for i in range(len(nasty_ids))],
                           tool_calls=[{"at": 0, "tool": NASTY, "ok": True}], input={"text": NASTY}),
             sample_object(prompt=1, text=NASTY, input={"messages": [{"role": NASTY, "content": NASTY}]}),
             {"line": 3, "error": NASTY, "prompt_id": NASTY}]
    for options in ([], ["--model", MODEL], ["--model", MODEL, "--logprobs"]):
        out = show("-", *options, data=jsonl(lines).encode())
        assert not ALLOWED.search(out), (options, ALLOWED.search(out))
    out = show("-", data=jsonl(lines).encode())
    assert r"a\x1b]0;owned\x07\x1b[31mb\r\x08\x7f\x00\x9b1mc\u{202e}gnp\u{2066}\u{2028}" + "\n    d\te\n" in out
    rc, out, err = coppice("show", "-", data=b'{"sample": \x1b[31m}\n')
    assert rc == 1 and "line 1" in err and "\x1b" not in err


def test_show_refuses_objects_that_are_no_samples():
    good = sample_object(logprobs=[-1, 1.0], reward=1)
    bad = [{k: v for k, v in good.items() if k != gone} for gone in ("sample", "tokens", "mask", "finish", "prompt", "prompt_tokens")]
    bad += [dict(good, **change) for change in (
        {"sample": -1}, {"tokens": [1, "a"]}, {"tokens": {}}, {"tokens": [1, 2, 3]}, {"tokens": [1, 2**40]}, {"mask": [1]},
        {"mask": [1, 2]}, {"mask": "10"}, {"logprobs": [-1, 1, 1]}, {"logprobs": [None, 1]}, {"logprobs": 5}, {"finish": 3}, {"stop": []},
        {"text": 5}, {"reward": "much"}, {"tool_calls": 3}, {"tool_calls": [3]}, {"prompt": "x"}, {"prompt_tokens": [-1]})]
    assert heads(show("-", data=jsonl([good]).encode())) == [(0, 0)]
    for o in bad:
        rc, _, err = coppice("show", "-", data=jsonl([o]).encode())
        wrong = next(k for k in [*good, "stop", "text", "reward"] if o.get(k) != good.get(k))
        assert rc == 1 and (wrong in err or "mask" in err), (o, err)
    for data in (b"", b"\n\n"):
        rc, out, err = coppice("show", "-", data=data)
        assert (rc, out) == (0, "") and "nothing" in err


def test_show_survives_flipped_bytes(samples):
    whole = bytearray(frame(*records_of(samples)))
    rng = np.random.default_rng(0)
    for at in rng.choice(len(whole), 40, replace=False):
        broken = copy.copy(whole)
        broken[at] ^= 1 << int(rng.integers(8))
        rc, _, err = coppice("show", "-", data=bytes(broken))
        assert rc in (0, 1), err
