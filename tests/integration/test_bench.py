"""`coppice bench`: the document that it prints, and what it refuses.  No figure here is a speed that must be reached."""
import json
import math
import os
import subprocess

COPPICE = os.environ.get("COPPICE", "build/coppice")
SMALL = ("--shape", "d2", "--prompt-tokens", "70", "--decode-tokens", "3", "--repeat", "1")

TOP = {"shape", "parameters", "numerics", "isa", "threads", "prompt_tokens", "decode_tokens", "temperature", "top_k", "repeat",
       "separate", "peak_bandwidth_bytes_per_sec", "peak_flops_per_sec", "prefill", "sweep"}
PREFILL = {"tokens", "ttft_sec", "tok_per_sec", "mfu_percent"}
ENTRY = {"batch_size", "ttft_sec", "tpot_sec", "tok_per_sec", "mbu_percent", "mfu_percent", "memory_bytes", "sample_percent",
         "decode_bytes", "decode_flops"}
MOST_PERCENT = 400  # the peaks, too, suffer from what else the machine does


def bench(*options):
    p = subprocess.run([COPPICE, "bench", *options], capture_output=True, text=True, timeout=300)
    return p.returncode, p.stdout, p.stderr


def document(*options):
    rc, out, err = bench(*options, "--json")
    assert rc == 0 and err == "", err
    return json.loads(out)  # the whole of stdout is the one document


def check_figures(d):
    assert d["peak_bandwidth_bytes_per_sec"] > 1e7 and d["peak_flops_per_sec"] > 1e7
    assert set(d["prefill"]) == PREFILL
    assert d["prefill"]["tokens"] == d["prompt_tokens"]
    assert math.isclose(d["prefill"]["tok_per_sec"] * d["prefill"]["ttft_sec"], d["prompt_tokens"], rel_tol=1e-6)
    assert 0 < d["prefill"]["mfu_percent"] < MOST_PERCENT
    for e in d["sweep"]:
        assert set(e) == ENTRY
        assert e["ttft_sec"] > 0 and e["tpot_sec"] > 0 and e["tok_per_sec"] > 0
        assert 0 < e["mbu_percent"] < MOST_PERCENT and 0 < e["mfu_percent"] < MOST_PERCENT
        assert 0 < e["sample_percent"] < 100
        assert 10e6 < e["memory_bytes"] < 4e9


def test_the_document_holds_the_figures_of_each_entry():
    d = document(*SMALL, "--samples", "1,3", "--threads", "1")
    assert set(d) == TOP
    assert d["shape"] == "d2" and d["numerics"] == "cop1-bf16" and d["threads"] == 1
    assert d["separate"] is False and d["decode_tokens"] == 3
    assert [e["batch_size"] for e in d["sweep"]] == [1, 3]
    check_figures(d)


def test_decode_counts_the_tokens_after_the_first():
    d = document(*SMALL[:4], "--decode-tokens", "2", "--repeat", "1", "--samples", "5")
    e = d["sweep"][0]  # the one step that there is: five tokens
    assert math.isclose(e["tok_per_sec"] * e["tpot_sec"], 5, rel_tol=1e-6)


def test_64_samples_of_a_prompt_cost_little_more_memory_than_one():
    prompt, decoded, page = 700, 30, 64
    d = document("--shape", "d4", "--prompt-tokens", str(prompt), "--decode-tokens", str(decoded), "--repeat", "1", "--samples", "1,64")
    one, many = (e["memory_bytes"] for e in d["sweep"])
    kv_bytes = 4 * 2 * 256 * 2  # of a token: layers, keys and values, width, bf16
    own_pages = -(-(prompt + decoded) // page) - prompt // page  # of a completion, its copy of the prompt's last page included
    assert many <= 1.25 * one + 64 * own_pages * page * kv_bytes
    assert many < one + 64 * prompt * kv_bytes  # a copy of the prompt for each would not fit


def test_separate_prompts_hold_more_memory_and_must_read_more():
    shared = document(*SMALL[:2], "--prompt-tokens", "1000", "--decode-tokens", "2", "--repeat", "1", "--samples", "8")
    separate = document(*SMALL[:2], "--prompt-tokens", "1000", "--decode-tokens", "2", "--repeat", "1", "--samples", "8", "--separate")
    check_figures(separate)
    assert separate["separate"] is True

    # Seven more prompts' keys and values: 1000 tokens of 128 x 2 x 2 bytes in the long layer, half in the window of 512.
    more = 7 * 512 * (1000 + 512)
    assert separate["sweep"][0]["decode_bytes"] - shared["sweep"][0]["decode_bytes"] == more
    grown = separate["sweep"][0]["memory_bytes"] - shared["sweep"][0]["memory_bytes"]
    assert grown > 7 * 15 * 64 * 1024 - 2 * 2**21  # memory comes in huge pages of 2 MiB


def test_fork_tells_a_ratio():
    d = document(*SMALL, "--samples", "1", "--fork")
    assert set(d) == TOP | {"fork_speedup"}
    assert 0.1 < d["fork_speedup"] < 100


def test_a_model_and_its_profile_are_named():
    d = document("--model", "tests/models/calc-d4", "--precision", "f32", "--prompt-tokens", "20", "--decode-tokens", "3", "--samples", "2",
                 "--repeat", "2", "--temperature", "0", "--top-k", "0")
    assert set(d) == TOP - {"shape"} | {"model"}
    assert d["model"] == "tests/models/calc-d4" and d["numerics"] == "cop1-f32"
    check_figures(d)


def test_the_table_has_a_line_for_each_entry():
    rc, out, err = bench(*SMALL, "--samples", "1,2", "--fork")
    assert rc == 0 and err == ""
    lines = out.splitlines()
    assert "d2" in lines[0] and "cop1-bf16" in lines[0] and "GB/s" in lines[1]
    rows = [line.split() for line in lines if line and line.split()[0] in ("prefill", "1", "2")]
    assert [row[0] for row in rows] == ["prefill", "1", "2"]
    assert "8 samples" in lines[-1]


def test_what_makes_no_sense_is_refused():
    for options, word in [((), "--model"), (("--shape", "d2", "--model", "tests/models/calc-d4"), "not both"),
                          (("--shape", "d2", "--samples", ""), "--samples"), (("--shape", "d2", "--samples", "1,,2"), "--samples"),
                          (("--shape", "d2", "--samples", "1,0"), "--samples"), (("--shape", "d2", "--samples", "5000"), "--samples"),
                          (("--shape", "d2", "--samples", "8 "), "--samples"), (("--shape", "d2", "--samples", "1,"), "--samples"),
                          (("--shape", "d2", "--samples", ",".join("1" * 65)), "--samples"),
                          (("--shape", "d2", "--decode-tokens", "1"), "decode-tokens"),
                          (("--shape", "d2", "--temperature", "0.0001"), "--temperature"),
                          (("--shape", "d2", "--softcap", "20"), "--shape"), (("--shape", "d2", "--repeat", "0"), "repeat")]:
        rc, out, err = bench(*options)
        assert rc == 2 and out == "" and word in err and len(err.splitlines()) == 1, (options, err)


def test_what_cannot_run_is_told_before_anything_is_measured():
    for options, words in [(("--shape", "d49"), ["d49", "d48"]), (("--shape", "nano"), ["nano", "d48"]),
                           (("--shape", "d2", "--prompt-tokens", "20480"), ["20480", "context"]),
                           (("--shape", "d2", "--context", "150"), ["100", "64", "150"]),
                           (("--shape", "d2", "--kv-memory", "1M", "--samples", "1,64"), ["64", "--kv-memory"]),
                           (("--shape", "d2", "--kv-memory", "300K", "--samples", "1", "--fork"), ["8", "--kv-memory"]),
                           (("--model", "tests/models/none"), ["tests/models/none"])]:
        rc, out, err = bench(*options)
        assert rc == 1 and out == "" and all(word in err for word in words), (options, err)
        assert len(err.splitlines()) == 1
