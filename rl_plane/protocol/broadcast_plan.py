"""Plans the broadcasts of one announced part, and its messages to the workers. No I/O."""

from __future__ import annotations

from rl_plane.errors import PayloadTooLarge
from rl_plane.protocol.shared_tensors import GpuCopies
from rl_plane.protocol.update_requests import Part
from rl_plane.protocol.versions import TensorSpec

MAX_PIECE_BYTES = 600_000
"""The most bytes of names, dtypes and shapes in one message to a worker: well below NATS's limit."""
TENSOR_BYTES = 16
"""The most bytes of msgpack that a tensor takes beside the text of its name and dtype."""
SIDE_BYTES = 9
"""The most bytes of msgpack that each dimension takes."""

PLACE_BYTES = 48
"""The most bytes of msgpack that the place of a tensor takes beside its strides."""
MEMORY_BYTES = 128
"""The most bytes of msgpack that a memory takes beside its texts."""

Placed = tuple[str, TensorSpec]


def chunks(part: Part) -> list[list[Placed]]:
    """The tensors of each broadcast. The layout `packed` cuts as vLLM does: after the tensor that overfills the
    bucket."""
    tensors = list(zip(part.names, part.specs, strict=True))
    if part.layout == "each":
        return [[one] for one in tensors]
    if part.layout == "flat":
        return [tensors] if tensors else []
    found: list[list[Placed]] = []
    room = -1
    for one in tensors:
        if room < 0:
            found.append([])
            room = part.bucket_bytes
        found[-1].append(one)
        room -= one[1].nbytes
    return found


def pieces(part: Part) -> list[Part]:
    """Splits a part into parts that each fit into one message to a worker, with the same broadcasts.

    Raises PayloadTooLarge if a single broadcast does not fit.
    """
    sizes = [
        TENSOR_BYTES + len(name.encode()) + len(dtype) + SIDE_BYTES * len(shape)
        for name, dtype, shape in zip(part.names, part.dtypes, part.shapes, strict=True)
    ]
    if part.places is not None:  # a memory may have several tensors, and a share of a GPU's is opened once
        if sum(sizes) + _placed_bytes(part) > MAX_PIECE_BYTES:
            raise PayloadTooLarge(
                f"the places of {len(sizes)} tensors do not fit into a message to the workers",
                field="names",
                fix="send fewer tensors in one call: smaller buckets",
            )
        return [part]
    if sum(sizes) <= MAX_PIECE_BYTES:
        return [part]
    counts = [1] * len(sizes) if part.check_only else [len(chunk) for chunk in chunks(part)]
    cuts, start, size, end = [0], 0, 0, 0
    for count in counts:
        start, end = end, end + count
        more = sum(sizes[start:end])
        if more > MAX_PIECE_BYTES:
            raise PayloadTooLarge(
                f"the description of a broadcast of {count} tensors does not fit into a message to the workers",
                field="names",
                fix="send them in several broadcasts: smaller buckets, or one for each tensor",
            )
        if size + more > MAX_PIECE_BYTES:
            cuts.append(start)
            size = 0
        size += more
    return [_between(part, *ends) for ends in zip(cuts, [*cuts[1:], len(sizes)], strict=True)]


def _placed_bytes(part: Part) -> int:
    places = sum(PLACE_BYTES + SIDE_BYTES * len((one and one.strides) or ()) for one in part.places or ())
    shared = [
        copy
        for one in (*part.memories, *part.unused)
        for copy in (one.copies if isinstance(one, GpuCopies) else (one,))
    ]
    texts = (value for one in shared for value in one.model_dump().values())
    return places + MEMORY_BYTES * len(shared) + sum(len(text) for text in texts if isinstance(text, str))


def _between(part: Part, start: int, end: int) -> Part:
    fields = {name: getattr(part, name)[start:end] for name in ("names", "dtypes", "shapes")}
    return part.model_copy(update=fields)
