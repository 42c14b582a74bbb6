"""The message of actors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from gradwire.ids import RefId
from gradwire.rpc.messages import Call
from gradwire.wire.message import Message


class ActorCall(Message, frozen=True, tag=0x53):
    """Run a method of an actor when it is its turn. Answered as the call in it."""

    actor: RefId
    most: Annotated[int, msgspec.Meta(ge=1)]
    """how many methods of the actor may run at a time"""
    call: Call

    @property
    def carried(self) -> Sequence[object]:
        """As of the call."""
        return self.call.carried
