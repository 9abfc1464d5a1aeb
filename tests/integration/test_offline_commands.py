"""`coppice generate` and `coppice score` against the worker: the same engine, the same bits."""
import json
import os
import subprocess

import numpy as np

from wire_client import f32, u32, u8

COPPICE = os.environ.get("COPPICE", "build/coppice")
MODEL = "tests/models/calc-d4"
QUESTION = [{"role": "user", "content": "Compute (42-26)*8."}]


def run(*args, lines=(), text=None):
    data = text if text is not None else "".join(json.dumps(line) + "\n" for line in lines)
    p = subprocess.run([COPPICE, *args, "--model", MODEL], input=data, capture_output=True, text=True, timeout=300)
    return p.returncode, [json.loads(line) for line in p.stdout.splitlines()], p.stderr


def generate(*options, **kwargs):
    return run("generate", "-i", "-", "-o", "-", *options, **kwargs)


def test_generate_gives_the_bits_of_a_worker(client):
    rc, out, _ = generate("-n", "4", "--seed", "7", "--temperature", "1.5", "--max-tokens", "60", "--logprobs", "sampling,model",
                          lines=[{"messages": QUESTION}, {"tokens": [1015, 40, 41], "id": "x", "seed": 9, "note": 1}])
    assert rc == 0 and len(out) == 8
    served = client.rollout([{"messages": QUESTION, "id": "0"}, {"tokens": [1015, 40, 41], "id": "x", "seed": 9}], n=4, seed=7,
                            temperature=1.5, max_tokens=60, logprobs=["sampling", "model"])
    by_place = {(s["prompt"], s["sample"]): s for s in served.samples}
    for s in out:
        other = by_place[s["prompt"], s["sample"]]
        assert s["prompt_id"] == other["prompt_id"] and s["seed"] == other["seed"] and s["finish"] == other["finish"]
        assert s["tokens"] == u32(other["tokens"]).tolist() and s["mask"] == u8(other["mask"]).tolist()
        for key in ("logprobs", "model_logprobs"):  # nine digits bring back every bit
            assert np.array(s[key], np.float32).tobytes() == other[key]
        line = {"tokens": [1015, 40, 41], "id": "x", "seed": 9, "note": 1} if s["prompt"] == 1 else {"messages": QUESTION}
        assert s["input"] == line


def test_generate_knows_stop_strings_and_entropy(client):
    rc, out, _ = generate("-n", "2", "--seed", "7", "--stop", "<|output_start|>", "--stop=is", "--entropy", "--max-tokens", "30",
                          lines=[{"messages": QUESTION}, {"text": "Three"}])
    assert rc == 0 and len(out) == 4
    served = client.rollout([{"messages": QUESTION, "id": "0"}, {"text": "Three", "id": "1"}], n=2, seed=7, max_tokens=30,
                            stop=["<|output_start|>", "is"], entropy=True)
    by_place = {(s["prompt"], s["sample"]): s for s in served.samples}
    for s in out:
        other = by_place[s["prompt"], s["sample"]]
        assert (s["finish"], s.get("stop")) == (other["finish"], other.get("stop"))
        assert s["tokens"] == u32(other["tokens"]).tolist() and s["prompt_tokens"] == u32(other["prompt_tokens"]).tolist()
        assert np.array(s["entropy"], np.float32).tobytes() == other["entropy"]
    assert {"<|output_start|>"} <= {s.get("stop") for s in out}


def test_generate_tells_bad_lines_and_goes_on():
    bad = ['nope', '{"text": "1", "tokens": [1]}', '{"tokens": [1024]}', "{}", '{"tokens": []}', '{"text": "1", "seed": -1}',
           '{"text": "1", "id": 7}', '{"text": 5}', '{"messages": []}']
    rc, out, _ = generate("--seed", "1", "--max-tokens", "2", text="\n".join(['{"text": "1"}', *bad, '{"text": "2"}']))
    assert rc == 3
    assert [s.get("prompt") for s in out] == [0, *[None] * 9, 10]  # in order of line
    assert [s["line"] for s in out if "error" in s] == list(range(1, 10))


def test_generate_refuses_what_makes_no_sense():
    for options, word in [(("-i", "-"), "-o DIR"), (("-o", "-"), "no input"),
                          (("-i", "-", "-o", "-", "--kept"), "--top-k"), (("-i", "-", "-o", "-", "-n", "0"), "n"),
                          (("-i", "-", "-o", "-", "--temperature", "0.0001"), "temperature"),
                          (("-i", "-", "-o", "-", "--logprobs", "both"), "logprobs"),
                          (("-i", "-", "-o", "-", "--stop", ""), "1 to 256"), (("-i", "-", "-o", "-", *["--stop", "x"] * 17), "16 times"),
                          (("-i", "-", "-o", "-", "--tempature", "1"), "--temperature")]:
        rc, out, err = run("generate", *options)
        assert rc == 2 and out == [] and word in err, (options, err)


def test_score_gives_the_bits_of_a_worker(client):
    sequences = [[1015, 1016, 72, 105, 300], [5]]
    rc, out, _ = run("score", "--top", "3", lines=[{"tokens": s} for s in sequences])
    assert rc == 0
    served = client.ask("score", sequences=sequences, top=3)["scores"]
    for line, other, tokens in zip(out, served, sequences):
        assert line["logprobs"][0] is None and line["top_ids"][0] is None and line["top_logprobs"][0] is None
        assert np.array(line["logprobs"][1:], np.float32).tobytes() == other["logprobs"][4:]
        assert np.array(line["top_ids"][1:], np.uint32).tobytes() == other["top_ids"][12:]
        assert line["next_ids"] == u32(other["next_ids"]).tolist()
        assert np.array(line["next_logprobs"], np.float32).tobytes() == other["next_logprobs"]
        assert len(line["logprobs"]) == len(tokens) and f32(other["logprobs"])[0] == 1.0


def test_score_tells_bad_lines():
    rc, out, _ = run("score", lines=[{"tokens": []}, {"tokens": [1, -1]}, {"token": [1]}, {"tokens": [1, 2]}])
    assert rc == 1
    assert [line.get("line") for line in out] == [1, 2, 3, None]
    assert "tokens[1]" in out[1]["error"] and "token" in out[2]["error"]


def test_tokenize_and_detokenize():
    rc, out, _ = run("tokenize", lines=[{"text": "strawberry 12"}, {"messages": QUESTION}, {"txt": "a"}])
    assert rc == 1 and "txt" in out[2]["error"]
    assert out[1]["tokens"][0] == 1015 and out[1]["tokens"][-1] == 1018
    rc, back, _ = run("detokenize", lines=[{"tokens": out[0]["tokens"]}, {"tokens": [1024]}])
    assert rc == 1 and back[0]["text"] == "strawberry 12" and "error" in back[1]
