"""nanochat's interface to a worker."""
import pytest
import torch

from conftest import EARLY, FULL
from coppice import nanochat
from nanochat_f import load

QUESTION = [{"role": "user", "content": "What is 1,234 * 56?"}]


@pytest.fixture
def engine(worker_on):
    with worker_on(EARLY, "--precision", "f32") as endpoint, nanochat.RemoteEngine(endpoint) as engine:
        yield engine


def text(engine, ids):
    return engine.client.detokenize(ids).text


def test_a_batch_is_two_lists_without_the_terminal_token(engine):
    engine.update(load(FULL))
    tokens = engine.client.tokenize(QUESTION).tolist()
    results, masks = engine.generate_batch(tokens, num_samples=3, temperature=0.0)
    assert len(results) == len(masks) == 3 and results[0] == results[1] == results[2]
    ids, mask = results[0], masks[0]
    assert all(isinstance(v, int) for v in ids + mask) and len(ids) == len(mask)
    assert ids[:len(tokens)] == tokens and not any(mask[:len(tokens)])
    assert text(engine, ids[len(tokens):]) == "<|python_start|>1,234*56<|python_end|><|output_start|>69104<|output_end|>The answer is 69104."
    forced = [i for i, m in zip(ids[len(tokens):], mask[len(tokens):]) if not m]
    assert text(engine, forced) == "<|output_start|>69104<|output_end|>"


def test_limits_and_seeds(engine):
    tokens = engine.client.tokenize(QUESTION).tolist()
    assert engine.generate_batch(tokens, 2, max_tokens=0) == ([tokens] * 2, [[0] * len(tokens)] * 2)
    cut, mask = engine.generate_batch(tokens, 1, max_tokens=3)
    assert len(cut[0]) == len(tokens) + 3 == len(mask[0])  # cut short: no terminal token to leave out
    once, again, other = (engine.generate_batch(tokens, 8, max_tokens=40, temperature=2.0, top_k=50, seed=s)[0] for s in (-1, -1, 2))
    assert once == again != other


def test_an_update_brings_what_a_checkpoint_holds(engine):
    """Whatever the module is wrapped in, and whichever buffers it has."""
    class Wrapped(torch.nn.Module):  # as DistributedDataParallel
        def __init__(self, module):
            super().__init__()
            self.module, self.device_ids = module, None

    class Compiled(torch.nn.Module):  # as torch.compile
        def __init__(self, module):
            super().__init__()
            self._orig_mod = module

    model = load(FULL)
    model.register_buffer("cos", torch.zeros(1, 3))
    model.register_buffer("sin", torch.zeros(1, 3), persistent=False)
    versions = [engine.update(model)]
    digest = engine.client.ping()["weights"][1]
    for same in (Wrapped(model), Compiled(model), Wrapped(Compiled(model)), model.state_dict(), Compiled(model).state_dict()):
        versions.append(engine.update(same, policy="recompute"))
        assert engine.client.ping()["weights"] == [versions[-1], digest]
    assert versions == [1, 2, 3, 4, 5, 6]


def test_bf16_tensors_are_sent_as_they_are(engine):
    """The digest is that of the file, which has them."""
    path = f"{FULL}/model_005426.pt"
    state = torch.load(path, weights_only=True)
    assert {t.dtype for t in state.values()} == {torch.float32, torch.bfloat16}
    engine.client.update_weights(1, path=path)
    digest = engine.client.ping()["weights"][1]
    engine.client.update_weights(2, path=EARLY)
    assert engine.client.ping()["weights"][1] != digest
    assert engine.client.update_weights(3, tensors=state) == (3, digest)
