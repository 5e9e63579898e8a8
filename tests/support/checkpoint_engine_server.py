"""A stand-in for checkpoint-engine's parameter server: two ranks in one process, each with the socket of its GPU. The
messages, their order and the answers are the real ones. CUDA is a stand-in over shared memory."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

from tests.support.commanded_process import CommandedProcess, serve
from tests.support.ipc_handles_trainer import GPUS
from tests.support.shared_host_cuda import SharedMemory

if TYPE_CHECKING:
    from tests.conftest import Plane

ALIGN = 256
ANSWER_MS = 60_000
"""A worker answers when it has copied, on a busy machine."""


class CheckpointEngineServer(CommandedProcess):
    """The handle of the server's process."""

    def __init__(self, plane: Plane) -> None:
        super().__init__(plane, "tests.support.checkpoint_engine_server", imports="vllm")


class ParameterServer:
    """The server itself, whose ranks are threads of this process."""

    def __init__(self) -> None:
        self._memory = SharedMemory()
        self._numbers = itertools.count()
        self._outcome: list[str] = []
        self._thread: threading.Thread | None = None

    def begin(self, argument: dict[str, Any]) -> dict[str, str]:
        """Binds the sockets, and sends on a thread. Returns the addresses by GPU.

        Args (in `argument`):
            directory: the checkpoint.
            buckets: the number of buckets.
            gpus: the GPUs, each with a rank. Absent: both.
            damaged: the number of the rank whose buffers have a wrong byte.
            waits: the server stops after the first bucket, until it is killed.
            first: bytes in hex that are sent in place of the handles.
        """
        import zmq

        context = zmq.Context()
        number = next(self._numbers)
        addresses = {gpu: f"ipc://@checkpoint-engine-{gpu}-{number}.sock" for gpu in argument.get("gpus", GPUS)}
        sockets = []
        for address in addresses.values():
            sockets.append(context.socket(zmq.REQ))
            sockets[-1].setsockopt(zmq.LINGER, 0)
            sockets[-1].setsockopt(zmq.RCVTIMEO, ANSWER_MS)
            sockets[-1].bind(address)
        self._outcome = []
        self._thread = threading.Thread(target=self._run, args=(sockets, argument), daemon=True)
        self._thread.start()
        return addresses

    def end(self, argument: None) -> str:
        """Waits for the end. Returns what failed."""
        assert self._thread is not None
        self._thread.join(ANSWER_MS / 1000)
        return self._outcome[0] if self._outcome else "it has not ended"

    def _run(self, sockets: list[Any], argument: dict[str, Any]) -> None:
        try:
            self._send(sockets, argument)
            self._outcome.append("")
        except Exception as error:
            self._outcome.append(f"{type(error).__name__}: {error}")
        for socket in sockets:
            socket.close()

    def _send(self, sockets: list[Any], argument: dict[str, Any]) -> None:
        import torch
        from safetensors.torch import load_file

        tensors = load_file(f"{argument['directory']}/model.safetensors")
        names = sorted(tensors)
        buckets = [names[start :: argument["buckets"]] for start in range(argument["buckets"])]
        room = max(sum(-(-tensors[name].nbytes // ALIGN) * ALIGN for name in one) for one in buckets)
        buffers = [self._memory.empty(2 * room) for _ in sockets]
        for socket, buffer in zip(sockets, buffers, strict=True):
            if "first" in argument:
                socket.send(bytes.fromhex(argument["first"]))
            else:
                socket.send_pyobj(self._memory.reduce_tensor(buffer))
        for number, bucket in enumerate(buckets):
            start = number % 2 * room
            described, at = [], start
            for name in bucket:
                data = tensors[name].reshape(-1).view(torch.uint8)
                for buffer in buffers:
                    buffer[at : at + data.numel()].copy_(data)
                described.append(
                    {"name": name, "dtype": tensors[name].dtype, "shape": tensors[name].shape, "offset": at}
                )
                at += -(-data.numel() // ALIGN) * ALIGN
            if "damaged" in argument:
                buffers[argument["damaged"]][start] ^= 1
            answers = [socket.recv() for socket in sockets]
            if any(answers):
                for socket in sockets:
                    socket.send_pyobj(RuntimeError("Some workers failed to update weights"))
                raise RuntimeError("Failed to update weights due to remote errors")
            if number and argument.get("waits"):
                threading.Event().wait()
            for socket in sockets:
                socket.send_pyobj(described)
        for _ in range(2):
            for socket in sockets:
                socket.recv()
            for socket in sockets:
                socket.send_pyobj(None)
        for socket in sockets:
            socket.recv()

    def held(self, argument: None) -> list[int]:
        return self._memory.held()

    def close(self) -> None:
        self._memory.close()


def _serve() -> None:
    server = ParameterServer()
    try:
        serve(lambda what, argument: getattr(server, what)(argument))
    finally:
        server.close()


if __name__ == "__main__":
    _serve()
