"""What comes back: samples and scores."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, List, Mapping, NamedTuple, Optional, Tuple, Union

import numpy as np

from . import wire
from .errors import ProtocolError


class ToolCall(NamedTuple):
    """at: index in `tokens` of the token that closed the call; ok False: the tool gave no answer."""

    at: int
    tool: str
    ok: bool


class WeightsRun(NamedTuple):
    """The weights in use from token `start` on, up to the next run or the end."""

    start: int
    version: int
    digest: str


@dataclass(frozen=True, eq=False)
class Sample:
    """One completion.  T is its length in tokens, sampled and forced together.

    The arrays are read-only views of the message that brought them; `.copy()` what you want to change.
    Arrays that were not asked for are None.
    """

    prompt: int  #: index of the prompt in the request
    sample: int  #: index of the sample in the prompt
    seed: int  #: the seed that was used
    tokens: np.ndarray  #: [T] u32, the stop token included; a `prefix` is not repeated
    mask: np.ndarray  #: [T] u8, 1 sampled by the model, 0 forced (tool results)
    finish: str  #: "stop", "length" or "cancelled"
    prompt_id: Optional[str] = None  #: the prompt's id, as given
    prompt_tokens: Optional[np.ndarray] = None  #: [P] u32, of text and messages as the worker tokenized them
    logprobs: Optional[np.ndarray] = None  #: [T] f32, nats, of the distribution drawn from; 1.0 where the mask is 0
    model_logprobs: Optional[np.ndarray] = None  #: [T] f32, nats, of the whole vocabulary at temperature 1; 1.0 where forced
    entropy: Optional[np.ndarray] = None  #: [T] f32, nats, of the distribution drawn from; 1.0 where forced
    kept_ids: Optional[np.ndarray] = None  #: [K] u32, the ids that survived truncation, token after token, best first
    kept_offsets: Optional[np.ndarray] = None  #: [T + 1] u32: token t has kept_ids[kept_offsets[t]:kept_offsets[t + 1]]
    stop: Union[int, str, None] = None  #: the stop token or string that was hit
    tool_calls: List[ToolCall] = field(default_factory=list)
    weights: List[WeightsRun] = field(default_factory=list)  #: runs that cover the tokens without gap or overlap
    text: Optional[str] = None  #: the completion's text, where asked for

    @classmethod
    def from_wire(cls, m: Mapping[str, Any]) -> "Sample":
        """From a map of a `samples` message; keys that this version does not know are ignored."""
        try:
            return cls(
                prompt=m["prompt"], sample=m["sample"], seed=m["seed"], finish=m["finish"],
                tokens=wire.array(m["tokens"], "<u4"), mask=wire.array(m["mask"], "u1"),
                prompt_id=m.get("prompt_id"), prompt_tokens=wire.array(m.get("prompt_tokens"), "<u4"),
                logprobs=wire.array(m.get("logprobs"), "<f4"), model_logprobs=wire.array(m.get("model_logprobs"), "<f4"),
                entropy=wire.array(m.get("entropy"), "<f4"), kept_ids=wire.array(m.get("kept_ids"), "<u4"),
                kept_offsets=wire.array(m.get("kept_offsets"), "<u4"), stop=m.get("stop"), text=m.get("text"),
                tool_calls=[ToolCall(c["at"], c["tool"], c["ok"]) for c in m.get("tool_calls", ())],
                weights=[WeightsRun(*run[:3]) for run in m.get("weights", ())])
        except (KeyError, TypeError) as e:
            raise ProtocolError(f"cannot read a sample: {e!r}") from None

    def kept(self, t: int) -> np.ndarray:
        """[k] u32, the ids that survived truncation at token t, best first; empty at forced tokens."""
        if self.kept_ids is None or self.kept_offsets is None:
            raise ValueError("the rollout did not ask for `kept`")
        return self.kept_ids[self.kept_offsets[t]:self.kept_offsets[t + 1]]


@dataclass(frozen=True, eq=False)
class Score:
    """One scored sequence of T tokens.  The last four are None where `top` is 0."""

    logprobs: np.ndarray  #: [T] f32, nats, of token t given those before it; entry 0 is 1.0
    top_ids: Optional[np.ndarray] = None  #: [T, top] u32, best first; row 0 is 0xFFFFFFFF
    top_logprobs: Optional[np.ndarray] = None  #: [T, top] f32; row 0 is 1.0
    next_ids: Optional[np.ndarray] = None  #: [top] u32, after the last token
    next_logprobs: Optional[np.ndarray] = None  #: [top] f32

    @classmethod
    def from_wire(cls, m: Mapping[str, Any], top: int) -> "Score":
        try:
            logprobs = wire.array(m["logprobs"], "<f4")
            if not top:
                return cls(logprobs)
            return cls(logprobs, wire.array(m["top_ids"], "<u4").reshape(-1, top),
                       wire.array(m["top_logprobs"], "<f4").reshape(-1, top), wire.array(m["next_ids"], "<u4"),
                       wire.array(m["next_logprobs"], "<f4"))
        except (KeyError, TypeError, ValueError) as e:
            raise ProtocolError(f"cannot read a score: {e!r}") from None


class Scores(NamedTuple):
    """scores: one per sequence; weights: (version, digest) they were computed with; numerics: the profile's name."""

    scores: List[Score]
    weights: Tuple[int, str]
    numerics: str

    @classmethod
    def from_wire(cls, m: Mapping[str, Any], top: int) -> "Scores":
        try:
            version, digest = m["weights"][:2]
            return cls([Score.from_wire(s, top) for s in m["scores"]], (version, digest), m["numerics"])
        except (KeyError, TypeError, ValueError) as e:
            raise ProtocolError(f"cannot read scores: {e!r}") from None


class Text(NamedTuple):
    """text: valid UTF-8, U+FFFD for what was not; raw: what the tokens really hold."""

    text: str
    raw: bytes
