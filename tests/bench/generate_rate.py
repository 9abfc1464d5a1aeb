"""Tokens per second of `coppice generate -o DIR` as a share of the engine's alone on the same rows.

    make && make build/release/bare_engine && python3 tests/bench/generate_rate.py

Both generate the same samples for prompts of tests/models/tasks.py with calc-d4, in turn; the share is of the fastest run of each.
generate's time is the whole command's, less that of one with an empty input: from the first line to the complete data set.
The engine's is without reading and tokenizing. calc-d4 is the hardest case: it makes so many tokens per second that all else
weighs most.
"""
import argparse, json, os, pathlib, random, subprocess, sys, tempfile, time

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests/models/calc-d4"


def write_prompts(path, n):
    sys.path.insert(0, str(MODEL.parent))
    import tasks
    rng = random.Random(1)
    with open(path, "w") as out:
        for _ in range(n):
            task = tasks.sample(rng)
            print(json.dumps({"messages": task["messages"][:1], "answer": task["answer"]}), file=out)


def run_seconds(command):
    start = time.perf_counter()
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--prompts", type=int, default=400)
    p.add_argument("--samples", type=int, default=16)
    p.add_argument("--max-tokens", type=int, default=96)
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--repeat", type=int, default=5)
    a = p.parse_args()
    bare_times, times, empty_times, tokens = [], [], [], set()
    with tempfile.TemporaryDirectory() as folder:
        source, empty = pathlib.Path(folder, "prompts.jsonl"), pathlib.Path(folder, "empty.jsonl")
        write_prompts(source, a.prompts)
        empty.touch()
        for i in range(a.repeat):
            bare = subprocess.run([ROOT / "build/release/bare_engine", MODEL, source, str(a.samples), "42", str(a.max_tokens),
                                   str(a.threads)], check=True, capture_output=True, text=True).stdout.split()
            generate = [ROOT / "build/coppice", "generate", "--model", MODEL, "-n", str(a.samples), "--seed", "42", "--max-tokens",
                        str(a.max_tokens), "--threads", str(a.threads)]
            empty_times.append(run_seconds([*generate, "-i", empty, "-o", f"{folder}/empty-{i}"]))
            times.append(run_seconds([*generate, "-i", source, "-o", f"{folder}/{i}"]))
            bare_times.append(float(bare[0]))
            totals = json.loads(pathlib.Path(folder, str(i), "manifest.json").read_text())["totals"]
            tokens |= {int(bare[1]), totals["sampled_tokens"] + totals["forced_tokens"]}
    assert len(tokens) == 1, "both must generate the same"
    n, alone, whole = tokens.pop(), min(bare_times), min(times) - min(empty_times)
    print(f"{a.prompts} prompts x {a.samples}: {n} tokens; engine alone {n / alone:.0f} tokens/s, generate {n / whole:.0f}: "
          f"{100 * alone / whole:.1f} % of it")


if __name__ == "__main__":
    main()
