"""Keys with roles, their file, and HTTPS."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from frontend.frontend_limits import FrontendLimits
from frontend.server import listener_keys
from frontend.server.options import FrontendOptions
from rl_plane.errors import InvalidRequest, PermissionDenied, Unavailable
from rl_plane.fleet.http_client import call_facade
from rl_plane.protocol.http_keys import ROLES, Caller, Role, hash_key, parse_keys_file
from tests.conftest import Plane
from tests.support.frontend_here import started
from tests.support.key_files import write_keys
from tests.support.plain_client import plain_client

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

BOUND_S = 30.0
PAGE = Path(__file__).parents[2] / "docs" / "security-http.md"
BEGIN, END = "<!-- routes by role: begin -->", "<!-- routes by role: end -->"
KEYS: dict[str, Role] = {f"key of {role}": role for role in ROLES}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@asynccontextmanager
async def listeners_of(plane: Plane, **more: Any) -> AsyncIterator[dict[str, Any]]:
    options = FrontendOptions(plane.url, plane.namespace, plane.component, rl_port=0, http_port=0, **more)
    async with started(options) as urls:
        yield urls


async def status_of(http: httpx.AsyncClient, method: str, path: str, key: str | None) -> int:
    """The status of a call that changes nothing: a POST has a body that is no JSON."""
    content = b"[" if method == "POST" else None
    headers = {} if key is None else bearer(key)
    async with http.stream(method, path.replace("{id}", "0" * 16), content=content, headers=headers) as reply:
        return reply.status_code


async def test_each_role_may_call_its_routes_and_no_others(plane: Plane, tmp_path: Path) -> None:
    """Calls every route with every role. The OpenAPI document and docs/security-http.md must say the same."""
    plane.spawn()
    table: dict[tuple[str, str], dict[str, list[str]]] = {}
    async with listeners_of(plane, keys_file=write_keys(tmp_path / "keys.toml", KEYS)) as urls:
        for name, title in (("rl_url", "facade"), ("http_url", "generation")):
            async with plain_client(base_url=urls[name], timeout=BOUND_S) as http:
                if name == "rl_url":
                    ready = await http.get(
                        "/v1/rl/ready", params={"wait_s": BOUND_S}, headers=bearer("key of read")
                    )
                    assert ready.status_code == 200
                document = (await http.get("/openapi.json")).json()
                for path, methods in document["paths"].items():
                    for method, described in methods.items():
                        route, part = f"{method.upper()} {path}", ", ".join(described["tags"])
                        stranger = await status_of(http, method.upper(), path, None)
                        if described.get("security") == []:
                            assert stranger == 200, route
                            table.setdefault(("no key", title), {}).setdefault(part, []).append(route)
                            continue
                        assert stranger == 401, route
                        statuses = {
                            role: await status_of(http, method.upper(), path, key) for key, role in KEYS.items()
                        }
                        allowed = [role for role, status in statuses.items() if status != 403]
                        assert 401 not in statuses.values(), route
                        said = {role for one in described["security"] for role in one["key"]}
                        assert said <= set(allowed), route
                        rows = table.setdefault((", ".join(allowed), title), {})
                        rows.setdefault(part, []).append(route)
    text = PAGE.read_text()
    shown = text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()
    assert shown == rendered(table), f"docs/security-http.md must have:\n{rendered(table)}"


def rendered(table: dict[tuple[str, str], dict[str, list[str]]]) -> str:
    lines = []
    for roles, listener in sorted(table, key=lambda key: (-len(key[0].split(", ")), key)):
        lines += [f"**{roles}**, on the {listener} listener:", ""]
        for part, routes in table[roles, listener].items():
            listed = ", ".join(f"`{one}`" for one in routes).replace(" /", "\0/")  # so that no route is divided
            wrapped = textwrap.wrap(f"- {part}: {listed}", 120, subsequent_indent="  ", break_on_hyphens=False)
            lines += [line.replace("\0", " ") for line in wrapped]
        lines += [""]
    return "\n".join(lines).strip()


async def until(status: int, http: httpx.AsyncClient, key: str) -> None:
    async with asyncio.timeout(BOUND_S):
        while (await http.get("/metrics", headers=bearer(key))).status_code != status:
            continue


async def test_keys_are_changed_without_a_restart(plane: Plane, tmp_path: Path) -> None:
    file = write_keys(tmp_path / "keys.toml", {"old": "read"})
    async with (
        listeners_of(plane, keys_file=file, admin_key="own") as urls,
        plain_client(base_url=urls["rl_url"], timeout=BOUND_S) as http,
    ):
        await until(200, http, "old")
        write_keys(file, {"new": "read"})
        await until(200, http, "new")
        assert (await http.get("/metrics", headers=bearer("old"))).status_code == 401
        file.write_text("no keys")  # a mistake locks no caller out
        file.chmod(0o600)
        await asyncio.sleep(listener_keys.RELOAD_S)
        for key in ("new", "own"):
            assert (await http.get("/metrics", headers=bearer(key))).status_code == 200
        write_keys(file, {"newer": "steer"})
        await until(200, http, "newer")


def test_a_role_that_does_not_suffice_is_named(plane: Plane, tmp_path: Path) -> None:
    async def call() -> None:
        async with listeners_of(plane, keys_file=write_keys(tmp_path / "keys.toml", {"k": "read"})) as urls:
            with pytest.raises(PermissionDenied) as raised:
                await asyncio.to_thread(call_facade, urls["rl_url"], "k", "pause", {}, BOUND_S)
            assert raised.value.facts["fix"] == "use a key with the role steer"

    asyncio.run(call())


async def test_history_and_events_say_whose_key_asked(plane: Plane, tmp_path: Path) -> None:
    plane.spawn()
    file = write_keys(tmp_path / "keys.toml", KEYS)
    async with (
        listeners_of(plane, keys_file=file) as urls,
        plain_client(base_url=urls["rl_url"], timeout=BOUND_S, headers=bearer("key of steer")) as http,
        http.stream("GET", "/v1/rl/events") as stream,
    ):
        lines = stream.aiter_lines()
        await anext(lines)
        assert (await http.get("/v1/rl/ready", params={"wait_s": BOUND_S})).status_code == 200
        refused = await http.post(
            "/v1/rl/update_weights", json={"transport": {"backend": "filesystem", "path": "no"}}
        )
        assert refused.status_code == 400
        transport = {"backend": "filesystem", "path": str(plane.model(1))}
        done = await http.post("/v1/rl/update_weights", json={"transport": transport, "version": "one"})
        assert done.status_code == 200, done.text
        assert (await http.post("/v1/rl/pause", headers=bearer("key of admin"))).status_code == 200
        updates = (await http.get("/v1/rl/updates")).json()["updates"]
        assert [(one["label"], one["asked_by"]) for one in updates if one["label"] == "one"] == [("one", "steer")]
        asked: dict[str, str] = {}
        async with asyncio.timeout(BOUND_S):
            while not {"pause", "finished"} <= asked.keys():
                line = await anext(lines)
                if line.startswith("data: ") and "asked_by" in (event := json.loads(line[6:])):
                    asked[event.get("op") or event["change"]] = event["asked_by"]
    assert asked["update_weights"] == asked["began"] == asked["finished"] == "steer"
    assert asked["pause"] == "admin"


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("", None, "can't read"),
        ("[[key]]", 0o622, "others may write"),
        ("nonsense", 0o600, "is not TOML"),
        ('[[key]]\nid = "a"', 0o600, "key[0] has other fields"),
        ('[[key]]\nid = "a"\nrole = "root"\nsha256 = "' + "0" * 64 + '"', 0o600, "no role 'root'"),
        ('[[key]]\nid = "a b"\nrole = "read"\nsha256 = "' + "0" * 64 + '"', 0o600, "no id of a key"),
        ('[[key]]\nid = "a"\nrole = "read"\nsha256 = "secret"', 0o600, "sha256 is no hash"),
        ('[other]\nid = "a"', 0o600, "more than entries"),
    ],
)
async def test_a_wrong_keys_file_ends_the_start(
    plane: Plane, tmp_path: Path, text: str, mode: int | None, words: str
) -> None:
    file = tmp_path / "keys.toml"
    if mode is not None:
        file.write_text(text)
        file.chmod(mode)
    with pytest.raises(InvalidRequest) as raised:
        async with listeners_of(plane, keys_file=file):
            pass
    assert words in raised.value.message
    assert raised.value.facts["field"].startswith("keys_file")
    assert raised.value.facts["fix"]


def rl_plane(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rl_plane.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)


def test_the_command_makes_keys_and_takes_them_out(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    key = rl_plane("keys", "http-add", file, "trainer-1", "steer").stdout.strip()
    assert key not in file.read_text()
    assert os.stat(file).st_mode & 0o777 == 0o600
    assert parse_keys_file(file.read_bytes()) == {hash_key(key.encode()): Caller("trainer-1", "steer")}
    again = rl_plane("keys", "http-add", file, "trainer-1", "read")
    assert (again.returncode, "use another id" in again.stderr) == (2, True)
    assert rl_plane("keys", "http-remove", file, "unknown").returncode == 1
    assert rl_plane("keys", "http-remove", file, "trainer-1").returncode == 0
    assert parse_keys_file(file.read_bytes()) == {}


class Issuer:
    """A certificate authority, and the files of a listener's certificate."""

    def __init__(self, tmp: Path) -> None:
        self.authority = trustme.CA()
        self.certificate, self.key, self.ca = tmp / "cert.pem", tmp / "key.pem", tmp / "ca.pem"
        self.authority.cert_pem.write_to_path(str(self.ca))
        self.issue()

    def issue(self) -> int:
        """Replaces the files, and returns the certificate's serial number."""
        made = self.authority.issue_cert("127.0.0.1", "localhost")
        for path, pem in ((self.key, made.private_key_pem), (self.certificate, made.cert_chain_pems[0])):
            pem.write_to_path(f"{path}.new")
            os.chmod(f"{path}.new", 0o600)
            os.replace(f"{path}.new", path)
        return int(ssl_serial(made.cert_chain_pems[0].bytes()), 16)

    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.ca))


def ssl_serial(pem: bytes) -> str:
    from cryptography import x509

    return f"{x509.load_pem_x509_certificate(pem).serial_number:x}"


async def served_serial(url: str, context: ssl.SSLContext) -> int:
    _, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port, ssl=context)
    found = writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]
    writer.close()
    return int(found, 16)


async def test_both_listeners_speak_https_and_take_a_new_certificate(plane: Plane, tmp_path: Path) -> None:
    issuer = Issuer(tmp_path)
    trusted = issuer.context()
    files = {"https_cert": issuer.certificate, "https_key": issuer.key}
    limits = FrontendLimits(certificate_reload_s=0.1)
    async with listeners_of(plane, admin_key="k", limits=limits, **files) as urls:
        async with httpx.AsyncClient(verify=trusted, timeout=BOUND_S) as http:
            assert (await http.get(urls["rl_url"] + "/v1/rl/health")).status_code == 200
            assert (await http.get(urls["http_url"] + "/health")).status_code == 200
            with pytest.raises(httpx.TransportError):
                await http.get(urls["rl_url"].replace("https", "http") + "/v1/rl/health")
            serial = issuer.issue()
            async with asyncio.timeout(BOUND_S):
                while await served_serial(urls["rl_url"], trusted) != serial:
                    continue
        with pytest.raises(Unavailable, match="no certificate that is trusted here") as raised:
            await asyncio.to_thread(call_facade, urls["rl_url"], "k", "state", {}, BOUND_S)
        assert "SSL_CERT_FILE" in raised.value.facts["fix"]


async def test_a_tls_handshake_that_does_not_begin_ends(plane: Plane, tmp_path: Path) -> None:
    issuer = Issuer(tmp_path)
    files = {"https_cert": issuer.certificate, "https_key": issuer.key}
    async with listeners_of(plane, admin_key="k", limits=FrontendLimits(head_timeout_s=0.2), **files) as urls:
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(urls["rl_url"]).port)
        async with asyncio.timeout(BOUND_S):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(
    ("broken", "field"),
    [("missing", "https_key"), ("readable", "https_key"), ("other", "https_cert"), ("alone", "https_key")],
)
async def test_a_wrong_certificate_ends_the_start(plane: Plane, tmp_path: Path, broken: str, field: str) -> None:
    issuer = Issuer(tmp_path)
    key: Path | None = issuer.key
    if broken == "missing":
        issuer.key.unlink()
    elif broken == "readable":
        issuer.key.chmod(0o644)
    elif broken == "other":
        trustme.CA().issue_cert("localhost").private_key_pem.write_to_path(str(issuer.key))
        issuer.key.chmod(0o600)
    else:
        key = None
    with pytest.raises(InvalidRequest) as raised:
        async with listeners_of(plane, https_cert=issuer.certificate, https_key=key):
            pass
    assert raised.value.facts["field"] == field
    assert raised.value.facts["fix"]
