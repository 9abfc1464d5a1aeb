"""What a worker answers to those who keep to the protocol: proto/README.md, from outside."""
import numpy as np
import pytest

from wire_client import Rollout, f32, u8, u32

CHAT = {"messages": [{"role": "user", "content": "What is 1,234 * 56?"}]}
TEXT = {"text": "Three apples and four plums"}
LONG = {"text": "one two three four five six seven eight nine ten " * 8}  # over 64 tokens, the size of a page
ENDLESS = {"max_tokens": 4000, "stop_tokens": [], "tools": []}  # seconds of work: to be cancelled


def totals(done):
    """`done` but for what differs from run to run."""
    return {key: value for key, value in done.items() if key not in ("id", "seconds")}


def expect_one_length(sample):
    n = len(sample["tokens"]) // 4
    assert len(sample["mask"]) == n
    for key in ("logprobs", "model_logprobs"):
        assert key not in sample or len(sample[key]) == 4 * n
    return n


def in_flight(client, **keys):
    """Start a rollout; its id, once it is accepted."""
    id = client.send("rollout", **keys)
    reply = client.receive()
    assert (reply["type"], reply["id"]) == ("accepted", id)
    return id, reply


def until_cancelled(client, other, id, accepted):
    """Cancel a rollout that `client` waits for; the rollout."""
    assert other.ask("cancel", target=id)["type"] == "done"
    return Rollout([accepted] + client.replies(id))


# ---- Rollouts.


def test_the_arrays_of_a_sample_have_one_length_and_1_at_forced_tokens(client):
    r = client.rollout([CHAT], n=4, seed=7, logprobs=["sampling", "model"])
    for s in r.samples:
        n = expect_one_length(s)
        mask = u8(s["mask"])
        assert n > 0 and set(mask) == {0, 1}
        for key in ("logprobs", "model_logprobs"):
            values = f32(s[key])
            assert (values[mask == 0] == 1.0).all() and (values[mask == 1] <= 0.0).all()
        assert [(s["prompt"], s["sample"], s["seed"])] == [(0, r.samples.index(s), 7)]
    sampled = sum(int(u8(s["mask"]).sum()) for s in r.samples)
    assert r.done["sampled_tokens"] == sampled
    assert r.done["forced_tokens"] == sum(len(s["mask"]) for s in r.samples) - sampled
    assert r.done["prompt_tokens"] == len(u32(r.samples[0]["prompt_tokens"]))


def test_a_tool_call_is_run_and_told(client):
    (s,) = client.rollout([CHAT], seed=7, text=True).samples
    (call,) = s["tool_calls"]
    assert call["tool"] == "calculator" and call["ok"] is True
    mask, tokens = u8(s["mask"]), u32(s["tokens"])
    assert mask[call["at"]] == 1 and mask[call["at"] + 1] == 0
    end = call["at"] + 1
    while mask[end] == 0:
        end += 1
    forced = client.ask("detokenize", tokens=tokens[call["at"] + 1:end].tobytes())["text"]
    assert forced == "<|output_start|>69104<|output_end|>"
    assert s["text"].endswith("The answer is 69104.<|assistant_end|>")
    assert (s["finish"], s["stop"]) == ("stop", int(tokens[-1]))


def test_without_tools_nothing_is_forced(client):
    (s,) = client.rollout([CHAT], seed=7, tools=[], max_tokens=40).samples
    assert s["tool_calls"] == [] and u8(s["mask"]).all()


def test_weights_runs_cover_the_tokens(client):
    weights = client.ask("ping")["weights"]
    r = client.rollout([CHAT, TEXT], n=2, max_tokens=12)
    assert r.accepted["weights"] == weights
    for s in r.samples:
        assert s["weights"] == [[0, *weights]]


def test_prompt_tokens_come_back_where_the_worker_tokenized(client):
    (bos, *_), plain = u32(client.rollout([CHAT]).samples[0]["prompt_tokens"]), client.ask("tokenize", **TEXT)
    as_text = client.rollout([TEXT], seed=3, max_tokens=8).samples[0]
    assert list(u32(as_text.pop("prompt_tokens"))) == [bos, *u32(plain["tokens"])]
    as_tokens = client.rollout([{"tokens": [int(bos), *u32(plain["tokens"]).tolist()]}], seed=3, max_tokens=8).samples[0]
    assert as_tokens == as_text  # and no prompt_tokens


def test_text_is_the_decoded_completion(client):
    for s in client.rollout([CHAT, TEXT], n=2, text=True, max_tokens=30).samples:
        assert s["text"] == client.ask("detokenize", tokens=s["tokens"])["text"]


def test_kept_ids_hold_the_token_that_was_drawn(client):
    (s,) = client.rollout([CHAT], seed=1, kept=True, top_k=5, temperature=2.0).samples
    offsets, kept, mask = u32(s["kept_offsets"]), u32(s["kept_ids"]), u8(s["mask"])
    assert len(offsets) == len(mask) + 1 and offsets[0] == 0 and offsets[-1] == len(kept)
    for t, token in enumerate(u32(s["tokens"])):
        here = kept[offsets[t]:offsets[t + 1]]
        assert len(here) == 5 and token in here if mask[t] else len(here) == 0


def test_temperature_0_takes_the_likeliest(client):
    a, b = client.rollout([CHAT], n=2, temperature=0, kept=True, top_k=3, seed=1).samples
    assert a["tokens"] == b["tokens"] and u32(a["kept_ids"]).tolist() == u32(a["tokens"])[u8(a["mask"]) == 1].tolist()
    assert (f32(a["logprobs"])[u8(a["mask"]) == 1] == 0.0).all()


def test_max_tokens_ends_a_sample_as_length(client):
    (s,) = client.rollout([TEXT], max_tokens=5, stop_tokens=[]).samples
    assert len(s["mask"]) == 5 and s["finish"] == "length" and "stop" not in s


def test_a_stop_token_ends_a_sample_and_min_tokens_holds_it_off(client):
    free = client.rollout([TEXT], seed=5, max_tokens=6, stop_tokens=[]).samples[0]
    stop = int(u32(free["tokens"])[2])
    s = client.rollout([TEXT], seed=5, max_tokens=6, stop_tokens=[stop]).samples[0]
    assert u32(s["tokens"])[-1] == stop == s["stop"] and s["finish"] == "stop" and len(s["mask"]) <= 3
    s = client.rollout([TEXT], seed=5, max_tokens=6, min_tokens=6, stop_tokens=[stop]).samples[0]
    assert stop not in u32(s["tokens"]) and s["finish"] == "length"


def test_the_same_seed_gives_the_same_bytes(client, worker):
    def once(**keys):
        r = client.rollout([CHAT, TEXT], n=3, temperature=1.5, max_tokens=40, logprobs=["sampling", "model"], **keys)
        return r.samples, totals(r.done)

    first = once(seed=11)
    assert once(seed=11) == first
    assert once(seed=12)[0] != first[0]
    assert all(s["prompt_id"] == "x" for s in client.rollout([{**TEXT, "id": "x"}], max_tokens=3).samples)


def test_a_seed_that_the_worker_drew_repeats_the_rollout(client):
    drawn = client.rollout([TEXT], n=2, max_tokens=20)
    assert drawn.accepted["seed"] < 2**53
    assert client.rollout([TEXT], n=2, max_tokens=20, seed=drawn.accepted["seed"]).samples == drawn.samples


def test_one_sample_index_can_be_had_alone(client):
    many = client.rollout([CHAT], n=4, seed=9, temperature=2.0).samples
    assert client.rollout([{**CHAT, "sample": 3}], seed=9, temperature=2.0).samples == [many[3]]


def test_a_partial_rollout_is_continued_with_prefix(client):
    """Cut anywhere, also within what the calculator forced."""
    keys = {"seed": 21, "temperature": 1.2, "logprobs": ["sampling", "model"]}
    whole = client.rollout([CHAT], n=2, **keys).samples[1]
    tokens, n = u32(whole["tokens"]), expect_one_length(whole)
    assert whole["tool_calls"]
    cuts = range(n)
    parts = client.rollout([{**CHAT, "sample": 1, "prefix": tokens[:k].tobytes()} for k in cuts], **keys).samples
    for k, part in zip(cuts, parts, strict=True):
        assert part["mask"] == whole["mask"][k:]
        for key in ("tokens", "logprobs", "model_logprobs"):
            assert part[key] == whole[key][4 * k:]
        calls = [{**c, "at": c["at"] - k} for c in whole["tool_calls"] if c["at"] >= k]
        assert part["tool_calls"] == calls and part["finish"] == whole["finish"]


def test_deliver_says_what_a_message_holds(client):
    ways = {way: client.rollout([CHAT, TEXT], n=3, seed=2, max_tokens=30, deliver=way)
            for way in ("sample", "prompt", "request")}
    assert [len(b) for b in ways["sample"].batches] == [1] * 6
    assert sorted([(s["prompt"], s["sample"]) for s in b] for b in ways["prompt"].batches) == [
        [(p, i) for i in range(3)] for p in range(2)]
    assert ways["request"].batches == [ways["request"].samples]  # in order
    assert ways["sample"].samples == ways["prompt"].samples == ways["request"].samples


def test_compress_false_changes_the_frames_only(client, worker):
    """The client checks each frame for whether it is compressed."""
    keys = {"n": 2, "seed": 4, "max_tokens": 60, "stop_tokens": []}
    with worker.client(compress=False) as plain:
        assert plain.rollout([CHAT], **keys).samples == client.rollout([CHAT], **keys).samples


def test_requests_may_come_compressed(client):
    (reply,) = client.replies(client.send("tokenize", text="apples " * 500, zip=True))
    assert reply["tokens"] == client.ask("tokenize", text="apples " * 500)["tokens"]


# ---- The other requests.


def test_ping_names_the_worker(client):
    pong = client.ask("ping")
    assert (pong["type"], pong["protocol"], pong["model"], pong["state"]) == ("pong", 1, "calc-d4", "ready")
    version, digest = pong["weights"]
    assert version == 0 and len(digest) == 32 and int(digest, 16) >= 0
    assert pong["numerics"] and pong["version"] and pong["backend"]


def test_status_counts_what_was_done(client):
    before = client.ask("status")
    done = client.rollout([CHAT, TEXT], n=2, max_tokens=20).done
    after = client.ask("status")
    for key in ("prompt_tokens", "sampled_tokens", "forced_tokens", "samples"):
        assert after[key] - before[key] == done[key], key
    assert after["requests"] - before["requests"] >= 1 and after["steps"] > before["steps"]
    assert after["rows"] == after["queued"] == after["pages_used"] == after["pages_shared"] == 0
    assert after["pages_total"] == after["pages_used"] + after["pages_cached"] + after["pages_free"]


def test_the_samples_of_a_prompt_share_its_pages(client, worker):
    with worker.client() as other:
        id, accepted = in_flight(client, prompts=[LONG], n=8, **ENDLESS)
        status = other.ask("status")
        while status["rows"] < 8:  # the prompt is still being read
            status = other.ask("status")
        assert status["pages_shared"] > 0 and status["pages_used"] > status["pages_shared"]
        assert status["pages_total"] == status["pages_used"] + status["pages_cached"] + status["pages_free"]
        until_cancelled(client, other, id, accepted)


def test_a_score_has_the_bits_of_model_logprobs(client):
    r = client.rollout([CHAT], n=4, seed=13, temperature=0.7, logprobs=["sampling", "model"])
    prompt = u32(r.samples[0]["prompt_tokens"])
    sequences = [np.concatenate([prompt, u32(s["tokens"])]).tobytes() for s in r.samples]
    for key, temperature in (("model_logprobs", 1.0), ("logprobs", 0.7)):
        reply = client.ask("score", sequences=sequences, temperature=temperature)
        for s, score in zip(r.samples, reply["scores"], strict=True):
            scored, drawn = u32(score["logprobs"]), u32(s[key])  # compared as bits
            assert f32(score["logprobs"])[0] == 1.0
            here = u8(s["mask"]) == 1
            assert (scored[len(prompt):][here] == drawn[here]).all()


def test_a_score_tells_the_top(client):
    (score,) = client.ask("score", sequences=[[1, 2, 3]], top=2)["scores"]
    top_ids, top = u32(score["top_ids"]).reshape(3, 2), f32(score["top_logprobs"]).reshape(3, 2)
    assert (top_ids[0] == 0xFFFFFFFF).all() and (top[0] == 1.0).all()
    assert (top[1:, 0] >= top[1:, 1]).all() and (f32(score["logprobs"])[1:] <= top[1:, 0]).all()
    assert len(u32(score["next_ids"])) == len(f32(score["next_logprobs"])) == 2


@pytest.mark.parametrize("text", ["", "What is 2 + 2?", "naïve — 東京 🙂", "a\0b", "<|bos|>"])
def test_tokens_decode_to_the_text_they_came_from(client, text):
    tokens = client.ask("tokenize", text=text)["tokens"]
    back = client.ask("detokenize", tokens=tokens)
    assert (back["text"], back["bytes"]) == (text, text.encode())


def test_half_a_character_decodes_to_the_replacement(client):
    tokens = u32(client.ask("tokenize", text="🙂")["tokens"])
    assert len(tokens) > 1
    back = client.ask("detokenize", tokens=tokens[:1].tolist())
    assert "\ufffd" in back["text"] and "🙂".encode().startswith(back["bytes"])


def test_messages_are_tokenized_as_a_prompt_is(client):
    assert client.ask("tokenize", **CHAT)["tokens"] == client.rollout([CHAT]).samples[0]["prompt_tokens"]


# ---- Cancelling, and what is refused.


def test_cancelled_samples_come_back_with_what_they_have(client, worker):
    with worker.client() as other:
        id, accepted = in_flight(client, prompts=[CHAT, TEXT], n=2, seed=6, **ENDLESS)
        while other.ask("status")["rows"] < 4:
            pass
        r = until_cancelled(client, other, id, accepted)
    whole = client.rollout([CHAT, TEXT], n=2, seed=6, **{**ENDLESS, "max_tokens": 30}).samples
    for cancelled, s in zip(r.samples, whole, strict=True):
        n = min(expect_one_length(cancelled), 30)
        assert cancelled["finish"] == "cancelled"
        assert cancelled["tokens"][:4 * n] == s["tokens"][:4 * n]
    assert client.ask("status")["pages_used"] == 0


def test_cancelling_the_unknown_is_not_found(client):
    failed = client.failure("cancel", target="nobody")
    assert (failed.code, failed.key) == ("not_found", "target")


def test_an_id_in_flight_is_refused_to_other_content(client, worker):
    with worker.client() as other:
        id, accepted = in_flight(client, prompts=[TEXT], **ENDLESS)
        failed = other.failure("rollout", id=id, prompts=[CHAT])
        assert (failed.code, failed.key) == ("duplicate_id", "id")
        assert other.ask("ping", id=id)["id"] == id  # other types only echo it
        assert other.ask("score", id=id, sequences=[[1]])["id"] == id
        until_cancelled(client, other, id, accepted)


def test_the_id_of_a_score_is_free_for_a_rollout(client):
    client.send("score", id="shared", sequences=[bytes(4 * 500)] * 4)
    client.send("rollout", id="shared", prompts=[TEXT], max_tokens=3)  # the score is in flight
    due = {"scores", "accepted", "samples", "done"}
    while due:
        due.remove(client.receive()["type"])  # an error is none of them


@pytest.mark.parametrize("type, keys, code, key", [
    ("rollout", {"prompts": [{"tokens": [1] * 6000}]}, "too_long", "prompts[0].tokens"),
    ("score", {"sequences": [[1], [1] * 6000]}, "too_long", "sequences[1]"),
    ("rollout", {"prompts": [{"tokens": [1]}, {"tokens": [1, 1024]}]}, "bad_request", "prompts[1].tokens"),
    ("rollout", {"prompts": [{"tokens": [1], "sample": 0, "prefix": [2**32 - 1]}]}, "bad_request", "prompts[0].prefix"),
    ("rollout", {"prompts": [{"tokens": [1]}], "stop_tokens": [5000]}, "bad_request", "stop_tokens"),
    ("score", {"sequences": [[1024]]}, "bad_request", "sequences[0]"),
    ("detokenize", {"tokens": [1024]}, "bad_request", "tokens"),
    ("rollout", {"prompts": [TEXT], "tools": ["calculator", "browser"]}, "unsupported", "tools[1]"),
    ("transmogrify", {}, "unknown_type", "type"),
])
def test_what_cannot_be_served_names_its_key(client, type, keys, code, key):
    failed = client.failure(type, **keys)
    assert (failed.code, failed.key) == (code, key)


def test_a_row_that_the_pool_cannot_hold_is_too_large(start_worker):
    with start_worker("--kv-memory", "1M").client() as client:
        for type, keys, key in (("rollout", {"prompts": [{"tokens": [1] * 4000}]}, "prompts[0].tokens"),
                                ("score", {"sequences": [[1] * 4000]}, "sequences[0]")):
            failed = client.failure(type, **keys)
            assert (failed.code, failed.key) == ("too_large", key)
        assert len(client.rollout([TEXT], n=16, max_tokens=70, stop_tokens=[]).samples) == 16  # in turns


@pytest.mark.parametrize("type", ["sleep", "wake"])
def test_a_type_that_is_not_built_is_unsupported(client, type):
    failed = client.failure(type, target="x")
    assert (failed.code, failed.key) == ("unsupported", "type")


@pytest.mark.parametrize("type, keys", [("rollout", {"prompts": [TEXT]}), ("score", {"sequences": [[1]]})])
def test_a_key_that_is_not_built_is_unsupported(client, type, keys):
    failed = client.failure(type, model="calc-d4", **keys)
    assert (failed.code, failed.key) == ("unsupported", "model")


# ---- The end.


def test_after_sigterm_what_is_in_flight_is_finished_and_the_new_refused(start_worker):
    worker = start_worker()
    keys = {"n": 8, "seed": 3, "max_tokens": 160, "stop_tokens": [], "tools": []}
    with worker.client() as client, worker.client() as other:
        before = client.rollout([TEXT], **keys).samples
        id, accepted = in_flight(client, prompts=[TEXT], **keys)
        worker.terminate()
        while other.ask("ping")["state"] != "draining":
            pass
        assert other.failure("rollout", prompts=[TEXT]).code == "draining"
        assert other.failure("score", sequences=[[1]]).code == "draining"
        assert Rollout([accepted] + client.replies(id)).samples == before
    worker.expect_clean_end()
