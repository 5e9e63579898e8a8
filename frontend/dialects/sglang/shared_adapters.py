"""Copies an adapter's tensors out of memory that its trainer shares.

An adapter is small. The frontend stores it in NATS, as it stores an adapter that came in a body. So a late worker
fetches it without its trainer, and only this frontend must be on the trainer's machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from frontend.dialects.common.shared_tensor import SharedTensor
from frontend.dialects.sglang.body_tensors import MAX_HELD_BYTES, Tensors
from frontend.dialects.sglang.serialized_tensors import FIELD, SharedTensors
from rl_plane.errors import InvalidWeights, PayloadTooLarge, Unsupported
from rl_plane.protocol.shared_tensors import NamedMemory
from rl_plane.protocol.versions import DEFAULT_ALGORITHM, HostTensor
from rl_plane.transports.trainer_memory import HEADER_BYTES, opened_memory, read_memory

IN_A_FILE = 'send them as a safetensors file (load_format "safetensors")'


def copied(found: SharedTensors) -> Tensors:
    """Copies the tensors.

    Raises:
        InvalidRequest: the memory is not on this machine, or not this user's.
        PayloadTooLarge: the tensors have more than MAX_HELD_BYTES.
        Unsupported: a tensor is on a GPU, or has gaps between its elements.
    """
    size = sum(one.spec.nbytes for _, one in found.tensors)
    if size > MAX_HELD_BYTES:
        raise PayloadTooLarge(
            f"the adapter has {size} bytes; this frontend holds at most {MAX_HELD_BYTES}",
            field=FIELD,
            fix="send a smaller adapter, or load it from a directory",
        )
    return {name: _copied(name, one) for name, one in found.tensors}


def _copied(name: str, one: SharedTensor) -> HostTensor:
    data = memoryview(bytearray(one.spec.nbytes))
    if one.memory is None:
        return HostTensor(one.spec, data, owned=True)
    if not isinstance(one.memory, NamedMemory):
        raise Unsupported(
            f"{name} is on a GPU, and an adapter's tensors are read from host memory", field=FIELD, fix=IN_A_FILE
        )
    if one.strides is not None:
        raise Unsupported(f"{name} is not contiguous", field=FIELD, fix=f"send contiguous tensors, or {IN_A_FILE}")
    with opened_memory(one.memory) as descriptor:
        try:
            read_memory(descriptor, HEADER_BYTES + one.start, data, DEFAULT_ALGORITHM)
        except ValueError as error:
            raise InvalidWeights(
                f"{name} can't be read: {error}", field=FIELD, fix="send the adapter again"
            ) from error
    return HostTensor(one.spec, data, owned=True)


def check_sums(tensors: Tensors, expected: Mapping[str, str]) -> None:
    """Compares each tensor with the SHA-256 of its bytes that the trainer states. InvalidWeights: one differs, is
    missing, or is not named."""
    for name in sorted(tensors.keys() | expected.keys()):
        if name not in tensors:
            why = "is stated and did not come"
        elif name not in expected:
            why = "came and is not stated"
        elif hashlib.sha256(tensors[name].data).hexdigest() != expected[name].lower():
            why = "has another SHA-256 than stated"
        else:
            continue
        raise InvalidWeights(
            f"the tensor {name[:200]} {why}", field="expected_checksums", fix="send the adapter again"
        )
