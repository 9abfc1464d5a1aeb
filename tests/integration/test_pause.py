"""pause, resume and min_weights: what stands still, what is told, and what still holds meanwhile."""
import time

import pytest

from checkpoints import EARLY, START
from test_pressure import ENDLESS, PROMPT, end, in_flight, is_idle, runs, stands_still, wait_for
from wire_client import Rollout

TWO = {"prompts": [PROMPT], "n": 2, "seed": 4, "max_tokens": 20, "stop_tokens": [], "tools": []}
LONG = {**TWO, "max_tokens": 600}


def state(client):
    return client.ask("ping")["state"]


def steps(client):
    return client.ask("status")["steps"]


def expect_silence(client, milliseconds=200):
    assert client.socket.poll(milliseconds) == 0


@pytest.fixture
def paused_later(worker):
    """The worker, which runs again afterwards whatever happened."""
    yield worker
    with worker.client() as client:
        client.ask("resume")
        wait_for(is_idle, client)


# ---- pause.


def test_pause_finish_lets_what_has_started_end_and_answers_then(paused_later):
    worker = paused_later
    with worker.client() as client, worker.client() as other, worker.client() as pauser:
        whole = client.rollout(**LONG).samples
        id, accepted = in_flight(client, **LONG)
        wait_for(runs, other, 2)
        pause = pauser.send("pause")
        wait_for(lambda: state(other) == "paused")
        waiting, waits = in_flight(other, **TWO)
        assert Rollout([accepted] + client.replies(id)).samples == whole
        assert [r["type"] for r in pauser.replies(pause)] == ["done"]
        assert stands_still(client)
        expect_silence(other)
        assert pauser.ask("resume")["type"] == "done" and state(pauser) == "ready"
        assert len(Rollout([waits] + other.replies(waiting)).samples) == 2


def test_requests_to_pause_that_wait_are_bounded(paused_later):
    worker = paused_later
    with worker.client() as client, worker.client() as pauser, worker.client() as other:
        id, accepted = in_flight(client, **{**LONG, "max_tokens": 4000})
        for _ in range(1100):
            pauser.send("pause")
        refused = [pauser.receive() for _ in range(1100 - 1024)]
        assert {(r["type"], r.get("code"), r.get("retry_after")) for r in refused} == {("error", "overloaded", 1.0)}
        assert state(other) == "paused"
        other.ask("cancel", target=id)
        assert {pauser.receive()["type"] for _ in range(1024)} == {"done"}
        assert len(Rollout([accepted] + client.replies(id)).samples) == 2


def test_an_update_that_a_held_row_would_hold_up_is_refused(start_worker):
    """Three sets are in memory, and nothing ends before resume: who waits for the update first would wait forever."""
    worker = start_worker("--grace", "0")
    with worker.client() as client, worker.client() as other:
        version, rollouts = 0, []
        for path in (EARLY, START):
            rollouts.append(in_flight(client, **{**LONG, "max_tokens": 4000})[0])
            wait_for(lambda: other.ask("status")["rows"] == 2 * len(rollouts))
            version += 1
            other.ask("weights", version=version, source={"path": path})
        other.ask("pause", mode="keep")
        failed = other.failure("weights", version=version + 1, source={"path": EARLY})
        assert failed.code == "overloaded" and "resume" in failed.message
        for id in rollouts:
            other.ask("cancel", target=id)
        assert other.ask("weights", version=version + 1, source={"path": START})["weights"][0] == version + 1


def test_pause_keep_holds_rows_where_they_are(paused_later):
    worker = paused_later
    with worker.client() as client, worker.client() as other:
        whole = client.rollout(**LONG).samples
        id, accepted = in_flight(client, **LONG)
        wait_for(runs, other, 2)
        assert other.ask("pause", mode="keep")["type"] == "done" and state(other) == "paused"
        before = steps(other)
        expect_silence(client)
        assert steps(other) == before and other.ask("status")["rows"] == 2
        other.ask("resume")
        assert Rollout([accepted] + client.replies(id)).samples == whole
        assert steps(other) > before


def test_pause_abort_brings_back_what_runs_and_keeps_what_waits(start_worker):
    worker = start_worker("--max-rows", "2")
    with worker.client() as client, worker.client() as other:
        whole = client.rollout(**{**LONG, "n": 4}).samples
        id, accepted = in_flight(client, **{**LONG, "n": 4})
        wait_for(runs, other, 2)
        assert other.ask("pause", mode="abort")["type"] == "done"
        cut = [client.receive()["samples"][0] for _ in range(2)]
        assert [s["finish"] for s in cut] == ["cancelled"] * 2 and {s["sample"] for s in cut} == {0, 1}
        assert all(whole[s["sample"]]["tokens"].startswith(s["tokens"]) and s["tokens"] for s in cut)
        assert stands_still(other)
        expect_silence(client)
        other.ask("resume")
        rest = [r["samples"][0] for r in client.replies(id)[:-1]]
        assert sorted(rest, key=lambda s: s["sample"]) == whole[2:]


def test_the_newest_pause_holds_and_all_are_answered(paused_later):
    worker = paused_later
    with worker.client() as client, worker.client() as other, worker.client() as pauser:
        id, accepted = in_flight(client, **ENDLESS, n=32)
        wait_for(runs, other, 32)
        first = [pauser.send("pause"), pauser.send("pause", mode="finish")]
        wait_for(lambda: state(other) == "paused")
        expect_silence(pauser)
        other.ask("pause", mode="keep")
        assert {pauser.receive()["id"] for _ in first} == set(first)
        before = steps(other)
        time.sleep(0.1)
        assert steps(other) == before
        later = pauser.send("pause", mode="finish")  # what was held goes on to its end
        wait_for(lambda: steps(other) > before)
        expect_silence(pauser)
        other.ask("resume")
        assert pauser.receive()["id"] == later and runs(other, 32)
        assert other.ask("resume")["type"] == "done" and state(other) == "ready"  # it runs already
        end(client, id, accepted, other)


def test_cancels_and_timeouts_hold_while_paused_and_no_step_is_missed(start_worker):
    worker = start_worker("--step-timeout", "2")
    with worker.client() as client, worker.client() as other:
        id, accepted = in_flight(client, **ENDLESS)
        wait_for(runs, other, 1)
        other.ask("pause", mode="keep")
        start = time.monotonic()
        timed = other.rollout([PROMPT], timeout=0.5)  # it has not started
        assert [s["finish"] for s in timed.samples] == ["cancelled"] and time.monotonic() - start >= 0.5
        time.sleep(4)
        assert worker.process.poll() is None and state(other) == "paused"
        cut = end(client, id, accepted, other).samples
        assert cut[0]["finish"] == "cancelled" and cut[0]["tokens"]
        other.ask("resume")
        assert len(other.rollout(**TWO).samples) == 2


@pytest.mark.parametrize("mode", ["finish", "keep"])
def test_after_the_grace_time_what_is_paused_or_held_comes_back(start_worker, mode):
    worker = start_worker("--grace", "0.3")
    with worker.client() as client, worker.client() as other, worker.client() as third, worker.client() as pauser:
        running, accepted = in_flight(client, **ENDLESS, n=32)
        wait_for(runs, other, 32)
        pause = pauser.send("pause", mode=mode)
        wait_for(lambda: state(third) == "paused")
        waiting, waits = in_flight(other, **TWO)
        held = third.send("rollout", min_weights=1, **TWO)
        third.ask("ping")
        worker.terminate()
        cut = [Rollout([accepted] + client.replies(running)), Rollout([waits] + other.replies(waiting)), Rollout(third.replies(held))]
        assert {s["finish"] for r in cut for s in r.samples} == {"cancelled"}
        assert [r["type"] for r in pauser.replies(pause)] == ["done"]
    worker.expect_clean_end()


# ---- min_weights.


def test_a_rollout_waits_for_the_weights_that_it_wants(start_worker):
    worker = start_worker("--max-queue", "2")
    with worker.client() as client, worker.client() as other:
        keys = {**TWO, "min_weights": 2}
        held = [client.send("rollout", **keys) for _ in range(2)]
        client.ask("ping")
        assert other.failure("rollout", **TWO).code == "overloaded"  # they count as waiting
        failed = other.failure("rollout", id=held[0], **TWO)
        assert failed.code == "duplicate_id"
        other.send("rollout", id=held[1], **keys)  # who attaches waits as well
        other.ask("weights", version=1, source={"path": EARLY})
        expect_silence(client)
        weights = other.ask("weights", version=3, source={"path": EARLY})["weights"]
        assert weights[0] == 3
        for c, id in ((client, held[0]), (other, held[1])):
            r = Rollout(c.replies(id))
            assert r.accepted["weights"] == weights and all(s["weights"] == [[0, *weights]] for s in r.samples)
        assert len(client.rollout(**keys).samples) == 2  # there is room, and it need not wait


def test_weights_that_do_not_come_are_a_timeout_and_the_id_is_free(worker):
    with worker.client() as client:
        start = time.monotonic()
        failed = client.failure("rollout", id="hopeful", min_weights=9, weights_timeout=0.3, **TWO)
        assert failed.code == "timeout" and "version 0" in failed.message and time.monotonic() - start >= 0.3
        client.send("rollout", id="hopeful", **TWO)
        assert len(Rollout(client.replies("hopeful")).samples) == 2


def test_a_held_rollout_comes_back_as_cancelled_on_timeout_and_on_cancel(worker):
    with worker.client() as client, worker.client() as other:
        timed = client.rollout(**TWO, min_weights=9, timeout=0.3)
        id = client.send("rollout", **TWO, min_weights=9)
        client.ask("ping")
        assert other.ask("cancel", target=id)["type"] == "done"
        for r in (timed, Rollout(client.replies(id))):
            assert [(s["finish"], s["tokens"]) for s in r.samples] == [("cancelled", b"")] * 2
