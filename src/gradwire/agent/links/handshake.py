"""The handshake over a channel, and the Hello that follows: the driver of handshake_state.py.

The handshake uses `send_raw` and `recv_raw` only: no frame of a connection is decoded before both
sides have given their proof. Then each side sends a Hello, which says what the peer should know
about it.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

from gradwire.agent.links.handshake_state import (
    HEAD_BYTES,
    NONCE_BYTES,
    Dialling,
    Listening,
    Reason,
    Refusal,
    body_length,
    refused,
)
from gradwire.agent.messages import Hello
from gradwire.agent.peers.directory import Directory
from gradwire.agent.peers.secret import Secret
from gradwire.agent.peers.state import Member
from gradwire.errors import BadMessage, GradwireError
from gradwire.ids import WorkerId
from gradwire.transport.base import Channel

_PURPOSE = "handshake"


def prove(channel: Channel, secret: Secret, job: str, me: str, peer: str, deadline: float) -> None:
    """As the dialler: prove who we are, and check that `peer` listens."""
    dialling = Dialling(
        secret.key(_PURPOSE),
        job,
        me,
        peer,
        nonce=secrets.token_bytes(NONCE_BYTES),
        binding=channel.binding,
    )
    channel.send_raw(dialling.opening(channel.peer_names), deadline)
    channel.send_raw(dialling.proof(_heard(channel, deadline)), deadline)
    dialling.check(_heard(channel, deadline))


def examine(channel: Channel, secret: Secret, job: str, me: str, deadline: float) -> str:
    """As the listener: check the dialler's proof; returns its name.

    A refused dialler is told the reason, unless it does not even speak this protocol.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    listening = Listening(secret.key(_PURPOSE), job, me, nonce=nonce, binding=channel.binding)
    try:
        opening = _heard(channel, deadline)
        channel.send_raw(listening.challenge(opening, channel.peer_names), deadline)
        channel.send_raw(listening.proof(_heard(channel, deadline)), deadline)
    except Refusal as refusal:
        if refusal.reason is not Reason.STRANGER:  # it would not understand
            with suppress(GradwireError):
                channel.send_raw(refused(refusal.reason), deadline)
        raise
    return listening.peer


def _heard(channel: Channel, deadline: float) -> bytes:
    head = channel.recv_raw(HEAD_BYTES, deadline)
    return head + channel.recv_raw(body_length(head), deadline)


def check_hello(
    theirs: Hello, name: str, directory: Directory, *, dialled: WorkerId | None
) -> Member:
    """The member that sent this Hello. BadMessage if it is not the worker that was dialled."""
    if dialled is not None and theirs.worker != dialled:
        raise BadMessage(f"{name} says that it is not number {dialled}, but {theirs.worker}")
    if dialled is not None and theirs.incarnation != directory.incarnation(dialled):
        raise BadMessage(f"{name} is another incarnation than the one that was dialled")
    return Member(theirs.worker, name, theirs.address, theirs.incarnation, theirs.note)
