import pytest

from fake_worker import FakeWorker


@pytest.fixture
def worker():
    """Starts scripted workers; they end with the test."""
    started = []

    def start(script, **options):
        started.append(FakeWorker(script, **options))
        return started[-1]

    yield start
    for w in started:
        w.close()
