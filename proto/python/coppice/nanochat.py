"""For nanochat's scripts: what its Engine does, done by a worker.

    engine = RemoteEngine("tcp://127.0.0.1:5555")                    # instead of Engine(model, tokenizer)
    results, masks = engine.generate_batch(tokens, num_samples=16, max_tokens=256, temperature=1.0, top_k=50, seed=1)
    optimizer.step()
    engine.update(model)                                             # the worker goes on with the new weights
"""
from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from .client import Client

NO_LIMIT = 0xFFFFFFFF  # the context ends a sample first
_NOT_SAVED = ("cos", "sin")  # rotary tables: computed, in no checkpoint


def checkpoint_tensors(model: Any) -> Dict[str, Any]:
    """What a checkpoint of the module holds, name -> tensor, whatever it is wrapped in (torch.compile, DistributedDataParallel)."""
    while True:
        inner = getattr(model, "_orig_mod", None) or (getattr(model, "module", None) if hasattr(model, "device_ids") else None)
        if inner is None:
            break
        model = inner
    state = model if isinstance(model, dict) else model.state_dict()
    return {name: tensor for name, tensor in state.items() if name.removeprefix("_orig_mod.") not in _NOT_SAVED}


class RemoteEngine:
    """Generation by a worker, or by several, with `generate_batch` as nanochat's Engine has it.

    endpoint  as Client takes it: one, or a list; or a Client
    options   of the Client

    The samples of one seed are always the same, but others than torch's generator gives for it.  At temperature 0 the results
    are those of nanochat's Engine, but for near ties in the logits: the worker's own fp32 arithmetic, or bf16, decides them.
    """

    def __init__(self, endpoint: Union[str, Sequence[str], Client], **options: Any) -> None:
        self._owned = not isinstance(endpoint, Client)
        self.client = Client(endpoint, **options) if self._owned else endpoint

    def close(self) -> None:
        if self._owned:
            self.client.close()

    def __enter__(self) -> "RemoteEngine":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def generate_batch(self, tokens: List[int], num_samples: int = 1, max_tokens: Optional[int] = None,
                       temperature: float = 1.0, top_k: Optional[int] = None,
                       seed: int = 42) -> Tuple[List[List[int]], List[List[int]]]:
        """Completions of one prompt.  Returns two lists with an entry per sample: the ids of prompt and completion without the
        terminal token, and a mask of the same length that is 1 where the model sampled, 0 in the prompt and where a tool
        forced a token.

        tokens      the prompt's ids, its <|bos|> among them
        max_tokens  of each completion; None: as many as fit the context
        top_k       None or 0: off
        seed        any int; torch's seeds may be negative
        """
        if max_tokens is not None and max_tokens <= 0:
            return [list(tokens) for _ in range(num_samples)], [[0] * len(tokens) for _ in range(num_samples)]
        rollout = self.client.rollout([list(tokens)], n=num_samples, max_tokens=min(max_tokens or NO_LIMIT, NO_LIMIT),
                                      temperature=temperature, top_k=top_k or 0, seed=seed % (1 << 64), logprobs=[])
        results, masks = [], []
        for sample in rollout.wait():
            end = len(sample.tokens) - (sample.finish == "stop")
            results.append(list(tokens) + sample.tokens[:end].tolist())
            masks.append([0] * len(tokens) + sample.mask[:end].tolist())
        rollout.ack()
        return results, masks

    def update(self, model: Any, policy: str = "finish", version: Optional[int] = None) -> int:
        """Bring the module's weights to the worker and wait until they are in use; returns their version.

        model    a torch module, compiled or wrapped or not, or a state dict; its tensors may be on any device
        policy   of samples that run, as in Client.update_weights
        version  None: the one after that in use
        """
        if version is None:
            version = 1 + max(pong["weights"][0] for pong in self._pongs())
        return self.client.update_weights(version, tensors=checkpoint_tensors(model), policy=policy)[0]

    def _pongs(self) -> List[Dict[str, Any]]:
        pong = self.client.ping()
        return [p for p in pong if p] if isinstance(pong, list) else [pong]
