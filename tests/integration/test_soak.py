"""Many rollouts through one worker: no sample is lost or told twice, memory is flat after the first fifth, and no
descriptor leaks, while clients come and go, cancel, leave without a word and send nonsense.

SOAK_REQUESTS is the number of rollouts, of eight samples each; `make soak` runs 20 000 of them.
"""
import os
import pathlib
import random
import time

from wire_client import LAST, u32

REQUESTS = int(os.environ.get("SOAK_REQUESTS", 500))
N = 8
WINDOW = 12  # rollouts in flight
CONNECTION_REQUESTS = 50  # after so many a client leaves for a new one
TOLERANCE_KIB = 2048  # of resident memory, from the first fifth to the end
SANITIZED = any(name in os.environ.get("COPPICE", "") for name in ("address", "thread"))

CHATS = [{"messages": [{"role": "user", "content": f"What is {a} * {b}?"}]} for a, b in [(12, 34), (1234, 56), (7, 8)]]


def resident_kib(pid):
    """Of anonymous memory: the file-backed part follows the page cache."""
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])


def n_descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


class Crowd:
    """Clients of one worker, one at a time, and what they have asked for."""

    def __init__(self, worker, seed):
        self.worker = worker
        self.random = random.Random(seed)
        self.client = worker.client()
        self.open = {}  # id -> [prompts, {(prompt, sample)}]
        self.samples = self.cancelled = self.left = self.moves = 0

    def prompt(self):
        if self.random.random() < 0.5:
            return self.random.choice(CHATS)
        length = self.random.choice([1, 20, 63, 64, 65, 130])
        head = [17 * i % 900 for i in range(length)]
        return {"tokens": head + [self.random.randrange(900) for _ in range(self.random.randrange(4))]}

    def submit(self):
        prompts = [self.prompt() for _ in range(self.random.choice([1, 1, 1, 2]))]
        keys = self.random.choice([{}, {"text": True}, {"top_k": 5, "kept": True}, {"deliver": "prompt"},
                                   {"deliver": "request", "logprobs": ["sampling", "model"]}])
        id = self.client.send("rollout", prompts=prompts, n=N, max_tokens=self.random.choice([1, 4, 8, 16]),
                              stop_tokens=self.random.sample(range(900), 40), **keys)
        self.open[id] = [len(prompts), set()]
        if self.random.random() < 0.02:
            self.client.send("cancel", target=id)
            self.cancelled += 1
        if self.random.random() < 0.02:
            self.client.send("rollout", prompts=[{"tokens": [1] * 6000}])  # too long

    def take(self):
        """One reply."""
        reply = self.client.receive()
        if reply["id"] not in self.open:  # an ack's, a cancel's or a refused rollout's
            assert reply["type"] == "done" or reply["code"] in ("not_found", "too_long"), reply
            return
        prompts, told = self.open[reply["id"]]
        for sample in reply.get("samples", []) if reply["type"] == "samples" else []:
            at = sample["prompt"], sample["sample"]
            assert at not in told and sample["prompt"] < prompts and sample["sample"] < N, sample
            assert len(u32(sample["tokens"])) == len(sample["mask"])
            told.add(at)
        if reply["type"] in LAST:
            assert reply["type"] == "done", reply
            assert len(told) == prompts * N == reply["samples"]
            self.samples += len(told)
            del self.open[reply["id"]]
            self.client.send("ack", target=reply["id"])

    def move(self):
        """Leave; every third time with rollouts in flight, which nobody asks for again."""
        self.moves += 1
        if self.moves % 3 == 0:
            self.left += len(self.open)
            self.open.clear()
        while self.open:
            self.take()
        self.client.socket.close()
        self.client = self.worker.client()

    def run(self, n_requests):
        for i in range(n_requests):
            self.submit()
            while len(self.open) >= WINDOW:
                self.take()
            if i % CONNECTION_REQUESTS == CONNECTION_REQUESTS - 1:
                self.move()
        while self.open:
            self.take()


def descriptors_settled(crowd, wanted, patience=60):
    """How many the worker has once it has noticed who left, the current client being connected."""
    pid = crowd.worker.process.pid
    crowd.client.ask("ping")
    deadline = time.monotonic() + patience
    while n_descriptors(pid) != wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    return n_descriptors(pid)


def test_a_worker_serves_on_and_on_in_the_same_memory(start_worker):
    worker = start_worker("--kv-memory", "8M", "--keep-results", "1")
    pid = worker.process.pid
    crowd = Crowd(worker, seed=REQUESTS)
    crowd.client.ask("ping")
    descriptors = n_descriptors(pid)
    crowd.run(REQUESTS // 5)
    before = resident_kib(pid)
    crowd.run(REQUESTS - REQUESTS // 5)
    assert descriptors_settled(crowd, descriptors) == descriptors
    status = crowd.client.ask("status")
    after = resident_kib(pid)
    print(f"{REQUESTS} rollouts, {crowd.samples} samples, {crowd.cancelled} cancelled, {crowd.left} left behind; "
          f"{before} KiB after the first fifth, {after} KiB at the end; {descriptors} descriptors; {status}")
    assert (status["rows"], status["queued"], status["pages_used"]) == (0, 0, 0)
    assert crowd.samples > REQUESTS * N / 2 and crowd.cancelled and crowd.left
    if not SANITIZED:  # sanitizers keep freed blocks back
        assert after - before < TOLERANCE_KIB
