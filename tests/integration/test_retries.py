"""A rollout belongs to its id: clients that ask again, come back, are killed, acknowledge, or never do."""
import hashlib
import signal
import subprocess
import sys
import time

import msgpack
import pytest

from conftest import PATIENCE
from test_pressure import (BACKLOG, CLIENTS, ENDLESS, MANY, PROMPT, clients_to_kill, end, in_flight, is_idle, runs, slow_client,
                           stands_still, wait_for)
from wire_client import LAST, Rollout

TWO = {"prompts": [PROMPT, {"tokens": [1016, 9]}], "n": 3, "seed": 4, "max_tokens": 30, "stop_tokens": [], "tools": []}


def samples_made(client):
    return client.ask("status")["samples"]


def is_dropped(client, id):
    """Whether the worker has forgotten a rollout that was finished: as long as it has not, there is nothing to cancel."""
    client.send("cancel", id="look", target=id)
    reply = client.receive()
    assert reply["id"] == "look" and (reply["type"] == "done" or reply["code"] == "not_found"), reply
    return reply["type"] == "error"


# ---- Attaching.


def test_a_repeat_gets_the_same_messages_byte_by_byte(worker):
    with worker.client() as first, worker.client() as second:
        id = first.send("rollout", **TWO)
        messages = first.messages(id)
        before = samples_made(first)
        for client in (second, first, second):
            client.send("rollout", id=id, **TWO)
            assert client.messages(id) == messages
        assert samples_made(first) == before


def test_a_repeat_gets_what_is_finished_and_then_the_rest(worker):
    keys = {**ENDLESS, "n": 40, "max_tokens": 60, "seed": 1}
    with worker.client() as whole, worker.client() as first, worker.client() as second, worker.client() as third:
        expected = whole.rollout(**keys).samples
        id, accepted = in_flight(first, **keys)
        told = first.receive()
        assert told["type"] == "samples"
        second.send("rollout", id=id, **keys)
        assert second.receive() == accepted and second.receive() == told
        third.send("rollout", id=id, **keys)
        assert Rollout(third.replies(id)).samples == expected
        before = samples_made(whole)
        first.send("ping", id="then")  # what comes to those that were left behind is only what was under way
        while first.receive()["type"] != "pong":
            pass
        assert samples_made(whole) == before


def test_a_storm_of_repeats_has_one_generation_behind_it(worker):
    keys = {**TWO, "n": 8, "max_tokens": 100}
    with worker.client() as client:
        before = samples_made(client)
        for _ in range(100):
            client.send("rollout", id="storm", **keys)
        got, done = {}, 0
        client.send("ping", id="end")
        while done == 0 or "end" not in got:
            reply = client.receive()
            got.setdefault(reply["id"], []).append(reply)
            done += reply["type"] == "done"
        clients = [worker.client() for _ in range(100)]
        for c in clients:
            c.send("rollout", id="storm", **keys)
        rollouts = [Rollout(c.replies("storm")) for c in clients]
        assert all(r.samples == rollouts[0].samples and r.accepted == rollouts[0].accepted for r in rollouts)
        told = {(s["prompt"], s["sample"]): s for r in got["storm"] if r["type"] == "samples" for s in r["samples"]}
        assert [told[key] for key in sorted(told)] == rollouts[0].samples
        assert samples_made(client) - before == 16
        for c in clients:
            c.socket.close()


def test_many_connections_storm_while_it_runs(worker):
    keys = {**TWO, "n": 8, "max_tokens": 200}
    with worker.client() as client:
        before = samples_made(client)
        clients = [worker.client() for _ in range(20)]
        for c in clients * 5:
            c.send("rollout", id="many", **keys)
        wait_for(lambda: samples_made(client) - before >= 16)
        wait_for(is_idle, client)
        client.send("rollout", id="many", **keys)
        assert len(Rollout(client.replies("many")).samples) == 16
        assert samples_made(client) - before == 16
        for c in clients:
            c.socket.close()


def test_the_same_id_with_other_content_is_refused(worker):
    with worker.client() as client:
        id = client.send("rollout", **TWO)
        messages = client.messages(id)
        for changed in ({"n": 2}, {"temperature": 0.5}, {"seed": 5}, {"prompts": [PROMPT]}, {"max_tokens": 31},
                        {"deliver": "prompt"}, {"min_weights": 1}):
            failed = client.failure("rollout", id=id, **{**TWO, **changed})
            assert (failed.code, failed.key) == ("duplicate_id", "id"), changed
        client.send("rollout", id=id, compress=False, **TWO, top_k=0, deliver="sample")  # spelt out, it is the same
        assert client.messages(id) == messages


def test_a_repeat_may_leave_out_a_seed_that_was_drawn_or_give_it(worker):
    drawn = {key: value for key, value in TWO.items() if key != "seed"}
    with worker.client() as client:
        id = client.send("rollout", **drawn)
        r = Rollout(client.replies(id))
        for keys in (drawn, {**drawn, "seed": r.accepted["seed"]}):
            client.send("rollout", id=id, **keys)
            assert Rollout(client.replies(id)).samples == r.samples
        assert client.failure("rollout", id=id, **drawn, seed=r.accepted["seed"] + 1).code == "duplicate_id"
        given = client.send("rollout", **TWO)
        client.replies(given)
        assert client.failure("rollout", id=given, **drawn).code == "duplicate_id"


def test_an_id_is_free_after_an_error(worker):
    with worker.client() as client:
        too_long = {**TWO, "prompts": [{"tokens": [1] * 6000}]}
        assert client.failure("rollout", id="again", **too_long).code == "too_long"
        assert client.failure("rollout", id="again", **too_long).code == "too_long"
        contradicted = {"prompts": [{"tokens": [1016], "sample": 0, "prefix": [1, 2, 3]}], "max_tokens": 2, "stop_tokens": [3]}
        assert client.failure("rollout", id="again", **contradicted).code == "bad_request"  # told by the engine
        client.send("rollout", id="again", **TWO)
        assert len(Rollout(client.replies("again")).samples) == 6


def test_attaching_needs_no_room_in_the_queue_and_works_while_draining(start_worker):
    worker = start_worker("--max-rows", "1", "--max-queue", "1", "--grace", "60")
    with worker.client() as client, worker.client() as other, worker.client() as third:
        id, accepted = in_flight(third, **ENDLESS)
        wait_for(runs, other, 1)
        waiting, _ = in_flight(client, **TWO)
        assert other.failure("rollout", prompts=[PROMPT]).code == "overloaded"
        other.send("rollout", id=waiting, **TWO)
        assert other.receive()["type"] == "accepted"
        worker.terminate()
        wait_for(lambda: client.ask("ping")["state"] == "draining")
        client.send("rollout", id=waiting, **TWO)
        assert client.receive()["type"] == "accepted"
        assert client.failure("rollout", **TWO).code == "draining"
        end(third, id, accepted, other)
        samples = [s for reply in client.replies(waiting)[:-1] for s in reply["samples"]]
        assert [s["finish"] for s in samples] == ["length"] * 6
    worker.expect_clean_end()


def test_a_rollout_is_cancelled_from_elsewhere(worker):
    with worker.client() as client, worker.client() as other:
        id, accepted = in_flight(client, **ENDLESS, n=3, seed=2)
        wait_for(runs, other, 3)
        assert other.ask("cancel", target=id)["type"] == "done"
        r = Rollout([accepted] + client.replies(id))
        assert {s["finish"] for s in r.samples} == {"cancelled"} and all(s["tokens"] for s in r.samples)
        assert other.ask("cancel", target=id)["type"] == "done"  # a repeat finds nothing left to do
        other.send("rollout", id=id, **ENDLESS, n=3, seed=2)
        assert Rollout(other.replies(id)).samples == r.samples


# ---- Clients that are killed, and clients that are slow.


def test_who_takes_the_place_of_a_killed_client_misses_nothing(worker):
    keys = [{**TWO, "id": f"lost-{i}", "n": 8, "seed": i, "max_tokens": 120} for i in range(10)]
    with worker.client() as client:
        expected = [client.rollout(**{**k, "id": None}).samples for k in keys]
        before = samples_made(client)
        p = clients_to_kill(worker, *keys)
        p.kill()
        p.communicate()
        time.sleep(0.1)  # some are finished by then, some are not
        for k in keys:
            client.send("rollout", **k)
        got = {k["id"]: [] for k in keys}
        while any(not replies or replies[-1]["type"] not in LAST for replies in got.values()):
            reply = client.receive()
            got[reply["id"]].append(reply)
        assert [Rollout(got[k["id"]]).samples for k in keys] == expected
        assert samples_made(client) - before == 160


def test_a_stopped_client_holds_up_nobody_and_loses_nothing(start_worker):
    """It is stopped in the middle and goes on much later; what it reads is what it would have read at once."""
    worker = start_worker("--max-rows", "16", "--max-backlog", str(BACKLOG))
    reader = CLIENTS.replace('print("accepted", flush=True)\nsys.stdin.read()', """
import hashlib, msgpack
print("accepted", flush=True)
sys.stdin.readline()
n, got = 0, hashlib.sha256()
while True:
    reply = sockets[0].recv()
    got.update(reply)
    n += 1
    if msgpack.unpackb(reply)["type"] == "done":
        break
print(n, got.hexdigest(), flush=True)
""")
    keys = {**MANY, "id": "stopped", "compress": False}
    with worker.client() as other:
        frame = msgpack.packb({"type": "rollout", **keys}).hex()
        p = subprocess.Popen([sys.executable, "-c", reader, worker.endpoint, frame], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
        try:
            assert p.stdout.readline() == "accepted\n"
            p.send_signal(signal.SIGSTOP)
            wait_for(lambda: "client_parked" in worker.stderr.read_text())
            start = time.monotonic()
            for i in range(10):
                other.rollout([PROMPT], n=2, max_tokens=20)
            assert time.monotonic() - start < PATIENCE / 10
            p.send_signal(signal.SIGCONT)
            print("go", file=p.stdin, flush=True)
            n, digest = p.stdout.readline().split()
        finally:
            p.kill()
            p.communicate()
        with worker.client(compress=False) as again:
            again.send("rollout", **keys)
            messages = again.messages("stopped")
        assert int(n) == len(messages) - 1  # the program had read `accepted`
        assert digest == hashlib.sha256(b"".join(messages[1:])).hexdigest()


def test_a_slow_client_that_comes_back_as_another_is_served_on(start_worker):
    """Parked under its old name, its rollout goes on under the new one."""
    worker = start_worker("--max-rows", "16", "--max-backlog", str(BACKLOG))
    with slow_client(worker) as slow, worker.client() as other, worker.client(compress=False) as again:
        id, waiting = slow.send("rollout", **MANY), slow.send("rollout", **TWO)
        wait_for(lambda: "client_parked" in worker.stderr.read_text())
        wait_for(stands_still, other)
        assert samples_made(other) < MANY["n"]
        again.send("rollout", id=waiting, **TWO)
        assert len(Rollout(again.replies(waiting)).samples) == 6  # while the other one still is parked
        assert stands_still(other)
        again.send("rollout", id=id, **MANY)
        assert len(Rollout(again.replies(id)).samples) == MANY["n"] == samples_made(other) - 6


# ---- How long results stay.


def test_ack_frees_an_id(worker):
    with worker.client() as client, worker.client() as other:
        id = client.send("rollout", **TWO)
        client.replies(id)
        assert other.ask("ack", target=id)["type"] == "done"
        failed = client.failure("ack", target=id)
        assert (failed.code, failed.key) == ("not_found", "target")
        before = samples_made(client)
        client.send("rollout", id=id, **{**TWO, "n": 1})  # free for anything
        assert len(Rollout(client.replies(id)).samples) == 2 == samples_made(client) - before


def test_what_is_unfinished_cannot_be_acknowledged(worker):
    with worker.client() as client, worker.client() as other:
        id, accepted = in_flight(client, **ENDLESS)
        failed = other.failure("ack", target=id)
        assert (failed.code, failed.key) == ("bad_request", "target")
        other.ask("cancel", target=id)
        Rollout([accepted] + client.replies(id))
        assert other.failure("ack", target="nobody").code == "not_found"


def test_results_are_kept_for_so_long(start_worker):
    worker = start_worker("--keep-results", "1.5")
    with worker.client() as client:
        id = client.send("rollout", **TWO)
        messages = client.messages(id)
        over = time.monotonic()
        client.send("rollout", id=id, **TWO)
        again = client.messages(id)
        assert again == messages or time.monotonic() - over > 1
        wait_for(is_dropped, client, id)
        assert time.monotonic() - over > 1.4
        before = samples_made(client)
        client.send("rollout", id=id, **TWO)
        assert len(Rollout(client.replies(id)).samples) == 6 == samples_made(client) - before


def test_results_that_a_client_is_still_being_sent_do_not_expire(start_worker):
    worker = start_worker("--keep-results", "0", "--max-rows", "16")
    with slow_client(worker) as slow, worker.client() as other:
        id = slow.send("rollout", **MANY)
        wait_for(lambda: samples_made(other) == MANY["n"])
        wait_for(is_idle, other)
        time.sleep(0.2)
        assert len(Rollout(slow.replies(id)).samples) == MANY["n"]
        wait_for(is_dropped, other, id)  # once all is sent


def test_the_oldest_results_make_room(start_worker):
    worker = start_worker("--keep-bytes", "256K")
    keys = {**TWO, "n": 16, "kept": True, "top_k": 32, "compress": False}  # about 200 KB
    with worker.client(compress=False) as client:
        first = client.send("rollout", **keys)
        messages = client.messages(first)
        client.send("rollout", id=first, **keys)
        assert client.messages(first) == messages
        second = client.send("rollout", **keys)
        client.messages(second)
        client.ask("ping")
        assert is_dropped(client, first) and not is_dropped(client, second)


def test_a_running_rollout_whose_results_made_room_ends_but_takes_nobody_in(start_worker):
    worker = start_worker("--keep-bytes", "64K", "--max-rows", "4")
    keys = {**TWO, "prompts": [PROMPT], "n": 100, "kept": True, "top_k": 64}
    with worker.client(compress=False) as client, worker.client(compress=False) as other:
        expected = client.rollout(**keys).samples
        id, accepted = in_flight(client, **keys)
        got = [accepted] + [client.receive() for _ in range(20)]
        failed = other.failure("rollout", id=id, **keys)
        assert failed.code == "duplicate_id" and "--keep-bytes" in failed.message
        while got[-1]["type"] != "done":
            got.append(client.receive())
        assert Rollout(got).samples == expected
        wait_for(is_dropped, other, id)


def test_results_that_nobody_fetches_fill_the_worker_until_they_expire(start_worker):
    worker = start_worker("--keep-bytes", "64K", "--keep-results", "3")
    keys = {**TWO, "prompts": [PROMPT], "n": 100, "kept": True, "top_k": 64, "id": "unfetched", "compress": False}
    with worker.client(compress=False) as client:
        p = clients_to_kill(worker, keys)
        p.kill()
        p.communicate()
        wait_for(lambda: samples_made(client) == 100)
        wait_for(is_idle, client)
        failed = client.failure("rollout", **TWO)
        assert failed.code == "overloaded" and "--keep-bytes" in failed.message
        assert client.ask("ping")["state"] == "ready"
        wait_for(is_dropped, client, "unfetched")
        client.rollout(**TWO)


def test_ten_thousand_results_are_kept_and_found(start_worker):
    worker = start_worker()
    keys = {"prompts": [{"tokens": [5]}], "max_tokens": 1, "seed": 1, "stop_tokens": []}
    with worker.client() as client:
        for start in range(0, 10000, 500):
            for i in range(start, start + 500):
                client.send("rollout", id=f"kept-{i}", **keys)
            done = 0
            while done < 500:
                done += client.receive()["type"] == "done"
        before = samples_made(client)
        for i in (0, 1, 4999, 9999):
            client.send("rollout", id=f"kept-{i}", **keys)
            assert len(Rollout(client.replies(f"kept-{i}")).samples) == 1
        assert samples_made(client) == before == 10000


# ---- The end.


@pytest.mark.parametrize("grace", ["0", "0.3"])
def test_what_the_grace_time_cuts_off_is_continued_elsewhere(start_worker, grace):
    """The cancelled samples, continued with `prefix` on another worker, are the tokens that one worker makes alone."""
    worker, another = start_worker("--grace", grace, "--max-rows", "4"), start_worker()
    keys = {"prompts": [PROMPT, {"tokens": [1016, 9, 10], "id": "x"}], "n": 4, "seed": 8, "max_tokens": 4000, "stop_tokens": [],
            "tools": []}
    with worker.client() as client, another.client() as other:
        id, accepted = in_flight(client, **keys)
        wait_for(runs, client, 4)
        time.sleep(0.1)
        worker.terminate()
        r = Rollout([accepted] + client.replies(id))
        worker.expect_clean_end()
        assert {s["finish"] for s in r.samples} == {"cancelled"} and r.samples[0]["tokens"] and not r.samples[-1]["tokens"]
        prompts = [{**keys["prompts"][s["prompt"]], "sample": s["sample"], "prefix": s["tokens"]} for s in r.samples]
        keys["max_tokens"] = 20 + max(len(s["mask"]) for s in r.samples)
        rest = other.rollout(**{**keys, "prompts": prompts, "n": 1}).samples
        whole = other.rollout(**keys).samples
        for s, t, w in zip(r.samples, rest, whole, strict=True):
            assert s["tokens"] + t["tokens"] == w["tokens"] and s["logprobs"] + t["logprobs"] == w["logprobs"]
            assert s["mask"] + t["mask"] == w["mask"] and t["finish"] == w["finish"]
