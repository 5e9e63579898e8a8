"""The metrics of a real frontend and a real worker; the docs, the dashboard and the alerts that name them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import pytest_asyncio
import yaml

from frontend.server.options import FrontendOptions
from rl_plane.bus.lock import hold_lock
from rl_plane.protocol.http_keys import Role
from rl_plane.protocol.subjects import Subjects
from tests.conftest import Plane
from tests.support.frontend_here import started
from tests.support.key_files import write_keys
from tests.support.metrics_pages import families, metrics_url, samples, values
from tests.support.paths import ROOT
from tests.support.plain_client import plain_client
from tests.support.promql import parse

BOUND_S = 30.0
PAGE = ROOT / "docs" / "metrics.md"
ALERTS = ROOT / "deploy" / "alerts.yml"
DASHBOARD = ROOT / "deploy" / "grafana-dashboard.json"
OF_PROMETHEUS = {"up": set[str]()}
"""Metrics that Prometheus makes itself."""
TARGET_LABELS = {"job", "instance", "fleet"}
"""Labels that Prometheus adds to each series. The scrape configuration of docs/metrics.md sets `fleet`."""


class Pages(NamedTuple):
    frontend: str
    worker: str


async def page(http: httpx.AsyncClient, url: str) -> str:
    reply = await http.get(url)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    return reply.text


@pytest.fixture(scope="module")
def seen() -> list[Pages]:
    """The pages that the first test made, for all tests."""
    return []


@pytest_asyncio.fixture
async def pages(plane: Plane, seen: list[Pages]) -> Pages:
    if not seen:
        seen.append(await pages_after_a_life(plane))
    return seen[0]


async def pages_after_a_life(plane: Plane) -> Pages:
    """The pages after a life in which every kind of event has happened."""
    one, other = plane.spawn(metrics={"metrics_port": 0}, token_delay_s=0.005), plane.spawn(token_delay_s=0.005)
    options = FrontendOptions(plane.url, plane.namespace, plane.component, rl_port=0, http_port=0)
    async with started(options) as urls, plain_client(base_url=urls["rl_url"], timeout=BOUND_S) as http:
        assert (await http.get("/v1/rl/ready", params={"wait_s": BOUND_S, "min_workers": 2})).status_code == 200
        body = {"prompt_token_ids": [5, 6, 7], "max_tokens": 40}
        for stream in (False, True):
            reply = await http.post(urls["http_url"] + "/v1/completions", json={**body, "stream": stream})
            assert reply.status_code == 200, reply.text
        for path, status in ((plane.model(1), 200), (plane.tmp / "nothing", 400)):
            transport = {"backend": "filesystem", "path": str(path)}
            done = await http.post("/v1/rl/update_weights", json={"transport": transport})
            assert done.status_code == status, done.text
        prepared = await http.post(
            "/v1/rl/prepare_weights_update",
            json={"transport": {"backend": "filesystem", "path": str(plane.model(2))}},
        )
        assert prepared.status_code == 200, prepared.text
        assert (await http.post("/v1/rl/pause", json={"lease_s": 500})).status_code == 200
        other.kill()

        async def settled() -> Pages | None:
            found = Pages(await page(http, "/metrics"), await page(http, metrics_url(one)))
            shown, own = values(found.frontend, plane.component), values(found.worker)
            true = (
                sum(value for key, value in shown.items() if key.startswith("rl_plane_workers_left_total")) == 1
                and shown['rl_plane_workers{state="paused"}'] == 1
                and shown["rl_plane_update_seconds_count" + '{outcome="committed",transport="filesystem"}'] == 1
                and shown["rl_plane_lock_held_seconds"] == 0
                and own["rl_plane_worker_staged_bytes"] > 0
            )
            return found if true else None

        found: Pages = await plane.until(settled)
        return found


async def test_the_metrics_pages_show_what_has_happened(pages: Pages) -> None:
    shown, own = values(pages.frontend, "engine"), values(pages.worker)
    nbytes = shown['rl_plane_update_received_bytes_total{transport="filesystem"}']
    assert nbytes > 0
    assert (
        own['rl_plane_worker_received_bytes_total{transport="filesystem"}'] == nbytes
    )  # two updates of one worker
    assert own["rl_plane_worker_staged_bytes"] == nbytes / 2
    assert shown['rl_plane_updates_total{outcome="committed",transport="filesystem"}'] == 1
    assert shown['rl_plane_workers_left_total{reason="connection"}'] == 1
    assert (shown["rl_plane_committed_sequence"], own["rl_plane_worker_sequence"]) == (1, 1)
    assert (shown["rl_plane_paused"], own["rl_plane_worker_paused"]) == (1, 1)
    assert 0 < shown["rl_plane_pause_lease_left_seconds"] <= 500
    assert 0 < own["rl_plane_worker_pause_lease_left_seconds"] <= 500
    assert (shown["rl_plane_nats_connected"], own["rl_plane_worker_nats_connected"]) == (1, 1)
    assert shown["rl_plane_generation_tokens_total"] == 80
    assert shown["rl_plane_generation_first_token_seconds_count"] == 2
    assert 0 < shown["rl_plane_generation_token_gap_seconds_count"] <= 78  # tokens of a first message have no gap
    assert shown['rl_plane_generation_version_lag_bucket{le="0.0"}'] == 2
    assert shown['rl_plane_calls_total{op="update_weights",outcome="ok"}'] == 1
    assert own['rl_plane_worker_ops_total{op="commit_update",outcome="ok"}'] == 1
    assert own["rl_plane_worker_open"] == 1
    assert shown["rl_plane_canary_difference_count"] == 1
    for found in (shown, own):
        assert found["process_resident_memory_bytes"] > 1e6


async def test_the_metrics_show_the_holder_of_the_lock_and_a_kept_copy(plane: Plane) -> None:
    worker = plane.spawn(metrics={"metrics_port": 0})
    client = await plane.client("trainer")
    options = FrontendOptions(plane.url, plane.namespace, plane.component, rl_port=0, http_port=None)
    async with started(options) as urls, plain_client(base_url=urls["rl_url"], timeout=BOUND_S) as http:
        assert (await http.get("/v1/rl/ready", params={"wait_s": BOUND_S})).status_code == 200
        body = {
            "transport": {"backend": "filesystem", "path": str(plane.model(1))},
            "policy": {"keep_staged": True},
        }
        done = await http.post("/v1/rl/update_weights", json=body)
        assert done.status_code == 200, done.text
        url = metrics_url(worker)

        async def kept() -> bool:
            own = values(await page(http, url))
            received = own['rl_plane_worker_received_bytes_total{transport="filesystem"}']
            return 0 < own["rl_plane_worker_kept_bytes"] == received

        await plane.until(kept)

        async def held() -> dict[str, float]:
            shown = values(await page(http, "/metrics"), plane.component)
            assert (shown["rl_plane_lock_held_seconds"] > 0) == (shown['rl_plane_lock_held{by="client"}'] == 1)
            return {key: value for key, value in shown.items() if key.startswith("rl_plane_lock_held{") and value}

        async def free() -> bool:
            return await held() == {}

        async def clients() -> bool:
            return await held() == {'rl_plane_lock_held{by="client"}': 1}

        await plane.until(free)
        state = Subjects(plane.namespace, plane.component).state
        async with hold_lock(client.bus, state, "trainer", died=lambda connection: False):
            await plane.until(clients)
        await plane.until(free)


# ---- the docs ----


def rows(name: str) -> list[list[str]]:
    """The cells of a table of docs/metrics.md, without its two heading lines."""
    text = PAGE.read_text()
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    table = text[text.index(begin) + len(begin) : text.index(end)].strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def documented(name: str) -> dict[str, tuple[str, set[str]]]:
    return {row[0].strip("`"): (row[1], set(re.findall(r"`(\w+)`", row[2]))) for row in rows(name)}


def shown_families(text: str) -> dict[str, tuple[str, set[str]]]:
    """The page's own families. Each must have a series, or its labels would be unknown."""
    found = {name: one for name, one in families(text).items() if name.startswith("rl_plane_")}
    with_series = {re.sub(r"_(bucket|sum|count)$", "", sample.name) for sample in samples(text)}
    assert not found.keys() - with_series - {sample.name for sample in samples(text)}
    return found


async def test_the_docs_list_each_metric_with_its_labels(pages: Pages) -> None:
    assert shown_families(pages.frontend) == documented("metrics of a frontend")
    assert shown_families(pages.worker) == documented("metrics of a worker")


def test_the_docs_say_what_to_do_at_each_alert() -> None:
    assert [row[0].strip("`") for row in rows("alerts")] == [rule["alert"] for rule in alert_rules()]


# ---- the alerts and the dashboard ----


def alert_rules() -> list[dict[str, str]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    for rule in alert_rules():
        yield rule["alert"], rule["expr"]
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


async def test_alerts_and_dashboard_name_metrics_and_labels_that_exist(pages: Pages) -> None:
    known: dict[str, set[str]] = dict(OF_PROMETHEUS)
    label_values: dict[tuple[str, str], set[str]] = {}
    counters: set[str] = set()
    checked: set[str] = set()
    for text in pages:
        for name, (kind, labels) in families(text).items():
            known[name] = labels
            if kind == "histogram":
                for part in ("_bucket", "_sum", "_count"):
                    known[name + part] = labels | ({"le"} if part == "_bucket" else set())
                    counters.add(name + part)
            elif kind == "counter":
                counters.add(name)
        for sample in samples(text):
            for label, value in sample.labels.items():
                label_values.setdefault((sample.name, label), set()).add(value)
    for where, text in expressions():
        parsed = parse(text)
        for one in parsed.selectors:
            assert one.metric in known, f"{where}: there is no metric {one.metric}"
            assert one.has_range == (one.metric in counters), f"{where}: rate is for counters: {one.metric}"
            for label, words in one.matchers.items():
                assert label in known[one.metric] | TARGET_LABELS, f"{where}: {one.metric} has no label {label}"
                if label in TARGET_LABELS or words == [f"${label}"]:  # a variable of Grafana
                    continue
                for word in words:
                    found = label_values[one.metric, label]
                    assert word in found or one.metric in LATE, f"{where}: no {label} of {one.metric} is {word}"
            checked.add(one.metric)
        shared = {label for one in parsed.selectors for label in known[one.metric]} | TARGET_LABELS
        assert parsed.groupings <= shared, f"{where}: it groups by {parsed.groupings - shared}"
    assert len(checked) > 30


LATE = {
    "rl_plane_update_seconds_bucket",
    "rl_plane_calls_total",
    "rl_plane_worker_ops_total",
}
"""Metrics whose series come with the first event of their kind."""


async def test_alerts_use_only_labels_that_their_expression_keeps(pages: Pages) -> None:
    for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]:
        parsed = parse(rule["expr"])
        used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        kept = parsed.groupings or TARGET_LABELS
        assert used <= kept, rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_a_worker_that_loads_its_engine_raises_no_alert_of_a_frontend() -> None:
    expressions = {rule["alert"]: rule["expr"] for rule in alert_rules()}
    jobs = [one["job_name"] for one in scrape_configs()]
    targets = {"RlPlaneTargetDown": ["rl-plane-frontend"], "RlPlaneWorkerTargetDown": ["rl-plane-worker"]}
    for name, wanted in targets.items():
        matched = re.findall(r'job(=~|!~)"(.*?)"', expressions[name])
        found = [job for job in jobs if all((op == "=~") == bool(re.fullmatch(of, job)) for op, of in matched)]
        assert found == wanted, name


def test_the_alert_of_two_protocols_tells_the_fleets_apart_that_the_docs_label() -> None:
    (rule,) = [rule for rule in alert_rules() if rule["alert"] == "RlPlaneProtocolsDiffer"]
    assert parse(rule["expr"]).groupings == {"fleet", "protocol"}
    fleets = {target["labels"]["fleet"] for one in scrape_configs() for target in one["static_configs"]}
    assert len(fleets) == 1


def scrape_configs() -> list[dict[str, Any]]:
    """The scrape configuration of docs/metrics.md."""
    found = re.search(r"```yaml\n(rule_files.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    configs: list[dict[str, Any]] = yaml.safe_load(found[1])["scrape_configs"]
    return configs


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_takes_the_alerts() -> None:
    subprocess.run(["promtool", "check", "rules", ALERTS], check=True, timeout=BOUND_S)


def test_each_panel_of_the_dashboard_has_its_place() -> None:
    taken: set[tuple[int, int]] = set()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


# ---- who may read ----


async def test_a_frontends_metrics_take_a_read_key_alone(plane: Plane, tmp_path: Path) -> None:
    keys: dict[str, Role] = {"scraper": "read", "user": "generate"}
    file = write_keys(tmp_path / "keys.toml", keys)
    options = FrontendOptions(
        plane.url, plane.namespace, plane.component, rl_port=0, http_port=None, keys_file=file
    )
    async with started(options) as urls, plain_client(base_url=urls["rl_url"], timeout=BOUND_S) as http:
        statuses = {
            key: (await http.get("/metrics", headers={"Authorization": f"Bearer {key}"})).status_code
            for key in ("scraper", "user", "stranger")
        }
        assert statuses == {"scraper": 200, "user": 403, "stranger": 401}
        assert (await http.get("/metrics")).status_code == 401
        paused = await http.post("/v1/rl/pause", headers={"Authorization": "Bearer scraper"})
        assert paused.status_code == 403


async def test_a_workers_metrics_need_its_key(plane: Plane) -> None:
    is_open = plane.spawn(ready=False, metrics={"metrics_port": 0})
    locked = plane.spawn(metrics={"metrics_port": 0, "metrics_key": "secret"})
    async with plain_client(timeout=BOUND_S) as http:
        for worker, headers, status in (
            (is_open.wait_ready(), {}, 200),
            (is_open, {"Host": "localhost:9102"}, 200),
            (is_open, {"Host": "evil.example:9102"}, 401),
            (locked, {}, 401),
            (locked, {"Authorization": "Bearer other"}, 401),
            (locked, {"Authorization": "Bearer secret"}, 200),
        ):
            reply = await http.get(metrics_url(worker), headers=headers)
            assert reply.status_code == status, (headers, reply.text)
            if worker is locked and status == 401:
                assert "Authorization: Bearer" in reply.text
        root = metrics_url(is_open).removesuffix("metrics")
        assert (await http.get(root)).status_code == 404
        assert (await http.post(root + "metrics")).status_code == 405
