"""The handshake: four short messages that authenticate both ends, before anything else is read.

    dialler   opening     who dials whom in which job, and a nonce
    listener  challenge   a nonce of its own
    dialler   proof       HMAC-SHA256 of all of this, in the role of the dialler
    listener  proof       the same, in its own role

Instead of any of its messages the listener may send a refusal with its reason.

Rules of this file:
  1. Pure: bytes in, bytes out, a `Refusal` for what is wrong. Nonces are arguments.
  2. Nothing is negotiated: one version, one digest. Both are under the proof.
  3. The listener says nothing that depends on the secret before the dialler has given its proof. So
     an outsider that can merely connect gets nothing to test guesses with.
  4. What is refused is not repeated: bytes of an outsider never get into an error or a log.

The proof binds the version, the job, both names, both nonces and the channel, under a label for the
role. So it is worth nothing on another connection (replay), in the other direction (reflection, the
other role), between two other names, or in a channel that ends at a man in the middle.

With one secret for all, a member can claim the name of another: outsiders are kept out, members
are not kept apart. Certificates do that: then the claimed name must be one that they hold.
"""

from __future__ import annotations

import hmac
import math
import re
import struct
from enum import IntEnum
from typing import Final, Generic, TypeVar, final

from gradwire.errors import NotTrusted

T = TypeVar("T")

VERSION: Final = 4
NONCE_BYTES: Final = 32
MOST_BYTES: Final = 512  # of any message here
_HEAD: Final = struct.Struct(">8sHBH")
HEAD_BYTES: Final = _HEAD.size
_MAGIC: Final = b"gradwire"
_SHORT: Final = struct.Struct(">H")
_NAME: Final = re.compile(r"[A-Za-z0-9\-_:]{1,127}")
_JOB: Final = re.compile(r"[A-Za-z0-9\-_]{1,64}")
_OPENING, _CHALLENGE, _PROOF, _REFUSED = 1, 2, 3, 4
_DIALLER, _LISTENER = b"gradwire: the dialler's proof", b"gradwire: the listener's proof"
_SAME_SECRET: Final = (
    "give every worker of the job the same secret: Options(secret=…) or GRADWIRE_SECRET_FILE"
)


class Reason(IntEnum):
    """Why a peer is refused; the listener sends this number."""

    STRANGER = 0
    VERSION = 1
    JOB = 2
    NAME = 3
    CERTIFICATE = 4
    SECRET = 5


class Refusal(NotTrusted):
    """A peer is refused by the handshake."""

    def __init__(self, reason: Reason, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


def body_length(head: bytes) -> int:
    """How many bytes follow these first ones; Refusal if they do not begin a message."""
    magic, version, _, length = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise Refusal(Reason.STRANGER, "it does not speak our protocol")
    if version != VERSION:
        raise Refusal(
            Reason.VERSION,
            f"it speaks protocol {version}, this worker {VERSION}",
            hint="install the same version of gradwire for every worker of the job",
        )
    if length > MOST_BYTES - HEAD_BYTES:
        raise Refusal(Reason.STRANGER, f"it wants to say more than {MOST_BYTES} bytes")
    return int(length)


def refused(reason: Reason) -> bytes:
    """The listener's refusal, sent before it closes."""
    return _message(_REFUSED, bytes([reason]))


@final
class Dialling:
    """The dialler's side of one handshake."""

    def __init__(
        self, key: bytes, job: str, me: str, peer: str, *, nonce: bytes, binding: bytes = b""
    ) -> None:
        self._key, self._peer, self._me = key, peer, me
        self._nonce, self._binding = nonce, binding
        self._said = _fields(job.encode(), me.encode(), peer.encode(), nonce)

    def opening(self, peer_names: tuple[str, ...] | None = None) -> bytes:
        """The first message; Refusal if the certificate has another name than the peer."""
        if peer_names is not None and self._peer not in peer_names:
            raise Refusal(
                Reason.CERTIFICATE,
                f"its certificate is not that of {self._peer}",
                hint=f"the certificate of {self._peer} must hold that name (its SAN)",
            )
        return _message(_OPENING, self._said)

    def proof(self, challenge: bytes) -> bytes:
        """The answer to the listener's challenge."""
        theirs = self._body(challenge, _CHALLENGE)
        if len(theirs) != NONCE_BYTES or theirs == self._nonce:
            raise Refusal(Reason.STRANGER, f"{self._peer} did not give a challenge of its own")
        self._transcript = _transcript(self._said, theirs, self._binding)
        return _message(_PROOF, _mac(self._key, _DIALLER, self._transcript))

    def check(self, proof: bytes) -> None:
        """Refusal unless the listener's proof shows that it knows the secret."""
        theirs = self._body(proof, _PROOF)
        if not hmac.compare_digest(theirs, _mac(self._key, _LISTENER, self._transcript)):
            raise Refusal(
                Reason.SECRET,
                f"{self._peer} did not prove that it knows the secret of the job",
                hint=_SAME_SECRET,
            )

    def _body(self, words: bytes, kind: int) -> bytes:
        if words[: len(_MAGIC) + 3] == _message(_REFUSED, b"")[: len(_MAGIC) + 3]:
            raise self._told(words[HEAD_BYTES:])
        return _body(words, kind)

    def _told(self, body: bytes) -> Refusal:
        reason = Reason(body[0]) if len(body) == 1 and body[0] in set(Reason) else Reason.STRANGER
        peer, me = self._peer, self._me
        text, hint = {
            Reason.STRANGER: (f"{peer} does not take {me} for a worker", None),
            Reason.VERSION: (f"{peer} does not speak protocol {VERSION}", None),
            Reason.JOB: (
                f"{peer} belongs to another job",
                "it was started anew, or a worker of another job has its address now",
            ),
            Reason.NAME: (
                f"another worker than {peer} listens there",
                "a worker of another job may have its address now",
            ),
            Reason.CERTIFICATE: (
                f"{peer} does not find the name {me} in the certificate of {me}",
                "give each worker the certificate that was made for its name",
            ),
            Reason.SECRET: (f"{peer} has another secret than {me}", _SAME_SECRET),
        }[reason]
        return Refusal(reason, text, hint=hint)


@final
class Listening:
    """The listener's side of one handshake."""

    def __init__(
        self, key: bytes, job: str, me: str, *, nonce: bytes, binding: bytes = b""
    ) -> None:
        self._key, self._job, self._me = key, job, me
        self._nonce, self._binding = nonce, binding
        self.peer = ""  # the name of the dialler, once `proof` has returned

    def challenge(self, opening: bytes, peer_names: tuple[str, ...] | None = None) -> bytes:
        """The answer to an opening that is meant for us, or Refusal."""
        said = _body(opening, _OPENING)
        job, self._claimed, to, nonce = _opened(said)
        if job != self._job:
            raise Refusal(Reason.JOB, "it belongs to another job")
        if to != self._me:
            raise Refusal(Reason.NAME, "it looks for another worker")
        if self._claimed == self._me:
            raise Refusal(Reason.NAME, f"it claims to be {self._me}, as is this worker")
        if peer_names is not None and self._claimed not in peer_names:
            raise Refusal(Reason.CERTIFICATE, "it claims a name that its certificate does not hold")
        if nonce == self._nonce:
            raise Refusal(Reason.STRANGER, "it has our nonce")
        self._transcript = _transcript(said, self._nonce, self._binding)
        return _message(_CHALLENGE, self._nonce)

    def proof(self, said: bytes) -> bytes:
        """Our proof to a dialler that has given its own, or Refusal."""
        theirs = _body(said, _PROOF)
        if not hmac.compare_digest(theirs, _mac(self._key, _DIALLER, self._transcript)):
            raise Refusal(Reason.SECRET, "it does not know the secret of the job")
        self.peer = self._claimed
        return _message(_PROOF, _mac(self._key, _LISTENER, self._transcript))


def _message(kind: int, body: bytes) -> bytes:
    return _HEAD.pack(_MAGIC, VERSION, kind, len(body)) + body


def _body(words: bytes, kind: int) -> bytes:
    """What follows the head of a message of this kind."""
    if len(words) < HEAD_BYTES or len(words) != HEAD_BYTES + body_length(words[:HEAD_BYTES]):
        raise Refusal(Reason.STRANGER, "it said something else than it announced")
    if words[len(_MAGIC) + 2] != kind:
        raise Refusal(Reason.STRANGER, "it spoke out of turn")
    return words[HEAD_BYTES:]


def _fields(*fields: bytes) -> bytes:
    """Each with its length before it, so that no two lists of fields read the same."""
    return b"".join(_SHORT.pack(len(field)) + field for field in fields)


def _opened(said: bytes) -> tuple[str, str, str, bytes]:
    """Job, dialler, listener and nonce of an opening."""
    fields, at = [], 0
    while at + _SHORT.size <= len(said):
        (length,) = _SHORT.unpack_from(said, at)
        at += _SHORT.size + length
        fields.append(said[at - length : at])
    if at != len(said) or len(fields) != 4 or len(fields[3]) != NONCE_BYTES:
        raise Refusal(Reason.STRANGER, "its opening is not one")
    job, dialler, listener = (field.decode("latin-1") for field in fields[:3])
    if not (_JOB.fullmatch(job) and _NAME.fullmatch(dialler) and _NAME.fullmatch(listener)):
        raise Refusal(Reason.STRANGER, "its opening holds no names")
    return job, dialler, listener, fields[3]


def _transcript(said: bytes, nonce: bytes, binding: bytes) -> bytes:
    return _fields(_SHORT.pack(VERSION), said, nonce, binding)


def _mac(key: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, _fields(role, transcript), "sha256")


@final
class PendingHandshakes(Generic[T]):
    """Connections whose peer is not authenticated yet, oldest first; time is an argument.

    Their number is limited. When the limit is reached, the next connection waits until a handshake
    ends or the oldest has had its fair time, and is then removed. So many silent connections delay
    a worker by little, and many workers that connect at once are let in one by one.
    """

    def __init__(self, most: int, fair_seconds: float) -> None:
        self._most, self._fair_seconds = most, fair_seconds
        self._since: dict[T, float] = {}

    @property
    def has_room(self) -> bool:
        """Whether one more may be added."""
        return len(self._since) < self._most

    def add(self, channel: T, now: float) -> None:
        """A handshake begins."""
        self._since[channel] = now

    def remove(self, channel: T) -> bool:
        """A handshake has ended; False if it was not pending any more."""
        return self._since.pop(channel, None) is not None

    def next_due(self) -> float:
        """When the oldest has had its fair time."""
        return min(self._since.values(), default=math.inf) + self._fair_seconds

    def maybe_overdue(self, now: float) -> T | None:
        """The oldest, if it has had its fair time and its place is needed."""
        if self.has_room or now < self.next_due():
            return None
        return next(iter(self._since))
