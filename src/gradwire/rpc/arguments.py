"""What a function is to be called with: `args` and `kwargs`, as a user passes them.

`fn(*args)` accepts everything that can be iterated: a tensor of shape (1, 3) would pass its row,
a text its first letter, a dict its keys. All of these are mistakes, and none of them would show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradwire.errors import ArgumentTypeError

_TEXT = (str, bytes, bytearray, memoryview)


def positional(args: object, what: str = "args") -> tuple[object, ...]:
    """The positional arguments, of a tuple or a list.

    hot: asked for each call.
    """
    if type(args) is tuple:
        return args
    if isinstance(args, tuple | list):
        return tuple(args)
    raise _not_arguments(args, what)


def of_sequence(args: object) -> tuple[object, ...]:
    """The same for programs of torch's, where any sequence will do, and None for no arguments."""
    if args is None:
        return ()
    if isinstance(args, Sequence) and not isinstance(args, _TEXT):
        return tuple(args)
    raise _not_arguments(args, "args")


def keywords(kwargs: object, what: str = "kwargs") -> dict[str, object]:
    """The keyword arguments, of a dict or another mapping; None for no such arguments."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise ArgumentTypeError(
            f"{what} is a {type(kwargs).__name__}, not a dict", hint=f"{what}={{'name': value}}"
        )
    return dict(kwargs)


def _not_arguments(args: object, what: str) -> ArgumentTypeError:
    kind = type(args).__name__
    if isinstance(args, Mapping):
        hint = f"{what}=(value,) passes it as one argument, kwargs=value as named ones"
    elif hasattr(args, "__iter__") and not isinstance(args, _TEXT):
        hint = f"{what}=(value,) passes it as one argument, {what}=tuple(value) its elements"
    else:
        hint = f"{what}=(value,), with the comma, passes it as one argument"
    return ArgumentTypeError(f"{what} is a {kind}, not a tuple or a list of arguments", hint=hint)
