"""Stop strings, entropy, enough, and a model that computes NaN, through the socket."""
import shutil
import struct
import zipfile

import coppice
import numpy as np
import pytest

from wire_client import LAST, Rollout, f32, u8, u32

CHAT = {"messages": [{"role": "user", "content": "What is 1,234 * 56?"}]}
TEXT = {"text": "Three apples and four plums"}
ALL = {"logprobs": ["sampling", "model"], "entropy": True, "text": True}


def head(sample, n):
    """The arrays of a sample's first n tokens."""
    return [sample["mask"][:n]] + [sample[key][:4 * n] for key in ("tokens", "logprobs", "model_logprobs", "entropy")]


# ---- Stop strings.


def test_a_stop_string_ends_a_sample_with_the_token_that_completes_it(client):
    whole = client.rollout([CHAT, TEXT], n=3, seed=7, stop_tokens=[], max_tokens=40, **ALL).samples
    for s in whole:
        raw = client.ask("detokenize", tokens=s["tokens"])["bytes"]
        for at in range(0, len(raw) - 5, 29):
            piece = raw[at:at + 5]
            if not piece.isascii():
                continue
            ended = client.rollout([CHAT, TEXT], n=3, seed=7, stop_tokens=[], max_tokens=40, stop=["\n\0never", piece.decode()],
                                   **ALL).samples[whole.index(s)]
            n = len(ended["mask"])
            assert (ended["finish"], ended["stop"]) == ("stop", piece.decode())
            assert head(ended, n) == head(s, n)
            ends = raw.index(piece) + 5
            shorter = client.ask("detokenize", tokens=ended["tokens"][:-4])["bytes"]
            assert len(shorter) < ends <= len(client.ask("detokenize", tokens=ended["tokens"])["bytes"])


def test_a_stop_string_in_a_tool_s_answer_drops_the_rest_of_it(client):
    (s,) = client.rollout([CHAT], seed=7, stop=["<|output_start|>69"], **ALL).samples
    assert s["stop"] == "<|output_start|>69" and s["text"].endswith("<|python_end|><|output_start|>69")
    assert u8(s["mask"])[-2:].tolist() == [0, 0] and len(s["tool_calls"]) == 1
    (s,) = client.rollout([CHAT], seed=7, stop=["<|python_end|>"], **ALL).samples  # what would call the tool
    assert s["stop"] == "<|python_end|>" and s["tool_calls"] == [] and u8(s["mask"]).all()


def test_of_several_strings_the_one_that_ends_first_is_told_then_the_longest(client):
    for stop in (["answer", "The", "he", "e"], ["he", "The", "e", "answer"]):
        (s,) = client.rollout([CHAT], seed=7, stop=stop, tools=[], min_tokens=0, **ALL).samples
        assert s["finish"] == "stop" and s["text"].count(s["stop"]) >= 1
        ends = {string: s["text"].find(string) + len(string) for string in stop if string in s["text"]}
        first = min(ends.values())
        assert s["stop"] == max((string for string in ends if ends[string] == first), key=len)


def test_min_tokens_holds_stop_strings_off(client):
    keys = dict(seed=7, stop_tokens=[], max_tokens=30, **ALL)
    whole, = client.rollout([CHAT], **keys).samples
    stop = "1,234"
    assert whole["text"].count(stop) == 1
    (s,) = client.rollout([CHAT], stop=[stop], **keys).samples
    n = len(s["mask"])
    assert s["stop"] == stop and n < 30
    (s,) = client.rollout([CHAT], stop=[stop], min_tokens=n - 1, **keys).samples
    assert s["stop"] == stop and len(s["mask"]) == n
    (s,) = client.rollout([CHAT], stop=[stop], min_tokens=n, **keys).samples  # now it is passed over, for ever
    assert s == whole and "stop" not in s


def test_a_prefix_goes_on_within_a_stop_string_and_may_not_complete_one(client):
    keys = dict(seed=21, temperature=1.2, stop=["<|output_start|>6910"], **ALL)
    whole = client.rollout([CHAT], n=2, **keys).samples[1]
    assert whole["stop"] == keys["stop"][0]
    n, tokens = len(whole["mask"]), u32(whole["tokens"])
    for k in range(n):
        (part,) = client.rollout([{**CHAT, "sample": 1, "prefix": tokens[:k].tobytes()}], **keys).samples
        assert (part["finish"], part["stop"]) == ("stop", whole["stop"])
        assert part["mask"] == whole["mask"][k:] and part["tokens"] == whole["tokens"][4 * k:]
        assert part["entropy"] == whole["entropy"][4 * k:]
    failed = client.failure("rollout", prompts=[TEXT, {**CHAT, "sample": 1, "prefix": tokens.tobytes()}], **keys)
    assert (failed.code, failed.key) == ("bad_request", "prompts[1].prefix") and "stop string" in failed.message


# ---- Entropy.


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_the_entropy_is_that_of_what_was_kept(client, temperature):
    r = client.rollout([CHAT, TEXT], n=2, seed=3, top_k=20, temperature=temperature, max_tokens=40, **ALL)
    plain = client.rollout([CHAT, TEXT], n=2, seed=3, top_k=20, temperature=temperature, max_tokens=40,
                           logprobs=["sampling", "model"], text=True)
    assert [{**s, "entropy": None} for s in r.samples] == [{**s, "entropy": None} for s in plain.samples]
    assert all("entropy" not in s for s in plain.samples)
    seen = 0
    for s in r.samples:
        prompt, tokens = u32(s["prompt_tokens"]), u32(s["tokens"])
        (score,) = client.ask("score", sequences=[np.concatenate([prompt, tokens]).tobytes()], top=20,
                              temperature=temperature)["scores"]
        top = f32(score["top_logprobs"]).reshape(-1, 20)[len(prompt):].astype(np.float64)
        log_p = top - np.log(np.exp(top).sum(axis=1, keepdims=True))
        wanted = -(np.exp(log_p) * log_p).sum(axis=1)
        sampled = u8(s["mask"]) == 1
        assert np.abs(f32(s["entropy"]) - wanted)[sampled].max() < 1e-5
        assert (f32(s["entropy"])[~sampled] == 1.0).all() and len(f32(s["entropy"])) == len(sampled)
        seen += (wanted[sampled] > 0.1).sum()
    assert seen > 10


def test_the_entropy_at_temperature_0_is_0(client):
    (s,) = client.rollout([CHAT], temperature=0, entropy=True).samples
    assert (f32(s["entropy"]) == 1.0 - u8(s["mask"])).all()


# ---- Enough.


@pytest.mark.parametrize("deliver", ["sample", "prompt", "request"])
def test_once_enough_samples_have_ended_the_others_are_cancelled(client, deliver):
    keys = dict(n=8, seed=5, temperature=2.0, max_tokens=60, stop_tokens=list(range(0, 1024, 16)), deliver=deliver, **ALL)
    whole = client.rollout([TEXT, CHAT], **keys).samples
    r = client.rollout([{**TEXT, "enough": 3}, CHAT], **keys)
    finishes = [s["finish"] for s in r.samples]
    assert finishes[:8].count("cancelled") == 5 and "cancelled" not in finishes[8:]
    for s, w in zip(r.samples, whole, strict=True):
        if s["finish"] == "cancelled":
            n = len(s["mask"])
            assert head(s, n) == head(w, n) and "stop" not in s and len(s["entropy"]) == 4 * n
        else:
            assert s == w
    assert client.rollout([{**TEXT, "enough": 9}, CHAT], **keys).samples == whole
    assert client.ask("status")["pages_used"] == 0


def test_enough_counts_length_and_lets_samples_never_start(start_worker):
    with start_worker("--kv-memory", "256K").client() as client:  # four pages: the samples take turns
        r = client.rollout([{**TEXT, "enough": 2}], n=16, max_tokens=50, stop_tokens=[], tools=[], seed=1)
        assert [s["finish"] for s in r.samples].count("length") == 2
        assert any(s["finish"] == "cancelled" and not s["mask"] for s in r.samples)
        assert r.done["samples"] == 16
        assert len(client.rollout([TEXT], n=2, max_tokens=5).samples) == 2  # nothing is left behind


# ---- NaN.

POISON = 900  # what comes after it has no logits


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory, start_worker):
    """A worker on calc-d4, but that the last value embedding of one token is as great as bf16 can be: its products overflow."""
    folder = tmp_path_factory.mktemp("poisoned") / "calc-d4"
    shutil.copytree("tests/models/calc-d4", folder)
    path = folder / "model_005426.pt"
    with zipfile.ZipFile("tests/models/calc-d4/model_005426.pt") as good, zipfile.ZipFile(path, "w") as bad:
        for info in good.infolist():
            data = bytearray(good.read(info))
            if info.filename.endswith("/data/34"):  # value_embeds.3.weight, bf16 [1024, 64]
                assert len(data) == 1024 * 64 * 2
                data[POISON * 128:(POISON + 1) * 128] = struct.pack("<H", 0x7F7F) * 64
            bad.writestr(info.filename, bytes(data))
    return start_worker("--model", str(folder))


def test_nan_fails_its_own_request_and_no_other(poisoned):
    bad, keys = {"tokens": [1015, POISON, 40]}, dict(n=4, seed=3, max_tokens=400, top_k=20, stop_tokens=[], tools=[], **ALL)
    with poisoned.client() as client, poisoned.client() as other:
        before = client.rollout([CHAT], **keys).samples
        score = client.ask("score", sequences=[[1015, 40, 41, 42]], top=3)
        id = client.send("rollout", prompts=[CHAT], **keys)
        accepted = client.receive()
        assert (accepted["type"], accepted["id"]) == ("accepted", id)
        for _ in range(3):
            other.send("rollout", id="bad", prompts=[TEXT, bad], n=2, max_tokens=300, stop_tokens=[])
            kinds = []
            while not kinds or kinds[-1]["type"] not in LAST:
                kinds.append(other.receive())
            assert kinds[-1]["type"] == "error" and kinds[-1]["code"] == "model_error" and "no number" in kinds[-1]["message"]
            failed = other.failure("score", sequences=[[1015, 40], bad["tokens"]])
            assert failed.code == "model_error" and "sequence 1" in failed.message
            assert other.ask("score", sequences=[[1015, 40, 41, 42]], top=3)["scores"] == score["scores"]
        assert Rollout([accepted] + client.replies(id)).samples == before
        assert client.ask("status")["pages_used"] == 0


# ---- The Python package.


def test_the_package_s_client_has_it_all(worker):
    with coppice.Client(worker.endpoint) as client:
        rollout = client.rollout([{**CHAT, "enough": 2}, TEXT], n=4, seed=7, max_tokens=30, stop=["69104"], entropy=True,
                                 deliver="request")
        samples = rollout.wait()
        assert [s.finish for s in samples[:4]].count("stop") == 2
        for s in samples:
            assert s.entropy.dtype == np.float32 and len(s.entropy) == len(s.tokens)
            assert (s.entropy[s.mask == 0] == 1.0).all() and (s.entropy[s.mask == 1] >= 0.0).all()
            assert s.stop == "69104" if s.finish == "stop" and s.prompt == 0 else s.stop is None or s.prompt == 1
        with pytest.raises(coppice.errors.BadRequest):
            client.score([[1, 2]], temperature=0)
