"""Where the pages of running jobs are written down, for their user alone.

One file for each page, in a directory that only its owner may enter: the address holds the token.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from gradwire.errors import UsageError
from gradwire.options import runtime_directory

_MOST_BYTES = 1 << 16
_SUFFIX = ".page"
_REDIRECT = b'<!doctype html><meta http-equiv="refresh" content="0; url=%b">\n'


class JobPage(msgspec.Struct, frozen=True):
    """A page that a worker of this user serves on this machine."""

    url: str
    pid: int
    parent: int
    """the process that started it"""
    worker: str
    program: str
    workers: int
    """how many workers there were when it began"""


def write_down(page: JobPage) -> list[Path]:
    """Write where a page is; the files to remove when it is no more."""
    directory = _own(runtime_directory())
    path = directory / f"{page.pid}-{page.worker.replace(':', '_')}{_SUFFIX}"
    _write(_opener(path), _REDIRECT % page.url.encode())
    _write(path, msgspec.json.encode(page))
    return [path, _opener(path)]


def file_to_open(page: JobPage) -> Path | None:
    """A file that leads a browser to the page: others may read a command line, but not a file."""
    for path in _own(runtime_directory()).glob(f"{page.pid}-*{_SUFFIX}"):
        if _maybe_read(path) == page and _opener(path).exists():
            return _opener(path)
    return None


def _opener(path: Path) -> Path:
    return path.with_suffix(".html")


def _write(path: Path, text: bytes) -> None:
    draft = path.with_suffix(".draft")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.write(text)
    draft.replace(path)


def running_pages() -> list[JobPage]:
    """The pages of this user's jobs on this machine; what dead processes have left is removed."""
    directory = runtime_directory()
    if not directory.exists():
        return []
    found = []
    for path in sorted(_own(directory).glob(f"*{_SUFFIX}")):
        page = _maybe_read(path)
        if page is None or not _is_alive(page.pid):
            for left in (path, _opener(path)):
                with suppress(OSError):
                    left.unlink()
        else:
            found.append(page)
    return found


def chosen(pages: Sequence[JobPage], job: str | None) -> JobPage:
    """The page that is meant: by a process id or an address, or the only one."""
    if job is not None and job.startswith("http://"):
        return JobPage(job, 0, 0, "", "", 0)
    fitting = [page for page in pages if job is None or job in (str(page.pid), str(page.parent))]
    if len(fitting) == 1:
        return fitting[0]
    listed = "; ".join(f"{page.pid} ({page.program}, {page.worker})" for page in pages)
    if not pages:
        why, hint = "no job of yours serves a page here", "gradwire.run(…, page=True) starts one"
    elif not fitting:
        why, hint = f"no job {job} serves a page here", f"there are: {listed}"
    else:
        why, hint = f"{len(fitting)} jobs of yours serve pages", f"name a process id: {listed}"
    raise UsageError(why, hint=hint)


def _own(directory: Path) -> Path:
    """The directory, made if need be; UsageError if others could put files there or read them."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = directory.lstat()
    is_mine = about.st_uid == os.getuid() and stat.S_ISDIR(about.st_mode)
    if not is_mine or stat.S_IMODE(about.st_mode) & 0o077:
        raise UsageError(
            f"{directory} is not a directory that only you can enter",
            hint=f"chmod 700 {directory}; or set XDG_RUNTIME_DIR to a directory of your own",
        )
    return directory


def _maybe_read(path: Path) -> JobPage | None:
    try:
        if path.lstat().st_size > _MOST_BYTES:
            return None
        return msgspec.json.decode(path.read_bytes(), type=JobPage)
    except (OSError, msgspec.DecodeError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return False
    return True
