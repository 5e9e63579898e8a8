"""One soak: a fleet, clients, disturbances, and the conditions that must hold in the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from tests.soak.chaos import FIRST_ADAPTERS, Chaos, schedule
from tests.soak.checker import Checker, Fault
from tests.soak.fleet import Broken, SoakFleet
from tests.soak.load import Clients, Floors
from tests.soak.models import Weights, make_weights
from tests.soak.report import Report, leaks

SERVED_S = 60.0
"""The bound in seconds after the last step until each client has had an answer again."""
ENDED_S = 60.0
"""The bound in seconds after that until each client has the answer to its last request."""
SETTLE_S = 2.0
"""The seconds between two comparisons with the history. Choices that were cut off are stored until then."""
NO_HEAD = frozenset({"sglang"})
"""Engines that take no adapter of `lm_head`, as the witnesses are: a fleet with one of them is without adapters."""


async def soak(tmp: Path, seconds: float, seed: int, engines: Sequence[str], clients: int) -> Report:
    start = time.monotonic()
    report = Report(seed, seconds, engines)
    (tmp / "weights").mkdir()
    weights = await make_weights(tmp / "weights", "float32" if set(engines) == {"hf"} else "bfloat16")
    fleet = SoakFleet(tmp, engines, weights.base(0), weights.root)
    try:
        await fleet.start()
        await _soak(fleet, weights, report, clients)
    except Broken as error:
        report.faults.append(Fault("broken", "", "", "", str(error)))
    finally:
        await fleet.close()
    if not report.good:
        print(fleet.tail(), flush=True)
    report.elapsed_s = time.monotonic() - start
    return report


async def _soak(fleet: SoakFleet, weights: Weights, report: Report, count: int) -> None:
    with_adapters = not NO_HEAD & set(report.engines)
    adapters = {name: name == FIRST_ADAPTERS[0] for name in FIRST_ADAPTERS if with_adapters}
    floors, checker = Floors(), Checker(weights.reference)
    chaos = Chaos(fleet, weights, floors, with_adapters)
    await chaos.first()
    await fleet.whole()
    await fleet.learn_committed()
    report.before = await fleet.counts()
    urls = [lambda name=name: fleet.url(name) for name in fleet.frontends]
    clients = Clients(
        urls, checker, floors, adapters, fleet.was_down, chaos.aborts, clients=count, seed=report.seed
    )
    settling = asyncio.create_task(_settle(fleet, checker, report))
    try:
        await chaos.run(schedule(report.seed, report.seconds, with_adapters), report.seconds)
        ended = time.monotonic()
        await _served(clients, report)
        async with asyncio.timeout(ENDED_S):
            await clients.stop()
        await fleet.whole()
        report.whole_s = time.monotonic() - ended
        await fleet.idle()
        report.after = await fleet.counts()
    except TimeoutError:
        report.faults.append(
            Fault("stuck", "", "", "", f"clients still wait {ENDED_S:g} s after their last request")
        )
    finally:
        settling.cancel()
        await asyncio.gather(settling, return_exceptions=True)
        report.faults += [*clients.faults, *chaos.faults]
        report.routes = clients.by_route
        report.requests, report.trouble, report.steps = clients.by_kind, clients.trouble, chaos.outcomes
        report.tokens, report.choices = checker.tokens, checker.choices
        report.crossed, report.fragments = checker.crossed, checker.fragments
    await fleet.learn_committed()
    report.faults += checker.settle(fleet.committed, final=True)
    report.versions = len(fleet.committed)
    report.faults += leaks(report.before, report.after)


async def _settle(fleet: SoakFleet, checker: Checker, report: Report) -> None:
    """Settles deliveries now and then, so that a long soak does not store all of them, and the history still has
    their versions."""
    while True:
        await asyncio.sleep(SETTLE_S)
        try:
            await fleet.learn_committed()
        except Broken as error:
            report.faults.append(Fault("broken", "", "", "", str(error)))
            continue
        report.faults += checker.settle(fleet.committed)


async def _served(clients: Clients, report: Report) -> None:
    """Waits until every client has had a good answer since now."""
    before, give_up = dict(clients.done), time.monotonic() + SERVED_S
    while waiting := [name for name, count in before.items() if clients.done[name] == count]:
        if time.monotonic() > give_up:
            words = f"{len(waiting)} of {clients.clients} clients had no answer in the last {SERVED_S:g} s"
            report.faults.append(Fault("not served", "", "", "", words))
            return
        await asyncio.sleep(0.1)
