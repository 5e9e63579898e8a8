"""Runs every command in the docs: the blocks of each page in their order, in a new folder, with a fleet of its own.

A fenced block's tags say how. `sh` and `python` run to their end and must succeed. `sh background` runs until the end
of the page. `sh gpu` and `sh container` need what CI machines lack. Blocks of other languages are not commands.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

FLEET_UP_S = 90.0
"""Two torch processes start side by side on two cores."""
BLOCK_S = 120.0

NEEDS_MORE = {"gpu", "container"}
RUN_ELSEWHERE = {
    "make demo": "tests/docs/test_demo_run.py runs it",
    ".venv/bin/rl-plane demo --engine vllm": "tests/docs/test_demo_run.py runs a short one",
    ".venv/bin/rl-plane demo --engine sglang": "tests/docs/test_demo_run.py runs a short one",
    "make test": "it is the run that this test is a part of",
    "make test-fast": "it is a part of make test",
    "make setup": "make test begins with it",
    "make engines": "make test begins with it",
    "make test-docs": "these tests are that run",
    "make test-kills": "its tests are marked `kills`",
    "make test-bench": "its tests are marked `bench`",
    ".venv/bin/pip install ./examples/echo_engine": "tests/engines/test_third_party_engine.py installs it",
    ".venv/bin/rl-plane worker --engine echo --model /tmp/echo-model": (
        "tests/engines/test_third_party_engine.py runs it"
    ),
    ".venv/bin/pip install ./examples/plain_http_transport": (
        "tests/transports/test_third_party_transport.py installs it"
    ),
    ".venv/bin/rl-plane publish ./checkpoint --transport plain_http": "test_third_party_transport.py publishes so",
    "make bench": "tests/docs/test_bench_quick.py runs a short one",
}

ENGINES_OF = {
    "test_engine_generation": {"sglang", "vllm"},
    "test_engine_updates": {"sglang", "vllm"},
    "test_hf_generation": {"hf"},
    "test_hf_updates": {"hf"},
    "test_mixed_fleet": {"hf", "sglang", "vllm"},
    "test_structured_output": {"sglang", "vllm"},
    "test_two_ranks": {"sglang", "vllm"},
}
"""Test module → the engines that its tests run."""


class Block(NamedTuple):
    page: str
    line: int
    language: str
    tags: frozenset[str]
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in re.finditer(r"^```(\w+)([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start()) + 1
        tags = frozenset(match[2].split())
        found.append(Block(str(page.relative_to(ROOT)), line, match[1], tags, match[3]))
    return found


ROOMS = ("bench", "frontend", "rl_plane/commit", "worker")
"""The folders of code with a README of their own."""
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *(ROOT / room / "README.md" for room in ROOMS)])
COMMANDS = {
    page: [block for block in blocks(page) if block.language in ("sh", "python", "bash")] for page in PAGES
}
RUN = [page for page in PAGES if any(not block.tags & NEEDS_MORE for block in COMMANDS[page])]


def without_run_elsewhere(text: str) -> str:
    lines = [line for line in text.splitlines() if line.split("#")[0].strip() not in RUN_ELSEWHERE]
    return "\n".join(lines).strip()


@contextmanager
def background(block: Block, cwd: Path, environment: dict[str, str]) -> Iterator[None]:
    with (cwd / "background.log").open("ab") as log:
        process = subprocess.Popen(
            ["bash", "-e", "-c", block.text],
            cwd=cwd,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        if "rl-plane up" in block.text:
            wait_for_fleet(process, cwd)
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for_fleet(process: subprocess.Popen[bytes], cwd: Path) -> None:
    give_up = time.monotonic() + FLEET_UP_S
    while time.monotonic() < give_up and process.poll() is None:
        try:
            with urllib.request.urlopen("http://127.0.0.1:8002/v1/rl/ready?min_workers=2", timeout=10) as reply:
                if reply.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"the fleet did not come up:\n{(cwd / 'background.log').read_text()[-4000:]}")


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page.parent == ROOT else pytest.mark.docs) for page in RUN],
    ids=lambda page: str(page.relative_to(ROOT)),
)
@pytest.mark.timeout(300)
def test_the_page_runs_as_written(page: Path, tmp_path: Path) -> None:
    environment = dict(os.environ, PYTHONPATH=str(ROOT), PYTHONDONTWRITEBYTECODE="1")
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parent.parent)
    for name in ("rl_plane", "worker", "frontend"):
        (tmp_path / name).symlink_to(ROOT / name)
    running = []
    try:
        for block in COMMANDS[page]:
            text = without_run_elsewhere(block.text)
            if block.tags & NEEDS_MORE or not text:
                continue
            if "background" in block.tags:
                running.append(background(block, tmp_path, environment))
                running[-1].__enter__()
                continue
            if block.language == "python":
                command = [sys.executable, "-c", text]
            else:
                # -f: curl fails on an HTTP error instead of printing it.
                command = ["bash", "-e", "-o", "pipefail", "-c", text.replace("curl -s", "curl -sf")]
            done = subprocess.run(
                command,
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=BLOCK_S,
                check=False,
            )
            where = f"{block.page}:{block.line}"
            assert done.returncode == 0, (
                f"{where}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
            )
    finally:
        for each in reversed(running):
            each.__exit__(None, None, None)


def test_every_block_that_does_not_run_is_counted() -> None:
    """Counts the blocks that need a GPU or containers, so that no other block is left out unseen."""
    left_out = {
        page.relative_to(ROOT).as_posix(): sum(bool(block.tags & NEEDS_MORE) for block in COMMANDS[page])
        for page in PAGES
    }
    assert {name: count for name, count in left_out.items() if count} == {
        "bench/README.md": 2,
        "docs/containers.md": left_out["docs/containers.md"],
        "docs/several-hosts.md": 2,
        "docs/tracing.md": 1,
    }


def test_the_reference_is_up_to_date() -> None:
    script = ROOT / "docs" / "generate_reference.py"
    code = f"import runpy, sys; sys.stdout.write(runpy.run_path({str(script)!r})['reference']())"
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert fresh == (ROOT / "docs" / "reference.md").read_text(), "run: python docs/generate_reference.py"


def test_every_row_of_the_engines_has_tests_of_each() -> None:
    """A "yes" in the table only says that `describe` denies nothing, so tests of every engine have to show it."""
    features = runpy.run_path(str(ROOT / "docs" / "generate_engines.py"))["FEATURES"]
    page = (ROOT / "docs" / "engines.md").read_text()
    for feature in features.values():
        assert re.search(rf"^\| {re.escape(feature.words)} \|", page, re.MULTILINE), feature.words
        run: set[str] = set()
        for module, name in (test.split("::") for test in feature.tests):
            text = (ROOT / "tests" / "engines" / f"{module}.py").read_text()
            assert re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), f"there is no {module}::{name}"
            run |= ENGINES_OF[module]
        assert run == {"hf", "sglang", "vllm"}, feature.words


def test_every_test_that_a_page_names_exists() -> None:
    for page in PAGES:
        for file, words in set(re.findall(r"`(tests/[\w/]+\.py)(?: -k ([\w-]+))?`", page.read_text())):
            assert (ROOT / file).exists(), f"{page.name}: there is no {file}"
            # The names in the kill matrix are parameters, which it computes.
            if words and not file.startswith("tests/kill/"):
                assert words in (ROOT / file).read_text(), f"{page.name}: no test of {file} is called {words}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_has_a_target() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text()):
            if "://" in target:
                continue
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(linked), f"{page.name}: {target}#{anchor}"


def test_curl_is_here() -> None:
    assert shutil.which("curl"), "the docs use curl"
