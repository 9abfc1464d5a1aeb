"""How fast nanochat's own Engine decodes and prefills on the CPU: the yardstick for Coppice's numbers.

The model has random weights: only its shape and dtype matter for speed.  Nothing of nanochat is kept here, so it takes a
checkout, and the few packages its engine imports:

    pip install torch numpy filelock tiktoken rustbpe
    git clone https://github.com/karpathy/nanochat
    python tests/bench/nanochat_engine.py --nanochat nanochat --shape d12 --dtype bf16 --threads 2

Decode: tokens of all samples together over the time from the first column of tokens to the last, after a prompt of 100.
Prefill: one forward pass over the prompt into an empty KV cache; it computes the logits of every position, as Engine does.
Each number is the median of --repeat runs after one to warm up.

bf16 means that nanochat computes in bf16 (NANOCHAT_DTYPE) and that all weights are stored in bf16 beforehand.  As
nanochat loads a checkpoint on a CPU, the matrices stay fp32 and are converted at every step; --keep-fp32 measures that.
"""
import argparse, json, os, statistics, sys, time

VOCAB, CONTEXT, HEAD_DIM = 32768, 2048, 64
PROMPT, NEW_TOKENS = 100, 64


class StubTokenizer:
    """Every special token is an id that the model cannot draw, so that no row ends early or calls a tool."""

    def encode_special(self, name):
        return VOCAB

    def get_bos_token_id(self):
        return VOCAB


def make_model(n_layers, dtype, keep_fp32):
    import torch
    from nanochat.gpt import GPT, GPTConfig
    dim = HEAD_DIM * n_layers
    model = GPT(GPTConfig(sequence_len=CONTEXT, vocab_size=VOCAB, n_layer=n_layers, n_head=n_layers, n_kv_head=n_layers,
                          n_embd=dim, window_pattern="SSSL"))
    torch.manual_seed(1)
    model.init_weights()
    for weight in model.parameters():  # the output projections start as zeros, which no trained model has
        if weight.dim() == 2 and not weight.any():
            torch.nn.init.normal_(weight, std=0.02)
    if not keep_fp32:
        model.to(dtype)
    return model.eval()


def prompt(n_tokens):
    return [(7919 * i + 11) % VOCAB for i in range(n_tokens)]


def decode_rate(engine, batch_size):
    """Tokens per second, prompt and first column left out."""
    columns = engine.generate(prompt(PROMPT), num_samples=batch_size, max_tokens=NEW_TOKENS, temperature=1.0, top_k=50,
                              seed=1)
    next(columns)
    start = time.perf_counter()
    for _ in range(NEW_TOKENS - 1):
        column, _ = next(columns)
        assert len(column) == batch_size and max(column) < VOCAB
    return batch_size * (NEW_TOKENS - 1) / (time.perf_counter() - start)


def prefill_time(model, dtype, n_tokens):
    import torch
    from nanochat.engine import KVCache
    ids = torch.tensor([prompt(n_tokens)])
    config = model.config
    cache = KVCache(batch_size=1, num_heads=config.n_kv_head, seq_len=n_tokens, head_dim=HEAD_DIM,
                    num_layers=config.n_layer, device=ids.device, dtype=dtype)
    with torch.inference_mode():
        start = time.perf_counter()
        model.forward(ids, kv_cache=cache)
        return time.perf_counter() - start


def median_of(repeat, measure, *args):
    measure(*args)
    return statistics.median(measure(*args) for _ in range(repeat))


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--nanochat", required=True, metavar="DIR", help="a checkout of karpathy/nanochat")
    args.add_argument("--shape", default="d12", metavar="dN", help="N layers, N heads of 64, width 64 N (d12)")
    args.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    args.add_argument("--threads", type=int, default=2)
    args.add_argument("--repeat", type=int, default=3)
    args.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="samples at once (1 8 32)")
    args.add_argument("--prefill", type=int, nargs="+", default=[100, 512], metavar="N", help="prompt lengths (100 512)")
    args.add_argument("--keep-fp32", action="store_true", help="bf16: leave the matrices in fp32, as nanochat loads them")
    args.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    args = args.parse_args()
    if not (args.shape[:1] == "d" and args.shape[1:].isdecimal() and int(args.shape[1:]) > 0):
        sys.exit(f'cannot measure shape "{args.shape}": it is d and the number of layers, such as d12')

    # nanochat reads these when it is imported: its dtype, and no GPU, which it would otherwise pick its attention for
    os.environ["NANOCHAT_DTYPE"] = {"fp32": "float32", "bf16": "bfloat16"}[args.dtype]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.path.insert(0, args.nanochat)
    import torch
    from nanochat.engine import Engine
    torch.set_num_threads(args.threads)

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    model = make_model(int(args.shape[1:]), dtype, args.keep_fp32)
    engine = Engine(model, StubTokenizer())
    decode = [{"batch_size": n, "tok_per_sec": median_of(args.repeat, decode_rate, engine, n)} for n in args.batch]
    prefill = [{"tokens": n, "sec": median_of(args.repeat, prefill_time, model, dtype, n)} for n in args.prefill]

    if args.json:
        print(json.dumps({"shape": args.shape, "dtype": args.dtype, "threads": args.threads, "torch": torch.__version__,
                          "decode": decode, "prefill": prefill}))
        return
    print(f"{args.shape} {args.dtype}, {args.threads} threads, torch {torch.__version__}")
    for d in decode:
        print(f"decode  {d['batch_size']:5} samples {d['tok_per_sec']:10.1f} tok/s")
    for p in prefill:
        print(f"prefill {p['tokens']:5} tokens  {p['sec']:10.3f} s   {p['tokens'] / p['sec']:10.1f} tok/s")


if __name__ == "__main__":
    main()
