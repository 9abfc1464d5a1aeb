"""The client: one connection, any number of requests in flight."""
from __future__ import annotations

import time
import uuid
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Set, Tuple, Union

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from . import errors, wire
from .sample import Sample, Scores, Text

Message = Mapping[str, Any]
Prompt = Union[str, wire.Tokens, Sequence[Message], Mapping[str, Any]]

CONNECT_SECONDS = 5.0  # after which there is no worker at an endpoint that has never answered


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


def prompt_maps(prompts: Union[str, Mapping[str, Any], Iterable[Prompt]]) -> List[Dict[str, Any]]:
    """All prompts of a request; a single str or dict counts as one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompt_map(prompts)]
    prompts = list(prompts)
    if prompts and isinstance(prompts[0], (int, np.integer)):
        raise TypeError("cannot use a list of ints as prompts: for one prompt of token ids, write [[1, 2, 3]]")
    return [prompt_map(p) for p in prompts]


class _Pending:
    """A request that waits for replies.  `frame` is kept to be sent again after a reconnect."""

    def __init__(self, frame: bytes) -> None:
        self.frame = frame
        self.error: Optional[errors.CoppiceError] = None
        self.reply: Optional[Dict[str, Any]] = None

    @property
    def finished(self) -> bool:
        return self.error is not None or self.reply is not None

    def frame_again(self) -> bytes:
        """The frame to send after a reconnect."""
        return self.frame

    def take(self, reply: Dict[str, Any]) -> None:
        self.reply = reply


class Rollout(_Pending):
    """A rollout in progress.  Iterating yields samples as they arrive, from the first one on, and raises the error that
    ended the rollout, if one did.

    id        the request's id
    samples   list of Sample that have arrived, in order of arrival
    accepted  dict {samples, seed, weights, numerics} once the worker has taken the request, else None
    done      dict {samples, prompt_tokens, cached_tokens, sampled_tokens, forced_tokens, seconds} at the end, else None
    """

    def __init__(self, client: "Client", id: str, frame: bytes) -> None:
        super().__init__(frame)
        self._client = client
        self.id = id
        self.samples: List[Sample] = []
        self.accepted: Optional[Dict[str, Any]] = None
        self._seen: Set[Tuple[int, int]] = set()

    @property
    def done(self) -> Optional[Dict[str, Any]]:
        return self.reply

    def take(self, reply: Dict[str, Any]) -> None:
        kind = reply.get("type")
        if kind == "samples":
            for m in reply.get("samples", ()):
                self._take_sample(Sample.from_wire(m))
        elif kind == "accepted":
            self._take_accepted(_body(reply))
        elif kind == "done":
            self.reply = _body(reply)

    def frame_again(self) -> bytes:
        """With the seed that the worker drew, if it did: a worker that was restarted would draw another."""
        if self.accepted is None or "seed" not in self.accepted:
            return self.frame
        return wire.pack({"seed": self.accepted["seed"], **wire.unpack(self.frame)})

    def _take_accepted(self, accepted: Dict[str, Any]) -> None:
        """The second one, after a reconnect, must promise what the first did."""
        if self.accepted is None:
            self.accepted = accepted
            return
        differ = [f"{what} {was} before, {now} now" for what, was, now in zip(("weights", "numerics"), _promise(self.accepted),
                                                                             _promise(accepted)) if was != now]
        if differ:
            self._client._send(wire.pack({"type": "cancel", "id": str(uuid.uuid4()), "target": self.id}))
            raise errors.WorkerChanged("cannot go on with the rollout after a reconnect, the worker is another one: "
                                       f"{'; '.join(differ)}; start it anew")

    def _take_sample(self, sample: Sample) -> None:
        """A worker that was restarted generates again what had arrived already."""
        at = sample.prompt, sample.sample
        if at not in self._seen:
            self._seen.add(at)
            self.samples.append(sample)

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


def _body(reply: Mapping[str, Any]) -> Dict[str, Any]:
    return {k: v for k, v in reply.items() if k not in ("type", "id")}


def _promise(accepted: Mapping[str, Any]) -> Tuple[Any, Any]:
    """What an `accepted` says of the bits to come: the digest of the weights, and the numerics."""
    return (accepted.get("weights") or (0, None))[1], accepted.get("numerics")


def _given(**keys: Any) -> Dict[str, Any]:
    """The keys whose value is not None."""
    return {k: v for k, v in keys.items() if v is not None}


class Client:
    """A connection to a worker.  Requests run side by side, told apart by their ids; one thread at a time may use it.

    endpoint    such as "tcp://127.0.0.1:5555" or "ipc:///run/coppice.sock"
    timeout     seconds that the worker may take to answer a ping before a wait raises Timeout
    silence     seconds without any reply after which a wait sends that ping; long rollouts are silent, dead workers too.
                A wait for a worker that was never there raises ConnectionLost after as long, at most 5 s
    server_key  CURVE: the server's public key (40 characters, Z85).  Today's worker has no CURVE: this is for a proxy that has
    public_key, secret_key  CURVE: this client's pair; made up if only server_key is given
    context     a zmq.Context to share; the client makes its own otherwise

    A lost connection is found again by itself, and open requests are sent again under the same ids.  A worker that was
    restarted meanwhile begins them anew, with the same seed; samples that had arrived come only once.  If its weights or
    numerics are others, the rollout ends in WorkerChanged.  To attach to a rollout that still runs is not built yet: a worker
    that lost just the connection may still be at it, and then the rollout ends in DuplicateId.
    """

    def __init__(self, endpoint: str, timeout: float = 10.0, silence: float = 10.0, *,
                 server_key: Union[str, bytes, None] = None, public_key: Union[str, bytes, None] = None,
                 secret_key: Union[str, bytes, None] = None, context: Optional[zmq.Context] = None) -> None:
        self.endpoint = endpoint
        self.timeout = timeout
        self.silence = silence
        self._pending: Dict[str, _Pending] = {}
        self._ping_id: Optional[str] = None  # of the ping that ends a silence
        self._deadline = 0.0  # when a silence becomes too long
        self._connected = False
        self._own_context = context is None
        self._context = context or zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 500
        self._socket.sndhwm = self._socket.rcvhwm = 0
        if server_key is not None:
            self._use_curve(server_key, public_key, secret_key)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def _use_curve(self, server_key: Union[str, bytes], public_key: Union[str, bytes, None],
                   secret_key: Union[str, bytes, None]) -> None:
        if (public_key is None) != (secret_key is None):
            raise ValueError("cannot use one key of a pair: give public_key and secret_key, or neither")
        if public_key is None:
            public_key, secret_key = zmq.curve_keypair()
        as_bytes = lambda key: key.encode() if isinstance(key, str) else key
        self._socket.curve_serverkey = as_bytes(server_key)
        self._socket.curve_publickey = as_bytes(public_key)
        self._socket.curve_secretkey = as_bytes(secret_key)

    def close(self) -> None:
        """Close the connection.  Requests that are still open end in ConnectionLost here; the worker goes on with them."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        for pending in self._pending.values():
            pending.error = errors.ConnectionLost("the client was closed before the request ended")
        self._pending.clear()
        if self._own_context:
            self._context.term()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    # ---- Requests.

    def rollout(self, prompts: Union[str, Mapping[str, Any], Iterable[Prompt]], *, n: Optional[int] = None,
                seed: Optional[int] = None, max_tokens: Optional[int] = None, min_tokens: Optional[int] = None,
                temperature: Optional[float] = None, top_k: Optional[int] = None, top_p: Optional[float] = None,
                min_p: Optional[float] = None, stop_tokens: Optional[wire.Tokens] = None,
                stop: Optional[Sequence[str]] = None, tools: Optional[Sequence[str]] = None,
                logprobs: Optional[Sequence[str]] = None, entropy: Optional[bool] = None, kept: Optional[bool] = None,
                text: Optional[bool] = None, deliver: Optional[str] = None, compress: Optional[bool] = None,
                timeout: Optional[float] = None, min_weights: Optional[int] = None,
                weights_timeout: Optional[float] = None, model: Optional[str] = None,
                id: Optional[str] = None) -> Rollout:
        """Start a rollout and return at once.  What is left out has the protocol's default.

        prompts      each a str, token ids, a list of message dicts, or a dict as in the protocol (see prompt_map)
        n            samples per prompt
        seed         u64; with the same seed, weights and prompts the same samples come back, bit for bit
        max_tokens   tokens per sample, sampled and forced together
        temperature  0 (argmax), or 0.001 to 100
        top_k, top_p, min_p  truncation; 0, 1.0, 0.0 are off
        stop_tokens  ids that end a sample, instead of the model's
        stop         at most 16 strings of 1 to 256 bytes; a sample ends with the token that completes one of them
        logprobs     which to return: "sampling" (of the distribution drawn from), "model" (whole vocabulary, temperature 1)
        entropy      also return the entropy of the distribution that each token was drawn from
        kept         also return the ids that survived truncation; needs top_k
        text         also return the completions' text
        deliver      "sample" as each ends, "prompt" when all of one's have, or "request"
        timeout      seconds after which the worker cancels what is unfinished
        id           1 to 128 bytes, global to the worker; a UUID by default.  That of a rollout in flight is refused (DuplicateId)
        min_weights, weights_timeout, model  not built yet: the worker answers Unsupported
        """
        id = id or str(uuid.uuid4())
        message = {"type": "rollout", "id": id, "prompts": prompt_maps(prompts)}
        message.update(_given(n=n, seed=seed, max_tokens=max_tokens, min_tokens=min_tokens, temperature=temperature,
                              top_k=top_k, top_p=top_p, min_p=min_p, stop=stop, tools=tools, logprobs=logprobs,
                              entropy=entropy, kept=kept, text=text, deliver=deliver, compress=compress, timeout=timeout,
                              min_weights=min_weights, weights_timeout=weights_timeout, model=model))
        if stop_tokens is not None:
            message["stop_tokens"] = wire.pack_tokens(stop_tokens)
        rollout = Rollout(self, id, wire.pack(message))
        self._start(id, rollout)
        return rollout

    def ping(self, timeout: Optional[float] = None) -> Dict[str, Any]:
        """What answers: {version, protocol, model, weights, backend, numerics, state}.  timeout: seconds, at most."""
        return self._ask({"type": "ping"}, timeout)

    def status(self) -> Dict[str, Any]:
        """The worker's counters: rows, pages and queue now, tokens and samples since its start."""
        return self._ask({"type": "status"})

    def cancel(self, target: str) -> None:
        """End the rollout with the id `target`.  Raises NotFound if there is none."""
        self._ask({"type": "cancel", "target": target})

    def score(self, sequences: Iterable[wire.Tokens], top: int = 0, temperature: float = 1.0) -> Scores:
        """Log-probabilities of given tokens.

        sequences    1 to 4096, each of one or more token ids
        top          also the best `top` (0 to 20) ids per position
        temperature  0.001 to 100, of the distribution that is scored under
        """
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

    # ---- Sending and receiving.

    def _start(self, id: str, pending: _Pending) -> None:
        if self._socket.closed:
            raise errors.ConnectionLost("cannot send a request: the client is closed")
        if id in self._pending:
            raise errors.DuplicateId(f'cannot send a request: "{id}" is in use by another one of this client', "id")
        if not self._pending:
            self._heard()
        self._send(pending.frame)
        self._pending[id] = pending

    def _send(self, frame: bytes) -> None:
        """Queue a frame.  There is no high-water mark, so that only a connection that libzmq has given up, as after a
        refused handshake, cannot take one; a blocking send would then wait for ever."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise errors.ConnectionLost(f"cannot send to {self.endpoint}: the connection was refused, perhaps for want of the "
                                        "right CURVE keys; open a new client") from None

    def _ask(self, message: Dict[str, Any], timeout: Optional[float] = None) -> Dict[str, Any]:
        """Send a request that has one reply, and wait for it."""
        id = str(uuid.uuid4())
        pending = _Pending(wire.pack({"type": message.pop("type"), "id": id, **message}))
        self._start(id, pending)
        try:
            self._wait(pending, timeout)
        finally:
            self._pending.pop(id, None)
        return _body(pending.reply)

    def _wait(self, pending: _Pending, timeout: Optional[float]) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while not pending.finished:
            self._pump(end)
            if end is not None and not pending.finished and time.monotonic() >= end:
                raise errors.Timeout(f"the worker at {self.endpoint} did not finish within {timeout:g} s")
        if pending.error:
            raise pending.error

    def _heard(self) -> None:
        """The worker is alive: begin a new silence."""
        if self._ping_id is not None:
            self._pending.pop(self._ping_id, None)
            self._ping_id = None
        patience = self.silence if self._connected else min(self.silence, CONNECT_SECONDS)
        self._deadline = time.monotonic() + patience

    def _pump(self, end: Optional[float] = None) -> None:
        """Take what has arrived; wait for something at most until `end` or the end of the silence."""
        if self._socket.closed:
            raise errors.ConnectionLost("cannot wait for replies: the client is closed")
        until = self._deadline if end is None else min(self._deadline, end)
        ready = dict(self._poller.poll(max(0.0, until - time.monotonic()) * 1000))
        if self._monitor in ready:
            self._greet()
        if self._socket in ready:
            self._heard()
            while True:
                try:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    return
                self._dispatch(frames)
        if time.monotonic() >= self._deadline:
            self._break_silence()

    def _greet(self) -> None:
        """After the first connection, each further one means that the worker knows us no more: send all again."""
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            if self._connected:
                for pending in list(self._pending.values()):
                    self._send(pending.frame_again())
            else:
                self._connected = True
                self._heard()

    def _break_silence(self) -> None:
        if not self._connected:
            self._heard()  # as below
            raise errors.ConnectionLost(f"there is no worker at {self.endpoint}: not connected after "
                                        f"{min(self.silence, CONNECT_SECONDS):g} s")
        if self._ping_id is not None:
            self._heard()  # whoever waits again begins a silence of its own
            raise errors.Timeout(f"the worker at {self.endpoint} was silent for {self.silence:g} s and did not answer a ping "
                                 f"within {self.timeout:g} s")
        id = str(uuid.uuid4())
        ping = _Pending(wire.pack({"type": "ping", "id": id}))
        self._start(id, ping)
        self._ping_id = id
        self._deadline = time.monotonic() + self.timeout

    def _dispatch(self, frames: List[bytes]) -> None:
        """Give a reply to the request that it belongs to; what belongs to none (any more) is dropped."""
        if len(frames) != 1:
            raise errors.ProtocolError(f"cannot read a message of {len(frames)} frames: expected one")
        reply = wire.unpack(frames[0])
        id, kind = reply.get("id"), reply.get("type")
        if kind == "error" and id == "":
            raise errors.from_reply(reply)  # the worker could not tell whose request it was
        pending = self._pending.get(id)
        if pending is None:
            return
        if kind == "error":
            pending.error = errors.from_reply(reply)
        else:
            try:
                pending.take(reply)
            except (errors.ProtocolError, errors.ConnectionLost) as e:
                pending.error = e
        if pending.finished:
            del self._pending[id]
