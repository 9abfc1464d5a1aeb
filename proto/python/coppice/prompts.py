"""What a caller may give as prompts, as the protocol has it."""
from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping, Sequence, Union

import numpy as np

from . import wire

Message = Mapping[str, Any]
Prompt = Union[str, wire.Tokens, Sequence[Message], Mapping[str, Any]]
Prompts = Union[str, Mapping[str, Any], Iterable[Prompt]]


def prompt_map(prompt: Prompt) -> Dict[str, Any]:
    """A prompt as the protocol has it.

    prompt  a str (`text`), token ids as a list or a one-dimensional numpy array (`tokens`), a list of message dicts
            (`messages`), or a dict with the protocol's keys, whose `tokens` and `prefix` may be lists or arrays too
    """
    if isinstance(prompt, Mapping):
        return {k: wire.pack_tokens(v) if k in ("tokens", "prefix") and not isinstance(v, bytes) else v
                for k, v in prompt.items()}
    if isinstance(prompt, str):
        return {"text": prompt}
    if isinstance(prompt, np.ndarray):
        return {"tokens": wire.pack_tokens(prompt)}
    if isinstance(prompt, Iterable):
        items = list(prompt)
        if items and all(isinstance(m, Mapping) for m in items):
            return {"messages": items}
        return {"tokens": wire.pack_tokens(items)}
    raise TypeError(f"cannot use a {type(prompt).__name__} as a prompt: expected str, token ids, messages or a dict")


def prompt_maps(prompts: Prompts) -> List[Dict[str, Any]]:
    """All prompts of a request; a single str or dict counts as one prompt."""
    if isinstance(prompts, (str, Mapping)):
        prompts = [prompts]
    if not isinstance(prompts, Iterable):
        raise TypeError(f"cannot use a value of type {type(prompts).__name__} as prompts: expected a list of prompts")
    prompts = list(prompts)
    if prompts and isinstance(prompts[0], (int, np.integer)):
        raise TypeError("cannot use a list of ints as prompts: for one prompt of token ids, write [[1, 2, 3]]")
    if any(isinstance(p, Mapping) and "role" in p for p in prompts):
        raise TypeError('cannot use messages as prompts: for one prompt of messages, write [[{"role": "user", "content": "hi"}]]')
    return [prompt_map(p) for p in prompts]


def estimated_tokens(prompt: Mapping[str, Any]) -> int:
    """About how many tokens a prompt has: exact for `tokens`, else by the rule of four characters a token."""
    if isinstance(prompt.get("tokens"), bytes):
        return len(prompt["tokens"]) // 4
    return 1 + len(str(prompt.get("text") or prompt.get("messages") or "")) // 4
