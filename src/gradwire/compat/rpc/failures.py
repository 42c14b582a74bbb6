"""Errors as programs written for torch.distributed.rpc expect them.

A call raises ValueError and TypeError as such, everything else as RuntimeError; fetching a value
raises the type that was raised. The text begins with where it happened, and ends with the remote
traceback.
"""

from __future__ import annotations

from gradwire.agent.peers.directory import Directory
from gradwire.errors import CallTimeout, RemoteError

_TIMED_OUT = "RPCErr:1:RPC ran for more than set timeout and will now be marked with an error"
_KEPT = (ValueError, TypeError)


def of_call(error: Exception, directory: Directory) -> Exception:
    """What a failed call raises."""
    if isinstance(error, CallTimeout):
        return timed_out(error)
    if not isinstance(error, RemoteError):
        return error
    kept = next((kind for kind in _KEPT if isinstance(error, kind)), None)
    if kept is not None:
        return kept(_story(error, directory))
    return RuntimeError(
        f"{error.type_name.rpartition(':')[2]}: {_story(error, directory)}\n"
        f"Original exception on remote side was {error.type_name}"
    )


def of_fetch(error: Exception, _: Directory) -> Exception:
    """What fetching a value raises."""
    return timed_out(error) if isinstance(error, CallTimeout) else error


def of_callback(error: Exception) -> Exception:
    """What waits for the callback of a future gets if it raises."""
    return RuntimeError(
        f"Got the following error when running the callback: {type(error).__name__}: {error}"
    )


def timed_out(error: CallTimeout) -> CallTimeout:
    """The same, in the words that programs look for."""
    if error.message.startswith(_TIMED_OUT):
        return error
    return CallTimeout(f"{_TIMED_OUT}: {error.message}", hint=error.hint)


def _story(error: RemoteError, directory: Directory) -> str:
    known = {info.name: info for info in directory.all()}
    where = known.get(error.worker, error.worker)
    said = f"{error.type_name.rpartition(':')[2]}('{error.message}')"
    return f"On {where}:\n{said}\n{error.remote_traceback}"
