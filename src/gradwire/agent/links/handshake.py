"""A handshake over a channel: who says what when is decided by handshake_state.py.

Only `hear` and `say` are used here: the frame decoder sees nothing of a connection, and nothing is
decoded, before both sides have given their proof.
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
from gradwire.agent.peers.secret import Secret
from gradwire.errors import GradwireError
from gradwire.transport.base import Channel

_PURPOSE = "handshake"


def prove(channel: Channel, secret: Secret, job: str, me: str, peer: str, deadline: float) -> None:
    """As the one who dialled: show who we are, and see that it is `peer` who listens."""
    dialling = Dialling(
        secret.key(_PURPOSE),
        job,
        me,
        peer,
        nonce=secrets.token_bytes(NONCE_BYTES),
        binding=channel.binding,
    )
    channel.say(dialling.opening(channel.peer_names), deadline)
    channel.say(dialling.proof(_heard(channel, deadline)), deadline)
    dialling.check(_heard(channel, deadline))


def examine(channel: Channel, secret: Secret, job: str, me: str, deadline: float) -> str:
    """As the one who was dialled: the name of who is there, once that is proven.

    One that is refused is told why, as far as that helps nobody else.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    listening = Listening(secret.key(_PURPOSE), job, me, nonce=nonce, binding=channel.binding)
    try:
        opening = _heard(channel, deadline)
        channel.say(listening.challenge(opening, channel.peer_names), deadline)
        channel.say(listening.proof(_heard(channel, deadline)), deadline)
    except Refusal as refusal:
        if refusal.reason is not Reason.STRANGER:  # who does not speak our language
            with suppress(GradwireError):
                channel.say(refused(refusal.reason), deadline)
        raise
    return listening.peer


def _heard(channel: Channel, deadline: float) -> bytes:
    head = channel.hear(HEAD_BYTES, deadline)
    return head + channel.hear(body_length(head), deadline)
