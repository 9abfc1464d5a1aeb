"""Train a small model to use its calculator, with GRPO: rollouts by a Coppice worker, gradients by PyTorch.

    python proto/python/examples/grpo.py                        # from the folder of the repository, after `make`
    python proto/python/examples/grpo.py --endpoint tcp://127.0.0.1:5555

Each step samples a few answers to each of some new questions, gives each an advantage over the others to the same question,
takes one or more gradient steps, and brings the new weights to the worker. The worker's log-probabilities are those that the
tokens were drawn with: no second pass has to compute them, and the importance ratio of the first gradient step is 1 but for
rounding. With the same options two runs print the same lines, but for the times.
"""
import argparse
import contextlib
import importlib.util
import os
import pathlib
import random
import signal
import sys
import tempfile
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # else PyTorch's threads spin while they wait, where others want the cores

import numpy as np
import torch

from coppice import Client, CoppiceError, demo
from nanochat_f import load

EVAL_SEED = 1_000_003  # of tasks that training does not see
MICROBATCH = 16  # sequences whose gradient is computed at once: small enough for a processor's cache


class Tasks:
    """Questions with an answer, from the generator that the model was trained with."""

    def __init__(self, path, seed):
        spec = importlib.util.spec_from_file_location("tasks", path)
        self._module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._module)
        self._random = random.Random(seed)

    def take(self, n):
        """n pairs of a prompt, as messages, and the answer, as text."""
        tasks = []
        while len(tasks) < n:
            task = self._module.sample(self._random)
            if task["answer"] is not None:
                tasks.append((task["messages"][:1], task["answer"]))
        return tasks


def reward(sample, answer):
    """1 for a completion that ended by itself with the right answer, else 0."""
    return float(sample.finish == "stop" and sample.text.removesuffix("<|assistant_end|>").endswith(f"The answer is {answer}."))


def merged(samples, gains):
    """Samples that matter, each completion of a prompt once: lists of the samples and of their gains, those of equal ones added.

    The objective is a sum over samples, so that equal ones may be computed once. Sorted by length, for little padding.
    """
    groups = {}
    for sample, gain in zip(samples, gains):
        if gain:
            groups.setdefault((sample.prompt, sample.tokens.tobytes()), []).append((sample, gain))
    groups = sorted(groups.values(), key=lambda group: len(group[0][0].prompt_tokens) + len(group[0][0].tokens))
    return [group[0][0] for group in groups], [sum(gain for _, gain in group) for group in groups]


class Batch:
    """Samples side by side: ids [B, T], and for each token whether it was sampled, its log-probability, its advantage."""

    def __init__(self, samples, advantages):
        length = max(len(s.prompt_tokens) + len(s.tokens) for s in samples)
        self.ids = torch.zeros(len(samples), length, dtype=torch.long)
        self.sampled = torch.zeros(len(samples), length, dtype=torch.bool)
        self.behaviour = torch.zeros(len(samples), length)
        self.advantage = torch.tensor(advantages, dtype=torch.float32)[:, None]
        for i, s in enumerate(samples):
            start, end = len(s.prompt_tokens), len(s.prompt_tokens) + len(s.tokens)
            self.ids[i, :end] = torch.from_numpy(np.concatenate((s.prompt_tokens, s.tokens)).astype(np.int64))
            self.sampled[i, start:end] = torch.from_numpy(s.mask.astype(bool))
            self.behaviour[i, start:end] = torch.from_numpy(s.logprobs.copy())

    def log_ratio(self, model, temperature):
        """[tokens that were sampled]: log-probability now less that of the draw."""
        return model(self.ids, self.sampled, temperature) - self.behaviour[self.sampled]

    def loss(self, log_ratio, clip):
        """The clipped objective of PPO, summed over the tokens, its sign turned."""
        ratio = log_ratio.exp()
        advantage = self.advantage.expand(self.sampled.shape)[self.sampled]
        return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).sum()


def advantages(rewards):
    """[prompts, samples]: above or below the mean of the prompt's samples; 0 where all are alike."""
    return rewards - rewards.mean(1, keepdims=True)


def optimizers(model, lr):
    """Muon for the layers' matrices; Adam for the few numbers that weigh whole layers, and for the scale of the logits, which
    makes the model surer of itself faster than anything else does.  Embeddings stay as they are: a step sees few of their rows,
    and its noise would outweigh what it learns."""
    matrices = [p for name, p in model.transformer["h"].named_parameters() if "gate" not in name]
    scalars = [model.resid_lambdas, model.x0_lambdas, model.smear_lambda, model.backout_lambda]
    groups = [{"params": scalars, "lr": lr / 3}, {"params": [model.log_scale], "lr": 6 * lr}]
    model.requires_grad_(False)
    for p in matrices + scalars:
        p.requires_grad_(True)
    return [torch.optim.Muon(matrices, lr=lr, momentum=0.9, weight_decay=0.0),
            torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)]


class Trainer:
    """The loop's state: the model, its optimizer, the worker's client, and the version of the weights in use there.

    log  receives the tokens of each step's samples, in order; for who wants to compare runs
    """

    def __init__(self, client, args):
        torch.manual_seed(args.seed)
        torch.set_num_threads(args.threads)
        torch.use_deterministic_algorithms(True)
        self.client, self.args = client, args
        self.model = load(args.model)
        self.optimizers = optimizers(self.model, args.lr)
        self.schedules = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, args.steps * args.inner) for o in self.optimizers]
        self.tasks = Tasks(args.tasks, args.seed)
        self.version = client.ping()["weights"][0]
        self.log = []

    def rollouts(self, tasks, n, seed):
        """The samples [prompts x n] and their rewards [prompts, n]."""
        rollout = self.client.rollout([messages for messages, _ in tasks], n=n, seed=seed, temperature=self.args.temperature,
                                      max_tokens=self.args.max_tokens, text=True, min_weights=self.version)
        samples = rollout.wait()
        rollout.ack()
        rewards = np.array([reward(s, tasks[s.prompt][1]) for s in samples]).reshape(len(tasks), n)
        return samples, rewards

    def evaluate(self):
        """pass@1 over tasks that training does not see, one sample each."""
        tasks = Tasks(self.args.tasks, EVAL_SEED).take(self.args.eval)
        return self.rollouts(tasks, 1, EVAL_SEED)[1].mean()

    def learn(self, samples, rewards):
        """The gradient steps; returns the log-ratios of the first, None where all samples are as good as each other."""
        gains = advantages(rewards).reshape(-1)
        kept, summed = merged(samples, gains)
        if not kept:
            return None
        batches = [Batch(kept[i:i + MICROBATCH], summed[i:i + MICROBATCH]) for i in range(0, len(kept), MICROBATCH)]
        n_tokens = sum(int(s.mask.sum()) for s, gain in zip(samples, gains) if gain)
        first = []
        for inner in range(self.args.inner):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            for batch in batches:
                log_ratio = batch.log_ratio(self.model, self.args.temperature)
                (batch.loss(log_ratio, self.args.clip) / n_tokens).backward()
                if inner == 0:
                    first.append(log_ratio.detach())
            for part in self.optimizers + self.schedules:
                part.step()
        return torch.cat(first)

    def publish(self):
        """Bring the weights to the worker, which uses them from its next step on."""
        self.version += 1
        state = self.model.checkpoint()
        if self.args.weights == "stream":
            self.client.update_weights(self.version, tensors=state)
            return
        with tempfile.TemporaryDirectory(prefix="coppice-grpo-", dir="/dev/shm") as folder:
            path = pathlib.Path(folder, f"model_{self.version:06d}.pt")
            torch.save(state, path)
            self.client.update_weights(self.version, path=str(path))  # read once: the file may go when it is in use

    def step(self, number):
        """One turn of the loop; returns what there is to tell of it."""
        times = [time.monotonic()]
        lap = lambda: times.append(time.monotonic())
        samples, rewards = self.rollouts(self.tasks.take(self.args.prompts), self.args.samples, self.args.seed * 1_000_000 + number)
        self.log.append([s.tokens.tobytes() for s in samples])
        lap()
        log_ratio = self.learn(samples, rewards)
        lap()
        self.publish()
        lap()
        seconds = dict(zip(("rollouts", "training", "weights"), np.diff(times)))
        return {"pass@1": rewards.mean(), "log_ratio": log_ratio, "seconds": seconds}


def told(number, result):
    """A step's line."""
    if result["log_ratio"] is None:
        ratio = "all alike, nothing to learn"
    else:
        r = result["log_ratio"].double()
        ratio = f"ratio mean {r.exp().mean():.6f}, |log ratio| mean {r.abs().mean():.1e} max {r.abs().max():.1e}"
    times = ", ".join(f"{what} {seconds:.2f} s" for what, seconds in result["seconds"].items())
    return f"step {number:3d}  pass@1 {result['pass@1']:.3f}  {ratio}  ({times})"


def arguments(argv=None):
    root = pathlib.Path(__file__).resolve().parents[3]
    here = lambda *parts: str(root.joinpath(*parts))
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--worker", metavar="PROGRAM", default=here("build/coppice"), help="the coppice program (%(default)s)")
    p.add_argument("--model", metavar="DIR", default=here("tests/models/calc-d4-early"),
                   help="the checkpoint to begin with, of nanochat's current architecture (%(default)s)")
    p.add_argument("--endpoint", help="use the worker that runs there, with the same model, instead of starting one")
    p.add_argument("--precision", choices=("bf16", "f32"), default="bf16", help="of the worker that is started (%(default)s)")
    p.add_argument("--tasks", metavar="FILE", default=here("tests/models/tasks.py"), help="the generator of questions (%(default)s)")
    p.add_argument("--weights", choices=("stream", "path"), default="stream",
                   help="how new weights reach the worker: over its socket, or as a file in /dev/shm (%(default)s)")
    number = lambda name, type, default, text: p.add_argument(name, type=type, default=default, metavar="N", help=f"{text} (%(default)s)")
    number("--steps", int, 80, "turns of the loop")
    number("--prompts", int, 256, "questions per step")
    number("--samples", int, 8, "answers to each")
    number("--inner", int, 1, "gradient steps with them")
    number("--eval", int, 512, "questions before and after, that training does not see; 0: none")
    number("--max-tokens", int, 96, "of an answer")
    number("--temperature", float, 1.0, "of the draw, at least 0.001")
    number("--clip", float, 0.2, "how far the ratio may go from 1 and still count")
    number("--lr", float, 0.016, "the learning rate of the matrices; it falls to a tenth")
    number("--threads", int, 2, "of PyTorch; part of what makes two runs alike")
    number("--seed", int, 1, "of the questions and the samples")
    return p.parse_args(argv)


def worker(args):
    """Gives the endpoint of the worker to use, which ends with the loop if it was started for it."""
    if args.endpoint:
        return contextlib.nullcontext(args.endpoint)
    return demo.running_worker(args.worker, args.model, "--precision", args.precision)


def main(argv=None):
    args = arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leaves the contexts below, which end the worker
    try:
        with worker(args) as endpoint, Client(endpoint) as client:
            trainer = Trainer(client, args)
            before = trainer.evaluate() if args.eval else None
            if args.eval:
                print(f"before    pass@1 {before:.3f}", flush=True)
            for number in range(args.steps):
                print(told(number, trainer.step(number)), flush=True)
            if args.eval:
                print(f"after     pass@1 {trainer.evaluate():.3f}")
    except (demo.DemoError, CoppiceError) as e:
        print(f"grpo: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
