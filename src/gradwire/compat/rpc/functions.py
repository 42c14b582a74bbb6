"""`@rpc.functions.async_execution`."""

from gradwire.rpc.asynchronous import async_execution

__all__ = ["async_execution"]
