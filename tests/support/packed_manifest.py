"""A small set of tensors and their manifest, in several buckets."""

from __future__ import annotations

from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.weights.manifest import Manifest, pack

TENSORS = {
    "small": HostTensor(TensorSpec("U8", (3,)), memoryview(b"abc")),
    "wide": HostTensor(TensorSpec("F32", (2, 2)), memoryview(bytes(range(16)))),
    "empty": HostTensor(TensorSpec("BF16", (0, 4)), memoryview(b"")),
    "half": HostTensor(TensorSpec("BF16", (3,)), memoryview(b"halves")),
}
MANIFEST = Manifest(pack([(name, tensor.spec) for name, tensor in TENSORS.items()], 64))
