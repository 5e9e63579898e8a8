"""Plans the relay of one update: the peers of each worker, and its share of the trainer's bytes. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rl_plane.protocol.relay import MAX_PEERS, RelayAddress, RelayPeer, RelayPlan


def plan_relay(workers: Mapping[str, RelayAddress]) -> dict[str, RelayPlan]:
    """Returns each worker's plan. Equal arguments give equal plans. Empty: a relay gains nothing.

    One worker of each host, the host's first, takes a share from the trainer. So the trainer sends each byte once, and
    each host receives each byte once over the network. The first workers form a ring in the order of their hosts. A
    worker reads from the workers 1, 2, 3, … places before it in the ring, if MAX_PEERS are enough for that, else from
    those 1, 2, 4, 8, … places before it. The places before are different for each worker, so no link has more readers
    than another one. The other workers of a host read from its first worker, and then from the same peers.

    Args:
        workers: each worker that receives the update and can serve its peers, with its address. Each host of an engine
            over several counts as a worker of its own (`name_of_host`).
    """
    if len(workers) < 2:
        return {}
    by_host: dict[str, list[str]] = {}
    for name in sorted(workers, key=lambda name: (workers[name]["host"], name)):
        by_host.setdefault(workers[name]["host"], []).append(name)
    ring = [names[0] for names in by_host.values()]
    share_of = {name: number for number, name in enumerate(ring)}

    def peer(name: str) -> RelayPeer:
        where = workers[name]
        return RelayPeer(worker=name, address=where["address"], port=where["port"], share=share_of.get(name))

    plans = {}
    for names in by_host.values():
        first, *others = names
        around = [ring[(share_of[first] - step) % len(ring)] for step in steps_back(len(ring))]
        plans[first] = _plan(first, share_of, len(ring), [peer(name) for name in around] or [peer(others[0])])
        for name in others:
            plans[name] = _plan(name, share_of, len(ring), [peer(one) for one in (first, *around)])
    return plans


def steps_back(count: int) -> list[int]:
    """The places between a worker and its peers, which are before it in a ring of `count`."""
    if count - 1 <= MAX_PEERS:
        return list(range(1, count))
    doubled = [1 << power for power in range(MAX_PEERS)]
    return [step for step in doubled if step < count]


def _plan(name: str, share_of: Mapping[str, int], shares: int, peers: list[RelayPeer]) -> RelayPlan:
    return RelayPlan(worker=name, share=share_of.get(name), shares=shares, peers=tuple(peers[:MAX_PEERS]))
