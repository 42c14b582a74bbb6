"""Certificates for tests: made once for all of them, in a directory that goes with the process."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from functools import cache
from pathlib import Path

from gradwire.launch.certs import Authority, Folder

NAMES = ("w0", "w1", "w2")
DAY = timedelta(days=1)


@cache
def _everything() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="gradwire-certificates-")


def folder_of(authority: str) -> Folder:
    """That of one job or another."""
    return Folder(Path(_everything().name) / authority)


@cache
def authority(name: str = "job") -> Authority:
    """Who signs for that job."""
    made = Authority.new()
    made.write(folder_of(name))
    return made


@cache
def job() -> Folder:
    """Certificates of w0, w1 and w2, each of its own, and `all`, by which one may be any of them;
    `late` was one of w0 until yesterday.
    """
    folder = folder_of("job")
    for name in NAMES:
        authority().enrol(folder, name, DAY)
    authority().enrol(folder, "all", DAY, names=NAMES)
    authority().enrol(folder, "late", -DAY, names=["w0"])
    return folder


@cache
def other_job() -> Folder:
    """Another authority with a w0 and a w1 of its own."""
    folder = folder_of("other")
    for name in ("w0", "w1"):
        authority("other").enrol(folder, name, DAY)
    return folder
