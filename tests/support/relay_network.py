"""A network of hosts with links of given speeds, on which receivers read from one another as their Choosers say.

A simulation: its clock is a number, its links are shared evenly, and it runs until every receiver has everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rl_plane.commit.relay_plan import plan_relay
from rl_plane.protocol.relay import TRAINER, RelayAddress, RelayPlan
from rl_plane.transports.nixl.relay_chooser import BucketRead, Chooser

MB = 1 << 20
GBIT = 125e6
LATENCY_S = 0.002
"""The time from a verified bucket until its peers know of it."""
LOOK_S = 0.05
"""A receiver asks its Chooser at least so often."""
MOST_S = 1e4


def addresses(hosts: Sequence[str]) -> dict[str, RelayAddress]:
    """A worker for each host name, in order."""
    return {
        f"w{number:03}": RelayAddress(host=host, address=f"10.0.0.{number}", port=4000 + number)
        for number, host in enumerate(hosts)
    }


@dataclass
class Flow:
    to: str
    read: BucketRead
    left: float


@dataclass
class Network:
    """Receivers on equal links, and a trainer. `slow`: a worker's link is so many times slower."""

    plans: Mapping[str, RelayPlan]
    sizes: Sequence[int]
    rate: float = GBIT
    slow: Mapping[str, float] = field(default_factory=dict)
    dies: Mapping[str, float] = field(default_factory=dict)
    """Worker → the time of its death, which its peers notice."""
    stops: Mapping[str, float] = field(default_factory=dict)
    """Worker → the time from which it sends nothing, without an end that its peers would notice."""
    wrong: frozenset[str] = frozenset()
    """Workers whose bytes are wrong."""

    def __post_init__(self) -> None:
        self.now = 0.0
        self.choosers = {name: Chooser(plan, self.sizes, 0.0) for name, plan in self.plans.items()}
        self.ended: dict[str, float] = {}
        self.sent: dict[str, float] = {}
        """Source → the bytes that left it."""
        self.received: dict[str, float] = {}
        self._has: dict[str, set[int]] = {name: set() for name in self.plans}
        self._flows: list[Flow] = []
        self._mail: list[tuple[float, str, str, int]] = []
        self._told: set[tuple[str, str]] = set()

    def run(self) -> dict[str, float]:
        """Returns the time at which each receiver had everything."""
        while self._running():
            assert self.now < MOST_S, f"{self.now} s, and some receivers wait"
            for name in self._running():
                self._choose(name)
            self._advance()
        return self.ended

    def _running(self) -> list[str]:
        return [name for name in self.choosers if name not in self.ended and not self._is_down(name)]

    def _is_down(self, name: str) -> bool:
        return self.now >= min(self.dies.get(name, MOST_S), self.stops.get(name, MOST_S))

    def _choose(self, name: str) -> None:
        chooser = self.choosers[name]
        for peer in chooser.hanging(self.now):
            self._lose(name, peer)
        while (read := chooser.next(self.now)) is not None:
            self._flows.append(Flow(name, read, self.sizes[read.bucket]))

    def _lose(self, name: str, peer: str) -> None:
        self.choosers[name].failed(peer)
        self._flows = [flow for flow in self._flows if flow.to != name or flow.read.source != peer]

    def _rates(self) -> list[float]:
        out: dict[str, int] = {}
        into: dict[str, int] = {}
        live = [not self._is_down(flow.read.source) and not self._is_down(flow.to) for flow in self._flows]
        for flow, lives in zip(self._flows, live, strict=True):
            if lives:
                out[flow.read.source] = out.get(flow.read.source, 0) + 1
                into[flow.to] = into.get(flow.to, 0) + 1
        return [
            min(self._link(flow.read.source) / out[flow.read.source], self._link(flow.to) / into[flow.to])
            if lives
            else 0.0
            for flow, lives in zip(self._flows, live, strict=True)
        ]

    def _link(self, name: str) -> float:
        return self.rate / self.slow.get(name, 1.0)

    def _advance(self) -> None:
        """Goes to the next event: a read ends, an announcement arrives, a worker dies, or a receiver looks again."""
        rates = self._rates()
        ends = [flow.left / rate for flow, rate in zip(self._flows, rates, strict=True) if rate]
        deaths = [at - self.now for at in (*self.dies.values(), *self.stops.values()) if at > self.now]
        step = min([LOOK_S, *ends, *deaths, *(at - self.now for at, *_ in self._mail if at > self.now)])
        self.now += step
        for flow, rate in zip(self._flows, rates, strict=True):
            flow.left -= rate * step
            self.sent[flow.read.source] = self.sent.get(flow.read.source, 0.0) + rate * step
            self.received[flow.to] = self.received.get(flow.to, 0.0) + rate * step
        for flow in [flow for flow in self._flows if flow.left < 1.0]:
            if flow in self._flows:
                self._flows.remove(flow)
                self._arrived(flow)
        for name, at in self.dies.items():
            for other in self._running():
                known = any(peer.worker == name for peer in self.plans[other].peers)
                if self.now >= at and known and (other, name) not in self._told:
                    self._told.add((other, name))
                    self._lose(other, name)
        due = [one for one in self._mail if one[0] <= self.now]
        self._mail = [one for one in self._mail if one[0] > self.now]
        for _, name, peer, bucket in due:
            if name not in self.ended:
                self.choosers[name].announced(peer, [bucket])

    def _arrived(self, flow: Flow) -> None:
        name, read, chooser = flow.to, flow.read, self.choosers[flow.to]
        if self._is_down(name):
            return
        chooser.arrived(read, self.now)
        if not chooser.is_missing(read.bucket):
            chooser.superseded(read)
            return
        if read.source in self.wrong:
            self._lose(name, read.source)
            return
        assert read.source == TRAINER or read.bucket in self._has[read.source], (
            "it was read before it was verified"
        )
        chooser.verified(read)
        self._has[name].add(read.bucket)
        if chooser.done:
            self.ended[name] = self.now
        for other, plan in self.plans.items():
            if any(peer.worker == name for peer in plan.peers):
                self._mail.append((self.now + LATENCY_S, other, name, read.bucket))


def relayed(hosts: int, buckets: int = 64, nbytes: int = 4 * MB, **how: object) -> Network:
    """One worker on each of `hosts` machines, which have run until all have everything."""
    found = Network(plan_relay(addresses([f"h{number:03}" for number in range(hosts)])), [nbytes] * buckets, **how)  # type: ignore[arg-type]
    found.run()
    return found
