"""Updates of tiny weights, beside the raw scatter-gathers that their phases need.

What is left of an update when the weights weigh nothing is control: six scatter-gathers to all workers (report_record,
prepare_update, follow_record, commit_update, follow_record, state), the decision's and the history's writes, and the
work of the workers. The raw ones send as many bytes to as many plain subscribers, and get as many back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from nats.aio.client import Client

from bench.fanout import JOIN_TIMEOUT_S, RawGather, per_process, time_rounds
from bench.peers import SIZE_DIGITS, peers, start_peer
from rl_plane.bus.scatter import Answer, Gather, Heard, Scatter
from rl_plane.client import RlClient
from rl_plane.membership.view import PING

GATE_TIMEOUT_S = 30.0
"""The bound of a call: a slow answer is a measurement, silence is not."""
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class CommitTimes:
    """Seconds of every round, in the order of the rounds."""

    workers: int
    gathers: int
    """Scatter-gathers of an update."""
    seconds: dict[str, list[float]]
    """`update`: the whole call. `raw`: the scatter-gathers."""
    excluded: int
    """The number of workers that updates excluded, in all rounds. They show that the machine was busy."""


@dataclass(slots=True)
class Sizes:
    """The bytes of one scatter-gather."""

    targets: int
    request: int
    reply: int


@contextmanager
def recorded(client: RlClient) -> Iterator[list[Sizes]]:
    """The scatter-gathers of this client meanwhile."""
    found: list[Sizes] = []
    gather: Gather = client._gather
    scatter = gather.scatter

    async def recording(
        targets: Sequence[tuple[str, bytes]],
        heard: Heard | None = None,
        headers: dict[str, str] | None = None,
    ) -> Scatter:
        started = await scatter(targets, heard, headers)
        if targets and targets[0][1] != PING:  # a sweep is no part of an update
            sizes = Sizes(len(targets), len(targets[0][1]), 0)
            found.append(sizes)
            take = started.answer

            def answered(index: int, answer: Answer) -> None:
                sizes.reply = max(sizes.reply, len(answer) if isinstance(answer, bytes) else 0)
                take(index, answer)

            started.answer = answered  # type: ignore[method-assign]
        return started

    gather.scatter = recording  # type: ignore[method-assign]
    try:
        yield found
    finally:
        gather.scatter = scatter  # type: ignore[method-assign]


class Updater:
    """Updates a fleet to one model, then to the other, and so on."""

    def __init__(self, client: RlClient, models: Sequence[Path]) -> None:
        self._client = client
        self._models = models
        self._count = 0

    async def update(self) -> int:
        """The number of workers that it excluded."""
        self._count += 1
        path = str(self._models[self._count % len(self._models)])
        body = {
            "transport": {"backend": "filesystem", "path": path},
            "policy": {"gate_timeout_s": GATE_TIMEOUT_S},
        }
        return len((await self._client.run("update_weights", body))["excluded"])


@asynccontextmanager
async def _raw(nats_url: str, subjects: list[str], sizes: Sequence[Sizes]) -> AsyncIterator[list[RawGather]]:
    connection = Client()
    await connection.connect(nats_url)
    try:
        gathers = []
        for size in sizes:
            payload = f"{size.reply:0{SIZE_DIGITS}}".ljust(size.request).encode()
            gathers.append(RawGather(connection, subjects, payload))
            await gathers[-1].start()
        yield gathers
    finally:
        await connection.close()


async def measure_commits(nats_url: str, models: Sequence[Path], workers: int, rounds: int) -> CommitTimes:
    namespace = f"commits{workers}"
    with ExitStack() as stack:
        fleet = [
            start_peer(
                "workers",
                nats_url=nats_url,
                namespace=namespace,
                model=str(models[0]),
                copies=count,
                weight_roots=[str(models[0].parent)],
            )
            for count in per_process(workers)
        ]
        stack.enter_context(peers(fleet))
        plain = [
            start_peer("subscribers", nats_url=nats_url, prefix=f"{namespace}.plain0.rl", copies=count)
            for count in per_process(workers)
        ]
        ready = stack.enter_context(peers(plain))
        subjects = [subject for peer in ready for subject in peer.said["subjects"]]
        async with await RlClient.connect(nats_url, namespace) as client:
            await client.wait_for(workers, JOIN_TIMEOUT_S)
            updater = Updater(client, models)
            await updater.update()
            with recorded(client) as sizes:
                await updater.update()
            async with _raw(nats_url, subjects, sizes) as raw:

                async def ask_raw() -> int:
                    return sum([await gather.ask_all() for gather in raw])

                ways = {"raw": ask_raw, "update": updater.update}
                seconds, missing = await time_rounds(ways, rounds, WARM_UP)
                return CommitTimes(workers, len(raw), seconds, missing["update"])
