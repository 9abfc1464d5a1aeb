"""A worker with more to do than it can: overload, timeouts, clients that do not read or are killed, steps that hang."""
import os
import subprocess
import sys
import time

import msgpack
import numpy as np
import pytest

from conftest import COPPICE, PATIENCE
from wire_client import LAST, Rollout, u32

PROMPT = {"tokens": [1016, 5, 6, 7]}
LONG = {"tokens": [1016, *range(20, 60)]}  # more than a step of `small_backlog` computes
OTHER = {"tokens": [1016, *range(9, 90)]}
ENDLESS = {"prompts": [PROMPT], "max_tokens": 4000, "stop_tokens": [], "tools": []}  # seconds of work for each sample
BACKLOG = 64 << 10


def in_flight(client, **keys):
    """Start a rollout; its id and what it was accepted with."""
    id = client.send("rollout", **keys)
    reply = client.receive()
    assert (reply["type"], reply["id"]) == ("accepted", id), reply
    return id, reply


def wait_for(what, *args):
    deadline = time.monotonic() + PATIENCE
    while not what(*args):
        assert time.monotonic() < deadline, "it does not come to that"


def runs(client, n):
    return client.ask("status")["rows"] == n


def is_idle(client):
    status = client.ask("status")
    return status["rows"] == status["queued"] == status["pages_used"] == 0


def stands_still(client):
    """Samples wait, and nothing runs: between two questions the engine would have made a step."""
    first, then = client.ask("status"), client.ask("status")
    return first["steps"] == then["steps"] and then["rows"] == 0 and then["queued"] > 0


def wait_until_parked(other, samples_before):
    """Something of the rollout has been made, and nothing more is: before that it stands still, too."""
    wait_for(lambda: other.ask("status")["samples"] > samples_before)
    wait_for(stands_still, other)


def end(client, id, accepted, other):
    """Cancel the rollout `id` of `client`; the rollout."""
    assert other.ask("cancel", target=id)["type"] == "done"
    return Rollout([accepted] + client.replies(id))


@pytest.fixture(scope="module")
def one_row(start_worker):
    return start_worker("--max-rows", "1", "--max-queue", "2")


# ---- The queue.


def test_requests_beyond_the_queue_are_overloaded_and_told_when_to_come_back(one_row):
    with one_row.client() as client, one_row.client() as other, one_row.client() as third:
        id, accepted = in_flight(client, **ENDLESS)
        wait_for(runs, other, 1)
        waiting = [in_flight(other, prompts=[PROMPT], max_tokens=3)[0], other.send("score", sequences=[[1, 2]])]
        other.ask("ping")  # so both have arrived
        for type, keys in (("rollout", {"prompts": [PROMPT]}), ("score", {"sequences": [[1]]})):
            third.send(type, id="late", **keys)
            reply = third.receive()
            assert (reply["type"], reply["id"], reply["code"]) == ("error", "late", "overloaded")
            assert 1 <= reply["retry_after"] <= 60 and "--max-queue" in reply["message"]
        assert third.ask("ping")["state"] == "ready" and third.ask("tokenize", text="x")["tokens"]  # no such limit
        end(client, id, accepted, third)
        got = [other.receive() for _ in range(3)]
        assert sorted(reply["type"] for reply in got) == ["done", "samples", "scores"]
        assert {reply["id"] for reply in got} == set(waiting)
        client.rollout([PROMPT], max_tokens=3)  # there is room again


def test_requests_that_are_refused_or_cancelled_leave_the_queue(one_row):
    """Each of them would otherwise take a place for ever."""
    with one_row.client() as client, one_row.client() as other, one_row.client() as third:
        id, accepted = in_flight(client, **ENDLESS)
        wait_for(runs, other, 1)
        for _ in range(3):
            assert other.failure("rollout", prompts=[{"tokens": [1024]}]).code == "bad_request"
            assert other.failure("rollout", prompts=[{"tokens": [1] * 6000}]).code == "too_long"
            assert other.failure("rollout", id=id, prompts=[PROMPT]).code == "duplicate_id"
            assert other.failure("score", sequences=[[1024]]).code == "bad_request"
            assert other.failure("score", sequences=[[1] * 6000]).code == "too_long"
            waiting, waits = in_flight(other, prompts=[PROMPT])
            end(other, waiting, waits, client)
        gone = one_row.client()
        gone.send("rollout", prompts=[PROMPT])
        gone.send("rollout", prompts=[PROMPT])
        while gone.receive()["type"] != "accepted" or gone.receive()["type"] != "accepted":
            pass
        gone.socket.close()  # it is noticed when a reply to it is due
        end(client, id, accepted, third)
        wait_for(is_idle, client)
        id, accepted = in_flight(client, **ENDLESS)
        wait_for(runs, other, 1)
        both = [in_flight(other, prompts=[PROMPT], max_tokens=2) for _ in range(2)]
        end(client, id, accepted, third)
        assert {other.receive()["id"] for _ in range(4)} == {id for id, _ in both}


# ---- Timeouts.


def test_a_timeout_cancels_what_runs_and_keeps_what_it_has(start_worker):
    worker = start_worker("--max-rows", "8")
    keys = {**ENDLESS, "n": 64, "seed": 5}  # more than can be done in that time, and not all of them start
    with worker.client() as client:
        start = time.monotonic()
        r = client.rollout(**keys, timeout=1)
        assert time.monotonic() - start >= 1 and r.done["seconds"] >= 0.9
        whole = client.rollout(**{**keys, "max_tokens": 20}).samples
        lengths = []
        for cut, s in zip(r.samples, whole, strict=True):
            n = min(len(cut["mask"]), 20)
            lengths.append(n)
            assert cut["tokens"][:4 * n] == s["tokens"][:4 * n] and cut["logprobs"][:4 * n] == s["logprobs"][:4 * n]
        assert {s["finish"] for s in r.samples} <= {"cancelled", "length"} and r.samples[-1]["finish"] == "cancelled"
        assert lengths[0] > 0 and lengths[-1] == 0
        wait_for(is_idle, client)


def test_a_timeout_counts_the_time_in_the_queue(one_row):
    with one_row.client() as client, one_row.client() as other:
        id, accepted = in_flight(client, **ENDLESS, n=20)
        wait_for(runs, other, 1)
        r = other.rollout([PROMPT, PROMPT], n=3, timeout=0.2)
        assert [s["finish"] for s in r.samples] == ["cancelled"] * 6 and r.done["sampled_tokens"] == 0
        assert not any(s["tokens"] for s in r.samples) and runs(other, 1)  # the first one still runs
        end(client, id, accepted, other)


def test_a_rollout_that_is_done_in_time_is_not_cancelled(one_row):
    with one_row.client() as client:
        plain = client.rollout([PROMPT], n=3, seed=1, max_tokens=8)
        timed = client.rollout([PROMPT], n=3, seed=1, max_tokens=8, timeout=1000)
        assert timed.samples == plain.samples


# ---- Clients that do not read.


def slow_client(worker):
    return worker.client(compress=False, rcvhwm=1, rcvbuf=4096)


# More than pipes and sockets hold (128 messages and some megabytes), in messages of 16 KiB: the rest stays with the worker.
MANY = {"prompts": [LONG], "n": 700, "seed": 9, "max_tokens": 4, "stop_tokens": [], "kept": True, "top_k": 1024}


@pytest.fixture(scope="module")
def small_backlog(start_worker):
    return start_worker("--max-rows", "16", "--max-queue", "4", "--step-tokens", "16", "--max-backlog", str(BACKLOG))


@pytest.fixture(scope="module")
def undisturbed(small_backlog):
    with small_backlog.client(compress=False) as c:
        return c.rollout(**MANY).samples


def test_a_client_that_does_not_read_is_parked_and_loses_nothing(small_backlog, undisturbed):
    with slow_client(small_backlog) as slow, small_backlog.client() as other:
        before = other.ask("status")["samples"]
        many = slow.send("rollout", **MANY)
        wait_for(lambda: other.ask("status")["samples"] > before)  # so it no longer waits, and these fill the queue:
        more = [slow.send("rollout", prompts=[OTHER], n=2, seed=i, max_tokens=70) for i in range(4)]
        wait_for(stands_still, other)
        assert other.ask("status")["samples"] - before < 0.8 * len(undisturbed)
        # What it has waiting fills the queue for nobody else, and holds up nobody.
        beside = [other.rollout([OTHER], n=2, seed=i, max_tokens=70).samples for i in range(4)]
        assert stands_still(other)
        late = slow.send("detokenize", tokens=[5])  # it waits, too
        got = {}
        while len(got) < 6 or any(replies[-1]["type"] not in LAST for replies in got.values()):
            reply = slow.receive()
            got.setdefault(reply["id"], []).append(reply)
        assert Rollout(got[many]).samples == undisturbed
        assert [Rollout(got[id]).samples for id in more] == beside
        assert got[late][0]["type"] == "text"
        wait_for(is_idle, other)


def test_requests_of_a_client_that_does_not_read_are_kept_up_to_a_limit(small_backlog, undisturbed):
    with slow_client(small_backlog) as slow, small_backlog.client() as other:
        before = other.ask("status")["samples"]
        many = slow.send("rollout", **MANY)
        wait_until_parked(other, before)
        sent = [slow.send("detokenize", tokens=[5] * 1000) for _ in range(200)]  # three times the limit
        for _ in range(300):
            time.sleep(0.002)
            other.ask("ping")  # each round lets some of those arrive, before any reply to them is read
        assert other.rollout([PROMPT], max_tokens=3)
        got = {}
        while len(got) < 201 or any(replies[-1]["type"] not in LAST for replies in got.values()):
            reply = slow.receive()
            got.setdefault(reply["id"], []).append(reply)
        assert Rollout(got[many]).samples == undisturbed
        replies = [got[id] for id in sent]
        assert {len(r) for r in replies} == {1}
        refused = [r[0] for r in replies if r[0]["type"] == "error"]
        assert len(refused) < 200 and {(r["code"], r["retry_after"]) for r in refused} == {("overloaded", 1.0)}
        assert len(slow.ask("detokenize", tokens=[5] * 1000)["text"]) == 1000  # it is served again


def test_messages_of_several_frames_are_bounded_too(start_worker):
    """They are answered without being kept, so that the answers must not pile up."""
    worker = start_worker("--max-backlog", "64K", "--kv-memory", "4M")
    sent = 200_000  # the buffers of the two sockets, of some megabytes, hold a fifth of the answers
    with slow_client(worker) as slow, worker.client() as other:
        for _ in range(sent):
            slow.socket.send_multipart([b"", b""])
        wait_for(lambda: other.ask("ping") and "client_ignored" in worker.stderr.read_text())
        answered, reply = 0, None
        while reply is None or reply["type"] == "error":
            if answered % 1000 == 0:
                slow.send("ping")  # the first ones may be among those that are ignored
            answered, reply = answered + 1, slow.receive()
        assert reply["type"] == "pong" and answered < sent / 2


def test_only_refusals_that_are_unread_count(start_worker):
    """Who is slow for long, and never done with reading, still hears of each of its requests."""
    worker = start_worker("--max-backlog", "64K", "--kv-memory", "4M")
    with slow_client(worker) as slow, worker.client() as other:
        open_ids, n_refused = set(), 0
        while n_refused < 6000:
            while len(open_ids) < 4000:
                open_ids.add(slow.send("detokenize", tokens=[5] * 1000))
            other.ask("ping")
            while len(open_ids) > 1000:
                reply = slow.receive()
                open_ids.remove(reply["id"])
                n_refused += reply["type"] == "error"
        for _ in range(len(open_ids)):
            open_ids.remove(slow.receive()["id"])
        assert "client_ignored" not in worker.stderr.read_text()


def test_what_all_clients_leave_unread_is_bounded_too(start_worker, undisturbed):
    worker = start_worker("--max-rows", "16", "--step-tokens", "16", "--keep-bytes", str(2 * BACKLOG))
    with slow_client(worker) as a, slow_client(worker) as b, worker.client() as other:
        many = [(c, c.send("rollout", **MANY)) for c in (a, b)]
        wait_until_parked(other, 100)
        assert other.ask("status")["samples"] < 0.9 * 2 * len(undisturbed)
        assert other.rollout([OTHER], n=2, max_tokens=70).samples
        for client, id in many:
            replies = [client.receive()]
            while replies[-1]["type"] not in LAST:
                replies.append(client.receive())
            assert {r["id"] for r in replies} == {id} and Rollout(replies).samples == undisturbed


def test_samples_that_wait_for_others_are_bounded(start_worker):
    with start_worker("--keep-bytes", "64K").client() as c:
        whole = dict(prompts=[LONG], n=200, seed=1, max_tokens=40, stop_tokens=[])
        error = c.failure("rollout", **whole, deliver="request")
        assert (error.code, error.key) == ("too_large", "deliver")
        assert len(c.rollout(**whole).samples) == 200
        assert len(c.rollout(**{**whole, "n": 4}, deliver="request").samples) == 4  # what failed has given its room back
        error = c.failure("score", sequences=[[5] * 100] * 10, top=20)
        assert (error.code, error.key) == ("too_large", "sequences")
        assert len(c.ask("score", sequences=[[5] * 100] * 10)["scores"]) == 10


def test_requests_in_flight_are_bounded_by_their_size(start_worker):
    worker = start_worker("--max-message", "64K", "--max-rows", "1", "--step-tokens", "8")
    with worker.client() as c, worker.client() as other:
        prompts = [{"tokens": np.full(300, 5, "<u4").tobytes()} for _ in range(42)]  # 51 KB: five are four messages' worth
        sent = [c.send("rollout", prompts=prompts, max_tokens=2) for _ in range(6)]
        got = {}
        while not any(r["type"] == "error" for r in got.values()):
            reply = c.receive()
            got[reply["id"]] = reply
        refused = [r for r in got.values() if r["type"] == "error"]
        assert refused[0]["id"] in sent[5:] and refused[0]["code"] == "overloaded" and refused[0]["retry_after"] > 0
        for id in sent[:5]:
            other.ask("cancel", target=id)
        wait_for(is_idle, other)
        assert other.rollout([PROMPT], max_tokens=2).samples  # they have given their room back


def test_a_timeout_holds_for_a_parked_client(small_backlog):
    with slow_client(small_backlog) as slow, small_backlog.client() as other:
        end = time.monotonic() + 3
        many = slow.send("rollout", **MANY, timeout=3)
        wait_for(lambda: stands_still(other) or is_idle(other))
        while time.monotonic() < end + 2:
            time.sleep(0.1)
        assert is_idle(other)  # though nobody reads, and nobody has asked anything meanwhile
        samples = Rollout(slow.replies(many)).samples
        assert samples[0]["finish"] == "length" and samples[-1]["finish"] == "cancelled"


# ---- Many clients, and clients that are killed.


def test_many_clients_at_once(start_worker):
    worker = start_worker("--max-rows", "64")
    clients = [worker.client() for _ in range(150)]
    sent = [c.send("rollout", prompts=[PROMPT], n=3, seed=i % 5, max_tokens=8) for i, c in enumerate(clients)]
    samples = [Rollout(c.replies(id)).samples for c, id in zip(clients, sent, strict=True)]
    assert all(s == samples[i % 5] for i, s in enumerate(samples)) and samples[0] != samples[1]
    for c in clients:
        c.socket.close()


CLIENTS = """
import sys, zmq
sockets = []
for frame in sys.argv[2:]:
    s = zmq.Context.instance().socket(zmq.DEALER)
    s.rcvhwm, s.rcvbuf = 1, 4096
    s.connect(sys.argv[1])
    s.send(bytes.fromhex(frame))
    sockets.append(s)
for s in sockets:
    s.recv()
print("accepted", flush=True)
sys.stdin.read()
"""


def clients_to_kill(worker, *requests):
    """A process with a client for each of these rollouts, all accepted."""
    frames = [msgpack.packb({"type": "rollout", **keys}).hex() for keys in requests]
    p = subprocess.Popen([sys.executable, "-c", CLIENTS, worker.endpoint, *frames], stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE)
    assert p.stdout.readline() == b"accepted\n"
    return p


def test_clients_that_are_killed_leave_nothing_behind(start_worker):
    worker = start_worker("--max-backlog", str(BACKLOG))

    def n_files():
        return len(os.listdir(f"/proc/{worker.process.pid}/fd"))

    with worker.client() as client:
        expected = client.rollout([PROMPT], n=4, seed=3, max_tokens=8).samples
        before = n_files()
        for turn in range(3):
            p = clients_to_kill(worker, *({**ENDLESS, "id": f"killed-{turn}-{i}", "n": 40, "max_tokens": 30} for i in range(20)))
            p.kill()
            p.communicate()
            assert client.rollout([PROMPT], n=4, seed=3, max_tokens=8).samples == expected
        wait_for(is_idle, client)
        wait_for(lambda: n_files() <= before)


def test_the_rollout_of_a_parked_client_that_is_killed_runs_on(small_backlog, undisturbed):
    keys = {**MANY, "id": "parked", "compress": False}
    with small_backlog.client() as other:
        before = other.ask("status")["samples"]
        p = clients_to_kill(small_backlog, keys)
        wait_until_parked(other, before)
        p.kill()
        p.communicate()
        wait_for(is_idle, other)
        with small_backlog.client(compress=False) as again:
            assert Rollout(again.replies(again.send("rollout", **keys))).samples == undisturbed
        assert other.ask("status")["samples"] - before == len(undisturbed)
        assert other.ask("ack", target="parked")["type"] == "done"
        assert other.failure("cancel", target="parked").code == "not_found"


# ---- The end.


def test_draining_ends_though_a_client_does_not_read(start_worker):
    """Its rollouts are cancelled when the grace time is over, and what it has not read by then is lost."""
    worker = start_worker("--max-rows", "16", "--max-backlog", str(BACKLOG), "--grace", "0.5")
    with slow_client(worker) as slow, worker.client() as other:
        slow.send("rollout", **MANY)
        wait_until_parked(other, 0)
        slow.send("detokenize", tokens=[5])
        worker.terminate()
        worker.expect_clean_end()


def test_who_reads_again_at_the_end_of_the_grace_time_still_gets_everything(start_worker):
    worker = start_worker("--max-rows", "16", "--max-backlog", str(BACKLOG), "--grace", "0.3")
    with slow_client(worker) as slow, worker.client() as other:
        id = slow.send("rollout", **MANY)
        wait_until_parked(other, 0)
        worker.terminate()
        wait_for(lambda: "grace_over" in worker.stderr.read_text())
        samples = Rollout(slow.replies(id)).samples
        assert samples[0]["finish"] == "length" and samples[-1]["finish"] == "cancelled"
    worker.expect_clean_end()


def test_a_step_that_does_not_come_back_ends_the_worker_and_says_where(tmp_path):
    """A step of a second or more, and a hundredth of one is allowed: plain C, one thread, a prompt as long as the context."""
    endpoint, stderr = tmp_path / "endpoint", tmp_path / "stderr"
    with open(stderr, "wb") as log:
        process = subprocess.Popen(
            [COPPICE, "worker", "--model", "tests/models/calc-d4", "--bind", "tcp://127.0.0.1:0", "--endpoint-file", endpoint,
             "--threads", "1", "--step-tokens", "8192", "--step-timeout", "0.01"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, env={**os.environ, "COPPICE_ISA": "scalar"})
    from wire_client import Client
    try:
        wait_for(endpoint.exists)
        with Client(endpoint.read_text().strip()) as client:
            client.ask("ping")
            time.sleep(0.2)  # many times what a step may take: without one, nothing is missing
            assert client.ask("ping")["state"] == "ready" and process.poll() is None
            client.send("rollout", prompts=[{"tokens": [7] * 5000}], max_tokens=1)
            assert process.wait(PATIENCE) == 3
    finally:
        process.kill()
    (line,) = [line for line in stderr.read_text().splitlines() if "step_timeout" in line]
    fields = dict(field.split("=") for field in line.split(" error step_timeout ")[1].split())
    assert fields["limit_sec"] == "0.01" and fields["step"] == "1" and fields["rows"] == "1" and fields["tokens"] == "5000"
    assert fields["operation"] in ("embedding", "projections", "attention", "mlp", "logits", "sampling")
    assert (0 <= int(fields["layer"]) < 4) == (fields["operation"] in ("projections", "attention", "mlp"))


@pytest.mark.parametrize("option, values", [
    ("--max-rows", ["0", "-1", "65537", "x"]), ("--max-queue", ["0", "1000001", "1.5"]), ("--step-tokens", ["0", "65537"]),
    ("--step-timeout", ["0", "-1", "0.001", "1e7", "inf"]), ("--grace", ["-1", "1e9"]), ("--max-backlog", ["0", "1K", "x", "2000G"]),
    ("--max-message", ["0", "5G"]), ("--keep-bytes", ["1K", "9999G"]),
    ("--keep-results", ["-1", "2e9", "x"]),
])
def test_options_out_of_range_are_named(option, values):
    for value in values:
        p = subprocess.run([COPPICE, "worker", "--model", "tests/models/calc-d4", f"{option}={value}"], capture_output=True,
                           text=True, timeout=PATIENCE)
        assert p.returncode == 2 and option in p.stderr and p.stderr.count("\n") == 1, p.stderr
