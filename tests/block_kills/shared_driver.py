"""Pretended devices for several processes: the blocks are files that both map."""

from __future__ import annotations

import mmap
import os

import torch

from gradwire.testing.pretend.driver import PretendBlock, PretendDriver


class SharedBlock(PretendBlock):
    """Events are not shared, so what is copied is there before the other process hears of it."""

    mapped = 0
    """bytes of all blocks of this process"""

    def __init__(self, device: torch.device, room: int, path: str | None = None) -> None:
        super().__init__(device, room)
        if path is None:
            self._file = os.memfd_create("pretended-block")
            os.ftruncate(self._file, room)
        else:
            self._file = os.open(path, os.O_RDWR)
        self._memory = torch.frombuffer(mmap.mmap(self._file, room), dtype=torch.uint8)
        SharedBlock.mapped += room

    @property
    def handle(self) -> bytes:
        return f"/proc/{os.getpid()}/fd/{self._file}".encode()

    def filled(self, stream) -> None:
        super().filled(stream)
        stream.synchronize()

    def taken(self, stream) -> None:
        super().taken(stream)
        stream.synchronize()

    def release(self) -> None:
        SharedBlock.mapped -= self.room
        os.close(self._file)


class SharedDriver(PretendDriver):
    """The pretended devices, which every process sees."""

    def make(self, device, room, marks):
        return SharedBlock(device, room)

    def open(self, device, room, handle, marks):
        return SharedBlock(device, room, handle.decode())
