"""A worker for tests that talk to one through its socket."""
import os
import pathlib
import signal
import subprocess
import time

import pytest

from wire_client import PATIENCE_MS, Client

COPPICE = os.environ.get("COPPICE", "build/coppice")
PATIENCE = PATIENCE_MS / 1000
# libzmq is not built with ThreadSanitizer: what it does to memory is not judged, its locks still count.
os.environ.setdefault("TSAN_OPTIONS", "ignore_noninstrumented_modules=1")
SANITIZER_REPORTS = ("Sanitizer", "runtime error:")


class Worker:
    """A running `coppice worker`, with its files in `folder`."""

    def __init__(self, folder, *options, model="tests/models/calc-d4"):
        endpoint_file = pathlib.Path(folder, "endpoint")
        self.stderr = pathlib.Path(folder, "stderr")
        with open(self.stderr, "wb") as stderr:
            self.process = subprocess.Popen(
                [COPPICE, "worker", "--model", model, "--bind", "tcp://127.0.0.1:0",
                 "--endpoint-file", endpoint_file, *options],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr)
        deadline = time.monotonic() + PATIENCE
        while not endpoint_file.exists():  # it is renamed into place, so it is whole once it is there
            assert self.process.poll() is None and time.monotonic() < deadline, self.stderr.read_text()
            time.sleep(0.01)
        self.endpoint = endpoint_file.read_text().strip()

    def client(self, **options):
        return Client(self.endpoint, **options)

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def expect_clean_end(self):
        """After SIGTERM: all is finished, status 0, nothing for a sanitizer to report."""
        status = self.process.wait(PATIENCE)
        log = self.stderr.read_text(errors="replace")
        assert status == 0, log
        assert not any(report in log for report in SANITIZER_REPORTS), log


@pytest.fixture(scope="module")
def start_worker(tmp_path_factory):
    """Starts workers with options; those that still run when the module is through are ended, and all must end well."""
    workers = []

    def start(*options, **keys):
        workers.append(Worker(tmp_path_factory.mktemp("worker"), *options, **keys))
        return workers[-1]

    yield start
    try:
        for worker in workers:
            if worker.process.poll() is None:
                worker.terminate()
        for worker in workers:
            worker.expect_clean_end()
    finally:
        for worker in workers:
            worker.process.kill()


@pytest.fixture(scope="module")
def worker(start_worker):
    return start_worker()


@pytest.fixture
def client(worker):
    with worker.client() as c:
        yield c
