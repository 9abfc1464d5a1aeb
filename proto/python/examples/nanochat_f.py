"""nanochat's current architecture in PyTorch, as a trainer needs it: a differentiable forward pass over whole sequences.

Parameters have the names that checkpoints have, so that state_dict() is what a worker takes. All is fp32: the bf16 embeddings
of a checkpoint are widened, which is exact.
"""
import json
import pathlib

import torch
import torch.nn.functional as F
from torch import nn

ROPE_BASE, QK_SCALE, GATE_FACTOR, SOFTCAP, EPS = 100_000.0, 1.2, 3.0, 15.0, 1.1920929e-07
GATE_CHANNELS, SMEAR_CHANNELS = 12, 24


def rms(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def rotate(x, cos, sin):
    """x [B, heads, T, head_dim]: each pair of its first and second half is turned by minus the position's angle."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)


def linear(n_in, n_out):
    return nn.Linear(n_in, n_out, bias=False)


class Attention(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads, has_value_embed):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.c_q, self.c_proj = linear(dim, dim), linear(dim, dim)
        self.c_k, self.c_v = (linear(dim, n_kv_heads * self.head_dim) for _ in range(2))
        if has_value_embed:
            self.ve_gate = linear(GATE_CHANNELS, n_kv_heads)

    def forward(self, h, value_embed, cos, sin, mask):
        heads = lambda x, n: x.unflatten(-1, (n, self.head_dim)).transpose(1, 2)
        q, k, v = heads(self.c_q(h), self.n_heads), heads(self.c_k(h), self.n_kv_heads), heads(self.c_v(h), self.n_kv_heads)
        if value_embed is not None:
            gate = GATE_FACTOR * torch.sigmoid(self.ve_gate(h[..., :GATE_CHANNELS]))  # [B, T, kv heads]
            v = v + gate.transpose(1, 2).unsqueeze(-1) * heads(value_embed, self.n_kv_heads)
        q, k = (rms(rotate(x, cos, sin)) * QK_SCALE for x in (q, k))
        group = self.n_heads // self.n_kv_heads
        y = F.scaled_dot_product_attention(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), attn_mask=mask)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.c_fc, self.c_proj = linear(dim, 4 * dim), linear(4 * dim, dim)

    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads, has_value_embed):
        super().__init__()
        self.attn, self.mlp = Attention(dim, n_heads, n_kv_heads, has_value_embed), Mlp(dim)


class Gpt(nn.Module):
    """config: `model_config` of a checkpoint's meta file."""

    def __init__(self, config):
        super().__init__()
        self.n_layers, dim, heads = config["n_layer"], config["n_embd"], config["n_head"]
        self.head_dim, kv_heads = dim // heads, config["n_kv_head"]
        self.vocab, rows = config["vocab_size"], -(-config["vocab_size"] // 64) * 64
        long = config["sequence_len"]
        short = -(-long // 4 // 128) * 128
        pattern = config.get("window_pattern", "L").upper()
        self.windows = [long if i == self.n_layers - 1 or pattern[i % len(pattern)] == "L" else short for i in range(self.n_layers)]
        with_values = [i for i in range(self.n_layers) if i % 2 == (self.n_layers - 1) % 2]
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(rows, dim),
            "h": nn.ModuleList(Block(dim, heads, kv_heads, i in with_values) for i in range(self.n_layers))})
        self.lm_head = linear(dim, rows)
        self.value_embeds = nn.ModuleDict({str(i): nn.Embedding(rows, kv_heads * self.head_dim) for i in with_values})
        self.resid_lambdas, self.x0_lambdas = (nn.Parameter(torch.empty(self.n_layers)) for _ in range(2))
        self.smear_lambda, self.backout_lambda = (nn.Parameter(torch.empty(1)) for _ in range(2))
        self.smear_gate = linear(SMEAR_CHANNELS, 1)
        self.log_scale = torch.zeros((), requires_grad=True)  # of all logits; no part of the state dict, see checkpoint()

    def hidden(self, ids):
        """[B, T, dim], what the logits are made from, of ids [B, T]; what follows a sequence's end in its row changes nothing
        before it."""
        at = torch.arange(ids.shape[1])
        angle = at[:, None] / ROPE_BASE ** (torch.arange(0, self.head_dim, 2) / self.head_dim)
        cos, sin = angle.cos(), angle.sin()
        back = at[:, None] - at[None, :]
        masks = {w: (back >= 0) & (back <= w) for w in set(self.windows)}
        e = rms(self.transformer["wte"](ids))
        smear = self.smear_lambda * torch.sigmoid(self.smear_gate(e[:, 1:, :SMEAR_CHANNELS]))
        x = first = torch.cat((e[:, :1], e[:, 1:] + smear * e[:, :-1]), 1)
        for i, block in enumerate(self.transformer["h"]):
            x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * first
            values = self.value_embeds[str(i)](ids) if str(i) in self.value_embeds else None
            x = x + block.attn(rms(x), values, cos, sin, masks[self.windows[i]])
            x = x + block.mlp(rms(x))
            if i == self.n_layers // 2:
                middle = x
        return rms(x - self.backout_lambda * middle)

    def forward(self, ids, wanted, temperature=1.0):
        """[n]: the log-probability of each of the n tokens that are `wanted`, given those before it in its row.

        ids     [B, T]
        wanted  [B, T] bool, false for the first of each row.  Only for these are logits computed: with a large vocabulary
                they are most of the work
        """
        z = self.log_scale.exp() * self.lm_head(self.hidden(ids[:, :-1])[wanted[:, 1:]])[:, :self.vocab]
        logits = SOFTCAP * torch.tanh(z / SOFTCAP)
        return -F.cross_entropy(logits / temperature, ids[wanted], reduction="none")

    def checkpoint(self):
        """What a checkpoint of this model holds, name -> tensor: the scale of the logits is a factor of lm_head's there."""
        scale = self.log_scale.detach().exp()
        return {name: scale * tensor if name == "lm_head.weight" else tensor for name, tensor in self.state_dict().items()}


def load(folder):
    """The model of a checkpoint's folder: its newest step."""
    path = max(pathlib.Path(folder).glob("model_*.pt"))
    meta = json.loads(path.with_name(path.stem.replace("model", "meta") + ".json").read_text())
    model = Gpt(meta["model_config"])
    model.load_state_dict({name: tensor.float() for name, tensor in torch.load(path, weights_only=True).items()})
    return model
