"""`make audit` reports vulnerable versions, and never takes an index without advisories for a clean result."""

from __future__ import annotations

import importlib.util
import json
import stat
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.paths import ROOT

BUG = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["9"]}


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / "deploy" / "locks" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def locks(tmp_path: Path) -> Path:
    (tmp_path / "one.txt").write_text(
        "nats-py==2.0 \\\n    --hash=sha256:00\nTorch==2.1+cpu \\\n    --hash=sha256:00\n"
    )
    (tmp_path / "two.txt").write_text("nats_py==3.0 ; sys_platform == 'linux' \\\n    --hash=sha256:00\n")
    return tmp_path


def advisories(folder: Path, bugs: dict[str, Any]) -> Path:
    """Makes a stand-in for pip-audit, which knows these bugs by `name==version`."""
    tool = folder / "pip-audit"
    tool.write_text(
        f"#!{sys.executable}\n"
        "import json, sys\n"
        f"bugs = json.loads({json.dumps(bugs)!r})\n"
        "pins = open(sys.argv[sys.argv.index('--requirement') + 1]).read().split()\n"
        "names = [pin.split('==')[0] for pin in pins]\n"
        "assert len(names) == len(set(names)), names\n"
        "rows = [dict(zip(('name', 'version'), pin.split('=='))) | {'vulns': bugs.get(pin, [])} for pin in pins]\n"
        "print(json.dumps({'dependencies': rows}))\n"
    )
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    return tool


def test_each_version_of_each_lock_is_asked_for(audit: ModuleType, locks: Path) -> None:
    assert audit.batches(locks) == [[("nats-py", "2.0"), ("torch", "2.1")], [("nats-py", "3.0")]]
    asked = {pin for batch in audit.batches(ROOT / "deploy" / "locks") for pin in batch}
    assert {"nats-py", "vllm", "sglang", "deepspeed", "uv"} <= {name for name, _ in asked}


def test_clean_locks_pass_with_the_time_of_the_data(
    audit: ModuleType, locks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = advisories(locks, {"requests==2.20.0": [BUG]})
    assert audit.main(locks, tool) == 0
    assert "audit: 3 versions, 0 advisories; PyPI's data of 20" in capsys.readouterr().out


def test_a_vulnerable_version_fails(audit: ModuleType, locks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool = advisories(locks, {"requests==2.20.0": [BUG], "nats-py==3.0": [BUG]})
    assert audit.main(locks, tool) == 1
    out = capsys.readouterr().out
    assert out.startswith("nats-py 3.0: PYSEC-1, CVE-1, mended in 9\n")
    assert "audit: 3 versions, 1 advisories" in out


def test_an_index_without_advisories_is_not_a_clean_result(
    audit: ModuleType, locks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.main(locks, advisories(locks, {})) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("audit: not done, because PyPI's advisories cannot be reached from here")
    assert "there are no advisories of requests==2.20.0" in line


@pytest.mark.parametrize(
    ("script", "says"),
    [("echo 'no such host' >&2; exit 1", "no such host"), ("exec tail -f /dev/null", "no answer within 0.3 s")],
    ids=["unreachable", "hangs"],
)
def test_a_service_that_does_not_answer_is_one_line(
    audit: ModuleType, locks: Path, capsys: pytest.CaptureFixture[str], script: str, says: str
) -> None:
    tool = locks / "pip-audit"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o700)
    assert audit.main(locks, tool, 0.3) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("audit: not done")
    assert says in line
