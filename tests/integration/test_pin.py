"""--pin: each computing thread has a core of its own, and only computing threads are bound."""
import os
import pathlib

import pytest

CORES = sorted(os.sched_getaffinity(0))
PROMPT = {"tokens": [1, 2, 3]}


def masks(worker):
    """The cores of each thread of a worker that has computed something."""
    with worker.client() as client:
        client.rollout(n=2, seed=1, max_tokens=4, prompts=[PROMPT])
    return [sorted(os.sched_getaffinity(int(task.name))) for task in pathlib.Path(f"/proc/{worker.process.pid}/task").iterdir()]


@pytest.mark.skipif(len(CORES) < 2, reason="one core: every thread is bound to it")
def test_computing_threads_are_bound_to_a_core_each(start_worker):
    found = masks(start_worker("--pin", "--threads", "2"))
    assert sorted(m for m in found if m != CORES) == [[CORES[0]], [CORES[1]]]
    assert CORES in found  # the service thread


def test_nothing_is_bound_unless_asked(start_worker):
    assert all(m == CORES for m in masks(start_worker("--threads", "2")))
