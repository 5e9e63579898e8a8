"""The command line itself: help, usage errors, what it imports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rl_plane._util.extras import EXTRA_OF_MODULE, missing_module
from rl_plane.cli import main
from rl_plane.cli.output import one_line
from rl_plane.cli.settings import SETTINGS
from tests.support.paths import ROOT
from worker.engines.fake.adapter import make_fake_model

COMMANDS = ["up", "nats", "worker", "frontend", "state", "workers", "pause", "resume", "update", "check"]
COMMANDS += ["events", "rollback", "abort", "complete", "updates", "enable", "disable", "publish", "demo"]

BLOCKED = [
    "torch",
    "prometheus_client",
    "starlette",
    "uvicorn",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "blake3",
    "xxhash",
    "yaml",
    "matplotlib",
    "httpx",
    "psutil",
    "jinja2",
]

_IMPORT_WITHOUT = f"""
import sys
for name in {BLOCKED!r}:
    sys.modules[name] = None
sys.modules["aiohttp"] = None  # nats-py takes it where it is, for WebSockets
import rl_plane, rl_plane.cli.main, rl_plane.sync, rl_plane.cli.models
allowed = {{"rl_plane", "nats", "msgpack", "pydantic", "pydantic_core", "typing_extensions", "annotated_types",
           "typing_inspection", "nkeys", "click"}}
tops = {{name.partition(".")[0] for name, module in sys.modules.items() if module is not None}}
third = {{top for top in tops if "site-packages" in (getattr(sys.modules.get(top), "__file__", None) or "")}}
print(sorted(top for top in third - allowed if not top.startswith("_")))
for command in {COMMANDS!r}:
    assert rl_plane.cli.main.run([command, "--help"]) == 0
"""


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)


def test_importing_and_help_need_nats_msgpack_pydantic_and_click_only() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", _IMPORT_WITHOUT], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_names_its_variable_and_no_key(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_PLANE_ADMIN_KEY", "geheim")
    monkeypatch.setenv("COLUMNS", "400")
    assert main.run([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "geheim" not in text
    for flag in text.split("\n  --")[1:]:
        assert re.search(r"\[env\s+var:\s+RL_PLANE_[A-Z_]+|^help", flag), flag


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "Missing command"),
        (["fly"], "No such command 'fly'"),
        (["state", "--fast"], "No such option '--fast'"),
        (["state", "--timeo", "3"], "No such option"),  # no abbreviations
        (["state", "--timeout-s", "nan"], "is no number of seconds"),
        (["enable"], "ID"),
        (["disable", "worker-1"], "16 lower-case hex digits"),
        (["pause", "--mode", "softly"], "'keep', 'wait', 'abort'"),
        (["worker"], "--engine with one of"),
        (["worker", "--engine", "vlm"], "use one of"),
        (["up", "--engine", "vlm"], "use one of fake"),
        (["up", "--workers", "-3"], "is not in the range"),
        (["worker", "--engine", "fake", "--model", "/nowhere"], "existing directory"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("rl-plane: error: ")
    assert "; fix: " in err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["worker", "--engine", "fake", "--engine-arg", "nope=1"], "nope"),
        (["worker", "--engine", "fake", "--nats-nkey", "/nowhere"], "/nowhere"),
        (["worker", "--engine", "fake", "--nnodes", "2"], "dist_init_addr"),
        (["frontend", "--nats-nkey", "/nowhere"], "/nowhere"),
    ],
)
def test_a_setting_that_a_process_itself_finds_wrong_is_exit_code_2_too(
    argv: list[str], words: str, tmp_path: Path
) -> None:
    model = ["--model", str(make_fake_model(tmp_path / "model", seed=0))] if argv[0] == "worker" else []
    run = [sys.executable, "-P", "-m", "rl_plane.cli.main", *argv, *model, "--json"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["code"] == "invalid_request"
    assert words in done.stderr


def test_a_bad_variable_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_PLANE_TIMEOUT_S", "-4")
    assert main.run(["state"]) == 2
    assert "RL_PLANE_TIMEOUT_S" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "fix"),
    [
        ("torch", "pip install 'rl-plane[hf]'"),
        ("transformers.models", "pip install 'rl-plane[hf]'"),
        ("vllm", "pip install 'rl-plane[vllm]'"),
        ("sglang.srt", "pip install 'rl-plane[sglang]'"),
        ("blake3", "pip install 'rl-plane[worker]'"),
        ("xxhash", "pip install 'rl-plane[worker]'"),
        ("yaml", "pip install 'rl-plane[worker]'"),
        ("starlette", "pip install 'rl-plane[frontend]'"),
        ("matplotlib", "pip install 'rl-plane[demo]'"),
        ("peft.tuners", "pip install 'rl-plane[hf]'"),
        ("numba", "pip install 'rl-plane[publish]'"),
        ("nixl", "pip install 'rl-plane[nixl]'"),
        ("something_else", "pip install something_else"),
    ],
)
def test_a_missing_module_names_the_extra(module: str, fix: str) -> None:
    assert missing_module(ModuleNotFoundError(name=module)).facts["fix"] == fix


def test_each_extra_that_an_error_names_can_be_installed() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(EXTRA_OF_MODULE.values()) <= extras.keys()
    for module in ("peft", "numba", "nixl", "torch", "blake3", "vllm"):
        assert any(one.startswith(module) for one in extras[EXTRA_OF_MODULE[module]]), module


def test_a_missing_extra_ends_a_command_in_one_line(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['blake3'] = None; from rl_plane.cli.main import run;"
        "sys.exit(run(['worker', '--engine', 'fake']))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == (
        "rl-plane: error: the Python module blake3 is not installed; fix: pip install 'rl-plane[worker]'\n"
    )


_ONLY_WORKER = """
import asyncio, sys
from pathlib import Path

from tests.support.hidden_packages import hide_all_but
here = Path(sys.argv[1])
hide_all_but("worker")

from rl_plane.cli.main import run
assert run(["worker", "--engine", "fake", "--model", str(here), "--nats-url", "nats://127.0.0.1:9"]) == 2

from worker.engines.base import EngineOptions
from worker.engines.fake.adapter import build, make_fake_model
from worker.testing.engine_contract import check_engine
options = EngineOptions(make_fake_model(here / "model", 1), device="cpu")
asyncio.run(check_engine(build, options, make_fake_model(here / "other", 2)))
"""


def test_the_worker_extra_is_enough_for_the_fake_engine_and_the_conformance_suite(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", _ONLY_WORKER, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_a_users_own_worker_py_does_not_shadow_ours(tmp_path: Path) -> None:
    for name in ("worker.py", "frontend.py", "rl_plane.py"):
        (tmp_path / name).write_text("raise SystemExit('shadowed')")
    script = Path(sys.executable).with_name("rl-plane")
    for command in ([str(script)], [sys.executable, "-P", "-m", "rl_plane.cli.main"]):
        done = subprocess.run(
            [*command, "worker", "--engine", "fake", "--model", str(tmp_path), "--nats-url", "nats://127.0.0.1:9"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "shadowed" not in done.stderr
        assert done.returncode == 2  # the directory is no model
        assert done.stderr.splitlines()[-1].startswith("rl-plane: error: ")


def test_text_from_outside_can_not_control_the_terminal() -> None:
    assert one_line("a\x1b[2Jb\nc") == "a?[2Jb c"
    assert one_line("no server at nats://user:geheim@host:4222") == "no server at nats://…@host:4222"


def test_without_its_extra_the_command_line_is_one_line() -> None:
    code = "import sys; sys.modules['click'] = None; from rl_plane.cli.main import run; sys.exit(run(['state']))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == (
        "rl-plane: error: the Python module click is not installed; fix: pip install 'rl-plane[cli]'\n"
    )
