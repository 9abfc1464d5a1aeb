"""What the tests of a trainer's loop share: the examples as modules, and workers."""
import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "proto/python/examples"))

from coppice import demo  # noqa: E402

COPPICE = os.environ.get("COPPICE", str(ROOT / "build/coppice"))
EARLY = str(ROOT / "tests/models/calc-d4-early")
FULL = str(ROOT / "tests/models/calc-d4")


@pytest.fixture
def worker_on():
    """worker_on(model, *options): the context of a worker of its own."""
    return lambda model, *options: demo.running_worker(COPPICE, model, *options)
