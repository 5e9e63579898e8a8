"""The socket on which the trainer's TCPStore listens.

torch's store serves every connection: it has no authentication. So it listens at the trainer's own address only, where
torch by itself would listen at every address of the machine. New connections are let in only while a group forms.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import socket
from datetime import timedelta
from typing import Any

from rl_plane._util.forks import not_for_children
from rl_plane._util.listening import listen_at

log = logging.getLogger("rl_plane.transports.group.store")

SO_ATTACH_FILTER = 26
SO_DETACH_FILTER = 27
BPF_RET = 0x06
"""A filter's instruction that ends it. Its operand is the number of bytes of the packet to keep: 0 drops it."""


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("operand", ctypes.c_uint32),
    )


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


class StoreListener:
    """Makes the trainer's store, and decides when it takes new connections.

    A packet filter on the listening socket drops new connections. Connections that exist are not affected.
    """

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        """Lets the store listen at `host`. InvalidRequest: that is impossible."""
        import torch.distributed as dist

        with listen_at(host, port) as listener:
            self._door = listener.dup()
            not_for_children.add(self._door)
            self.port = int(listener.getsockname()[1])
            self.store: Any = dist.TCPStore(
                host,
                self.port,
                None,
                True,
                timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )

    def open(self) -> None:
        """Lets new connections in."""
        with contextlib.suppress(OSError):  # there is no filter
            self._door.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)

    def shut(self) -> None:
        """Drops new connections, where the system can do that."""
        drop = (_Instruction * 1)(_Instruction(BPF_RET, 0, 0, 0))
        program = _Filter(1, drop)
        try:
            self._door.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, bytes(program))
        except OSError as error:
            log.info("the store of the group takes new connections while it lives: %s", error)

    def close(self) -> None:
        self._door.close()
