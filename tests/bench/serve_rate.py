"""Samples per second through the socket: 100 chat prompts on calc-d4, with 16 samples each and with one.

    make && make build/venv/ready
    build/venv/bin/python tests/bench/serve_rate.py

starts build/coppice as a worker, sends all prompts as one rollout (temperature 1, top-k 50, at most 96 tokens, the
calculator on) with the Python client, and tells the best of --repeat runs, from the request to the last sample.

    ... --nanochat DIR --python PYTHON

also tells what nanochat's own Engine does in fp32 with the same prompts, prompt by prompt: DIR is a checkout of
https://github.com/karpathy/nanochat, PYTHON one that has torch, numpy, filelock, tiktoken and rustbpe.  Nothing of nanochat is
kept here.  Only the ratio of one run on an idle machine means something.
"""
import argparse, json, os, pathlib, random, subprocess, sys, tempfile, time

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests/models/calc-d4"
COPPICE = os.environ.get("COPPICE", str(ROOT / "build/coppice"))
TEMPERATURE, TOP_K, MAX_TOKENS = 1.0, 50, 96


def chats(n_prompts):
    """The prompts, each a list of one message; the same ones in every run."""
    sys.path.insert(0, str(MODEL.parent))
    import tasks
    rng = random.Random(1)
    return [tasks.sample(rng)["messages"][:1] for _ in range(n_prompts)]


def best(repeat, run):
    """(seconds, what the run told) of the fastest."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        told = run()
        times.append((time.perf_counter() - start, told))
    return min(times)


# ---- Coppice.


def start_worker(folder, options):
    endpoint = pathlib.Path(folder, "endpoint")
    command = [COPPICE, "worker", "--model", MODEL, "--bind", "tcp://127.0.0.1:0", "--endpoint-file", endpoint, *options]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not endpoint.exists():
        if process.poll() is not None:
            sys.exit(f"the worker ended with status {process.returncode}")
        time.sleep(0.01)
    return process, endpoint.read_text().strip()


def measure_coppice(args):
    """{samples per prompt: (samples per second, tokens)}"""
    sys.path.insert(0, str(ROOT / "proto/python"))
    import coppice
    prompts, rates = chats(args.prompts), {}
    options = ["--threads", str(args.threads), "--precision", args.precision]
    with tempfile.TemporaryDirectory() as folder:
        process, endpoint = start_worker(folder, options)
        try:
            with coppice.Client(endpoint) as client:
                for n in args.samples:
                    def run():
                        got = client.rollout(prompts, n=n, seed=1, temperature=TEMPERATURE, top_k=TOP_K, max_tokens=MAX_TOKENS).wait()
                        assert len(got) == args.prompts * n
                        return sum(len(s.tokens) for s in got)
                    seconds, tokens = best(args.repeat, run)
                    rates[n] = args.prompts * n / seconds, tokens / args.prompts / n
        finally:
            process.terminate()
            process.wait()
    return rates


# ---- nanochat, in a Python that has torch.


def load_nanochat(checkout, threads):
    """Its Engine on calc-d4 in fp32, loaded by its own code."""
    # nanochat reads these when it is imported: its dtype, where its tokenizer is, and no GPU
    base = tempfile.mkdtemp()
    os.symlink(MODEL, os.path.join(base, "tokenizer"))
    os.environ.update(NANOCHAT_DTYPE="float32", NANOCHAT_BASE_DIR=base, CUDA_VISIBLE_DEVICES="")
    sys.path.insert(0, checkout)
    import torch
    from nanochat.checkpoint_manager import build_model, find_last_step
    from nanochat.engine import Engine
    torch.set_num_threads(threads)
    model, tokenizer, _ = build_model(str(MODEL), find_last_step(str(MODEL)), torch.device("cpu"), "eval")
    return Engine(model, tokenizer), tokenizer


def measure_nanochat(args):
    engine, tokenizer = load_nanochat(args.nanochat, args.threads)
    # it wants the assistant's message there, to take it off again
    answered = [{"messages": [*chat, {"role": "assistant", "content": ""}]} for chat in chats(args.prompts)]
    prompts, rates = [tokenizer.render_for_completion(c) for c in answered], {}
    for n in args.samples:
        def run():
            tokens = 0
            for i, prompt in enumerate(prompts):
                got, _ = engine.generate_batch(prompt, num_samples=n, temperature=TEMPERATURE, top_k=TOP_K, max_tokens=MAX_TOKENS, seed=i)
                assert len(got) == n
                tokens += sum(len(row) - len(prompt) + 1 for row in got)  # and the one that ends it
            return tokens
        seconds, tokens = best(args.repeat, run)
        rates[n] = args.prompts * n / seconds, tokens / args.prompts / n
    return rates


def nanochat_apart(args):
    """measure_nanochat() in the other Python."""
    command = [args.python, __file__, "--nanochat", args.nanochat, "--only-nanochat", "--repeat", str(args.repeat),
               "--threads", str(args.threads), "--prompts", str(args.prompts), "--samples", *map(str, args.samples)]
    p = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if p.returncode:
        sys.exit("could not measure nanochat")
    return {int(n): rate for n, rate in json.loads(p.stdout.splitlines()[-1]).items()}


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--samples", type=int, nargs="+", default=[16, 1], metavar="N", help="samples of each prompt (16 1)")
    args.add_argument("--prompts", type=int, default=100, metavar="N")
    args.add_argument("--repeat", type=int, default=3)
    args.add_argument("--threads", type=int, default=os.cpu_count())
    args.add_argument("--precision", default="bf16", choices=["bf16", "f32"])
    args.add_argument("--nanochat", metavar="DIR", help="a checkout of karpathy/nanochat, to compare with")
    args.add_argument("--python", default=sys.executable, help="a Python with nanochat's packages")
    args.add_argument("--only-nanochat", action="store_true", help=argparse.SUPPRESS)
    args = args.parse_args()
    if args.only_nanochat:
        print(json.dumps(measure_nanochat(args)))
        return
    ours = measure_coppice(args)
    theirs = nanochat_apart(args) if args.nanochat else {}
    for n, (rate, tokens) in ours.items():
        line = f"{args.prompts} prompts x {n:2}: {rate:8.1f} samples/s, {tokens:.1f} tokens each"
        if n in theirs:
            line += f"; nanochat {theirs[n][0]:.1f} samples/s, {theirs[n][1]:.1f} tokens each: {rate / theirs[n][0]:.1f} times as fast"
        print(line)


main()
