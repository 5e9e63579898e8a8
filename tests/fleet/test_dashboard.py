"""The dashboard in a real browser: what happens to a real fleet appears, and the abort button works."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rl_plane.protocol.http_keys import Role
from tests.support.browser import FOREIGN_HOST, chromium
from tests.support.http_calls import CALL_S, post_json
from tests.support.key_files import write_keys
from tests.support.large_fleet import large_fleet
from tests.support.paths import ROOT
from tests.support.started_command import READY_S, Started, eventually
from worker.engines.fake.adapter import make_fake_model

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

SEEN_MS = 30_000
"""Until a change is on the page, on a loaded machine. A hung worker is noticed only after seconds."""
SCREENSHOTS = "RL_PLANE_SCREENSHOTS"
"""With this variable the tests write the screenshots of docs/dashboard.md."""
IMAGES = ROOT / "docs" / "images"
MAX_IMAGE_BYTES = 200_000
LONG_TASK_MS = 1000
KEYS: dict[str, Role] = {"reading-key": "read", "steering-key": "steer", "generating-key": "generate"}
WATCH_TASKS = """
    window.longest = 0;
    new PerformanceObserver((list) => {
      for (const task of list.getEntries()) window.longest = Math.max(window.longest, task.duration);
    }).observe({ type: "longtask", buffered: true });
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


class Fleet:
    """A fleet of `fake` workers that `rl-plane up` has started."""

    def __init__(self, folder: Path, *argv: str) -> None:
        self.root = folder / "weights"
        self.root.mkdir()
        options = ("--weight-root", str(self.root), "--rl-port", "0", "--http-port", "0", *argv)
        self.started = Started(folder, "up", "--engine", "fake", *options)
        self.ready = self.started.line(READY_S, ready="up")
        self.url: str = self.ready["rl_url"]

    def post(self, op: str, body: dict[str, Any], key: str = "") -> dict[str, Any]:
        """The reply, also of a call that fails."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        return post_json(f"{self.url}/v1/rl/{op}", body, headers)

    def update(self, label: str, op: str = "update_weights", key: str = "", **policy: Any) -> dict[str, Any]:
        """Updates the fleet to a model that belongs to this label."""
        directory = make_fake_model(self.root / label, seed=sum(label.encode()))
        transport = {"backend": "filesystem", "path": str(directory)}
        return self.post(op, {"transport": transport, "version": label, "policy": policy}, key)


@pytest.fixture(scope="module")
def fleet(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("fleet"), "--workers", "4", "--expect", "4")
    yield made
    made.started.end()


@pytest.fixture(scope="module")
def locked(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet with a file of keys."""
    folder = tmp_path_factory.mktemp("locked")
    made = Fleet(folder, "--workers", "1", "--keys-file", str(write_keys(folder / "keys.toml", KEYS)))
    yield made
    made.started.end()


@contextmanager
def page_of(
    browser: Any, url: str, allowed: tuple[str, ...] = ("\0",), script: str = "", **options: Any
) -> Iterator[Any]:
    """A page of its own. It must neither fail, nor break its policy, nor call another host. `allowed`: the beginnings
    of lines that the console may have. `script`: runs before the page's own."""
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(SEEN_MS)
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    try:
        page.add_init_script(script)
        page.goto(url + "/")
        yield page
        assert [line for line in said if not line.startswith(allowed)] == []
        assert [one for one in asked if not one.startswith(url + "/")] == []
    finally:
        context.close()


REFUSED = ("Failed to load resource",)
"""The console's line for each reply with an error."""


def seen(page: Any, selector: str, text: str) -> Any:
    """Waits until an element with this text is there."""
    found = page.locator(selector).filter(has_text=text).first
    found.wait_for()
    return found


def entry_of(page: Any, label: str) -> Any:
    """The entry of an update in the history."""
    return page.locator("#history-list li").filter(has=page.get_by_text(label, exact=True))


def test_an_update_a_failed_canary_and_an_aborted_update_appear(browser: Any, fleet: Fleet) -> None:
    with page_of(browser, fleet.url, allowed=REFUSED) as page:
        seen(page, "#link", "live")
        seen(page, "#fact-ready", "4 of 4")
        seen(page, "#update", "No update runs")
        assert "error" not in fleet.update("one")
        seen(page, "#fact-version", "one")
        entry = entry_of(page, "one")
        entry.locator(".outcome.committed").wait_for()
        entry.locator(".stack[aria-label*=commit]").wait_for()
        entry.locator("summary").focus()
        page.keyboard.press("Enter")
        seen(page, "#history-list .details", "4 of 4 without an error")
        seen(page, "#event-list li", "update one committed")

        wrong = {"sequences": [[3, 5, 7]], "expected": [[-0.1, -0.1]]}
        assert fleet.update("two", canary=wrong)["error"]["code"] == "numerics"
        failed = entry_of(page, "two")
        failed.locator(".outcome.aborted").wait_for()
        assert failed.locator(".why").inner_text()
        seen(page, "#problem-list li", "the last update (two) failed")
        page.locator("#canary path.failed").first.wait_for()

        assert fleet.update("three", "prepare_weights_update")["ready"] is True
        seen(page, ".running .waits", "waits for the trainer's next call")
        assert page.locator(".lanes tr").count() == 5
        seen(page, ".lanes tr", "the coordinator's decision")
        page.locator("#abort").focus()
        page.keyboard.press("Enter")
        seen(page, "#confirm", "The trainer's call fails")
        page.keyboard.press("Enter")  # the focus is on the button that changes nothing
        page.locator("#confirm").wait_for(state="hidden")
        assert page.locator(".running").count() == 1
        page.locator("#abort").click()
        page.get_by_role("button", name="Abort the update").click()
        seen(page, "#abort-result", "The update three was aborted")
        seen(page, "#history-list li", "aborted by an operator at the dashboard")
        seen(page, "#update", "No update runs")
        said = fleet.post("complete_weights_update", {})["error"]
        assert said["code"] == "update_aborted"


def test_a_hung_worker_and_a_killed_one_appear(browser: Any, fleet: Fleet) -> None:
    hung, killed = fleet.ready["workers"][:2]
    with page_of(browser, fleet.url, allowed=REFUSED) as page:
        seen(page, "#worker-rows tr", hung["instance_id"])
        os.kill(hung["pid"], signal.SIGSTOP)
        try:
            seen(page, "#problem-list li", hung["instance_id"])
        finally:
            os.kill(hung["pid"], signal.SIGCONT)
        seen(page, "#worker-rows tr", hung["instance_id"])
        os.kill(killed["pid"], signal.SIGKILL)
        seen(page, "#other-list li", killed["instance_id"])
        seen(page, "#problem-list li", f"worker {killed['instance_id']} left")
        seen(page, "#problem-list li .fix", "Start it again")
        seen(page, "#fact-ready", "3 of 4")
        page.locator("#worker-rows tr").filter(has_text=killed["instance_id"]).wait_for(state="detached")


def test_the_page_shows_each_component_that_the_frontend_serves(browser: Any, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "--workers", "1", "--component", "policy", "--also-serve", "reference")
    try:
        with page_of(browser, fleet.url, allowed=REFUSED) as page:
            seen(page, "h1", "demo.policy")
            seen(page, "#fact-ready", "1 of 1")
            seen(page, "#components a", "reference").click()
            page.wait_for_url("**/?component=reference")
            seen(page, "h1", "reference")
            seen(page, "#problem-list li", "no worker is in the fleet")
            assert "error" not in fleet.update("one")
            seen(page, "#components a", "policy").click()
            seen(page, "#fact-version", "one")
            seen(page, "#event-list li", "update one committed")
    finally:
        fleet.started.end()


def test_wrong_keys_are_refused_in_plain_words_and_a_key_stays_in_its_tab(browser: Any, locked: Fleet) -> None:
    with page_of(browser, locked.url, allowed=REFUSED) as page:
        field = page.get_by_label("Key of this fleet")
        field.wait_for()
        assert page.locator("#fleet").is_hidden()

        def give(key: str) -> None:
            field.fill(key)
            page.keyboard.press("Enter")

        give("no-such-key")
        seen(page, "#refused", "This key was refused: the key is wrong")
        give("kéy ☃")
        seen(page, "#refused", "characters that no key has")
        give("generating-key")
        seen(page, "#refused", "This key may not look: the key 'generate' has the role generate")
        give("reading-key")
        seen(page, "#fact-ready", "1 of 1")
        page.reload()
        seen(page, "#fact-ready", "1 of 1")
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]

        assert locked.update("one", "prepare_weights_update", "steering-key")["ready"] is True
        page.locator("#abort").click()
        page.get_by_role("button", name="Abort the update").click()
        seen(page, "#abort-result", "was not aborted: the key 'read' has the role read. To fix it: use a key with")
        locked.post("abort_weights_update", {}, "steering-key")
        seen(page, "#update", "No update runs")
        page.get_by_role("button", name="Forget the key").click()
        field.wait_for()
        assert page.evaluate("sessionStorage.length") == 0
        give("reading-key")
        seen(page, "#fact-ready", "1 of 1")
        write_keys(locked.root.parent / "keys.toml", {"steering-key": "steer"})  # the owner takes the key out
        seen(page, "#refused", "This key was refused: the key is wrong")
        assert page.locator("#fleet").is_hidden()


def test_a_name_that_its_owner_has_rebound_gets_the_page_and_nothing_else(browser: Any, fleet: Fleet) -> None:
    url = fleet.url.replace("127.0.0.1", FOREIGN_HOST)
    with page_of(browser, url, allowed=REFUSED) as page:
        seen(page, "#link", f"a call to the name '{FOREIGN_HOST}' needs a key")
        assert page.evaluate("fetch('/v1/rl/state').then((answer) => answer.status)") == 401


def test_the_docs_load_nothing_from_elsewhere(browser: Any, fleet: Fleet) -> None:
    with page_of(browser, fleet.url, allowed=REFUSED) as page:
        page.get_by_role("link", name="API").click()
        seen(page, "summary", "/v1/rl/state")


def test_a_narrow_page_does_not_scroll_sideways_and_the_keyboard_reaches_all(browser: Any, fleet: Fleet) -> None:
    with page_of(browser, fleet.url, viewport={"width": 400, "height": 800}) as page:
        seen(page, "#link", "live")
        page.locator("#worker-rows tr").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        reached = set()
        for _ in range(40):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
            outline = "getComputedStyle(document.activeElement).outlineStyle"
            assert page.evaluate(f"document.activeElement === document.body || {outline} !== 'none'")
        assert {"A", "filter", "SUMMARY", "event-list"} <= reached
        for name in ("Workers", "Updates", "Events", "Running update"):
            assert page.locator("section").get_by_role("heading", name=name).count() == 1
        unnamed = "[...document.querySelectorAll('button, input, svg')].filter((one) => one.offsetParent"
        assert page.evaluate(f"{unnamed} && !one.textContent && !one.labels?.length).length") == 0


def test_a_thousand_workers_stay_fluid(browser: Any) -> None:
    with large_fleet(1000) as url, page_of(browser, url, script=WATCH_TASKS) as page:
        seen(page, "#workers-title", "1000")
        seen(page, "#page", "1 to 50 of 1000")
        assert page.locator("#worker-rows tr").count() == 50
        assert page.locator("#worker-rows tr .word.open").count() == 0, "the workers that need a look come first"
        page.get_by_role("button", name="Next").click()
        seen(page, "#page", "51 to 100 of 1000")
        seen(page, ".rest", "960 further workers")
        page.get_by_label("Filter").fill("00000000000003e7")
        page.locator("#worker-rows tr").nth(1).wait_for(state="detached")
        page.get_by_label("Filter").fill("")

        def turn() -> float:
            return float(page.locator(".running .facts").inner_text().partition(" s so far")[0])

        before = turn()
        eventually(lambda: turn() >= before + 5, SEEN_MS / 1000, "the page follows the fleet no more")
        assert page.locator("#event-list li").count() <= 80
        assert page.evaluate("window.longest") < LONG_TASK_MS


# ---- the screenshots of the docs ----


@pytest.mark.skipif(SCREENSHOTS not in os.environ, reason=f"writes docs/images only with {SCREENSHOTS}=1")
def test_each_screenshot_of_the_docs_is_written_and_small(browser: Any, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "--workers", "4", "--expect", "4")
    stop = threading.Event()

    def generate() -> None:
        body = json.dumps({"prompt_token_ids": [5, 6, 7], "max_tokens": 400}).encode()
        request = urllib.request.Request(
            fleet.ready["http_url"] + "/v1/completions", body, {"Content-Type": "application/json"}
        )
        while not stop.is_set():
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=CALL_S) as answer:
                answer.read()  # a call fails while its worker is killed

    threads = [threading.Thread(target=generate) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        with page_of(browser, fleet.url, allowed=REFUSED, viewport={"width": 1280, "height": 900}) as page:
            seen(page, "#link", "live")
            for step in (1, 2, 3):
                fleet.update(f"step_{step}")
                page.wait_for_timeout(7000)  # so that the chart has something to show
            fleet.update("step_4", canary={"sequences": [[3, 5, 7]], "expected": [[-0.1, -0.1]]})
            os.kill(fleet.ready["workers"][0]["pid"], signal.SIGKILL)
            seen(page, "#other-list li", "left")
            fleet.update("step_4b", "prepare_weights_update")
            seen(page, ".lanes tr", "the coordinator's decision")
            page.wait_for_timeout(4000)
            IMAGES.mkdir(exist_ok=True)
            for name, scheme, width in (
                ("light", "light", 1200),
                ("dark", "dark", 1200),
                ("narrow", "light", 400),
            ):
                page.emulate_media(color_scheme=scheme)
                page.set_viewport_size({"width": width, "height": 960 if width == 1200 else 1300})
                file = IMAGES / f"dashboard-{name}.png"
                page.wait_for_timeout(500)
                page.screenshot(path=file)
                assert file.stat().st_size < MAX_IMAGE_BYTES
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        fleet.started.end()
