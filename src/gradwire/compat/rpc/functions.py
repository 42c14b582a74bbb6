"""`@rpc.functions.async_execution`."""

from gradwire.rpc.expose.async_execution import async_execution

__all__ = ["async_execution"]
