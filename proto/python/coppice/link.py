"""One connection to one worker: frames out, replies to the requests that they belong to, silence noticed."""
from __future__ import annotations

import time
import uuid
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Set, Union

import zmq
from zmq.utils.monitor import recv_monitor_message

from . import errors, wire

CONNECT_SECONDS = 5.0  # after which there is no worker at an endpoint that has never answered

Key = Union[str, bytes, None]


def body(reply: Mapping[str, Any]) -> Dict[str, Any]:
    """What a reply says, without what every reply has."""
    return {k: v for k, v in reply.items() if k not in ("type", "id")}


class Pending:
    """A request that waits for replies; it has ended once it has its `reply` or an `error`.

    frame  what was sent, kept to be sent again after a reconnect
    again  whether that has happened
    """

    def __init__(self, frame: bytes) -> None:
        self.frame = frame
        self.again = False
        self.error: Optional[errors.CoppiceError] = None
        self.reply: Optional[Dict[str, Any]] = None

    @property
    def finished(self) -> bool:
        return self.error is not None or self.reply is not None

    def frame_again(self) -> Optional[bytes]:
        """The frame to send after a reconnect; None, with `error` set: it cannot be sent again."""
        self.again = True
        return self.frame

    def take(self, reply: Dict[str, Any]) -> None:
        """A reply that is no error."""
        self.reply = body(reply)

    def fail(self, error: errors.CoppiceError) -> None:
        """The first error counts."""
        self.error = self.error or error


class Whole(Pending):
    """A request that counts only if all of it went over one connection: after a reconnect it has failed."""

    def frame_again(self) -> Optional[bytes]:
        self.error = errors.ConnectionLost("the connection was lost before the request had its reply")
        return None


class Patience(NamedTuple):
    """How long a link waits, in seconds."""

    silence: float  #: without any reply, then it pings
    timeout: float  #: for that ping, then it connects anew
    total: float  #: since the last reply: then the wait ends in Timeout.  0: with the first ping that is not answered
    lost: Optional[float] = None  #: after the loss of a connection, until the worker counts as gone; None: silence decides


class Curve:
    """CURVE keys of a connection."""

    def __init__(self, server_key: Union[str, bytes], public_key: Key, secret_key: Key) -> None:
        if (public_key is None) != (secret_key is None):
            raise ValueError("cannot use one key of a pair: give public_key and secret_key, or neither")
        if public_key is None:
            public_key, secret_key = zmq.curve_keypair()
        self.server, self.public, self.secret = (k.encode() if isinstance(k, str) else k
                                                 for k in (server_key, public_key, secret_key))

    def use(self, socket: zmq.Socket) -> None:
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = self.server, self.public, self.secret


class Link:
    """A connection, and the requests that wait for replies over it.  Its sockets are registered with the client's poller.

    connected  the handshake is done and the connection stands
    gone       there is no worker now, or it goes: nothing new should be given to this link.  The owner sets it, a
               handshake clears it
    """

    def __init__(self, endpoint: str, context: zmq.Context, poller: zmq.Poller, patience: Patience,
                 curve: Optional[Curve] = None, high_water: int = 0) -> None:
        self.endpoint = endpoint
        self.pending: Dict[str, Pending] = {}
        self._dismissed: Set[str] = set()  # ids of dismiss() whose end the worker has yet to tell this connection
        self.connected = self.gone = False
        self._context, self._poller, self._patience, self._curve = context, poller, patience, curve
        self._high_water = high_water
        self._ever = False  # was connected once, if over a socket of before
        self._known = False  # was connected over this socket
        self._lost_at: Optional[float] = None
        self._ping_id: Optional[str] = None  # of the ping that ends a silence
        self._heard_at = self._deadline = 0.0  # the last sign of life; when a silence becomes too long
        self._open()

    # ---- The socket.

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 500
        self._socket.rcvhwm = 0
        self._socket.sndhwm = self._high_water
        if self._curve:
            self._curve.use(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._socket.connect(self.endpoint)
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self.connected = self._known = False
        self._dismissed.clear()

    def _shut(self) -> None:
        self._poller.unregister(self._socket)
        self._poller.unregister(self._monitor)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()

    @property
    def closed(self) -> bool:
        return self._socket.closed

    @property
    def was_connected(self) -> bool:
        """There is, or was, a worker."""
        return self._ever

    def close(self, why: str, linger: Optional[int] = None) -> None:
        """What is still open ends in ConnectionLost.  linger: milliseconds to go on sending what was queued."""
        if self.closed:
            return
        if linger is not None:
            self._socket.linger = linger
        self._shut()
        for pending in list(self.pending.values()):
            pending.fail(errors.ConnectionLost(why))
        self.pending.clear()

    # ---- Sending.

    def start(self, id: str, pending: Pending) -> None:
        """Send a request; its replies go to `pending` until it has finished."""
        if self.closed:
            raise errors.ConnectionLost("cannot send a request: the client is closed")
        if id in self.pending:
            raise errors.DuplicateId(f'cannot send a request: "{id}" is in use by another one of this client', "id")
        if not self.pending:
            self._heard()
        self.send(pending.frame)
        self.pending[id] = pending

    def send(self, frame: bytes) -> None:
        """Queue a frame.  Without a high-water mark only a connection that libzmq has given up, as after a refused
        handshake, cannot take one; a blocking send would then wait for ever."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise errors.ConnectionLost(f"cannot send to {self.endpoint}: the connection was refused, perhaps for want of the "
                                        "right CURVE keys; open a new client") from None

    def try_send(self, frame: bytes, wait: float) -> bool:
        """Queue a frame where there is a high-water mark; False if there was no room for `wait` seconds."""
        if not self._socket.poll(int(wait * 1000), zmq.POLLOUT):
            return False
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def tell(self, type: str, target: str) -> None:
        """Send a request about another one whose reply matters to nobody."""
        if not self.closed:
            try:
                self.send(wire.pack({"type": type, "id": str(uuid.uuid4()), "target": target}))
            except errors.ConnectionLost:
                pass

    def dismiss(self, id: str) -> None:
        """End a rollout here that nobody wants any more, and have the worker forget it once it has ended: under the same id it
        begins anew then, where it would attach to what was cancelled."""
        self.pending.pop(id, None)
        self._dismissed.add(id)
        self.tell("cancel", id)

    def is_ending(self, id: str) -> bool:
        """Whether a rollout of this id, or a part of it, was dismissed and the worker has not ended it yet."""
        return any(gone == id or gone.startswith(id + "/") for gone in self._dismissed)

    # ---- Receiving.

    def until(self) -> float:
        """By when work() has to be called again, on the clock of time.monotonic()."""
        if self._patience.lost is not None and self._lost_at is not None:
            return min(self._deadline, self._lost_at + self._patience.lost)
        return self._deadline

    def work(self, ready: Mapping[Any, int]) -> None:
        """Take what has arrived on the sockets that are `ready`.  Raises what a broken reply or an error without id deserves."""
        if self._monitor in ready:
            self._take_events()
        if self._socket in ready:
            self._heard()
            while not self.closed:
                try:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    return
                self._dispatch(frames)

    def check(self) -> None:
        """Notice silence and loss.  Raises ConnectionLost, or Timeout, if the worker counts as gone; what is pending stays."""
        now = time.monotonic()
        lost = self._patience.lost
        if lost is not None and self._lost_at is not None and now >= self._lost_at + lost:
            self._lost_at = None
            raise errors.ConnectionLost(f"the connection to {self.endpoint} was lost and not found again within {lost:g} s")
        if now >= self._deadline:
            self._break_silence(now)

    def _heard(self) -> None:
        """The worker is alive: begin a new silence."""
        if self._ping_id is not None:
            self.pending.pop(self._ping_id, None)
            self._ping_id = None
        silence = self._patience.silence
        self._heard_at = time.monotonic()
        self._deadline = self._heard_at + (silence if self._ever else min(silence, CONNECT_SECONDS))

    def _take_events(self) -> None:
        """After the first handshake of a socket, each further one means that the worker knows us no more: send all again."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_DISCONNECTED:
                self.connected = False
                self._dismissed.clear()
                self._lost_at = self._lost_at or time.monotonic()
                continue
            if self._known:
                self.send_again()
            if self._known or not self._ever:  # a handshake that renew() brought about is no sign of life: libzmq made it
                self._heard()
            self.connected = self._ever = self._known = True
            self.gone = False
            self._lost_at = None

    def send_again(self) -> None:
        """Send all that is open once more; what cannot be has failed."""
        for id, pending in list(self.pending.items()):
            frame = pending.frame_again()
            if frame is None:
                del self.pending[id]
            else:
                self.send(frame)

    def _break_silence(self, now: float) -> None:
        if not self._ever:
            self._heard()  # whoever waits again begins a silence of its own
            raise errors.ConnectionLost(f"there is no worker at {self.endpoint}: not connected after "
                                        f"{min(self._patience.silence, CONNECT_SECONDS):g} s")
        if self._ping_id is None:
            self._ping(now)
            return
        self.pending.pop(self._ping_id)
        self._ping_id = None
        if now >= self._heard_at + self._patience.total:
            silent = now - self._heard_at
            self._heard()
            raise errors.Timeout(f"the worker at {self.endpoint} was silent for {silent:.3g} s and did not answer a ping within "
                                 f"{self._patience.timeout:g} s")
        self.renew()
        self._ping(now)

    def renew(self) -> None:
        """A connection that gives no sign of life is replaced: it may hang where a new one does not.  Of what was queued in
        the old one only what is still open is sent."""
        self._socket.linger = 0
        self._shut()
        self._open()
        self.send_again()

    def _ping(self, now: float) -> None:
        id = str(uuid.uuid4())
        ping = Pending(wire.pack({"type": "ping", "id": id}))
        if self._high_water:
            self.try_send(ping.frame, 0)  # where there is no room for it the worker does not read, and will not answer
        else:
            self.send(ping.frame)
        self.pending[id] = ping
        self._ping_id = id
        self._deadline = now + self._patience.timeout

    def _dispatch(self, frames: List[bytes]) -> None:
        """Give a reply to the request that it belongs to; what belongs to none (any more) is dropped."""
        if len(frames) != 1:
            raise errors.ProtocolError(f"cannot read a message of {len(frames)} frames: expected one")
        reply = wire.unpack(frames[0])
        id, kind = reply.get("id"), reply.get("type")
        if kind == "error" and id == "":
            raise errors.from_reply(reply)  # the worker could not tell whose request it was
        pending = self.pending.get(id)
        if pending is None:
            if id in self._dismissed and kind in ("done", "error"):
                self._dismissed.remove(id)
                self.tell("ack", id)
            return
        if kind == "error":
            pending.fail(errors.from_reply(reply))
        else:
            try:
                pending.take(reply)
            except (errors.ProtocolError, errors.ConnectionLost) as e:
                pending.fail(e)
        if pending.finished:
            self.pending.pop(id, None)
