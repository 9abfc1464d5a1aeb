"""The client: any number of requests in flight, to one worker or spread over several."""
from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
import uuid
import weakref
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple, Union

import numpy as np
import zmq

from . import errors, wire
from .link import Curve, Key, Link, Patience, Pending, Whole
from .prompts import Message, Prompt, Prompts, estimated_tokens, prompt_map, prompt_maps
from .rollout import Part, Rollout
from .sample import Sample, Scores, Text
from .weights import CHUNK_BYTES, Update, Version, tensors_of

__all__ = ["Client", "Message", "Prompt", "Rollout", "prompt_map", "prompt_maps"]

LOST_SECONDS = 2.0  # that a lost connection may take to come back before another worker takes over
SETTLE_SECONDS = 1.0  # that a new client waits for those of its workers that do not answer at once
_CONTEXTS: Set[zmq.Context] = set()  # of clients that are open: one that were garbage before its sockets would wait for them
STREAM_FRAMES = 4  # of a stream of weights that wait in a socket


def _name_of(prompts: List[int]) -> str:
    """The same for the same prompts only: who asks again, of other workers, is not to get another part's samples."""
    return hashlib.sha256(repr(prompts).encode()).hexdigest()[:12]


def _given(**keys: Any) -> Dict[str, Any]:
    """The keys whose value is not None."""
    return {k: v for k, v in keys.items() if v is not None}


class _Judgement(Whole):
    """A ping that tells whether a worker that cancelled samples unasked is on its way out."""

    def __init__(self, client: "Client", part: Part, done: Dict[str, Any], frame: bytes) -> None:
        super().__init__(frame)
        self._client, self._part, self._done = client, part, done

    def take(self, reply: Dict[str, Any]) -> None:
        super().take(reply)
        link = self._part.link
        if reply.get("state") == "draining":
            link.gone = True
            self._client._move(self._part)
        else:
            link.pending.pop(self._part.id, None)
            self._part.end(self._done)


class _Asked(Pending):
    """A request with one reply."""

    def __init__(self, link: Link, message: Mapping[str, Any]) -> None:
        self._link, self._id = link, str(uuid.uuid4())
        super().__init__(wire.pack({"type": message["type"], "id": self._id, **message}))
        link.start(self._id, self)

    def forget(self) -> None:
        """Nobody waits any more."""
        self._link.pending.pop(self._id, None)


class Client:
    """A connection to a worker, or to several.  Requests run side by side, told apart by their ids; one thread at a time may
    use it.

    endpoint    such as "tcp://127.0.0.1:5555" or "ipc:///run/coppice.sock"; or a list of such
    timeout     seconds that the worker may take to answer a ping before the connection is made anew
    silence     seconds without any reply after which a wait sends that ping; long rollouts are silent, dead workers too.
                A wait for a worker that was never there raises ConnectionLost after as long, at most 5 s
    patience    seconds without any reply after which a wait raises Timeout; None: silence + 3 x timeout.  Rollouts stay open:
                a later wait takes them up again.  With several workers: how long all of them may be gone
    server_key  CURVE: the server's public key (40 characters, Z85).  Today's worker has no CURVE: this is for a proxy that has
    public_key, secret_key  CURVE: this client's pair; made up if only server_key is given
    context     a zmq.Context to share; the client makes its own otherwise

    A lost connection is found again by itself, and open requests are sent again under the same ids: the worker goes on with
    them as if nothing had happened.  A worker that was restarted begins them anew, with the same seed; samples that had
    arrived come only once.  If it has other numerics, or weights that no sample was made with, the rollout ends in
    WorkerChanged.

    With several workers a rollout's prompts are spread by the tokens that each has still to generate; all samples of a prompt
    come from one worker.  When a worker is gone (its connection lost for 2 s, or silent and without an answer to a ping, or
    ending), another takes over what it had open, with the same seed; one that comes back is used again.  Which worker
    generates a sample makes no difference to its bits, so all must have the same weights and numerics; where they have not,
    rollouts end in WorkersDiffer.
    """

    def __init__(self, endpoint: Union[str, Sequence[str]], timeout: float = 10.0, silence: float = 10.0, *,
                 patience: Optional[float] = None, server_key: Key = None, public_key: Key = None, secret_key: Key = None,
                 context: Optional[zmq.Context] = None) -> None:
        endpoints = [endpoint] if isinstance(endpoint, str) else list(endpoint)
        if not endpoints or len(set(endpoints)) < len(endpoints):
            raise ValueError(f"cannot connect to {endpoints}: expected one endpoint or more, each once")
        for e in endpoints:
            if not re.fullmatch(r"tcp://.+:\d+|(ipc|inproc)://.+", e):
                raise ValueError(f'cannot connect to "{e}": expected tcp://HOST:PORT or ipc://PATH')
        self.endpoint = endpoint
        self.endpoints = endpoints
        self.timeout = timeout
        self.silence = silence
        self.patience = silence + 3 * timeout if patience is None else patience
        self._curve = Curve(server_key, public_key, secret_key) if server_key is not None else None
        self._own_context = context is None
        self._context = context or zmq.Context()
        if self._own_context:
            _CONTEXTS.add(self._context)
        self._process = os.getpid()
        self._poller = zmq.Poller()
        self._several = len(endpoints) > 1
        alone = Patience(silence, timeout, self.patience)
        spread = Patience(silence, timeout, 0.0, LOST_SECONDS)
        self._links: List[Link] = []
        self._update_links: List[Link] = []
        self._homeless: List[Part] = []  # parts whose worker is gone and for which there is no other now
        self._closed = False
        self._links = [Link(e, self._context, self._poller, spread if self._several else alone, self._curve)
                       for e in endpoints]
        self._updating = False
        self._open: Dict[str, Rollout] = {}
        self._known: "weakref.WeakValueDictionary[str, Rollout]" = weakref.WeakValueDictionary()
        self._homeless_since = 0.0
        self._settled_by = time.monotonic() + SETTLE_SECONDS

    def close(self) -> None:
        """Close the connection.  Requests that are still open end in ConnectionLost here; the worker goes on with them."""
        if self._closed:
            return
        self._closed = True
        why = "the client was closed before the request ended"
        for link in self._links + self._update_links:
            link.close(why)
        homeless, self._homeless = self._homeless, []
        for part in homeless:
            part.fail(errors.ConnectionLost(why))
        if self._own_context:
            self._context.term()
            _CONTEXTS.discard(self._context)

    def __del__(self) -> None:
        """A client that nobody closed; in a forked process its sockets are the parent's."""
        if not getattr(self, "_closed", True) and self._process == os.getpid():
            self.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    # ---- Rollouts.

    def rollout(self, prompts: Prompts, *, n: Optional[int] = None,
                seed: Optional[int] = None, max_tokens: Optional[int] = None, min_tokens: Optional[int] = None,
                temperature: Optional[float] = None, top_k: Optional[int] = None, top_p: Optional[float] = None,
                min_p: Optional[float] = None, stop_tokens: Optional[wire.Tokens] = None,
                stop: Optional[Sequence[str]] = None, tools: Optional[Sequence[str]] = None,
                logprobs: Optional[Sequence[str]] = None, entropy: Optional[bool] = None, kept: Optional[bool] = None,
                text: Optional[bool] = None, deliver: Optional[str] = None, compress: Optional[bool] = None,
                timeout: Optional[float] = None, min_weights: Optional[int] = None,
                weights_timeout: Optional[float] = None, model: Optional[str] = None,
                id: Optional[str] = None) -> Rollout:
        """Start a rollout and return at once.  The last word on each line is the default.

        prompts      each a str, token ids, a list of message dicts, or a dict as in the protocol (see prompt_map)
        n            samples per prompt; 1
        seed         u64; with the same seed, weights and prompts the same samples come back, bit for bit; drawn anew
        max_tokens   tokens per sample, sampled and forced together; 256
        min_tokens   a sample with fewer does not end by a stop token or string, unless a tool forced that token; 0
        temperature  0 (argmax), or 0.001 to 100; 1.0
        top_k, top_p, min_p  truncation; 0, 1.0, 0.0, which is off
        stop_tokens  ids that end a sample, instead of the model's
        stop         at most 16 strings of 1 to 256 bytes; a sample ends with the token that completes one of them
        tools        names of tools that the model may call; all that it can, [] for none
        logprobs     which to return: "sampling" (of the distribution drawn from), "model" (whole vocabulary, temperature 1);
                     ["sampling"]
        entropy      also return the entropy of the distribution that each token was drawn from; False
        kept         also return the ids that survived truncation; needs a top_k of 1 to 1024; False
        text         also return the completions' text; False
        deliver      "sample" as each ends, "prompt" when all of one's have, or "request"; "sample"
        compress     whether replies may be compressed; True
        timeout      seconds after which the worker cancels what is unfinished; None
        min_weights  begin only once weights of this version, or a later one, are in use; 0 ...
        weights_timeout  ... for which to wait at most so many seconds (then RequestTimeout); 600
        model        which one of the worker's models; today's worker has one, and refuses this
        id           1 to 128 bytes, global to the worker; a UUID by default.  One that the worker knows attaches to that
                     rollout, which must have asked for the same (else DuplicateId).  With several workers 13 bytes are added
                     that name a part

        What the worker refuses is raised where the samples are waited for.
        """
        if self._closed:
            raise errors.ConnectionLost("cannot send a request: the client is closed")
        id = str(uuid.uuid4()) if id is None else id
        if id in self._open:
            raise errors.DuplicateId(f'cannot send a request: "{id}" is in use by another one of this client', "id")
        maps = prompt_maps(prompts)
        keys = _given(n=n, seed=seed, max_tokens=max_tokens, min_tokens=min_tokens, temperature=temperature,
                      top_k=top_k, top_p=top_p, min_p=min_p, stop=stop, tools=tools, logprobs=logprobs,
                      entropy=entropy, kept=kept, text=text, deliver=deliver, compress=compress, timeout=timeout,
                      min_weights=min_weights, weights_timeout=weights_timeout, model=model)
        if stop_tokens is not None:
            keys["stop_tokens"] = wire.pack_tokens(stop_tokens)
        if self._several:  # every worker must draw alike
            keys.setdefault("seed", secrets.randbelow(1 << 53))
        self._pump_until(lambda: not any(link.is_ending(id) for link in self._links), time.monotonic() + self.timeout)
        rollout = Rollout(self, id, bounded=timeout is not None or any("enough" in m for m in maps))
        self._spread(rollout, maps, keys)
        self._open[id] = self._known[id] = rollout
        return rollout

    def _spread(self, rollout: Rollout, maps: List[Dict[str, Any]], keys: Dict[str, Any]) -> None:
        """Make the parts and send them: each prompt goes to the worker that has least to do, those before it included."""
        n, max_tokens = (k if isinstance(k, (int, np.integer)) and k > 0 else 1  # of another one the worker tells what is wrong
                         for k in (keys.get("n", 1), keys.get("max_tokens", 256)))
        costs = [max_tokens + estimated_tokens(m) // n for m in maps]
        shares: List[Tuple[Optional[Link], List[int]]] = [(self._links[0], list(range(len(maps))))]
        if self._several:
            self._settle()
            links = self._usable() or [None]
            load = [self._outstanding(link) if link else 0 for link in links]
            shares = [(link, []) for link in links]
            for prompt, cost in enumerate(costs):
                least = load.index(min(load))
                load[least] += cost * n
                shares[least][1].append(prompt)
            shares = [share for share in shares if share[1]] or shares[:1]  # no prompts: a worker says what is wrong with that
        for link, mine in shares:
            id = f"{rollout.id}/{_name_of(mine)}" if self._several else rollout.id
            message = {"type": "rollout", "id": id, "prompts": [maps[i] for i in mine], **keys}
            part = Part(rollout, id, message, mine, [costs[i] for i in mine])
            part.link = link or self._links[0]
            rollout._parts.append(part)
            if link is None:
                self._put_aside(part)
            else:
                self._start_part(part)

    def _start_part(self, part: Part) -> None:
        try:
            part.link.start(part.id, part)
        except errors.ConnectionLost:
            if not self._several:
                raise
            part.link.gone = True
            self._move(part)

    def cancel(self, target: str) -> None:
        """End the rollout with the id `target`.  Raises NotFound if there is none."""
        rollout = self._open.get(target)
        if rollout is None or not self._several:
            if rollout is not None:
                rollout._cancelled = True
            self._ask_owners({"type": "cancel"}, [(link, target) for link in self._links])
            return
        rollout._cancelled = True
        for part in [p for p in rollout._parts if p in self._homeless]:
            self._homeless.remove(part)
            part.end({})
        self._ask_owners({"type": "cancel"}, [(p.link, p.id) for p in rollout._parts if not p.finished], missing_is_fine=True)

    def ack(self, id: str) -> None:
        """The results of the rollout with this id are stored: the worker need not keep them for a client that asks again.
        Raises NotFound if it has none, BadRequest before the rollout has ended."""
        rollout = self._known.get(id)
        owners = [(p.link, p.id) for p in rollout._parts] if rollout else [(link, id) for link in self._links]
        self._ask_owners({"type": "ack"}, owners)

    def _ack(self, rollout: Rollout) -> None:
        owners = [(p.link, p.id) for p in rollout._parts if not (self._several and p.link.gone)]
        self._ask_owners({"type": "ack"}, owners, missing_is_fine=True)

    def _ask_owners(self, message: Dict[str, Any], owners: Sequence[Tuple[Link, str]], missing_is_fine: bool = False) -> None:
        """Ask about targets where they are.  NotFound counts if nobody knows any, or not at all (nor then that one of several
        workers is gone); after a reconnect it means that the request had been carried out."""
        asked = [_Asked(link, {**message, "target": target}) for link, target in owners]
        self._wait_for(asked)
        missing = [p.error for p in asked if isinstance(p.error, errors.NotFound)]
        fine = (errors.NotFound, errors.ConnectionLost) if self._several and missing_is_fine else errors.NotFound
        for p in asked:
            if p.error is not None and not isinstance(p.error, fine):
                raise p.error
        if missing and len(missing) == len(asked) and not missing_is_fine and not any(p.again for p in asked):
            raise missing[0]

    # ---- Weights.

    def update_weights(self, version: int, path: Union[str, "os.PathLike[str]", None] = None,
                       tensors: Optional[Mapping[str, Any]] = None, *, policy: str = "finish", timeout: float = 600.0,
                       chunk_bytes: int = CHUNK_BYTES) -> Version:
        """Bring new weights and wait until they are in use; rollouts of this client go on meanwhile.  Returns (version, digest).

        version  from 1 on, higher than the one in use
        path     a checkpoint that the worker can read, from its own working directory if the path is relative: a directory as
                 its --model takes, or a .pt file of a state dict; or instead of it
        tensors  name -> a numpy array, a torch tensor (on any device), or a tuple (dtype name such as "BF16", shape, bytes).
                 They are sent as they are, one at a time in memory; a leading `_orig_mod.` of a name is left out
        policy   of samples that run: "finish" them with the old weights, "keep" their cache and go on with the new,
                 "recompute" the cache with the new and go on, or "abort" them
        timeout  seconds for all of it.  While the worker is `overloaded` it is asked again and again
        chunk_bytes  of a message with a piece of a tensor; a multiple of 8

        All or nothing: after an error the worker goes on with the weights that it had.  A connection that is lost in the middle
        begins the whole update again.  With several workers all must succeed: the error tells which did not, and those that
        did keep the new weights: to try again, give all of them a higher version.

        Raises BadRequest (the version does not grow; a tensor is missing, unknown or misshaped), ModelError (one is not finite),
        NotFound (no such path), Unsupported (a file of something else), Timeout, ConnectionLost, WorkersDiffer.
        """
        if (path is None) == (tensors is None):
            raise ValueError("cannot tell where the weights are: give `path` or `tensors`, not both")
        if path is not None and not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"cannot use a {type(path).__name__} as a path: expected a str; a state dict goes into `tensors`")
        if chunk_bytes < 8 or chunk_bytes % 8:
            raise ValueError(f"cannot send chunks of {chunk_bytes} bytes: expected a multiple of 8")
        if self._closed:
            raise errors.ConnectionLost("cannot send a request: the client is closed")
        update = Update(self, version, policy, None if path is None else str(path),
                        None if tensors is None else tensors_of(tensors), chunk_bytes)
        self._updating = True
        try:
            update.run(self.endpoints, time.monotonic() + timeout)
        finally:
            self._updating = False
        for rollout in self._open.values():
            rollout._digests.update(digest for _, digest in update.in_use.values())
        if update.failed:
            raise self._update_error(version, update)
        if len({digest for _, digest in update.in_use.values()}) > 1:
            raise errors.WorkersDiffer(f"the workers have different weights of version {version}: " + ", ".join(
                f"{digest} at {endpoint}" for endpoint, (_, digest) in update.in_use.items()))
        return update.in_use[self.endpoints[0]]

    def _update_error(self, version: int, update: Update) -> errors.CoppiceError:
        first = next(iter(update.failed.values()))
        if not self._several:
            return first
        told = "; ".join(f"{endpoint}: {error.message}" for endpoint, error in update.failed.items())
        others = ", ".join(update.in_use) or "no other"
        return type(first)(f"could not bring weights {version} to {told} (in use at {others})", first.key, first.retry_after,
                           first.code)

    def pause(self, mode: str = "finish", timeout: Optional[float] = None) -> None:
        """Start nothing new until resume(); requests are taken and wait.

        mode  of what runs: "finish" it before this returns, "keep" it as it is, waiting, or "abort" it
        """
        self._ask_each({"type": "pause", "mode": mode}, timeout)

    def resume(self, timeout: Optional[float] = None) -> None:
        """Go on after a pause()."""
        self._ask_each({"type": "resume"}, timeout)

    # ---- Other requests.

    def ping(self, timeout: Optional[float] = None) -> Any:
        """What answers: {version, protocol, model, weights, backend, numerics, state}.  With several workers a list of such, in
        the order of the endpoints, with None for those that are gone.  timeout: seconds, at most."""
        return self._tell_each({"type": "ping"}, timeout)

    def status(self, timeout: Optional[float] = None) -> Any:
        """The worker's counters: rows, pages and queue now, tokens and samples since its start.  With several workers a list
        as of ping()."""
        return self._tell_each({"type": "status"}, timeout)

    def score(self, sequences: Iterable[wire.Tokens], top: int = 0, temperature: float = 1.0) -> Scores:
        """Log-probabilities of given tokens.  With several workers the one that has least to do computes them.

        sequences    1 to 4096, each of one or more token ids
        top          also the best `top` (0 to 20) ids per position
        temperature  0.001 to 100, of the distribution that is scored under

        logprobs[t] of a score, in nats, is that of token t given those before it; entry 0 is 1.0.
        """
        sequences = list(sequences)
        if any(isinstance(s, (int, np.integer)) for s in sequences):
            raise TypeError("cannot score a list of ints: for one sequence, write [[1, 2, 3]]")
        reply = self._ask({"type": "score", "sequences": [wire.pack_tokens(s) for s in sequences], "top": top,
                           "temperature": temperature})
        return Scores.from_wire(reply, top)

    def tokenize(self, text: Union[str, Sequence[Message]]) -> np.ndarray:
        """[T] u32: the ids of a str (without BOS), or of a list of message dicts as a prompt."""
        key = "text" if isinstance(text, str) else "messages"
        return wire.array(self._ask({"type": "tokenize", key: text})["tokens"], "<u4")

    def detokenize(self, tokens: wire.Tokens) -> Text:
        """The text of token ids."""
        reply = self._ask({"type": "detokenize", "tokens": wire.pack_tokens(tokens)})
        return Text(reply["text"], reply["bytes"])

    # ---- Asking and waiting.

    def _ask_over(self, link: Link, message: Dict[str, Any], timeout: Optional[float] = None) -> Dict[str, Any]:
        """Send a request that has one reply, and wait for it."""
        pending = _Asked(link, message)
        try:
            self._wait(pending, timeout)
        finally:
            pending.forget()
        return pending.reply

    def _ask(self, message: Dict[str, Any], timeout: Optional[float] = None) -> Dict[str, Any]:
        """Ask the worker, or the one of several that has least to do."""
        if self._several:
            self._settle()
        return self._ask_over(self._least() or self._links[0], message, timeout)

    def _wait_for(self, asked: Sequence[_Asked], timeout: Optional[float] = None) -> None:
        """Until all have ended, well or not; Timeout if some have not in time."""
        try:
            if not self._pump_until(lambda: all(p.finished for p in asked),
                                    None if timeout is None else time.monotonic() + timeout):
                raise errors.Timeout(f"the worker at {self.endpoint} did not answer within {timeout:g} s")
        finally:
            for p in asked:
                p.forget()

    def _ask_each(self, message: Dict[str, Any], timeout: Optional[float]) -> None:
        """Ask all; the first error is raised when all have answered."""
        asked = [_Asked(link, message) for link in self._links]
        self._wait_for(asked, timeout)
        for p in asked:
            if p.error is not None:
                raise p.error

    def _tell_each(self, message: Dict[str, Any], timeout: Optional[float]) -> Any:
        if not self._several:
            return self._ask_over(self._links[0], message, timeout)
        self._settle()
        asked = [None if link.gone else _Asked(link, message) for link in self._links]
        self._wait_for([p for p in asked if p], timeout)
        for p in asked:
            if p and p.error is not None and not isinstance(p.error, errors.ConnectionLost):
                raise p.error
        return [p.reply if p else None for p in asked]

    def _wait(self, pending: Union[Pending, Rollout], timeout: Optional[float]) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        if not self._pump_until(lambda: pending.finished, end):
            raise errors.Timeout(f"the worker at {self.endpoint} did not finish within {timeout:g} s")
        if pending.error:
            raise pending.error

    def _pump_until(self, true: Callable[[], bool], end: Optional[float]) -> bool:
        """Receive until something is true; False if it is not by `end`."""
        while not true():
            if end is not None and time.monotonic() >= end:
                return False
            self._pump(end)
        return True

    def _pump(self, end: Optional[float] = None) -> None:
        """Take what has arrived; wait for something at most until `end` or until somebody's silence is too long."""
        if self._closed:
            raise errors.ConnectionLost("cannot wait for replies: the client is closed")
        links = self._links + self._update_links
        until = [link.until() for link in links if link.pending]
        if end is not None:
            until.append(end)
        if self._homeless:
            until.append(self._homeless_since + self.patience)
        wait = max(0.0, min(until) - time.monotonic()) if until else 1.0
        ready = dict(self._poller.poll(wait * 1000))
        for link in links:
            link.work(ready)
        for link in links:
            if link.pending and not link.closed:
                self._check(link)
        if self._homeless:
            self._house()

    def _pump_now(self) -> None:
        self._pump(time.monotonic())

    def _check(self, link: Link) -> None:
        try:
            link.check()
        except errors.ConnectionLost as e:
            if link in self._update_links:
                self._fail_all(link, e)
            elif self._several:
                self._give_up(link, e)
            else:
                raise

    def _fail_all(self, link: Link, error: errors.CoppiceError) -> None:
        for pending in list(link.pending.values()):
            pending.fail(error)
        link.pending.clear()

    # ---- Several workers.

    def _usable(self) -> List[Link]:
        """Those that new work may be given to: the connected ones, or, if none is, those of which nothing is known yet."""
        here = [link for link in self._links if not link.gone]
        return [link for link in here if link.connected] or here

    def _outstanding(self, link: Link) -> int:
        return sum(p.outstanding for p in link.pending.values() if isinstance(p, Part))

    def _least(self) -> Optional[Link]:
        usable = self._usable()
        return min(usable, key=self._outstanding) if usable else None

    def _settle(self) -> None:
        """Learn which workers are there: a new client gives those that have not answered yet a moment."""
        self._pump_now()
        while time.monotonic() < self._settled_by and any(not (link.connected or link.gone) for link in self._links):
            self._pump(self._settled_by)

    def _give_up(self, link: Link, error: errors.CoppiceError) -> None:
        """The worker is gone: others take over its parts, the rest of what was asked of it fails."""
        link.gone = True
        parts = [p for p in link.pending.values() if isinstance(p, Part)]
        for part in parts:
            del link.pending[part.id]
        self._fail_all(link, error)
        link.renew()
        for part in parts:
            self._move(part)

    def _move(self, part: Part) -> None:
        """To another worker, with all it has: under the same id and seed it gives the same samples there."""
        part.link.pending.pop(part.id, None)
        if part.rollout._cancelled:
            part.end({})
            return
        link = self._least()
        if link is None:
            self._put_aside(part)
            return
        part.link, part.frame = link, part.frame_again()
        self._start_part(part)

    def _put_aside(self, part: Part) -> None:
        if not self._homeless:
            self._homeless_since = time.monotonic()
        self._homeless.append(part)

    def _house(self) -> None:
        """Give the parts that have no worker to one that came back.  Raises ConnectionLost if none has for too long."""
        if any(not link.gone for link in self._links):
            parts, self._homeless = self._homeless, []
            for part in parts:
                if not part.rollout.finished:
                    self._move(part)
        elif time.monotonic() >= self._homeless_since + self.patience:
            self._homeless_since = time.monotonic()  # whoever waits again has patience of his own
            raise errors.ConnectionLost(f"there is no worker at any of {', '.join(self.endpoints)}")

    # ---- What parts and updates need.

    def _take_over(self, part: Part, error: errors.CoppiceError) -> bool:
        """Whether a part that failed goes on elsewhere: its worker takes nothing new, others do."""
        if not (self._several and isinstance(error, errors.Draining)) or self._closed:
            return False
        part.link.gone = True
        self._move(part)
        return True

    def _judge(self, part: Part, done: Dict[str, Any]) -> bool:
        """A part has ended with samples that were cancelled unasked; True: it has to go on elsewhere, or that is being found
        out.  False: a pause or new weights cancelled them, which is for the caller to deal with."""
        link = part.link
        if link.gone:
            self._move(part)
            return True
        id = str(uuid.uuid4())
        link.start(id, _Judgement(self, part, done, wire.pack({"type": "ping", "id": id})))
        return True

    def _ended(self, rollout: Rollout) -> None:
        self._open.pop(rollout.id, None)

    def _open_link(self, endpoint: str) -> Link:
        """A connection for an update, received from like the others until _drop_link()."""
        link = Link(endpoint, self._context, self._poller, Patience(self.silence, self.patience, 0.0, LOST_SECONDS),
                    self._curve, high_water=STREAM_FRAMES)
        self._update_links.append(link)
        return link

    def _drop_link(self, link: Link) -> None:
        self._update_links.remove(link)
        link.close("the update was given up", linger=0)
