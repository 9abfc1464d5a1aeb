"""A rollout in progress, made of one part per worker."""
from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Mapping, Optional, Set, Tuple

from . import errors, wire
from .link import Link, Pending, body
from .sample import Sample

if TYPE_CHECKING:
    from .client import Client

_COUNTERS = ("samples", "prompt_tokens", "cached_tokens", "sampled_tokens", "forced_tokens")


class Part(Pending):
    """The prompts of a rollout that one worker generates, as a request of its own.

    id       of that request, on whichever worker
    link     the connection it was sent over last
    prompts  their indices in the rollout, in the order of the part's own
    costs    what each of their samples counts for in the link's `outstanding`
    held     samples that came back cancelled though nobody here had asked for it: whether they count is decided at the end
    """

    def __init__(self, rollout: "Rollout", id: str, message: Mapping[str, Any], prompts: List[int], costs: List[int]) -> None:
        super().__init__(wire.pack(message))
        self.rollout, self.id, self.prompts, self.costs = rollout, id, prompts, costs
        self.link: Optional[Link] = None
        self.accepted: Optional[Dict[str, Any]] = None
        self.held: List[Sample] = []
        self._n = message.get("n", 1)
        self._given = [m.get("tokens") for m in message["prompts"]]  # packed, None where the worker tokenizes
        self._missing = [self._n] * len(prompts)

    @property
    def outstanding(self) -> int:
        """An estimate of the tokens that are still to come."""
        return 0 if self.finished else sum(n * cost for n, cost in zip(self._missing, self.costs))

    def frame_again(self) -> bytes:
        """With the seed that the worker drew, if it did: a worker that was restarted would draw another."""
        self.again, self.held = True, []
        if self.accepted is None or "seed" not in self.accepted:
            return self.frame
        return wire.pack({"seed": self.accepted["seed"], **wire.unpack(self.frame)})

    def take(self, reply: Dict[str, Any]) -> None:
        kind = reply.get("type")
        if kind == "samples":
            for m in reply.get("samples", ()):
                self._take_sample(Sample.from_wire(m))
        elif kind == "accepted":
            self._take_accepted(body(reply))
        elif kind == "done":
            self._take_done(body(reply))

    def _take_accepted(self, accepted: Dict[str, Any]) -> None:
        """Each one must promise what the rollout's first did: the samples of two models are not mixed."""
        first = self.rollout._promised(self, accepted)
        if self.accepted is None:
            self.accepted = accepted
        if first is not None:
            self.link.dismiss(self.id)
            raise first

    def _take_sample(self, sample: Sample) -> None:
        if not isinstance(sample.prompt, int) or not 0 <= sample.prompt < len(self.prompts):
            raise errors.ProtocolError(f"cannot place a sample of prompt {sample.prompt!r}: the request has {len(self.prompts)}")
        if sample.finish == "cancelled" and self.rollout._may_go_elsewhere:
            self.held.append(sample)
        else:
            self.deliver(sample)

    def deliver(self, sample: Sample) -> None:
        """Give it to the rollout, once: a worker that was restarted, or another one, generates again what had arrived."""
        local = sample.prompt
        changes: Dict[str, Any] = {}
        if self.prompts[local] != local:
            changes["prompt"] = self.prompts[local]
        if sample.prompt_tokens is None:
            changes["prompt_tokens"] = wire.array(self._given[local], "<u4")
        if changes:
            sample = dataclasses.replace(sample, **changes)
        if self.rollout._take_sample(sample):
            self._missing[local] = max(0, self._missing[local] - 1)

    def _take_done(self, done: Dict[str, Any]) -> None:
        if self.held and self.rollout._client._judge(self, done):
            return  # it goes on elsewhere, or waits to hear whether it has to
        self.end(done)

    def end(self, done: Dict[str, Any]) -> None:
        held, self.held = self.held, []
        for sample in held:
            self.deliver(sample)
        self.reply = done
        self.rollout._part_ended(self)

    def fail(self, error: errors.CoppiceError) -> None:
        if self.rollout._client._take_over(self, error):
            return
        self.error = error
        self.rollout._part_ended(self)

    def in_rollout(self, error: errors.CoppiceError) -> errors.CoppiceError:
        """The error with the index of the prompt in its key as the caller counts."""
        found = re.match(r"prompts\[(\d+)\](.*)", error.key or "")
        if found and int(found[1]) < len(self.prompts):
            key = f"prompts[{self.prompts[int(found[1])]}]{found[2]}"
            if key != error.key:
                return type(error)(error.message, key, error.retry_after, error.code)
        return error


class Rollout:
    """A rollout in progress.  Iterating yields samples as they arrive, from the first one on, and raises the error that
    ended the rollout, if one did.

    id        the request's id; with several workers those of its parts are made from it
    samples   list of Sample that have arrived, in order of arrival
    accepted  dict {samples, seed, weights, numerics} once the worker has taken the request, else None; with several
              workers once all have, `weights` and `numerics` as the first said
    done      dict {samples, prompt_tokens, cached_tokens, sampled_tokens, forced_tokens, seconds} at the end, else None;
              with several workers the sums, and the longest time
    """

    def __init__(self, client: "Client", id: str, bounded: bool) -> None:
        self._client = client
        self.id = id
        self.samples: List[Sample] = []
        self.error: Optional[errors.CoppiceError] = None
        self._parts: List[Part] = []
        self._bounded = bounded  # by `timeout` or `enough`: some samples may well come back cancelled
        self._cancelled = False
        self._seen: Set[Tuple[int, int]] = set()
        self._first: Optional[Tuple[str, Any, Any]] = None  # of the first `accepted`: who, digest, numerics
        self._digests: Set[Any] = set()  # of weights that its samples may have

    @property
    def accepted(self) -> Optional[Dict[str, Any]]:
        told = [part.accepted for part in self._parts]
        if not told or None in told:
            return None
        return told[0] if len(told) == 1 else {**told[0], "samples": sum(a.get("samples", 0) for a in told)}

    @property
    def done(self) -> Optional[Dict[str, Any]]:
        told = [part.reply for part in self._parts]
        if not told or None in told:
            return None
        if len(told) == 1:
            return told[0]
        total = {key: sum(d.get(key, 0) for d in told) for key in _COUNTERS}
        return {**total, "seconds": max(d.get("seconds", 0.0) for d in told)}

    @property
    def finished(self) -> bool:
        return self.error is not None or all(part.finished for part in self._parts)

    @property
    def _may_go_elsewhere(self) -> bool:
        """Whether a cancelled sample must be the doing of a worker that ends, or of other requests."""
        return self._client._several and not (self._cancelled or self._bounded)

    def _promised(self, part: Part, accepted: Mapping[str, Any]) -> Optional[errors.CoppiceError]:
        """None if what `accepted` says of the bits to come goes with what the rollout has, else why not."""
        digest, numerics = (accepted.get("weights") or (0, None))[1], accepted.get("numerics")
        if self._first is None:
            self._first = part.link.endpoint, digest, numerics
            self._digests.add(digest)
            return None
        who, first_digest, first_numerics = self._first
        differ = []
        if digest not in self._digests and not self._client._updating:
            differ.append(("weights", first_digest, digest))
        if numerics != first_numerics:
            differ.append(("numerics", first_numerics, numerics))
        if not differ:
            self._digests.add(digest)
            return None
        if part.link.endpoint == who:
            told = "; ".join(f"{what} {was} before, {now} now" for what, was, now in differ)
            return errors.WorkerChanged(f"cannot go on with the rollout after a reconnect, the worker is another one: {told}; "
                                        "start it anew")
        told = "; ".join(f"{what} {was} at {who}, {now} at {part.link.endpoint}" for what, was, now in differ)
        return errors.WorkersDiffer(f"cannot spread a rollout over workers that differ: {told}")

    def _take_sample(self, sample: Sample) -> bool:
        """False: it had arrived before."""
        at = sample.prompt, sample.sample
        if at in self._seen:
            return False
        self._seen.add(at)
        self.samples.append(sample)
        self._digests.update(run.digest for run in sample.weights)
        return True

    def _part_ended(self, part: Part) -> None:
        """With the first error the rollout has ended, and its other parts are of no use."""
        if part.error is not None and self.error is None:
            self.error = part.in_rollout(part.error)
            differs = isinstance(part.error, (errors.WorkerChanged, errors.WorkersDiffer))
            for other in self._parts:
                if self._client._closed:
                    break
                if not other.finished:
                    other.link.dismiss(other.id)
                elif differs and other is not part:
                    other.link.tell("ack", other.id)  # of weights that a repetition may not find any more
        if self.finished:
            self._client._ended(self)

    def __iter__(self) -> Iterator[Sample]:
        n = 0
        while True:
            while n < len(self.samples):
                n += 1
                yield self.samples[n - 1]
            if self.finished:
                break
            self._client._pump()
        if self.error:
            raise self.error

    def wait(self, timeout: Optional[float] = None) -> List[Sample]:
        """All samples, sorted by prompt and sample index.

        timeout  seconds to wait at most (then Timeout is raised and the rollout goes on); None: as long as the worker lives
        """
        self._client._wait(self, timeout)
        return sorted(self.samples, key=lambda s: (s.prompt, s.sample))

    def cancel(self) -> None:
        """Ask for the end: unfinished samples come back as "cancelled" with what they have."""
        self._client.cancel(self.id)

    def ack(self) -> None:
        """The results are stored: the worker need not keep them for another connection any more.  A worker that has none
        (any more) is fine.  Before the rollout's end the worker refuses (BadRequest)."""
        self._client._ack(self)
