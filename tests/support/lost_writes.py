"""A store of NATS that has lost its writes."""

from __future__ import annotations

from rl_plane.bus.connection import Bus
from rl_plane.protocol.subjects import KeyValueBucket


async def lose_all(bus: Bus, bucket: KeyValueBucket, first_sequence: int) -> None:
    """Makes the bucket as a store that has lost all its writes. The next write gets `first_sequence`, which the store
    may have given before."""
    streams = bus.nc.jetstream()
    config = (await streams.stream_info(bucket.stream)).config
    config.first_seq = first_sequence
    await streams.delete_stream(bucket.stream)
    await streams.add_stream(config)
