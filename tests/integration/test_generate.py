"""`coppice generate -o DIR`: data sets that are complete, whatever happens to the process that writes them."""
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import time

import coppice
import msgpack
import numpy as np
import pytest
import zstandard

COPPICE = os.environ.get("COPPICE", "build/coppice")
MODEL = "tests/models/calc-d4"
PATIENCE = 600
SLOW = 15 if "thread" in COPPICE else 3 if "address" in COPPICE else 1  # how much longer a sanitized program takes
OPTIONS = ["-n", "4", "--seed", "42", "--temperature", "2", "--max-tokens", "60", "--logprobs", "sampling,model", "--quiet"]
SHARD_BYTES = 8192 if SLOW == 1 else 1
SMALL_SHARDS = ["--shard-bytes", str(SHARD_BYTES)]
LINES = 300 if SLOW == 1 else 150  # more than a frame of records


def questions(n, seed=0):
    rng = random.Random(seed)
    lines = []
    for i in range(n):
        a, b = rng.randint(2, 999), rng.randint(2, 99)
        lines.append({"messages": [{"role": "user", "content": f"What is {a} * {b}?"}], "answer": str(a * b), "note": i})
    return lines


def write_lines(path, lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def command(source, folder, *options):
    return [COPPICE, "generate", "--model", MODEL, "-i", str(source), "-o", str(folder), *options]


def generate(source, folder, *options, **kwargs):
    return subprocess.run(command(source, folder, *options), capture_output=True, text=True, timeout=PATIENCE, **kwargs)


def manifest(folder):
    return json.loads(pathlib.Path(folder, "manifest.json").read_text())


def frames(path):
    """The content of each frame of a shard."""
    data, out = path.read_bytes(), []
    while data:
        d = zstandard.ZstdDecompressor().decompressobj()
        out.append(d.decompress(data))
        assert d.eof
        data = d.unused_data
    return out


def shards(folder):
    return sorted(pathlib.Path(folder).glob("shard-*.zst"))


def records(folder):
    out = []
    for shard in shards(folder):
        for frame in frames(shard):
            unpacker = msgpack.Unpacker(max_buffer_size=len(frame) + 1)
            unpacker.feed(frame)
            out.extend(unpacker)
    return out


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("input") / "prompts.jsonl", questions(LINES))


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    p = generate(source, folder, *OPTIONS, *SMALL_SHARDS)
    assert p.returncode == 0, p.stderr
    return folder


def test_a_data_set_holds_each_sample_once(source, whole):
    found = records(whole)
    assert [r["line"] for r in found] == list(range(LINES))
    assert [r["prompt_id"] for r in found] == [str(i) for i in range(LINES)]
    assert [r["input"] for r in found] == [json.loads(line) for line in source.read_text().splitlines()]
    for r in found:
        assert [s["sample"] for s in r["samples"]] == [0, 1, 2, 3]
        for s in r["samples"]:
            n = len(s["tokens"]) // 4
            assert s["prompt"] == r["line"] and len(s["mask"]) == n and len(s["logprobs"]) == 4 * n
    m = manifest(whole)
    assert m["state"] == "complete" and m["totals"]["samples"] == 4 * LINES and m["totals"]["errors"] == 0
    masks = [s["mask"] for r in found for s in r["samples"]]
    assert m["totals"]["sampled_tokens"] == sum(mask.count(1) for mask in masks)
    assert m["totals"]["forced_tokens"] == sum(mask.count(0) for mask in masks) > 0
    assert [s["file"] for s in m["shards"]] == [s.name for s in shards(whole)] and len(m["shards"]) > 1
    assert all(s["bytes"] >= SHARD_BYTES for s in m["shards"][:-1])


def test_the_samples_are_those_of_stdout(source, whole):
    p = subprocess.run(command(source, "-", *OPTIONS), capture_output=True, text=True, timeout=PATIENCE)
    assert p.returncode == 0
    printed = [json.loads(line) for line in p.stdout.splitlines()]
    stored = [(r, s) for r in records(whole) for s in r["samples"]]
    assert len(printed) == len(stored) == 4 * LINES
    for o, (r, s) in zip(printed, stored):
        assert (o["prompt"], o["prompt_id"], o["sample"], o["seed"]) == (r["line"], r["prompt_id"], s["sample"], s["seed"])
        assert np.array(o["tokens"], "<u4").tobytes() == s["tokens"] and bytes(o["mask"]) == s["mask"]
        assert np.array(o["logprobs"], "<f4").tobytes() == s["logprobs"]
        assert np.array(o["prompt_tokens"], "<u4").tobytes() == r["prompt_tokens"] and o["input"] == r["input"]


def test_the_python_package_reads_it(source, whole, tmp_path):
    found = list(coppice.read_dataset(whole))
    assert [r.line for r in found] == list(range(LINES)) and found[7].input["note"] == 7
    for r, raw in zip(found, records(whole)):
        assert r.prompt_tokens.tobytes() == raw["prompt_tokens"] and r.rewards is None and r.error is None
        assert [s.tokens.tobytes() for s in r.samples] == [s["tokens"] for s in raw["samples"]]
    torn = tmp_path / "torn.zst"
    torn.write_bytes(shards(whole)[0].read_bytes()[:-3])
    with pytest.raises(coppice.ProtocolError, match="ends within a frame"):
        list(coppice.read_shard(torn))


def test_a_finished_command_says_so(source, whole):
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    p = generate(source, whole, *OPTIONS)
    assert p.returncode == 0 and "complete already" in p.stderr
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == before


# ---- Interruptions.


def run_with_kills(source, folder, rng, sig, stdin=False):
    """Kill the run at random moments until it gets to its end.  How often it was killed."""
    text = source.read_bytes() if stdin else None
    for kills in range(200):
        p = subprocess.Popen(command("-" if stdin else source, folder, *OPTIONS, *SMALL_SHARDS),
                             stdin=subprocess.PIPE if stdin else subprocess.DEVNULL, stderr=subprocess.PIPE)
        # The first surely comes before the end; later ones live longer, so that it ends on slow machines.
        limit = SLOW * rng.uniform(0.02, 0.6 if kills else 0.1) * (1 + kills / 4)
        try:
            _, err = p.communicate(text, timeout=limit)
        except subprocess.TimeoutExpired:
            p.send_signal(sig)
            _, err = p.communicate(timeout=PATIENCE)
            if sig == signal.SIGINT:
                assert p.returncode in (0, 130, -signal.SIGINT), err
            continue
        if p.returncode == 0:
            return kills
        assert p.returncode in (130, -signal.SIGINT), err.decode()
    raise AssertionError("it never got to its end")


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_moment_it_goes_on(source, whole, tmp_path, seed):
    kills = run_with_kills(source, tmp_path / "out", random.Random(seed), signal.SIGKILL)
    assert kills > 0
    assert records(tmp_path / "out") == records(whole)
    assert manifest(tmp_path / "out")["totals"] == manifest(whole)["totals"]


def test_stdin_is_compared_as_it_comes(source, whole, tmp_path):
    assert run_with_kills(source, tmp_path / "out", random.Random(7), signal.SIGKILL, stdin=True) > 0
    assert records(tmp_path / "out") == records(whole)
    p = generate("-", tmp_path / "out", *OPTIONS, input=source.read_text())
    assert p.returncode == 0 and "complete already" in p.stderr
    p = generate("-", tmp_path / "out", *OPTIONS, input=source.read_text() + "{}\n")
    assert p.returncode == 1 and "is not what the output was begun with" in p.stderr


def begin_with_stdin(source, folder):
    """A run that was killed while it had written a part and waited for more input."""
    p = subprocess.Popen(command("-", folder, *OPTIONS), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    p.stdin.write(source.read_bytes())
    p.stdin.flush()
    deadline = time.monotonic() + PATIENCE
    while not shards(folder) or shards(folder)[0].stat().st_size == 0:
        assert time.monotonic() < deadline and p.poll() is None
        time.sleep(0.02)
    p.kill()
    p.wait()
    p.stdin.close()


def test_a_changed_start_of_stdin_is_refused(tmp_path):
    lines = questions(LINES, seed=3)
    text = write_lines(tmp_path / "p.jsonl", lines).read_text()
    begin_with_stdin(tmp_path / "p.jsonl", tmp_path / "out")
    other = generate("-", tmp_path / "out", *OPTIONS, input=text.replace('"note": 1}', '"note": 2}', 1))
    assert other.returncode == 1 and "lines of the input are not those that the output was begun with" in other.stderr
    short = generate("-", tmp_path / "out", *OPTIONS, input=json.dumps(lines[0]) + "\n")
    assert short.returncode == 1 and "lines of the input are not those" in short.stderr
    same = generate("-", tmp_path / "out", *OPTIONS, input=text)
    assert same.returncode == 0 and [r["line"] for r in records(tmp_path / "out")] == list(range(LINES))


def test_a_file_in_place_of_stdin_is_compared_too(source, whole, tmp_path):
    begin_with_stdin(source, tmp_path / "out")
    lines = source.read_text().splitlines()
    n_known = manifest(tmp_path / "out")["input"]["lines"]
    for changed in (lines[:1] + [lines[0]] + lines[2:], lines[:n_known - 1]):
        q = generate(write_lines(tmp_path / "other.jsonl", changed), tmp_path / "out", *OPTIONS)
        assert q.returncode == 1 and "is not what the output was begun with" in q.stderr
    assert generate(source, tmp_path / "out", *OPTIONS).returncode == 0
    assert records(tmp_path / "out") == records(whole)


def test_stdin_in_place_of_a_file_is_refused(source, tmp_path):
    p = subprocess.Popen(command(source, tmp_path / "out", *OPTIONS), stderr=subprocess.DEVNULL)
    while not shards(tmp_path / "out"):
        time.sleep(0.01)
    p.kill()
    p.wait()
    q = generate("-", tmp_path / "out", *OPTIONS, input=source.read_text())
    assert q.returncode == 1 and "give it with -i FILE" in q.stderr


def test_no_changed_line_of_stdin_is_written(source, whole, tmp_path):
    begin_with_stdin(source, tmp_path / "out")
    done, known = len(records(tmp_path / "out")), manifest(tmp_path / "out")["input"]["lines"]
    assert done <= known
    lines = source.read_text().splitlines()
    lines[known - 1] = lines[0]  # the last one that was known; all before it are the same
    q = generate("-", tmp_path / "out", *OPTIONS, input="\n".join(lines) + "\n")
    assert q.returncode == 1 and "lines of the input are not those" in q.stderr
    assert len(records(tmp_path / "out")) == done  # not even those before it


def test_an_input_that_ends_within_a_line_is_not_over(source, whole, tmp_path):
    data = source.read_bytes()
    p = subprocess.run(command("-", tmp_path / "out", *OPTIONS), input=data[:-20], capture_output=True, timeout=PATIENCE)
    assert p.returncode == 1 and f"ends within line {LINES - 1}".encode() in p.stderr and manifest(tmp_path / "out")["state"] == "running"
    assert subprocess.run(command("-", tmp_path / "out", *OPTIONS), input=data[:-1], timeout=PATIENCE).returncode == 0
    assert records(tmp_path / "out") == records(whole)


def test_ctrl_c_ends_cleanly_and_says_how_to_go_on(source, whole, tmp_path):
    p = subprocess.Popen(command(source, tmp_path / "out", *OPTIONS, *SMALL_SHARDS), stderr=subprocess.PIPE, text=True)
    while not shards(tmp_path / "out"):
        time.sleep(0.01)
    p.send_signal(signal.SIGINT)
    _, err = p.communicate(timeout=PATIENCE)
    assert p.returncode == 130 and "the same command goes on" in err
    half = records(tmp_path / "out")
    assert half == records(whole)[:len(half)]
    assert generate(source, tmp_path / "out", *OPTIONS, *SMALL_SHARDS).returncode == 0
    assert records(tmp_path / "out") == records(whole)


def test_what_is_finished_behind_a_slow_line_is_not_lost(tmp_path):
    source = write_lines(tmp_path / "p.jsonl", [{"text": "a"}, *questions(60)])
    options = ["-n", "2", "--seed", "1", "--max-tokens", "4500", "--quiet"]  # that text goes on and on
    assert generate(source, tmp_path / "whole", *options).returncode == 0
    held, wait = tmp_path / "out" / "held.zst", 0.3 * SLOW
    while not held.exists():
        p = subprocess.Popen(command(source, tmp_path / "out", *options), stderr=subprocess.PIPE, text=True)
        time.sleep(wait)
        p.send_signal(signal.SIGINT)
        _, err = p.communicate(timeout=PATIENCE)
        assert p.returncode in (130, -signal.SIGINT), err
        wait *= 1.5
    assert "lines more are finished, and wait for older ones" in err
    waiting = [m for frame in frames(held) for m in [msgpack.unpackb(frame)]]
    finished = {r["line"]: r for r in records(tmp_path / "whole")}
    assert len(waiting) > 0 and all(finished[m["line"]] == m for m in waiting)

    changed = generate(source, tmp_path / "out", *options, "--temperature", "0.5")
    assert changed.returncode == 1 and "parameters.temperature" in changed.stderr
    before = held.read_bytes()
    held.write_bytes(before[:-3] if len(waiting) % 2 else b"damaged")  # what is lost there is made again
    assert generate(source, tmp_path / "out", *options).returncode == 0
    assert records(tmp_path / "out") == records(tmp_path / "whole") and not held.exists()


def test_held_lines_stay_until_they_have_been_read_again(tmp_path):
    lines = [{"text": "a"}, *questions(60)]
    source = write_lines(tmp_path / "p.jsonl", lines)
    options = ["-n", "2", "--seed", "1", "--max-tokens", "4500", "--quiet"]
    assert generate(source, tmp_path / "whole", *options).returncode == 0
    folder, wait = tmp_path / "out", 0.3 * SLOW
    while not (folder / "held.zst").exists():
        with open(source) as f:
            p = subprocess.Popen(command("-", folder, *options), stdin=f, stderr=subprocess.DEVNULL)
            time.sleep(wait)
            p.send_signal(signal.SIGINT)
            p.wait(PATIENCE)
        wait *= 1.5
    held = (folder / "held.zst").read_bytes()
    changed = [*lines[:3], lines[1], *lines[4:]]
    p = generate("-", folder, *options, input="".join(json.dumps(line) + "\n" for line in changed))
    assert p.returncode == 1 and "lines of the input are not those" in p.stderr
    p = subprocess.Popen(command("-", folder, *options), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    time.sleep(wait)  # it has had no line yet
    p.send_signal(signal.SIGINT)
    p.wait(PATIENCE)
    p.stdin.close()
    assert (folder / "held.zst").read_bytes() == held
    assert generate(source, folder, *options).returncode == 0
    assert records(folder) == records(tmp_path / "whole") and not (folder / "held.zst").exists()


def test_ctrl_c_while_it_waits_for_stdin(tmp_path):
    p = subprocess.Popen(command("-", tmp_path / "out", *OPTIONS), stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    p.stdin.write(b'{"text": "1"}\n')
    p.stdin.flush()
    while not pathlib.Path(tmp_path, "out", "manifest.json").exists():
        time.sleep(0.01)
    time.sleep(0.3)
    p.send_signal(signal.SIGINT)
    assert p.wait(PATIENCE) == 130
    p.stdin.close()
    p.stderr.close()


def test_a_torn_frame_is_repaired(source, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "out")
    m = manifest(tmp_path / "out")
    last = m["shards"].pop()
    m["state"] = "running"
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(m))
    path = tmp_path / "out" / last["file"]
    path.write_bytes(path.read_bytes()[:-5])
    p = generate(source, tmp_path / "out", *OPTIONS, *SMALL_SHARDS)
    assert p.returncode == 0, p.stderr
    assert records(tmp_path / "out") == records(whole)


def test_a_full_disk_is_an_error_that_a_rerun_recovers_from(source, whole, tmp_path):
    def small_files():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))

    p = generate(source, tmp_path / "out", *OPTIONS, *SMALL_SHARDS, preexec_fn=small_files)
    assert p.returncode == 1 and "shard-0000" in p.stderr and "File too large" in p.stderr
    p = generate(source, tmp_path / "out", *OPTIONS, *SMALL_SHARDS)
    assert p.returncode == 0, p.stderr
    assert records(tmp_path / "out") == records(whole)


# ---- What is refused.


def test_other_parameters_are_refused_by_name(source, whole):
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    p = generate(source, whole, "-n", "5", "--seed", "43", "--max-tokens", "60", "--temperature", "0.5")
    assert p.returncode == 1
    for difference in ("parameters.n was 4 and is 5", "parameters.seed was 42 and is 43",
                       "parameters.temperature was 2.0 and is 0.5"):
        assert difference in p.stderr
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == before


def test_another_model_or_precision_is_refused(source, whole):
    p = generate(source, whole, *OPTIONS, "--precision", "f32")
    assert p.returncode == 1 and 'model.numerics was "cop1-bf16" and is "cop1-f32"' in p.stderr


def test_another_input_is_refused(whole, tmp_path):
    other = write_lines(tmp_path / "other.jsonl", questions(LINES + 1))
    p = generate(other, whole, *OPTIONS)
    assert p.returncode == 1 and "is not what the output was begun with" in p.stderr and str(LINES + 1) in p.stderr


def test_a_run_that_made_nothing_binds_to_nothing(tmp_path):
    source = write_lines(tmp_path / "p.jsonl", questions(5))
    p = generate(source, tmp_path / "out", *OPTIONS, "--reward", "no-such-program-here")
    assert p.returncode == 1 and records(tmp_path / "out") == []
    other = write_lines(tmp_path / "q.jsonl", questions(6))
    p = generate(other, tmp_path / "out", *OPTIONS, "--reward", "answer")
    assert p.returncode == 0 and len(records(tmp_path / "out")) == 6, p.stderr


def test_a_folder_of_other_things_is_refused(source, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    p = generate(source, tmp_path, *OPTIONS)
    assert p.returncode == 1 and "give a folder of its own" in p.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_without_a_seed_it_goes_on_with_the_first_one(tmp_path):
    source = write_lines(tmp_path / "p.jsonl", questions(5))
    options = ["-n", "2", "--max-tokens", "8", "--quiet"]
    assert generate(source, tmp_path / "a", *options).returncode == 0
    p = generate(source, tmp_path / "a", *options)
    assert p.returncode == 0 and "complete already" in p.stderr
    seed = manifest(tmp_path / "a")["parameters"]["seed"]
    assert generate(source, tmp_path / "b", *options, "--seed", str(seed)).returncode == 0
    assert records(tmp_path / "a") == records(tmp_path / "b")


def test_two_processes_do_not_write_into_one_folder(source, tmp_path):
    p = subprocess.Popen(command("-", tmp_path / "out", *OPTIONS), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    while not pathlib.Path(tmp_path, "out", "manifest.json").exists():
        time.sleep(0.01)
    other = generate(source, tmp_path / "out", *OPTIONS)
    assert other.returncode == 1 and "another process" in other.stderr
    p.stdin.close()
    assert p.wait(PATIENCE) == 0


# ---- Lines.


def test_bad_lines_become_records_and_the_run_goes_on(tmp_path):
    lines = questions(3) + ["nope", "", '{"text": "1", "tokens": [1]}', '{"text": 5, "k": 1}'] + questions(2, seed=1)
    source = write_lines(tmp_path / "p.jsonl", lines)
    p = generate(source, tmp_path / "out", *OPTIONS)
    assert p.returncode == 3 and "3 of them with an error" in p.stderr
    found = {r["line"]: r for r in records(tmp_path / "out")}
    assert sorted(found) == [0, 1, 2, 3, 5, 6, 7, 8]  # line 4 is blank
    assert [line for line, r in sorted(found.items()) if "error" in r] == [3, 5, 6]
    assert found[3]["input"] is None and "invalid JSON" in found[3]["error"]
    assert found[6]["input"] == {"text": 5, "k": 1} and found[6]["error"].startswith("text: ")
    assert manifest(tmp_path / "out")["totals"]["errors"] == 3
    printed = subprocess.run(command(source, "-", *OPTIONS), capture_output=True, text=True, timeout=PATIENCE)
    assert printed.returncode == 3
    errors = [json.loads(line) for line in printed.stdout.splitlines() if "error" in json.loads(line)]
    assert [e["line"] for e in errors] == [3, 5, 6]


def test_strict_stops_at_the_first_bad_line(tmp_path):
    source = write_lines(tmp_path / "p.jsonl", questions(3) + ["nope"] + questions(2, seed=1))
    p = generate(source, tmp_path / "out", *OPTIONS, "--strict")
    assert p.returncode == 1 and "line 3 (from 0): " in p.stderr
    assert not any("error" in r for r in records(tmp_path / "out"))
    assert generate(source, tmp_path / "out", *OPTIONS).returncode == 3
    assert [r["line"] for r in records(tmp_path / "out")] == list(range(6))


def test_zstandard_input_gives_the_same_set(source, whole, tmp_path):
    packed = tmp_path / "p.jsonl.zst"
    packed.write_bytes(zstandard.ZstdCompressor().compress(source.read_bytes()))
    assert generate(packed, tmp_path / "out", *OPTIONS).returncode == 0
    assert records(tmp_path / "out") == records(whole)


def test_parts_hold_the_same_samples_and_merge(source, whole, tmp_path):
    parts = [tmp_path / f"part-{i}" for i in range(3)]
    for i, part in enumerate(parts):
        assert generate(source, part, *OPTIONS, "--shard", f"{i}/3").returncode == 0
        assert [r["line"] for r in records(part)] == list(range(i, LINES, 3))
    merge = [COPPICE, "merge", *map(str, parts), "-o", str(tmp_path / "all")]
    p = subprocess.run(merge, capture_output=True, text=True, timeout=PATIENCE)
    assert p.returncode == 0, p.stderr
    assert records(tmp_path / "all") == records(whole)
    again = subprocess.run(merge, capture_output=True, text=True, timeout=PATIENCE)
    assert again.returncode == 0 and "complete" in again.stderr
    missing = subprocess.run([COPPICE, "merge", *map(str, parts[:2]), "-o", str(tmp_path / "two")], capture_output=True,
                             text=True, timeout=PATIENCE)
    assert missing.returncode == 1 and "2" in missing.stderr
    damaged = shards(parts[1])[0]
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    p = subprocess.run([COPPICE, "merge", *map(str, parts), "-o", str(tmp_path / "bad")], capture_output=True, text=True,
                       timeout=PATIENCE)
    assert p.returncode == 1 and damaged.name in p.stderr


# ---- Rewards.

JUDGE = """
import json, sys
for line in sys.stdin:
    o = json.loads(line)
    assert o["text"] and o["input"]["messages"]
    print(len(o["tokens"]) % 7 if o["sample"] != 1 else "null")
"""


def test_a_program_judges_samples(source, whole, tmp_path):
    (tmp_path / "judge.py").write_text(JUDGE)
    options = [*OPTIONS, "--reward", f"python3 {tmp_path}/judge.py"]
    p = generate(source, tmp_path / "all", *options)
    assert p.returncode == 0, p.stderr
    judged = records(tmp_path / "all")
    for r in judged:
        expected = [len(s["tokens"]) // 4 % 7 if s["sample"] != 1 else None for s in r["samples"]]
        assert r.pop("rewards") == expected
    assert judged == records(whole)  # and no text, which was not asked for

    assert generate(source, tmp_path / "best", *options, "--keep", "best").returncode == 0
    for r, full in zip(records(tmp_path / "best"), records(tmp_path / "all")):
        assert r["rewards"] == full["rewards"]
        best = max((i for i in range(4) if r["rewards"][i] is not None), key=lambda i: (r["rewards"][i], -i))
        assert r["samples"] == [full["samples"][best]]

    assert generate(source, tmp_path / "two", *options, "--keep", "2").returncode == 0
    assert all(len(r["samples"]) == 2 and r["samples"][0]["sample"] < r["samples"][1]["sample"]
               for r in records(tmp_path / "two"))


def test_a_program_may_answer_at_the_end(tmp_path):
    source = write_lines(tmp_path / "p.jsonl", questions(20))
    p = generate(source, tmp_path / "out", *OPTIONS, "--reward", "awk '{a[NR] = NR} END {for (i = 1; i <= NR; i++) print a[i]}'")
    assert p.returncode == 0, p.stderr
    rewards = [r["rewards"] for r in records(tmp_path / "out")]
    assert sorted(x for row in rewards for x in row) == list(range(1, 81))
    assert all(row == list(range(int(row[0]), int(row[0]) + 4)) for row in rewards)  # asked line by line, as they finish


def test_ctrl_c_ends_a_run_that_waits_for_its_judge(tmp_path):
    source = write_lines(tmp_path / "p.jsonl", questions(3))
    p = subprocess.Popen(command(source, tmp_path / "out", *OPTIONS, "--reward", "sleep 1000"), stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "out" / "manifest.json").exists():
        time.sleep(0.01)
    time.sleep(1)  # decoding is over by then, or it is not: both must end
    p.send_signal(signal.SIGINT)
    _, err = p.communicate(timeout=30)
    assert p.returncode == 130, err


def test_rewards_that_were_shifted_are_not_gone_on_with(tmp_path):
    source = write_lines(tmp_path / "p.jsonl", questions(20))
    (tmp_path / "judge.sh").write_text("echo -999; while read line; do echo 1; done\n")
    options = [*OPTIONS, "--reward", f"sh {tmp_path}/judge.sh"]
    assert generate(source, tmp_path / "out", *options).returncode == 1
    (tmp_path / "judge.sh").write_text("while read line; do echo 1; done\n")
    written = len(records(tmp_path / "out"))
    p = generate(source, tmp_path / "out", *options)
    if written == 0:  # it was told before anything was written
        assert p.returncode == 0 and all(r["rewards"] == [1] * 4 for r in records(tmp_path / "out"))
        assert "complete already" in generate(source, tmp_path / "out", *options).stderr
    else:
        assert "cannot be trusted" in p.stderr and manifest(tmp_path / "out")["state"] == "running"


@pytest.mark.parametrize("program,told", [("head -n 3 | wc -c", "ended"), ("cat", "line 1"), ("exit 3", "3"),
                                          ("no-such-program-here", "127"),
                                          ("awk '{print 1} END {print 2}'", "81")])
def test_a_program_that_fails_stops_the_run_and_a_rerun_goes_on(tmp_path, program, told):
    source = write_lines(tmp_path / "p.jsonl", questions(20))
    p = generate(source, tmp_path / "out", *OPTIONS, "--reward", program)
    assert p.returncode == 1 and "reward" in p.stderr
    assert told in p.stderr


def test_a_run_with_rewards_goes_on_after_a_kill(source, tmp_path):
    options = [*OPTIONS, *SMALL_SHARDS, "--reward", "answer"]
    assert generate(source, tmp_path / "whole", *options).returncode == 0
    p = subprocess.Popen(command(source, tmp_path / "out", *options), stderr=subprocess.DEVNULL)
    while not shards(tmp_path / "out"):
        time.sleep(0.01)
    p.kill()
    p.wait()
    p = generate(source, tmp_path / "out", *options)
    assert p.returncode == 0 and records(tmp_path / "out") == records(tmp_path / "whole")
    end = [line for line in p.stderr.splitlines() if "pass@1 " in line]
    told = generate(source, tmp_path / "whole", *options).stderr
    assert end and end[0] in told  # what was judged before the kill counts
    rewards = [r["rewards"] for r in records(tmp_path / "whole")]
    share = sum(row[0] for row in rewards) / len(rewards)
    assert f"pass@1 {share:.4f}" in end[0]


def test_a_pool_that_cannot_hold_every_line_is_refused(source, tmp_path):
    p = generate(source, tmp_path / "out", *OPTIONS, "--kv-memory", "1M")
    assert p.returncode == 1 and "raise --kv-memory" in p.stderr and not (tmp_path / "out").exists()
    p = generate(source, tmp_path / "out", *OPTIONS, "--kv-memory", "1M", "--context", "200")
    assert p.returncode == 0, p.stderr


def test_options_that_make_no_sense(tmp_path):
    source = write_lines(tmp_path / "p.jsonl", questions(1))
    for options in (["--shard", "3/3"], ["--shard", "x"], ["--shard", "0/3"], ["--keep", "best"], ["--keep", "0", "--reward", "answer"],
                    ["--shard-bytes", "0"]):
        p = generate(source, tmp_path / "out", *options)
        assert p.returncode == 2 and options[0] in p.stderr, options
    assert not (tmp_path / "out").exists()
