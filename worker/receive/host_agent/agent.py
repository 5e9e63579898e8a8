"""The methods of the host agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_plane._util.tasks import Cancelled
from rl_plane.errors import EngineFailed
from rl_plane.protocol.update_requests import ReceiveRequest
from rl_plane.transports.base import TransportContext
from worker.receive.host_agent.areas import passed
from worker.receive.host_agent.holder import HostHolder, HostStaged
from worker.receive.host_agent.windows import WINDOW_BYTES
from worker.receive.lacking_transports import LACKING
from worker.receive.rank_agents.agent_messages import WithDescriptor
from worker.receive.rank_agents.agent_server import Method
from worker.receive.rank_agents.model_description import ModelDescription
from worker.receive.received_bytes import ReceivedBytes
from worker.receive.weight_receiver import Receiver, load_transports


class HostAgent:
    """Receives for the ranks whose sockets are in `directory`. `begin` comes first, when the ranks have described their
    model."""

    def __init__(self, directory: Path, window_bytes: int = WINDOW_BYTES) -> None:
        """`window_bytes`: of the windows by which an update in place goes to the ranks."""
        self._directory = directory
        self._window_bytes = window_bytes
        self._holder: HostHolder | None = None
        self._receiver: Receiver | None = None
        self._ranks = 0
        self._first = 0

    def methods(self) -> dict[str, Method]:
        return {
            "ping": lambda body, cancelled: None,
            "begin": self._begin,
            "offer": lambda body, cancelled: self.receiver.offer(body["adapters"]),
            "relay_addresses": lambda body, cancelled: self.receiver.relay_addresses(),
            "open": lambda body, cancelled: self.receiver.open(
                body["staging"], ReceiveRequest.model_validate(body["request"]), body["limits"]
            ),
            "receive": lambda body, cancelled: self.receiver.receive(body["staging"], cancelled),
            "receive_part": lambda body, cancelled: self.receiver.receive_part(
                body["staging"], body["part"], cancelled
            ),
            "take": self._take,
            "loaded": lambda body, cancelled: self.receiver.loaded(body["staging"]),
            "discard": lambda body, cancelled: self.receiver.discard(body["staging"]),
            "cached_digest": lambda body, cancelled: self.receiver.cached_digest(),
            "init_transport": self._init_transport,
            "destroy_transport": lambda body, cancelled: self.receiver.destroy_transport(
                body["backend"], body["group"]
            ),
            "area": self._area,
            "window": self._window,
        }

    @property
    def receiver(self) -> Receiver:
        if self._receiver is None:
            raise EngineFailed("the host agent does not know the model yet")
        return self._receiver

    @property
    def _host_number(self) -> int:
        """The number of this host among those of the engine. Each has as many ranks."""
        return self._first // self._ranks

    def _begin(self, body: Mapping[str, Any], cancelled: Cancelled) -> dict[str, Any]:
        model = ModelDescription.from_wire(body["model"])
        context = replace(TransportContext.from_wire(body["places"]), rank_devices=model.devices)
        self._ranks, self._first = model.ranks, model.first
        self._holder = HostHolder(self._directory, model, self._window_bytes)
        transports = load_transports(context, model.devices[0])
        received = ReceivedBytes.shared(self._directory)
        self._receiver = Receiver(
            self._holder, transports, shared=True, received=received, host_number=self._host_number
        )
        return {"transports": list(self._receiver.backends), "lacking": LACKING}

    def _take(self, body: Mapping[str, Any], cancelled: Cancelled) -> None:
        """Gives what is staged to the ranks, which have mapped it. Memory that is not kept is used again after
        `loaded`, or freed when no rank maps it."""
        self.receiver.take(body["staging"])

    def _area(self, body: Mapping[str, Any], cancelled: Cancelled) -> WithDescriptor:
        staged, area = self.receiver.staged_area(body["staging"])
        assert isinstance(staged, HostStaged), "the holder's own"
        config = None if staged.config is None else dict(staged.config)
        return passed(area, config=config)

    def _window(self, body: Mapping[str, Any], cancelled: Cancelled) -> WithDescriptor | dict[str, Any]:
        windows = None if self._holder is None else self._holder.windows
        if windows is None:
            raise EngineFailed("no update in place is under way")
        return windows.ask(body["rank"] - self._first, body["number"], cancelled)

    def _init_transport(self, body: Mapping[str, Any], cancelled: Cancelled) -> None:
        place: dict[str, Any] = {}
        if isinstance(offset := body.get("rank_offset"), int):  # of the worker, whose hosts follow one another
            if body.get("form") == "torch":
                # A trainer that has formed a group by itself waits for all ranks: the host agent joins in place of
                # each rank of this host.
                place = {"rank_offset": offset + self._first, "members": self._ranks}
            else:
                place = {"rank_offset": offset + self._host_number}
        self.receiver.init_transport({**body, **place})
