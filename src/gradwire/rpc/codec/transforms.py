"""Tensors that cannot be sent because of where the call is made: inside a transform of torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradwire.errors import NotSerializable
from gradwire.torch_private import has_tangent, is_inside_transform, wrapped_by_transform


def check_not_transformed(tensors: Sequence[Tensor]) -> None:
    """NotSerializable for wrappers of torch.func and for tangents. hot: each message with tensors

    The memory of a wrapper does not hold its values: a functionalized one's is garbage.
    """
    if is_inside_transform() and (wrapped := wrapped_by_transform(tensors)) is not None:
        raise NotSerializable(
            "a tensor inside a torch.func transform (vmap, grad, …) cannot be serialized",
            place=f"tensors[{wrapped}]",
            hint="use the transform inside the function that is called, not around the call",
        )
    if has_tangent(tensors):
        raise NotSerializable(
            "a tensor with a forward-mode tangent, which does not cross workers",
            hint="differentiate in reverse, or leave dual_level() before the call",
        )
