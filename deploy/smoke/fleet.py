"""The two HTTP listeners of a frontend, as the smoke test calls them."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from deploy.smoke.checks import SmokeFailed, expect

CALL_S = 60.0
"""The bound of one HTTP call, and of each read of a stream. An update of the tiny model takes a second."""
POLL_S = 1.0
LAST_CALL_S = 5.0
"""No call of a wait begins later than this before the end, so that the reason is the fleet's and not a time-out."""

Json = dict[str, Any]


class Fleet:
    """Calls a frontend. No call outlives `give_up`, a time of `time.monotonic`."""

    def __init__(
        self, rl_url: str, http_url: str, admin_key: str, api_key: str, workers: int, give_up: float
    ) -> None:
        self.rl_url, self.http_url, self.admin_key = rl_url, http_url, admin_key
        self.workers = workers
        """The number of workers that the fleet must have."""
        self._keys = {rl_url: admin_key, http_url: api_key}
        self._give_up = give_up
        # No proxy stands before the frontend, whatever http_proxy says.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def open(self, base: str, path: str, body: Mapping[str, Any] | None, with_key: bool = True) -> Any:
        """Sends POST with a body, else GET, and returns the response. OSError when no frontend answers."""
        left = self._give_up - time.monotonic()
        if left <= 0:
            raise SmokeFailed(f"the time is over, before {path}")
        headers = {"Content-Type": "application/json"}
        if with_key:
            headers["Authorization"] = f"Bearer {self._keys[base]}"
        data = None if body is None else json.dumps(body).encode()
        return self._opener.open(urllib.request.Request(base + path, data, headers), timeout=min(CALL_S, left))

    def call(
        self, base: str, path: str, body: Mapping[str, Any] | None = None, with_key: bool = True
    ) -> tuple[int, Json]:
        """Returns the status and the reply."""
        try:
            with self.open(base, path, body, with_key) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def rl(self, op: str, body: Mapping[str, Any] | None = None, status: int = 200) -> Json:
        """Runs an op of the facade, which must answer this status."""
        got, reply = self.call(self.rl_url, f"/v1/rl/{op}", body)
        expect(got == status, f"HTTP {status} from {op}", f"HTTP {got} {json.dumps(reply)}")
        return reply

    def members(self) -> dict[str, str]:
        """Returns the incarnation of each worker in the fleet, by its instance id."""
        rows = self.rl("workers?min_workers=0")["workers"]
        return {row["instance_id"]: row["incarnation"] for row in rows}

    def wait_members(self) -> None:
        """Waits until all workers are in the fleet, open or closed."""
        self._wait(f"workers?min_workers={self.workers}&wait_s=1")

    def wait_ready(self) -> None:
        """Waits until all workers are open and serve the committed version."""
        self._wait(f"ready?min_workers={self.workers}&wait_s=1")
        expect(len(self.members()) == self.workers, f"{self.workers} workers", sorted(self.members()))

    def _wait(self, query: str) -> None:
        seen: object = "no frontend answered"
        while True:
            try:
                status, reply = self.call(self.rl_url, f"/v1/rl/{query}")
                if status == 200:
                    return
                expect(status == 503, f"HTTP 200 or 503 from {query}", f"HTTP {status} {json.dumps(reply)}")
                seen = reply["error"]["message"]
            except (OSError, http.client.HTTPException) as error:
                seen = error
            if time.monotonic() + LAST_CALL_S > self._give_up:
                raise SmokeFailed(f"the fleet did not come to {self.workers} workers in time: {seen}")
            time.sleep(POLL_S)

    def check_version(self, version: Json) -> None:
        """Checks that all workers are open and serve this version of the base."""
        self.wait_ready()
        reply = self.rl("weight_version")
        expect(reply["version"] == version, f"the committed version {version}", reply["version"])
        rows = self.rl("state")["workers"]
        held = [row["version"] for row in rows]
        expect(held == [version] * self.workers, f"{version} on {self.workers} workers", rows)

    def refuse_strangers(self) -> None:
        for base, path in ((self.rl_url, "/v1/rl/state"), (self.http_url, "/v1/models")):
            status, reply = self.call(base, path, with_key=False)
            expect(status == 401, f"HTTP 401 from {path} without a key", f"HTTP {status} {json.dumps(reply)}")
