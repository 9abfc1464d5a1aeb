"""The example's forward pass computes what the worker computes."""
import numpy as np
import pytest
import torch

from conftest import FULL, ROOT
from coppice import Client
from nanochat_f import load


def logprobs(gpt, ids):
    """[T - 1]: of all tokens of a sequence but the first."""
    wanted = torch.ones(1, len(ids), dtype=torch.bool)
    wanted[0, 0] = False
    with torch.no_grad():
        return gpt(ids[None], wanted).numpy()


# fp32 sums in another order give 4e-5 at most; bf16 weights and activations 0.2 for the unlikely ids of a random sequence.
@pytest.mark.parametrize("precision, most, mean", [("f32", 2e-4, 2e-5), ("bf16", 0.5, 0.05)])
@pytest.mark.parametrize("model", [FULL, str(ROOT / "tests/models/gen-F")])
def test_logprobs_are_those_of_score(worker_on, model, precision, most, mean):
    gpt = load(model)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, gpt.vocab, (n,), generator=generator) for n in (2, 50, 200, 300)]  # windows of 128 bite
    with worker_on(model, "--precision", precision) as endpoint, Client(endpoint) as client:
        scores = client.score([s.numpy() for s in sequences]).scores
    for sequence, score in zip(sequences, scores):
        differ = np.abs(logprobs(gpt, sequence) - score.logprobs[1:])
        assert differ.max() < most and differ.mean() < mean


def test_what_follows_a_sequence_in_its_row_changes_nothing():
    gpt = load(FULL)
    ids = torch.randint(0, gpt.vocab, (40,), generator=torch.Generator().manual_seed(2))
    alone, padded = logprobs(gpt, ids), logprobs(gpt, torch.cat((ids, torch.zeros(30, dtype=torch.long))))
    assert np.allclose(alone, padded[:39], atol=1e-4)
