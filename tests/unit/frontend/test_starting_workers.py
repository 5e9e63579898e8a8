"""Starting workers that the frontend lists: since when, and until when."""

from __future__ import annotations

from typing import Any

from nats.aio.msg import Msg

from frontend.facade.starting_workers import MAX_STARTING, SILENT_S, StartingWorkers
from rl_plane.membership.core import Changed, Member
from rl_plane.protocol.notices import StartNotice
from rl_plane.protocol.subjects import Subjects

FLEET = Subjects("demo", "engine")
ID_A, ID_B = "a" * 16, "b" * 16


class Around:
    """The view and the connection of a frontend, and its clock."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.closed: set[tuple[str, int]] = set()
        self.subjects = FLEET
        self.change: Any = None
        self.starting = StartingWorkers(self, self, lambda: self.now_s)  # type: ignore[arg-type]

    def listen(self, listener: Any) -> Any:
        self.change = listener
        return lambda: None

    async def subscribe(self, subject: str, callback: Any) -> None:
        assert subject == "demo.engine.starting.*"
        self.callback = callback

    def connection_closed(self, identity: tuple[str, int]) -> bool:
        return identity in self.closed

    async def hear(self, instance_id: str, elapsed_s: float, client_id: int = 1) -> None:
        notice = StartNotice(
            engine="fake",
            host="h",
            pid=1,
            phase="loading the model",
            elapsed_s=elapsed_s,
            in_phase_s=elapsed_s / 2,
            server_id="s",
            client_id=client_id,
        )
        await self.callback(Msg(None, FLEET.starting(instance_id), data=notice.encode()))

    def listed(self) -> list[str]:
        return [one["instance_id"] for one in self.starting.now()]


async def test_a_worker_is_listed_until_it_is_silent_its_connection_closes_or_it_joins() -> None:
    around = Around()
    await around.starting.start()
    await around.hear(ID_A, 10.0, 1)
    await around.hear(ID_B, 20.0, 2)
    around.now_s += 2.0
    (longest, other) = around.starting.now()
    assert (longest["instance_id"], longest["elapsed_s"], longest["in_phase_s"]) == (ID_B, 22.0, 12.0)
    assert other["instance_id"] == ID_A
    around.closed.add(("s", 2))
    assert around.listed() == [ID_A]
    await around.hear(ID_B, 1.0, 3)
    assert around.listed() == [ID_A, ID_B], "another process of it has another connection"
    member = Member(ID_B, "i", "s", 4, 1, {})
    around.change(Changed(None, member))
    assert around.listed() == [ID_A]
    around.change(Changed(member, None))
    around.now_s += SILENT_S - 2.0
    assert around.listed() == [ID_A]
    around.now_s += 0.1
    assert around.listed() == []


async def test_the_number_of_listed_workers_is_bounded() -> None:
    around = Around()
    await around.starting.start()
    ids = [f"{number:016x}" for number in range(MAX_STARTING + 1)]
    for number, instance_id in enumerate(ids):
        await around.hear(instance_id, 1.0, number)
    assert around.listed() == ids[:-1]
    around.closed.add(("s", 0))
    await around.hear(ids[-1], 1.0, MAX_STARTING)
    assert around.listed() == ids[1:]
