"""Start a worker on a model that can use a calculator, and sample from it.

    python -m coppice.demo --worker build/coppice --model tests/models/calc-d4
    python -m coppice.demo --endpoint tcp://127.0.0.1:5555

Four questions, eight samples each, always the same for one seed. Tokens that the model drew and tokens that the calculator
forced are told apart by colour, or by brackets where there is none. Exit status 0 if a third of the answers or more are right.
"""
from __future__ import annotations

import argparse
import collections
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import Dict, Iterator, List, Optional, TextIO, Tuple

import numpy as np

from . import Client, CoppiceError, Sample

QUESTIONS: List[Tuple[str, float]] = [
    ("What is 1,234 * 56?", 69104),
    ("Compute (42-26)*8.", 128),
    ("How many r are in strawberry?", 3),
    ("Iris shares 767 pens among 13 friends, and each adds 81. How many pens does each friend have?", 140),
]
SAMPLES = 8
START_SECONDS = 120
STOP_SECONDS = 30

_SAMPLED, _FORCED, _DIM, _BOLD, _OFF = "\033[32m", "\033[33m", "\033[2m", "\033[1m", "\033[0m"


class DemoError(Exception):
    """The demonstration cannot go on; the text says why."""


# ---- A worker of our own.


def _wait_for_endpoint(process: subprocess.Popen, path: pathlib.Path, log: pathlib.Path) -> str:
    """The endpoint that the worker wrote, once two readings agree (a reading may come in the middle of the writing)."""
    end = time.monotonic() + START_SECONDS
    before = ""
    while time.monotonic() < end:
        if process.poll() is not None:
            raise DemoError(f"the worker ended with status {process.returncode} before it was ready; it said:\n"
                            + log.read_text(errors="replace"))
        now = path.read_text().strip() if path.exists() else ""
        if now and now == before:
            return now
        before = now
        time.sleep(0.05)
    raise DemoError(f"the worker was not ready within {START_SECONDS} s; it said:\n" + log.read_text(errors="replace"))


def _stop(process: subprocess.Popen, log: pathlib.Path) -> None:
    """End the worker with SIGTERM; it must exit with status 0."""
    process.send_signal(signal.SIGTERM)
    try:
        status = process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        raise DemoError(f"the worker did not end within {STOP_SECONDS} s after SIGTERM") from None
    if status != 0:
        raise DemoError(f"the worker ended with status {status} after SIGTERM; it said:\n" + log.read_text(errors="replace"))


@contextlib.contextmanager
def running_worker(program: str, model: str, *options: str) -> Iterator[str]:
    """The endpoint of a worker, with further options of its command line, that lives as long as the context."""
    with tempfile.TemporaryDirectory(prefix="coppice-demo-") as folder:
        endpoint_file, log = pathlib.Path(folder, "endpoint"), pathlib.Path(folder, "log")
        command = [program, "worker", "--model", model, "--bind", "tcp://127.0.0.1:0", "--endpoint-file", str(endpoint_file),
                   *options]
        with open(log, "wb") as err:
            try:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=err, stderr=err)
            except OSError as e:
                raise DemoError(f'could not start "{program}": {e.strerror}') from None
        try:
            yield _wait_for_endpoint(process, endpoint_file, log)
            _stop(process, log)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


# ---- Showing.


class Painter:
    """Texts of sampled and forced tokens, told apart with or without colour."""

    def __init__(self, colour: bool) -> None:
        self.colour = colour

    def _in(self, code: str, text: str) -> str:
        return f"{code}{text}{_OFF}" if self.colour else text

    def sampled(self, text: str) -> str:
        return self._in(_SAMPLED, text)

    def forced(self, text: str) -> str:
        return self._in(_FORCED, text) if self.colour else f"⟦{text}⟧"

    def dim(self, text: str) -> str:
        return self._in(_DIM, text)

    def bold(self, text: str) -> str:
        return self._in(_BOLD, text)


def spans(mask: np.ndarray) -> List[Tuple[int, int, bool]]:
    """Runs of equal mask as (start, end, sampled)."""
    cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    return [(a, b, bool(mask[a])) for a, b in zip(cuts, cuts[1:]) if a < b]


def paint(client: Client, painter: Painter, sample: Sample) -> str:
    """The sample's text, span by span."""
    parts = []
    for start, end, drawn in spans(sample.mask):
        text = client.detokenize(sample.tokens[start:end]).text
        parts.append(painter.sampled(text) if drawn else painter.forced(text))
    return "".join(parts)


def answer(text: str) -> Optional[float]:
    """The number after the last "The answer is"; None if there is none."""
    found = re.findall(r"The answer is (-?[\d,]+(?:\.\d+)?)", text)
    return float(found[-1].replace(",", "")) if found else None


def show(client: Client, painter: Painter, samples: List[Sample], question: str, right: float,
         out: TextIO) -> int:
    """Print one question's distinct samples, most frequent first; returns how many answers are right."""
    print(f"\n{painter.bold(question)}", file=out)
    groups: Dict[bytes, List[Sample]] = collections.defaultdict(list)
    for sample in samples:
        groups[sample.tokens.tobytes()].append(sample)
    n_right = 0
    for group in sorted(groups.values(), key=lambda g: (-len(g), g[0].sample)):
        good = answer(group[0].text or "") == right
        n_right += good * len(group)
        print(f"  {'+' if good else '-'} {len(group)} x  {paint(client, painter, group[0])}"
              f"  {painter.dim('(' + group[0].finish + ')')}", file=out)
    return n_right


def demonstrate(client: Client, painter: Painter, seed: int, out: TextIO) -> int:
    """Sample and print; returns how many of the answers are right."""
    pong = client.ping()
    print(f"coppice {pong.get('version')}, model {pong.get('model')}, {pong.get('backend')}, {pong.get('numerics')}; "
          f"{painter.sampled('sampled by the model')}, {painter.forced('forced by the calculator')}", file=out)
    start = time.monotonic()
    rollout = client.rollout([[{"role": "user", "content": q}] for q, _ in QUESTIONS], n=SAMPLES, seed=seed, temperature=1.0,
                             max_tokens=96, text=True)
    samples = rollout.wait()
    seconds = time.monotonic() - start
    n_right = 0
    for i, (question, right) in enumerate(QUESTIONS):
        n_right += show(client, painter, [s for s in samples if s.prompt == i], question, right, out)
    n_tokens = sum(len(s.tokens) for s in samples)
    n_forced = sum(int((s.mask == 0).sum()) for s in samples)
    print(f"\n{n_right} of {len(samples)} answers right, {n_tokens} tokens, {n_forced} of them forced, {seconds:.2f} s", file=out)
    return n_right


def main(argv: Optional[List[str]] = None) -> int:
    options = argparse.ArgumentParser(prog="python -m coppice.demo", description=__doc__,
                                      formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--worker", metavar="PROGRAM", default="build/coppice", help="the coppice program (%(default)s)")
    options.add_argument("--model", metavar="DIR", default="tests/models/calc-d4", help="the model to start it with (%(default)s)")
    options.add_argument("--endpoint", help="use the worker that runs there instead of starting one")
    options.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    options.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="(%(default)s)")
    args = options.parse_args(argv)
    colour = args.color == "always" or (args.color == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
    worker = contextlib.nullcontext(args.endpoint) if args.endpoint else running_worker(args.worker, args.model)
    try:
        with worker as endpoint, Client(endpoint) as client:
            n_right = demonstrate(client, Painter(colour), args.seed, sys.stdout)
    except (DemoError, CoppiceError) as e:
        print(f"coppice.demo: {e}", file=sys.stderr)
        return 1
    return 0 if 3 * n_right >= len(QUESTIONS) * SAMPLES else 1


if __name__ == "__main__":
    sys.exit(main())
