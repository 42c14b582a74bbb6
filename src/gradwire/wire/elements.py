"""How many values a piece of msgpack holds, counted before it is decoded.

A value of one byte becomes an object of fifty or more, so that a limit on bytes does not limit
memory. Every value takes at least one byte: what is shorter than the limit needs no count, and
that is nearly everything. Text and bytes are stepped over, whatever their length. What is not
msgpack gives some number or other; the decoder refuses it.
"""

from __future__ import annotations

from gradwire.errors import NotSerializable, OverLimit

_Data = bytes | bytearray | memoryview


def _steps() -> list[int]:
    """How many bytes each first byte stands for; 0 where a length follows it."""
    steps = [1] * 256  # small numbers, None, bool, and the heads of small containers
    for length in range(32):
        steps[0xA0 + length] = 1 + length
    for first, step in ((0xCA, 5), (0xCB, 9), (0xDC, 3), (0xDD, 5), (0xDE, 3), (0xDF, 5)):
        steps[first] = step
    for power in range(4):
        steps[0xCC + power] = steps[0xD0 + power] = 1 + (1 << power)
    for power in range(5):
        steps[0xD4 + power] = 2 + (1 << power)
    for first in _LENGTHS:
        steps[first] = 0
    return steps


# bin, ext, str of 8, 16 and 32 bits: how wide the length is, and what stands beside it.
_LENGTHS = {
    **{0xC4 + n: (1 << n, 0) for n in range(3)},
    **{0xC7 + n: (1 << n, 1) for n in range(3)},
    **{0xD9 + n: (1 << n, 0) for n in range(3)},
}
_STEPS = _steps()


def has_more_than(data: _Data, most: int) -> bool:
    """Whether there are more values than that, containers and what is in them counted alike."""
    place = count = 0
    while place < len(data):
        count += 1
        if count > most:
            return True
        first = data[place]
        step = _STEPS[first]
        if not step:
            width, beside = _LENGTHS[first]
            length = int.from_bytes(data[place + 1 : place + 1 + width], "big")
            step = 1 + width + beside + length
        place += step
    return False


def check_arrived(data: _Data, most: int) -> None:
    """OverLimit if a peer sent more values than that."""
    if len(data) > most and has_more_than(data, most):
        raise OverLimit(
            f"a message holds more than {most} values",
            hint="its sender should send tensors or arrays; or raise Limits(elements=…) here",
        )


def check_leaving(data: _Data, most: int) -> None:
    """NotSerializable if a peer with the same limits would refuse so many."""
    if len(data) > most and has_more_than(data, most):
        raise NotSerializable(
            f"more than {most} numbers, texts and containers do not travel in one message",
            hint="send them as a tensor or a numpy array, or raise Limits(elements=…) on both ends",
        )
