"""A trace and torch's profiles of the workers in one archive, which Perfetto opens as one timeline.

Each file keeps its own clock; the manifest in the archive says how far they are apart. Perfetto
merges such archives since version 58.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gradwire.errors import BadMessage

_OURS = "gradwire.json.gz"


@dataclass(frozen=True, slots=True)
class Profile:
    """What torch's profiler has written on a worker, compressed."""

    content: bytes
    ahead: int
    """nanoseconds by which its clock is ahead of the clock of the trace"""


class _Head(msgspec.Struct):
    baseTimeNanoseconds: int = 0


def base_of(worker: str, content: bytes) -> int:
    """What torch has subtracted from the times in a profile, in nanoseconds."""
    try:
        return msgspec.json.decode(gzip.decompress(content), type=_Head).baseTimeNanoseconds
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        raise BadMessage(f"the profile of {worker} does not decode: {error}") from error


def archive(trace: bytes, profiles: Mapping[str, Profile], began: float) -> dict[str, bytes]:
    """The files, by name. `trace` begins at `began` seconds of its clock, and is compressed."""
    entries: list[dict[str, object]] = [{"path": _OURS}]
    files = {_OURS: trace}
    for worker, profile in profiles.items():
        name = f"torch-{worker}.json.gz"
        files[name] = profile.content
        # What is at 0 in the profile happened at `base` of its clock.
        offset = base_of(worker, profile.content) - profile.ahead - round(began * 1e9)
        clock = {"sync_to": {"file": _OURS}, "offset_ns": offset}
        entries.append({"path": name, "machine": {"name": f"torch on {worker}"}, "clocks": clock})
    manifest = {"perfetto_manifest": {"version": 1, "files": entries}}
    return {"perfetto_manifest.json": msgspec.json.encode(manifest), **files}


def write_tar(file: Path, files: Mapping[str, bytes]) -> None:
    """Write the files as a tar archive."""
    with tarfile.open(file, "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
