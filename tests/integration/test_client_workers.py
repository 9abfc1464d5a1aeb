"""The Python client against real workers: attaching, new weights, several workers of which some die."""
import os
import pathlib
import signal
import subprocess
import time

import pytest

import checkpoints
import coppice
from coppice import Client

COPPICE = os.environ.get("COPPICE", "build/coppice")
EARLY = "tests/models/calc-d4-early"
QUESTIONS = [[{"role": "user", "content": q}] for q in
             ("What is 1,234 * 56?", "Compute (42-26)*8.", "How many r are in strawberry?", "Who are you?", "12*12", "7+8")]
LONG = dict(max_tokens=600, stop_tokens=[], tools=[])


class Doomed:
    """A worker that the test kills, and that may come back at the same endpoint."""

    def __init__(self, folder, *options):
        self.file, self.options = pathlib.Path(folder, "endpoint"), options
        self.start("tcp://127.0.0.1:0")

    def start(self, bind):
        self.file.unlink(missing_ok=True)
        self.process = subprocess.Popen([COPPICE, "worker", "--model", "tests/models/calc-d4", "--bind", bind, "--endpoint-file",
                                         self.file, *self.options], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while not self.file.exists():
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        self.endpoint = self.file.read_text().strip()

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def doomed(tmp_path_factory):
    workers = []

    def start(*options):
        workers.append(Doomed(tmp_path_factory.mktemp("doomed"), *options))
        return workers[-1]

    yield start
    for w in workers:
        w.kill()


def content(samples):
    return [(s.prompt, s.sample, s.tokens.tobytes(), s.mask.tobytes(), s.logprobs.tobytes(), s.finish) for s in samples]


@pytest.fixture(scope="module")
def expected(start_worker):
    """What one undisturbed worker gives."""
    with Client(start_worker().endpoint) as client:
        return content(client.rollout(QUESTIONS, n=4, seed=11, **LONG).wait())


def some(rollout, n):
    """Wait for the first n samples."""
    arriving = iter(rollout)
    for _ in range(n):
        next(arriving)


def test_another_client_with_the_same_id_attaches(worker):
    with Client(worker.endpoint) as one, Client(worker.endpoint) as two:
        rollout = one.rollout(QUESTIONS, n=2, seed=11, id="shared", **LONG)
        some(rollout, 1)
        again = two.rollout(QUESTIONS, n=2, seed=11, id="shared", **LONG)
        assert len(again.wait()) == 12 and two.status()["requests"] == 1
        again.ack()
        with pytest.raises(coppice.NotFound):
            two.ack("shared")


def test_a_restarted_worker_gives_the_rest(doomed, expected):
    w = doomed()
    with Client(w.endpoint) as client:
        rollout = client.rollout(QUESTIONS, n=4, seed=11, **LONG)
        some(rollout, 2)
        w.kill()
        w.start(w.endpoint)
        assert content(rollout.wait(timeout=120)) == expected and len(rollout.samples) == len(expected)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_another_worker_takes_over(doomed, expected, how):
    """Killed, stopped, or asked to end with too little time for it."""
    a, b = doomed("--grace", "0.05"), doomed()
    with Client([a.endpoint, b.endpoint], silence=1.0, timeout=2.0) as client:
        rollout = client.rollout(QUESTIONS, n=4, seed=11, **LONG)
        some(rollout, 2)
        a.process.send_signal(how)
        assert content(rollout.wait(timeout=120)) == expected and len(rollout.samples) == len(expected)
        rollout.ack()


def test_a_restarted_trainer_gets_everything_from_the_workers_that_are_left(doomed, expected):
    """Its prompts are spread in another way, so that a worker meets the old id with other prompts."""
    a, b, c = doomed(), doomed(), doomed()
    with Client([w.endpoint for w in (a, b, c)]) as client:
        some(client.rollout(QUESTIONS, n=4, seed=11, id="again", **LONG), 2)
    c.kill()
    with Client([w.endpoint for w in (a, b, c)]) as client:
        rollout = client.rollout(QUESTIONS, n=4, seed=11, id="again", **LONG)
        assert content(rollout.wait(timeout=120)) == expected
        rollout.ack()


def test_several_workers_give_what_one_gives_and_both_are_used(doomed, expected):
    a, b = doomed(), doomed()
    with Client([a.endpoint, b.endpoint]) as client:
        assert content(client.rollout(QUESTIONS, n=4, seed=11, **LONG).wait()) == expected
        assert [s["prompt_tokens"] > 0 for s in client.status()] == [True, True]
        assert [p["state"] for p in client.ping()] == ["ready"] * 2


def test_new_weights_by_path_and_by_stream_are_the_same_everywhere(doomed):
    a, b = doomed(), doomed()
    tensors = checkpoints.tensors_of(next(pathlib.Path(EARLY).glob("*.pt")))
    stream = {t.name: (t.dtype, t.shape, t.data) for t in tensors}
    with Client([a.endpoint, b.endpoint]) as client:
        rollout = client.rollout(QUESTIONS, n=4, seed=11, **LONG)
        first = client.update_weights(1, path=EARLY)
        assert client.update_weights(2, tensors=stream, chunk_bytes=1 << 16) == (2, first[1])
        assert len(rollout.wait()) == 24  # begun with the old weights, and nothing of it lost
        after = client.rollout(QUESTIONS, n=1, seed=1, min_weights=2).wait()
        assert {run.digest for s in after for run in s.weights} == {first[1]}
        with pytest.raises(coppice.BadRequest, match="unknown"):
            client.update_weights(3, tensors={**stream, "more": ("F32", (1,), bytes(4))})
        with pytest.raises(coppice.BadRequest) as e:
            client.update_weights(2, path=EARLY)
        assert e.value.key == "version"


def test_a_worker_killed_in_the_middle_of_a_stream_gets_it_whole(doomed, monkeypatch):
    """It dies, and comes back, when the sender has come to the last tensor."""
    w = doomed()
    tensors = checkpoints.tensors_of(next(pathlib.Path(EARLY).glob("*.pt")))
    stream = {t.name: (t.dtype, t.shape, t.data) for t in tensors}

    seen, fetch = [], coppice.weights.Tensor.bytes

    def fetch_or_kill(tensor):
        seen.append(tensor.name)
        if len(seen) == len(stream):
            w.kill()
            w.start(w.endpoint)
        return fetch(tensor)

    monkeypatch.setattr(coppice.weights.Tensor, "bytes", fetch_or_kill)
    with Client(w.endpoint) as client:
        assert client.ping()["weights"][0] == 0
        version, digest = client.update_weights(1, tensors=stream, timeout=60)
        assert client.ping()["weights"] == [version, digest]
    assert len(seen) == 2 * len(stream)


def test_pausing_holds_what_comes(worker):
    with Client(worker.endpoint) as client:
        client.pause()
        rollout = client.rollout(QUESTIONS[:1], seed=1)
        with pytest.raises(coppice.Timeout):
            rollout.wait(timeout=0.3)
        assert client.ping()["state"] == "paused"
        client.resume()
        assert len(rollout.wait()) == 1
