"""One client, several workers: ROUTERs that play them."""
import threading
import time

import pytest

import coppice
from coppice import Client, client as client_module
from fake_worker import DONE, PONG, accepted, all_of, error, sample, samples, worker  # noqa: F401

QUICK = dict(silence=0.3, timeout=0.3, patience=1.5)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Losses are noticed quickly."""
    monkeypatch.setattr(client_module, "LOST_SECONDS", 0.2)


def answers(q):
    return [PONG] if q["type"] == "ping" else all_of(q) if q["type"] == "rollout" else [{"type": "done"}]


def pair(worker, a=answers, b=answers):
    return worker(a), worker(b)


def part(id, *prompts):
    """The id of the part of a rollout that has these of its prompts."""
    return f"{id}/{client_module._name_of(list(prompts))}"


def at(rollout):
    return [(s.prompt, s.sample) for s in rollout.wait(timeout=20)]


def test_prompts_are_spread_and_come_back_under_their_own_indices(worker):
    a, b = pair(worker)
    with Client([a.endpoint, b.endpoint]) as client:
        rollout = client.rollout(["one", "two", "three", "four", "five"], n=2, id="r")
        assert at(rollout) == [(p, i) for p in range(5) for i in range(2)]
        assert rollout.accepted["samples"] == rollout.done["samples"] == 10
    (one,), (two,) = a.of("rollout"), b.of("rollout")
    assert [one["id"], two["id"]] == [part("r", 0, 2, 4), part("r", 1, 3)] and one["seed"] == two["seed"] < 2**53 and one["n"] == two["n"] == 2
    assert [p["text"] for p in one["prompts"]] == ["one", "three", "five"] and [p["text"] for p in two["prompts"]] == ["two", "four"]


def test_who_has_less_to_do_gets_more(worker):
    go = threading.Event()

    def held(q):
        if q["type"] == "rollout" and q["id"] == part("first", 0):
            return [accepted()]
        return answers(q)

    a, b = pair(worker, held)
    with Client([a.endpoint, b.endpoint]) as client:
        first = client.rollout(["long"], n=4, max_tokens=100, id="first")
        assert at(client.rollout(["x"] * 4, max_tokens=100, id="second")) == [(p, 0) for p in range(4)]
        assert len(b.of("rollout")) == 1 and len(b.of("rollout")[0]["prompts"]) == 4
        go.set()
        first.cancel()
    assert [q["target"] for q in a.of("cancel")] == [part("first", 0)]


def test_tokens_are_given_back_as_samples_come(worker):
    a = worker(lambda q: [accepted(3), samples(sample(0, 0), sample(0, 1))] if q["type"] == "rollout" else answers(q))
    b = worker(answers)
    with Client([a.endpoint, b.endpoint]) as client:
        rollout = client.rollout([[1, 2, 3]], n=3, max_tokens=10)
        assert client._outstanding(client._links[0]) == 3 * (10 + 1)
        next(iter(rollout))
        assert client._outstanding(client._links[0]) == 10 + 1 and client._outstanding(client._links[1]) == 0


def test_keys_of_errors_are_those_of_the_caller(worker):
    a, b = pair(worker, answers, lambda q: [error("too_long", key="prompts[1].tokens")] if q["type"] == "rollout" else answers(q))
    with Client([a.endpoint, b.endpoint]) as client:
        with pytest.raises(coppice.TooLong) as e:
            client.rollout(["a", "b", "c", "d"]).wait()
    assert e.value.key == "prompts[3].tokens"


def test_with_the_first_error_the_others_are_cancelled(worker):
    a, b = pair(worker, lambda q: [accepted()] if q["type"] == "rollout" else answers(q),
                lambda q: [error("bad_request")] if q["type"] == "rollout" else answers(q))
    with Client([a.endpoint, b.endpoint]) as client:
        with pytest.raises(coppice.BadRequest):
            client.rollout(["a", "b"], id="r").wait()
        client.ping()
    assert [q["target"] for q in a.of("cancel")] == [part("r", 0)]


def test_another_worker_takes_over_what_a_lost_one_had_open(worker):
    a = worker(lambda q: [accepted(2), samples(sample(0, 1))])
    b = worker(answers)
    with Client([a.endpoint, b.endpoint], **QUICK) as client:
        rollout = client.rollout(["one", "two", "three"], n=2, id="r", seed=5)
        assert next(s for s in rollout if s.prompt == 0).sample == 1
        a.close()
        assert at(rollout) == [(p, i) for p in range(3) for i in range(2)]
        assert len(rollout.samples) == 6
    assert [q["id"] for q in b.of("rollout")] == [part("r", 1), part("r", 0, 2)]
    assert b.of("rollout")[1] == a.of("rollout")[0]  # the same id, seed and prompts


def test_another_worker_takes_over_from_a_silent_one(worker):
    a = worker(lambda q: [accepted(1)] if q["type"] == "rollout" else [])
    b = worker(answers)
    with Client([a.endpoint, b.endpoint], **QUICK) as client:
        start = time.monotonic()
        assert at(client.rollout(["one", "two"], id="r")) == [(0, 0), (1, 0)]
        assert 0.55 < time.monotonic() - start < 5
    assert [q["id"] for q in b.of("rollout")] == [part("r", 1), part("r", 0)]
    assert len(a.of("rollout")) == 1  # it does not get over the new connection what others do now


def test_a_worker_that_was_never_there_is_done_without(worker):
    b = worker(answers)
    with Client(["tcp://127.0.0.1:1", b.endpoint], **QUICK) as client:
        assert at(client.rollout(["one", "two"])) == [(0, 0), (1, 0)]
        assert client.ping() == [None, {k: v for k, v in PONG.items() if k != "type"}]


def test_a_worker_that_comes_late_is_not_given_what_others_have_done(worker, monkeypatch):
    monkeypatch.setattr(client_module, "SETTLE_SECONDS", 0.0)  # so that both get a part before it is known who is there
    a, b = pair(worker)
    a.close()
    with Client([a.endpoint, b.endpoint], **QUICK) as client:
        assert at(client.rollout(["one", "two", "three"], id="r")) == [(0, 0), (1, 0), (2, 0)]
        ids = {q["id"] for q in b.of("rollout")}
        assert ids in ({part("r", 0, 2), part("r", 1)}, {part("r", 0, 1, 2)})  # one where b answered before the rollout came
        late = worker(answers, endpoint=a.endpoint)
        for _ in range(50):
            if client.ping()[0]:
                break
            time.sleep(0.1)
        assert late.of("ping") and not late.of("rollout")


def test_a_worker_that_drains_gives_its_part_to_another(worker):
    a = worker(lambda q: [error("draining")] if q["type"] == "rollout" else answers(q))
    b = worker(answers)
    with Client([a.endpoint, b.endpoint]) as client:
        assert at(client.rollout(["one", "two"])) == [(0, 0), (1, 0)]
        assert at(client.rollout(["one", "two"])) == [(0, 0), (1, 0)]
    assert len(a.of("rollout")) == 1 and len(b.of("rollout")) == 3  # the second rollout did not even try


def cancelling(state):
    def script(q):
        if q["type"] == "ping":
            return [{**PONG, "state": state}]
        if q["type"] != "rollout":
            return [{"type": "done"}]
        return [accepted(2), samples(sample(0, 0), sample(0, 1, finish="cancelled", tokens=b"", mask=b"", weights=[])), DONE]
    return script


def test_what_a_draining_worker_cancels_is_generated_elsewhere(worker):
    a, b = pair(worker, cancelling("draining"))
    with Client([a.endpoint, b.endpoint]) as client:
        rollout = client.rollout(["one", "two"], n=2, id="r")
        assert at(rollout) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert {s.finish for s in rollout.samples} == {"stop"}
    assert [q["id"] for q in b.of("rollout")] == [part("r", 1), part("r", 0)]


def test_what_a_worker_cancels_for_other_reasons_is_the_callers(worker):
    """Of a pause or an update with "abort": the caller goes on with it as a prefix."""
    a, b = pair(worker, cancelling("paused"))
    with Client([a.endpoint, b.endpoint]) as client:
        assert [s.finish for s in client.rollout(["one", "two"], n=2).wait()] == ["stop", "cancelled", "stop", "stop"]
    assert len(b.of("rollout")) == 1


@pytest.mark.parametrize("keys", [{"timeout": 5.0}, {"prompts": [{"text": "one", "enough": 1}, "two"]}])
def test_what_the_caller_bounded_may_come_back_cancelled(worker, keys):
    a, b = pair(worker, cancelling("draining"))
    with Client([a.endpoint, b.endpoint]) as client:
        samples_ = client.rollout(**{"prompts": ["one", "two"], "n": 2, **keys}).wait()
    assert [s.finish for s in samples_] == ["stop", "cancelled", "stop", "stop"]
    assert len(b.of("rollout")) == 1


def test_a_worker_that_comes_back_is_used_again(worker):
    a, b = pair(worker)
    with Client([a.endpoint, b.endpoint], **QUICK) as client:
        client.rollout(["one", "two"]).wait()
        a.close()
        time.sleep(0.1)
        assert at(client.rollout(["one", "two"])) == [(0, 0), (1, 0)]
        assert len(b.of("rollout")[-1]["prompts"]) == 2
        again = worker(answers, endpoint=a.endpoint)
        for _ in range(50):
            time.sleep(0.1)
            if at(client.rollout(["one", "two"])) and again.of("rollout"):
                break
        assert again.of("rollout")


def test_when_all_are_gone_the_rollout_waits_for_the_first_to_come_back(worker):
    a, b = pair(worker, lambda q: [accepted()], lambda q: [accepted()])
    with Client([a.endpoint, b.endpoint], **QUICK) as client:
        rollout = client.rollout(["one", "two"], id="r")
        with pytest.raises(coppice.Timeout):
            rollout.wait(timeout=0.1)
        a.close()
        b.close()
        with pytest.raises(coppice.ConnectionLost, match="any of"):
            rollout.wait(timeout=20)
        again = worker(answers, endpoint=b.endpoint)
        for _ in range(10):
            try:
                assert at(rollout) == [(0, 0), (1, 0)]
                break
            except coppice.ConnectionLost:
                pass
        assert {q["id"] for q in again.of("rollout")} == {part("r", 0), part("r", 1)}


@pytest.mark.parametrize("change, told", [({"numerics": "f32"}, "numerics bf16 at {a}, f32 at {b}"),
                                          ({"weights": [0, "e"]}, "weights d at {a}, e at {b}")])
def test_workers_must_agree(worker, change, told):
    ready = threading.Event()

    def first(q):
        if q["type"] == "rollout":
            ready.set()
        return answers(q)

    def second(q):
        if q["type"] != "rollout":
            return answers(q)
        assert ready.wait(10)
        time.sleep(0.2)
        return [accepted(**change), samples(sample()), DONE]

    a, b = pair(worker, first, second)
    with Client([a.endpoint, b.endpoint]) as client:
        with pytest.raises(coppice.WorkersDiffer) as e:
            client.rollout(["one", "two"]).wait()
    assert told.format(a=a.endpoint, b=b.endpoint) in str(e.value)


def weights_of(digest, version=1):
    return lambda q: [{"type": "weights", "weights": [version, digest]}]


def test_new_weights_go_to_all(worker):
    a, b = pair(worker, weights_of("e"), weights_of("e"))
    with Client([a.endpoint, b.endpoint]) as client:
        assert client.update_weights(1, path="x") == (1, "e")
    assert len(a.of("weights")) == len(b.of("weights")) == 1


def test_an_update_that_one_refuses_tells_who_has_it(worker):
    a, b = pair(worker, weights_of("e"), lambda q: [error("model_error", "not finite")])
    with Client([a.endpoint, b.endpoint]) as client:
        with pytest.raises(coppice.ModelError) as e:
            client.update_weights(1, path="x")
    assert f"{b.endpoint}: not finite (in use at {a.endpoint})" in str(e.value)


def test_an_update_that_is_not_the_same_everywhere_is_told(worker):
    a, b = pair(worker, weights_of("e"), weights_of("f"))
    with Client([a.endpoint, b.endpoint]) as client:
        with pytest.raises(coppice.WorkersDiffer):
            client.update_weights(1, path="x")


def test_all_are_acknowledged_and_cancelled(worker):
    a, b = pair(worker)
    with Client([a.endpoint, b.endpoint]) as client:
        rollout = client.rollout(["one", "two"], id="r")
        rollout.wait()
        rollout.ack()
        client.ack("r")
        client.pause()
    assert [q["target"] for q in a.of("ack")] == [part("r", 0)] * 2 and [q["target"] for q in b.of("ack")] == [part("r", 1)] * 2
    assert len(a.of("pause")) == len(b.of("pause")) == 1


def test_a_worker_that_is_gone_need_not_acknowledge(worker):
    a, b = pair(worker)
    with Client([a.endpoint, b.endpoint], **QUICK) as client:
        rollout = client.rollout(["one", "two"], id="r")
        rollout.wait()
        a.close()
        rollout.ack()
    assert [q["target"] for q in b.of("ack")] == [part("r", 1)]


def test_what_was_cancelled_is_not_taken_over(worker):
    a, b = pair(worker, lambda q: [accepted()] if q["type"] == "rollout" else [])
    with Client([a.endpoint, b.endpoint], **QUICK) as client:
        rollout = client.rollout(["one", "two"], id="r")
        with pytest.raises(coppice.Timeout):
            rollout.wait(timeout=0.1)
        a.close()
        rollout.cancel()
        assert at(rollout) == [(1, 0)]
    assert [q["id"] for q in b.of("rollout")] == [part("r", 1)]


def test_closing_does_not_end_what_runs(worker):
    a, b = pair(worker, lambda q: [accepted()], lambda q: [accepted()])
    client = Client([a.endpoint, b.endpoint])
    rollout = client.rollout(["one", "two"])
    with pytest.raises(coppice.Timeout):
        rollout.wait(timeout=0.2)
    client.close()
    with pytest.raises(coppice.ConnectionLost):
        rollout.wait()
    time.sleep(0.1)
    assert not a.of("cancel") and not b.of("cancel")


def test_each_endpoint_counts_once():
    for endpoints in ([], ["tcp://127.0.0.1:1"] * 2):
        with pytest.raises(ValueError):
            Client(endpoints)
