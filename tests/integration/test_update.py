"""New weights, from a path and as a stream, while rollouts run: which set made which token, and what a broken update leaves."""
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from checkpoints import EARLY, FILES, START, Tensor, begin_stream, digest_of, send_chunks, send_stream, tensors_of
from test_pressure import PROMPT, in_flight, is_idle, runs, wait_for
from wire_client import LAST, Rollout, f32, u32

N_LONG = 2000  # tokens: long enough that an update falls into the middle, also on a quick machine
KEYS = {"prompts": [PROMPT], "n": 4, "seed": 4, "max_tokens": 20, "stop_tokens": [], "tools": []}
NONE = Tensor("zzz", "F32", [1], bytes(4))  # no tensor of the model
LONG = {**KEYS, "max_tokens": N_LONG, "logprobs": ["sampling", "model"]}


@pytest.fixture(scope="module")
def sets(start_worker):
    """What each checkpoint is called, and what it answers KEYS with."""
    made = {}
    for path in (START, EARLY):
        with start_worker(model=path).client() as client:
            made[path] = client.ask("ping")["weights"][1], client.rollout(**KEYS).samples
    assert made[START][0] != made[EARLY][0] and made[START][1] != made[EARLY][1]
    return made


@pytest.fixture(scope="module")
def tensors():
    return {path: tensors_of(file) for path, file in FILES.items()}


@pytest.fixture
def fresh(start_worker):
    return start_worker()


def update(client, version, path, **keys):
    return client.ask("weights", version=version, source={"path": path}, **keys)["weights"]


def tokens_of(samples):
    return [s["tokens"] for s in samples]


def both_replies(client, ids):
    """What the `weights` request and the commit got, in this order."""
    got = {}
    while len(got) < 2:
        reply = client.receive()
        got[reply["id"]] = reply
    return [got[id] for id in ids]


def expect_old_set(client, sets, version=0, path=START):
    """It serves, as it did before, and has the label that it had."""
    assert client.ask("ping")["weights"] == [version, sets[path][0]]
    assert tokens_of(client.rollout(**KEYS).samples) == tokens_of(sets[path][1])


# ---- From a path.


@pytest.mark.parametrize("source", [EARLY, FILES[EARLY]])
def test_weights_from_a_path_come_into_use(fresh, sets, source):
    with fresh.client() as client, fresh.client() as other:
        expect_old_set(client, sets)
        assert update(client, 7, source) == [7, sets[EARLY][0]]
        assert other.ask("ping")["weights"] == other.ask("status")["weights"] == [7, sets[EARLY][0]]
        r = other.rollout(**KEYS)
        assert r.accepted["weights"] == [7, sets[EARLY][0]] and all(s["weights"] == [[0, 7, sets[EARLY][0]]] for s in r.samples)
        assert tokens_of(r.samples) == tokens_of(sets[EARLY][1])
        assert client.ask("score", sequences=[[1, 2]])["weights"] == [7, sets[EARLY][0]]
        assert update(client, 8, START) == [8, sets[START][0]]
        expect_old_set(other, sets, 8)


def test_who_was_told_of_new_weights_finds_them_in_use(fresh, sets):
    """Whatever is sent after the reply, on whichever connection, sees them."""
    with fresh.client() as client, fresh.client() as other:
        for version in range(1, 21):
            weights = update(client, version, (START, EARLY)[version % 2])
            assert other.ask("ping")["weights"] == client.ask("ping")["weights"] == weights
            assert other.rollout([PROMPT], max_tokens=1).accepted["weights"] == weights


def test_the_same_weights_change_the_label_only(fresh, sets):
    with fresh.client() as client:
        prompt = {"tokens": [5] * 200}
        client.rollout([prompt], max_tokens=1)
        assert update(client, 3, START) == [3, sets[START][0]]
        assert client.rollout([prompt], max_tokens=1).done["cached_tokens"] > 0  # nothing was dropped
        assert update(client, 4, EARLY) == [4, sets[EARLY][0]]
        assert client.rollout([prompt], max_tokens=1).done["cached_tokens"] == 0
        expect_old_set(client, sets, 4, EARLY)


def test_versions_must_grow(fresh, sets):
    with fresh.client() as client:
        update(client, 5, EARLY)
        for version in (1, 5):
            failed = client.failure("weights", version=version, source={"path": START})
            assert (failed.code, failed.key) == ("bad_request", "version")
        queued = [client.send("weights", version=v, source={"path": START}) for v in (7, 6, 8)]  # judged when its turn comes
        replies = {r["id"]: r for r in (client.receive() for _ in queued)}
        assert [replies[id]["type"] for id in queued] == ["weights", "error", "weights"]
        assert (replies[queued[1]]["code"], replies[queued[1]]["key"]) == ("bad_request", "version")
        expect_old_set(client, sets, 8)


def test_paths_that_lead_nowhere_change_nothing(start_worker, sets, tmp_path):
    inside = tmp_path / "weights"
    inside.mkdir()
    (inside / "link").symlink_to(os.path.abspath(EARLY))
    (inside / "nothing.pt").write_bytes(b"")
    worker = start_worker("--weights-dir", str(inside))
    with worker.client() as client:
        for path, code in ((inside / "none", "not_found"), (inside / "nothing.pt", "bad_request"), (os.path.abspath(EARLY), "bad_request"),
                           (inside / "link", "bad_request"), (inside / ".." / "weights" / "link", "bad_request")):
            failed = client.failure("weights", version=1, source={"path": str(path)})
            assert (failed.code, failed.key) == (code, "source.path"), path
        expect_old_set(client, sets)
        whole = inside / "model_1.pt"
        whole.write_bytes(open(FILES[EARLY], "rb").read())
        assert update(client, 1, str(whole)) == [1, sets[EARLY][0]]
        expect_old_set(client, sets, 1, EARLY)


def test_links_in_the_weights_dir_lead_nowhere_else(start_worker, sets, tmp_path):
    """Neither the model file nor the meta file beside it, whether the file or its directory is named."""
    inside, outside = tmp_path / "weights", tmp_path / "weights-outside"
    for folder in (inside, outside, inside / "model", inside / "meta", inside / "base" / "base_checkpoints", inside / "pool", inside / "good"):
        folder.mkdir(parents=True)
    model, meta = (os.path.abspath(f"{EARLY}/{name}") for name in ("model_000110.pt", "meta_000110.json"))
    (outside / "tag").mkdir()
    (outside / "tag" / "model_000110.pt").symlink_to(model)
    (inside / "model" / "model_000110.pt").symlink_to(model)
    (inside / "meta" / "meta_000110.json").symlink_to(meta)
    (inside / "meta" / "model_000110.pt").write_bytes(open(model, "rb").read())
    (inside / "base" / "base_checkpoints" / "d4").symlink_to(outside / "tag")
    (inside / "pool" / "blob").write_bytes(open(model, "rb").read())
    (inside / "good" / "model_000001.pt").symlink_to("../pool/blob")
    (inside / "loop.pt").symlink_to("loop.pt")
    with start_worker("--weights-dir", str(inside)).client() as client:
        for path in ("model", "model/model_000110.pt", "meta", "meta/model_000110.pt", "base", "base/base_checkpoints/d4/model_000110.pt", "loop.pt"):
            failed = client.failure("weights", version=1, source={"path": str(inside / path)})
            assert (failed.code, failed.key) == ("bad_request", "source.path"), path
        expect_old_set(client, sets)
        assert update(client, 1, str(inside / "good")) == [1, sets[EARLY][0]]  # a link that stays inside


# ---- What becomes of rows in flight.


def runs_of(sample):
    """[(start, end, version)] of a sample."""
    n, starts = len(sample["mask"]), [r[0] for r in sample["weights"]]
    return [(a, b, r[1]) for a, b, r in zip(starts, starts[1:] + [n], sample["weights"], strict=True)]


def expect_scored(client, prompt, samples, version):
    """Under the set in use, a score has the bits that the runs of `version` have."""
    for s in samples:
        (score,) = client.ask("score", sequences=[np.concatenate([prompt, u32(s["tokens"])]).astype("<u4").tobytes()])["scores"]
        scored, told = u32(score["logprobs"])[len(prompt):], u32(s["model_logprobs"])
        for a, b, v in runs_of(s):
            assert v != version or (scored[a:b] == told[a:b]).all()


@pytest.mark.parametrize("policy", ["finish", "recompute", "keep", "abort"])
def test_a_policy_says_what_becomes_of_rows_in_flight(start_worker, sets, policy):
    worker = start_worker("--max-rows", "4")  # so that of eight samples four have not started
    with worker.client() as client, worker.client() as other:
        alone = client.rollout(**{**LONG, "n": 8}).samples
        id, accepted = in_flight(client, **{**LONG, "n": 8})
        wait_for(runs, other, 4)
        time.sleep(0.05)
        weights = update(other, 1, EARLY, policy=policy)
        r = Rollout([accepted] + client.replies(id))
        first, later = r.samples[:4], r.samples[4:]
        assert all(s["weights"] == [[0, *weights]] and s["finish"] == "length" for s in later)
        for s, a in zip(first, alone[:4], strict=True):
            (start, n, version), *rest = runs_of(s)
            assert (start, version) == (0, 0) and n > 0 and s["weights"][0][2] == sets[START][0]
            assert s["tokens"][:4 * n] == a["tokens"][:4 * n] and s["logprobs"][:4 * n] == a["logprobs"][:4 * n]
            if policy == "finish":
                assert not rest and s["tokens"] == a["tokens"] and s["finish"] == "length"
            elif policy == "abort":
                assert not rest and s["finish"] == "cancelled" and n < N_LONG
            else:
                assert [v for _, _, v in rest] == [1] and s["finish"] == "length" and len(s["mask"]) == N_LONG
                assert s["weights"][1][1:] == weights
        if policy != "keep":
            expect_scored(other, PROMPT["tokens"], r.samples, 1)
        update(other, 2, START)
        expect_scored(other, PROMPT["tokens"], first, 0)
        expect_old_set(client, sets, 2)
        wait_for(is_idle, client)


def test_what_is_aborted_is_continued_under_the_new_weights(fresh):
    with fresh.client() as client, fresh.client() as other:
        id, accepted = in_flight(client, **LONG)
        wait_for(runs, other, 4)
        time.sleep(0.05)
        weights = update(other, 1, EARLY, policy="abort")
        cut = Rollout([accepted] + client.replies(id)).samples
        prompts = [{**PROMPT, "sample": s["sample"], "prefix": s["tokens"]} for s in cut]
        rest = client.rollout(**{**LONG, "prompts": prompts, "n": 1}).samples
        for s, t in zip(cut, rest, strict=True):
            assert len(s["mask"]) + len(t["mask"]) == N_LONG and t["weights"] == [[0, *weights]]


def test_rows_that_wait_in_a_pause_go_on_under_the_new_weights(fresh, sets):
    """What a trainer does that wants nothing of the old policy to be drawn any more."""
    with fresh.client() as client, fresh.client() as other:
        id, accepted = in_flight(client, **LONG)
        wait_for(runs, other, 4)
        other.ask("pause", mode="keep")
        weights = update(other, 1, EARLY, policy="recompute")
        other.ask("resume")
        samples = Rollout([accepted] + client.replies(id)).samples
        assert all([run[1] for run in s["weights"]] == [0, 1] and s["weights"][1][1:] == weights for s in samples)
        expect_scored(other, PROMPT["tokens"], samples, 1)


def test_a_score_ends_under_the_weights_that_it_began_with(fresh, sets):
    sequences = [np.full(400, 5 + i, "<u4").tobytes() for i in range(24)]
    with fresh.client() as client, fresh.client() as other:
        old = client.ask("score", sequences=sequences)
        id = client.send("score", sequences=sequences)
        wait_for(lambda: other.ask("status")["rows"] > 0 or client.socket.poll(0))
        update(other, 1, EARLY)
        (reply,) = client.replies(id)
        assert reply["scores"] == old["scores"] and reply["weights"] == [0, sets[START][0]]
        assert client.ask("score", sequences=sequences)["scores"] != old["scores"]


def test_no_more_than_three_sets_are_in_memory_and_nobody_waits_for_that(fresh, sets, tensors):
    """Rows that end on the two older ones: the next path waits for them, a stream may not begin."""
    with fresh.client() as client, fresh.client() as other:
        running = []
        for version, path in ((1, EARLY), (2, START)):
            running.append(in_flight(client, **{**LONG, "n": 1, "max_tokens": 4000}))
            wait_for(runs, other, len(running))
            update(other, version, path)
        failed = other.failure("weights", version=4, source={"stream": {"tensors": 1, "bytes": 4}})
        assert failed.code == "overloaded" and "older sets" in failed.message
        waiting = client.send("weights", version=3, source={"path": EARLY})
        expect_old_set(other, sets, 2)  # it serves on
        assert client.socket.poll(100) == 0
        got = []
        for id, _ in running:
            other.ask("cancel", target=id)
        while len(got) < 5:
            got.append(client.receive())
        versions = {r["id"]: [run[1] for run in r["samples"][0]["weights"]] for r in got if r["type"] == "samples"}
        assert [versions[id] for id, _ in running] == [[0], [1]]
        assert [r["weights"] for r in got if r["id"] == waiting] == [[3, sets[EARLY][0]]]


def test_updates_every_50_ms_lose_and_mislabel_nothing(start_worker, sets):
    worker = start_worker("--max-rows", "16")
    policies = ["finish", "keep", "recompute", "abort"]
    digests = {0: sets[START][0]}
    with worker.client() as client, worker.client() as trainer:
        open_, samples, version = set(), [], 0
        until = time.monotonic() + 4
        next_update = time.monotonic()
        got = {}
        while time.monotonic() < until or open_:
            while time.monotonic() < until and len(open_) < 6:
                open_.add(client.send("rollout", prompts=[PROMPT, {"tokens": [1016] * 90}], n=4, max_tokens=60, tools=[],
                                      stop_tokens=[], kept=True, top_k=8, logprobs=["sampling", "model"]))
            if time.monotonic() >= next_update and time.monotonic() < until:
                version += 1
                path = (START, EARLY)[version % 2]
                digests[version] = sets[path][0]
                trainer.send("weights", id=f"update-{version}", version=version, source={"path": path},
                             policy=policies[version % 4])
                next_update += 0.05
            while client.socket.poll(5):
                reply = client.receive()
                got.setdefault(reply["id"], []).append(reply)
                if reply["type"] in LAST:
                    open_.remove(reply["id"])
        for v in range(1, version + 1):
            assert trainer.receive() == {"type": "weights", "id": f"update-{v}", "weights": [v, digests[v]]}
        for replies in got.values():
            samples += Rollout(replies).samples
        assert len(samples) == 8 * len(got) and version > 20
        seen = set()
        for s in samples:
            n = len(s["mask"])
            assert s["finish"] == "cancelled" or n == 60
            for key in ("logprobs", "model_logprobs"):
                assert len(f32(s[key])) == n and np.isfinite(f32(s[key])).all() and (f32(s[key]) <= 0).all()
            versions = [v for _, _, v in runs_of(s)]
            assert all(digest == digests[v] for _, v, digest in s["weights"]) and versions == sorted(set(versions))
            assert (n > 0) == bool(versions) and all(a < b for a, b, _ in runs_of(s))
            seen.update(versions)
        assert len(seen) > 5
        wait_for(is_idle, client)
        assert client.ask("ping")["weights"] == [version, digests[version]]


# ---- Streams.


@pytest.mark.parametrize("chunk_bytes", [1 << 22, 70_001, 3_333])
def test_a_stream_brings_the_same_set_as_the_path(fresh, sets, tensors, chunk_bytes):
    with fresh.client() as client, fresh.client() as other:
        id, accepted = in_flight(other, **LONG)
        replies = both_replies(client, send_stream(client, 1, tensors[EARLY], chunk_bytes))
        assert [r["weights"] for r in replies] == [[1, sets[EARLY][0]]] * 2
        expect_old_set(client, sets, 1, EARLY)
        assert Rollout([accepted] + other.replies(id)).samples[0]["finish"] == "length"
        assert [r["weights"] for r in both_replies(client, send_stream(client, 2, tensors[START]))] == [[2, sets[START][0]]] * 2
        expect_old_set(client, sets, 2)


def spoilt(tensors, name, **changes):
    return [t._replace(**changes) if t.name == name else t for t in tensors]


def spoil(how, tensors):
    """A stream that is broken in one way, and the error that it should get."""
    name = tensors[1].name
    data = bytearray(tensors[1].data)
    if how == "checksum":
        return tensors, {"digest": "0" * 32}, "bad_request"
    if how == "missing":
        return tensors[:-1], {}, "bad_request"
    if how == "unknown":
        return tensors + [NONE], {}, "bad_request"
    if how == "misshaped":
        return spoilt(tensors, name, shape=tensors[1].shape[::-1]), {}, "bad_request"
    if how == "order":
        return [tensors[1], tensors[0], *tensors[2:]], {}, "bad_request"
    if how == "infinite":
        data[-4:] = np.array([np.inf], "<f4").tobytes() if tensors[1].dtype == "F32" else bytes.fromhex("807f807f")
        return spoilt(tensors, name, data=bytes(data)), {}, "model_error"
    raise ValueError(how)


@pytest.mark.parametrize("how", ["checksum", "missing", "unknown", "misshaped", "order", "infinite"])
def test_a_broken_stream_changes_nothing(worker, sets, tensors, how):
    broken, keys, code = spoil(how, tensors[EARLY])
    with worker.client() as client, worker.client() as other:
        id, accepted = in_flight(other, **LONG)
        first, commit = both_replies(client, send_stream(client, 1, broken, 1 << 16, **keys))
        assert (first["type"], first["code"]) == (commit["type"], commit["code"]) == ("error", code), (first, commit)
        assert first["message"] == commit["message"]
        expect_old_set(client, sets)
        assert {s["finish"] for s in Rollout([accepted] + other.replies(id)).samples} == {"length"}


def test_a_stream_that_is_broken_off_leaves_its_version_free(start_worker, sets, tensors):
    worker = start_worker("--weights-silence", "1")
    half = tensors[EARLY][:12]
    with worker.client() as client, worker.client() as other:
        id = begin_stream(other, 1, tensors[EARLY])
        send_chunks(other, id, half, 1 << 16)
        other.ask("ping")  # so it has begun
        second = client.failure("weights", version=2, source={"stream": {"tensors": 1, "bytes": 4}})
        assert second.code == "overloaded"
        reply = other.receive()
        assert (reply["id"], reply["type"], reply["code"]) == (id, "error", "timeout")
        expect_old_set(client, sets)
        failed = other.failure("weights_commit", target=id, digest="0" * 32)
        assert failed.code == "timeout"
        replies = both_replies(client, send_stream(client, 1, tensors[EARLY]))
        assert [r["weights"] for r in replies] == [[1, sets[EARLY][0]]] * 2
        expect_old_set(client, sets, 1, EARLY)


SENDER = """
import sys
sys.path.insert(0, "tests/integration")
from checkpoints import EARLY, FILES, begin_stream, send_chunks, tensors_of
from wire_client import Client
client, tensors = Client(sys.argv[1]), tensors_of(FILES[EARLY])
send_chunks(client, begin_stream(client, 1, tensors), tensors[:20], 1 << 16)
client.ask("ping")
print("half", flush=True)
sys.stdin.read()
"""


def is_open_for_streams(client):
    """Looks by beginning one that ends at once, as a tensor of that name is unknown."""
    id = begin_stream(client, 1, [NONE])
    client.send("ping", id="look")
    reply = client.receive()
    if reply["type"] == "error":
        assert reply["code"] == "overloaded" and client.receive()["id"] == "look"
        return False
    send_chunks(client, id, [NONE])
    reply = client.receive()
    assert (reply["id"], reply["code"]) == (id, "bad_request")
    return True


def test_a_sender_that_is_killed_half_way_is_given_up(start_worker, sets, tensors):
    worker = start_worker("--weights-silence", "0.5")
    p = subprocess.Popen([sys.executable, "-c", SENDER, worker.endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert p.stdout.readline() == b"half\n"
    p.kill()
    p.communicate()
    with worker.client() as client:
        expect_old_set(client, sets)
        wait_for(lambda: is_open_for_streams(client))
        replies = both_replies(client, send_stream(client, 1, tensors[EARLY]))
        assert [r["weights"] for r in replies] == [[1, sets[EARLY][0]]] * 2
        expect_old_set(client, sets, 1, EARLY)


def test_chunks_and_commits_without_a_stream_are_not_found(worker, tensors):
    with worker.client() as client:
        send_chunks(client, "nobody", tensors[EARLY][:1])
        reply = client.receive()
        assert (reply["code"], reply["key"]) == ("not_found", "target")
        assert client.failure("weights_commit", target="nobody", digest="0" * 32).code == "not_found"


# ---- The end.


def test_a_worker_that_drains_takes_no_weights_and_waits_for_no_sender(start_worker, tensors):
    worker = start_worker("--grace", "1")
    with worker.client() as client, worker.client() as other:
        id = begin_stream(client, 1, tensors[EARLY])
        send_chunks(client, id, tensors[EARLY][:3])
        client.ask("ping")
        start = time.monotonic()
        worker.terminate()
        wait_for(lambda: other.ask("ping")["state"] == "draining")
        assert other.failure("weights", version=2, source={"path": EARLY}).code == "draining"
        worker.expect_clean_end()
        assert 0.5 < time.monotonic() - start < 60


def test_updates_under_way_end_with_the_worker(start_worker):
    """Whatever is being read or waits: nothing leaks, nothing hangs (a sanitizer would tell)."""
    worker = start_worker("--grace", "0")
    with worker.client() as client:
        in_flight(client, **LONG)
        for version in range(1, 30):
            client.send("weights", version=version, source={"path": (START, EARLY)[version % 2]})
        client.ask("ping")
        worker.terminate()
        worker.expect_clean_end()


def test_updates_under_way_at_the_end_are_told(start_worker, sets, tensors):
    """A stream that nobody goes on with and what waits behind it hold up nothing beyond the grace time."""
    worker = start_worker("--grace", "0.3")
    with worker.client() as client, worker.client() as other:
        id = begin_stream(client, 1, tensors[EARLY])
        send_chunks(client, id, tensors[EARLY][:3])
        behind = [client.send("weights", version=v, source={"path": EARLY}) for v in (2, 3)]
        expect_old_set(other, sets)
        client.ask("ping")
        worker.terminate()
        replies = {r["id"]: r for r in (client.receive() for _ in range(3))}
        assert {replies[i].get("code") for i in (id, *behind)} == {"draining"}
    worker.expect_clean_end()
