"""One update to many hosts, each of them a source: real receivers, on links of a given speed (see `bench.hosts`).

`python -m bench.relays`. Where the cores are the limit and not the links, give it slower links (`--megabits`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.hosts import Host, NoLab, lab
from bench.report import Row, ratio_table
from rl_plane._util.processes import die_with_parent
from rl_plane.commit.relay_plan import plan_relay
from rl_plane.protocol.relay import RelayAddress, RelayPlan

TENSOR_BYTES = 1 << 20
SLOW = 10
"""The slow link has so many times less."""
END_S = 20.0


@dataclass(frozen=True, slots=True)
class Relayed:
    """Seconds of one update."""

    nbytes: int
    bits: int
    hosts: int
    one_s: float
    """To one host."""
    relay_s: float
    killed_s: float
    """By relay, until the other hosts have everything. One host is killed in the middle."""
    slow_s: float
    """By relay, until the other hosts have everything. The link of one host has a tenth of the speed."""
    from_trainer: float
    """By relay: the bytes that the trainer sends, as a multiple of the weights."""
    busy: float
    """By relay: the share of this machine's cores that was busy."""

    @property
    def limit_s(self) -> float:
        """The time of a link for these bytes."""
        return self.nbytes * 8 / self.bits


class _Process:
    """A process on a host: see `bench.relay_process`."""

    def __init__(self, host: Host, towards: str) -> None:
        self.host = host
        self.process = subprocess.Popen(
            host.command(sys.executable, "-m", "bench.relay_process", towards),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0", "OMP_NUM_THREADS": "1"},
            preexec_fn=die_with_parent(),
        )

    def ask(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a host's process ended with {self.process.wait()}")
        said: dict[str, Any] = json.loads(line)
        return said

    def does(self, **what: Any) -> dict[str, Any]:
        self.ask(**what)
        return self.answer()


def measure_relay(nbytes: int, bits: int, hosts: int) -> Relayed:
    """Raises NoLab where this machine can't have a lab."""
    with lab(hosts + 1, bits) as places, _processes(places) as (trainer, *receivers):
        offered = trainer.does(
            do="offer",
            host=trainer.host.address,
            tensors=nbytes // TENSOR_BYTES,
            nbytes=TENSOR_BYTES,
            seed=1,
        )
        plans = _plans(receivers)
        _update(receivers, offered, plans)  # connections, and memory that was never touched
        one_s = max(_seconds(_update(receivers[:1], offered, [None])))
        begun, used = time.monotonic(), _cpu_s()
        results = _update(receivers, offered, plans)
        busy = (_cpu_s() - used) / (time.monotonic() - begun) / (os.cpu_count() or 1)
        relay_s = max(_seconds(results))
        from_trainer = sum(
            use["bytes"] for result in results for use in result["sources"] if use["source"] == "trainer"
        )
        slow = receivers[0]
        slow.host.set_rate(bits // SLOW)
        slow_s = max(_seconds(_update(receivers, offered, plans, leave=slow)))
        slow.host.set_rate(bits)
        killed_s = max(_seconds(_update(receivers, offered, plans, kill=slow, after_s=one_s / 2)))
        return Relayed(nbytes, bits, hosts, one_s, relay_s, killed_s, slow_s, from_trainer / nbytes, busy)


def _plans(receivers: Sequence[_Process]) -> list[RelayPlan]:
    names = [f"worker {number:03}" for number in range(len(receivers))]
    said = [one.does(do="address") for one in receivers]
    addresses = {
        name: RelayAddress(host=name, address=one["address"], port=one["port"])
        for name, one in zip(names, said, strict=True)
    }
    plans = plan_relay(addresses)
    return [plans[name] for name in names]


def _update(
    receivers: Sequence[_Process],
    offered: Mapping[str, Any],
    plans: Sequence[RelayPlan | None],
    *,
    leave: _Process | None = None,
    kill: _Process | None = None,
    after_s: float = 0.0,
) -> list[dict[str, Any]]:
    """Sends one version to all. Returns the results, but for those of a receiver to `leave` or to `kill`."""
    for one, plan in zip(receivers, plans, strict=True):
        one.does(do="open", transport=offered["transport"], plan=plan and plan.model_dump())
    for one in receivers:
        one.ask(do="begin")
    for one in receivers:
        one.answer()
    if kill is not None:
        time.sleep(after_s)  # the kill is a part of what is measured
        kill.process.kill()
    results = [one.does(do="result") for one in receivers if one not in (leave, kill)]
    for one in receivers:
        if one not in (leave, kill):
            one.does(do="end")
    if leave is not None:
        leave.does(do="abort")
    for result in results:
        if result.get("digest") != offered["digest"]:
            raise SystemExit(f"a host has other weights: {result}")
    return results


def _seconds(results: Sequence[Mapping[str, Any]]) -> list[float]:
    return [result["seconds"] for result in results]


def _cpu_s() -> float:
    """The seconds for which the cores of this machine were busy."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _processes(places: Sequence[Host]) -> Iterator[list[_Process]]:
    started = [_Process(place, places[-1 if place is places[0] else 0].address) for place in places]
    try:
        for one in started:
            one.answer()
        yield started
    finally:
        for one in started:
            one.process.kill()
            one.process.wait()


ONE_AIM, KILL_AIM, SLOW_AIM = 1.5, 2.0, 1.5
MEGABYTES, MEGABITS, HOSTS = 256, 1000, 8
QUICK_MEGABYTES, QUICK_HOSTS = 8, 2


def relay_rows(found: Relayed) -> list[Row]:
    """The rows of one measurement, beside the time of one host. A star takes as many times as long as there are
    hosts."""
    busy = f"links of {found.bits / 1e6:,.0f} Mbit/s, cores {found.busy:.0%} busy"
    size = f"{found.nbytes / 1e6:,.0f} MB to {found.hosts} hosts by relay"
    beside = f"one host ({found.one_s / found.limit_s:.2f} × its link's limit; {busy})"
    cases = (
        (f"{size}, the trainer sends {found.from_trainer:.2f} ×", found.relay_s, ONE_AIM),
        (f"{size}, one killed in the middle", found.killed_s, KILL_AIM),
        (f"{size}, one link at a tenth: the others", found.slow_s, SLOW_AIM),
    )
    return [
        Row(
            what,
            found.hosts,
            1,
            seconds,
            seconds,
            beside,
            found.one_s,
            found.one_s,
            value=seconds / found.one_s,
            aim=aim,
        )
        for what, seconds, aim in cases
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.relays", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=MEGABYTES, help="of weights")
    parser.add_argument("--megabits", type=int, default=MEGABITS, help="per second, of each link")
    parser.add_argument("--hosts", type=int, default=HOSTS)
    given = parser.parse_args()
    try:
        found = measure_relay(given.megabytes << 20, given.megabits * 1_000_000, given.hosts)
    except NoLab as error:
        print(f"the relay is not measured: {error}")
        return
    print(ratio_table(relay_rows(found)))


if __name__ == "__main__":
    main()
