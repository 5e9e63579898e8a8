"""The dashboard's files: each is served to everybody, and the page runs and loads nothing but them."""

from __future__ import annotations

import re
import tomllib

import httpx
import pytest

from frontend.dashboard import FILES, add_dashboard
from frontend.server.api import Api
from frontend.server.listener_keys import Keys
from rl_plane.protocol.http_keys import Caller
from tests.support.paths import ROOT

FOLDER = ROOT / "frontend" / "dashboard"
KEYS = Keys(("a-key", Caller("admin_key", "admin")))


def listener(keys: Keys) -> httpx.AsyncClient:
    api = Api("a facade", keys)
    add_dashboard(api)
    return httpx.AsyncClient(transport=httpx.ASGITransport(api.app()), base_url="http://127.0.0.1:8002")


@pytest.mark.parametrize("keys", [Keys(), KEYS], ids=["no keys", "keys"])
async def test_each_file_is_served_without_a_key_under_a_strict_policy(keys: Keys) -> None:
    async with listener(keys) as http:
        for path, (name, media_type) in FILES.items():
            answer = await http.get(path)
            assert answer.status_code == 200, path
            assert answer.content == (FOLDER / name).read_bytes()
            assert answer.headers["content-type"].startswith(media_type)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"


async def test_the_page_is_no_route_of_the_document_and_opens_no_other_path() -> None:
    async with listener(KEYS) as http:
        assert not set(FILES) & set((await http.get("/openapi.json")).json()["paths"])
        for path in ("/dashboard", "/dashboard/", "/dashboard/__init__.py", "/dashboard/../main.py"):
            assert (await http.get(path)).status_code == 401, path
        assert (await http.post("/")).status_code == 405


def test_every_file_is_served_and_comes_with_the_package() -> None:
    names = {path.name for path in FOLDER.iterdir() if path.suffix not in (".py", ".pyc") and path.is_file()}
    assert names == {name for name, _ in FILES.values()}
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    assert {f"*{(FOLDER / name).suffix}" for name in names} <= set(patterns)


def test_the_page_has_no_script_and_no_style_of_its_own_and_names_no_other_host() -> None:
    page = (FOLDER / "dashboard.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", page)
    for path in FOLDER.iterdir():
        if path.suffix in (".html", ".css", ".js"):
            text = path.read_text().replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"https?://|@import|url\(", text), path.name
            assert not re.search(r"innerHTML\s*=|outerHTML|insertAdjacentHTML|eval\(|new Function", text), (
                path.name
            )
