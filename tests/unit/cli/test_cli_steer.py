"""The commands that steer, against a facade of a few lines."""

from __future__ import annotations

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rl_plane.bus.key_folder import KeyFolder
from rl_plane.cli import main
from tests.support.small_facade import DIGEST, HEAD, ID_A, ID_B, VERSION, Facade, facade, starting_row

__all__ = ["facade"]

BOUND_S = 60.0


def state_row(instance_id: str) -> dict[str, Any]:
    return {
        "instance_id": instance_id,
        "incarnation": "i1",
        "status": "ok",
        "engine": "fake",
        "model": "tiny",
        "host": "h",
        "pid": 42,
        "ready": True,
        "pause": {"paused": True, "mode": "keep", "lease_left_s": 12.3},
        "admission": {"open": False, "reasons": ["disabled"]},
        "version": VERSION,
        "canary": {
            "passed": True,
            "against": "reference",
            "reason": None,
            "difference": 0.0031,
            "tolerance": 0.01,
            "mismatch_kl": 2e-7,
        },
        "running": 1,
        "waiting": 0,
    }


def test_state_is_a_table_or_json(facade: Facade, capsys: pytest.CaptureFixture[str]) -> None:
    error_row = {
        "instance_id": ID_B,
        "incarnation": "i",
        "status": "error",
        "error": {"code": "deadline_exceeded", "message": "no answer within 1 s"},
    }
    reply = {
        **HEAD,
        "ready": False,
        "pause_state": "mixed",
        "version": VERSION,
        "workers": [state_row(ID_A), error_row],
    }
    facade.answers(reply)
    assert main.run(["state"]) == 0
    out = capsys.readouterr().out
    assert "not ready, mixed, version 3 (step_3) blake3:abababababab, epoch 7" in out
    assert "closed: disabled" in out
    assert "keep, 12 s left" in out
    assert "0.0031 reference, kl 2e-07" in out
    assert f"{ID_B}: deadline_exceeded: no answer within 1 s" in out
    assert main.run(["state", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == reply
    assert facade.asked[0]["method"] == "GET"
    assert facade.asked[0]["path"] == "/v1/rl/state"
    assert facade.asked[0]["query"] == {}
    assert "Authorization" not in facade.asked[0]["headers"]


def test_state_shows_the_running_update(facade: Facade, capsys: pytest.CaptureFixture[str]) -> None:
    update = {
        "update_id": "u1",
        "label": "step_4",
        "phase": "prepare",
        "caller": "train.py@gpu3:7 at 10.0.0.7",
        "asked_by": "key-1",
        "who": "frontend@a:1",
        "transport": "gloo",
        "began_at": 1.0,
        "elapsed_s": 21.4,
        "in_phase_s": 21.3,
        "deadline_in_s": 279.0,
        "idle_limit_s": None,
        "waits_for": "the trainer's bytes, since 19 s (1 of 2 workers)",
        "workers": 2,
        "bytes": 3_000_000,
        "total_bytes": 4_000_000,
        "bytes_per_s": 5e6,
        "since_progress_s": 19.0,
    }
    own = {
        "update_id": "u1",
        "waits_for": "the trainer's bytes",
        "since_progress_s": 19.0,
        "total_bytes": 2_000_000,
    }
    rows = [
        {**state_row(ID_A), "update": {**own, "bytes": 2_000_000}},
        {**state_row(ID_B), "update": {**own, "bytes": 1_000_000}},
    ]
    facade.answers({**HEAD, "update": update, "workers": rows})
    assert main.run(["state"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:8] == [
        "update u1 (step_4): prepare, 21.4 s so far, 21.3 s in this phase, 279 s left",
        "  waits for the trainer's bytes, since 19 s (1 of 2 workers)",
        "  3.0 of 4.0 MB (75%) on 2 workers, 5.0 MB/s",
        "  asked by train.py@gpu3:7 at 10.0.0.7 with the key key-1 by gloo; frontend@a:1 coordinates it",
        f"    {ID_B}: 1.0 of 2.0 MB, waits for the trainer's bytes, last bytes 19 s ago",
        f"    {ID_A}: 2.0 of 2.0 MB, waits for the trainer's bytes, last bytes 19 s ago",
        "  to end it: rl-plane abort u1",
    ]
    waiting = {**update, "phase": "receive", "in_phase_s": None, "deadline_in_s": None, "idle_limit_s": 120.0}
    facade.answers({**HEAD, "update": waiting, "workers": []})
    assert main.run(["state"]) == 0
    assert "receive, 21.4 s so far, dropped after 120 s without a call of its trainer" in capsys.readouterr().out


def test_workers_that_left_are_listed(facade: Facade, capsys: pytest.CaptureFixture[str]) -> None:
    gone = {
        "instance_id": ID_B,
        "engine": "hf",
        "host": "gpu3",
        "pid": 7,
        "ago_s": 12.3,
        "why": "it did not answer",
        "back": False,
    }
    left = [{**gone, "back": True}, gone, {**gone, "ago_s": 600.0}]
    facade.answers({**HEAD, "ready": False, "expected": 2, "left": left, "workers": [state_row(ID_A)]})
    assert main.run(["state"]) == 0
    out = capsys.readouterr().out
    assert "1 of 2 workers, epoch 7" in out
    assert out.splitlines()[-2:] == [
        f"{ID_B} left 12 s ago: it did not answer",
        f"{ID_B} left 10 min ago: it did not answer",
    ]
    assert main.run(["workers"]) == 0
    table = capsys.readouterr().out.splitlines()[-4:]
    assert table[0].split() == ["LEFT", "INSTANCE", "ENGINE", "HOST", "PID", "BACK", "WHY"]
    assert [line.split()[7] for line in table[1:3]] == ["yes", "no"]


def test_abort_and_complete_name_the_update_and_print_the_outcome(
    facade: Facade, capsys: pytest.CaptureFixture[str]
) -> None:
    facade.answers({**HEAD, "update_id": "u1", "workers": []})
    assert main.run(["abort", "u1"]) == 0
    assert capsys.readouterr().out == "aborted the update u1 in 0.250 s\n"
    by = f"an operator on host {socket.gethostname()}"
    assert facade.asked[0]["path"] == "/v1/rl/abort_weights_update"
    assert facade.asked[0]["body"] == {"update_id": "u1", "by": by}
    facade.answers({**HEAD, "update_id": "the newest", "workers": []})
    assert main.run(["abort"]) == 0
    assert facade.asked[1]["path"] == "/v1/rl/abort_weights_update"
    assert facade.asked[1]["body"] == {"by": by}, "no id is sent, and the fleet names the update"
    assert capsys.readouterr().out == "aborted the update the newest in 0.250 s\n"
    facade.answers({**HEAD, "version": VERSION, "workers": [], "excluded": [], "phases": {"receive_s": 2.0}})
    assert main.run(["complete", "u1"]) == 0
    assert facade.asked[2]["path"] == "/v1/rl/complete_weights_update"
    assert facade.asked[2]["body"] == {"update_id": "u1"}
    assert "committed version 3 (step_3)" in capsys.readouterr().out
    assert main.run(["complete"]) == 0
    assert facade.asked[3]["path"] == "/v1/rl/complete_weights_update"
    assert facade.asked[3]["body"] == {}
    assert "committed version 3 (step_3)" in capsys.readouterr().out


def test_commands_send_the_selection_and_the_admin_key(facade: Facade, monkeypatch: pytest.MonkeyPatch) -> None:
    facade.answers({**HEAD, "workers": [state_row(ID_A)]})
    monkeypatch.setenv("RL_PLANE_ADMIN_KEY", "key-1")
    monkeypatch.setenv("RL_PLANE_WORKERS", "4")  # of `up`: no selection
    assert main.run(["workers", "--component", "a,b", "--workers", ID_A, "--url", facade.url + "/"]) == 0
    (asked,) = facade.asked
    assert asked["path"] == "/v1/rl/workers"
    assert asked["query"] == {"component": ["a,b"], "workers": [ID_A]}
    assert asked["headers"]["Authorization"] == "Bearer key-1"
    assert main.run(["workers", "--admin-key", "key-2"]) == 0
    assert facade.asked[1]["headers"]["Authorization"] == "Bearer key-2"
    assert facade.asked[1]["query"] == {}


def test_pause_sends_its_options_and_resume_sends_none(facade: Facade, capsys: pytest.CaptureFixture[str]) -> None:
    facade.answers({**HEAD, "workers": [state_row(ID_A), state_row(ID_B)]})
    assert main.run(["pause", "--mode", "abort", "--clear-cache", "--lease-s", "60"]) == 0
    assert facade.asked[0]["method"] == "POST"
    assert facade.asked[0]["body"] == {"mode": "abort", "clear_cache": True, "lease_s": 60.0}
    assert capsys.readouterr().out == "paused 2 workers in 0.250 s (abort); the fleet resumes by itself in 60 s\n"
    assert main.run(["resume"]) == 0
    assert facade.asked[1]["path"] == "/v1/rl/resume"
    assert facade.asked[1]["body"] == {}
    assert main.run(["pause", "--mode", "retract", "--lease-s", "60"]) == 0
    assert facade.asked[2]["body"] == {"mode": "retract", "lease_s": 60.0}, "the cache is as the mode says"


def test_update_sends_its_options_and_prints_the_outcome(
    facade: Facade, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = {
        **HEAD,
        "version": VERSION,
        "workers": [{"instance_id": ID_A, "incarnation": "i", "status": "ok"}],
        "excluded": [ID_B],
        "phases": {"prepare_s": 0.2},
    }
    facade.answers(reply)
    argv = ["update", "ckpt/step_3", "--version", "step_3", "--cast", "--keep-pause", "--pause-mode", "wait"]
    argv += [
        "--keep-staged",
        "--kv",
        "keep",
        "--on-prepare-failure",
        "exclude",
        "--min-ready",
        "2",
        "--timeout-s",
        "33",
    ]
    argv += ["--digest", DIGEST]
    assert main.run(argv) == 0
    (asked,) = facade.asked
    assert asked["path"] == "/v1/rl/update_weights"
    assert len(asked["headers"]["Idempotency-Key"]) == 32
    assert asked["body"] == {
        "transport": {"backend": "filesystem", "path": os.path.abspath("ckpt/step_3")},
        "version": "step_3",
        "digest": DIGEST,
        "cast": True,
        "policy": {
            "barrier": "strict",
            "staging": "host",
            "keep_staged": True,
            "relay": True,
            "pause_mode": "wait",
            "on_prepare_failure": "exclude",
            "min_ready": 2,
            "keep_pause": True,
            "kv": "keep",
            "prepare_timeout_s": 33.0,
            "gate_timeout_s": 2.0,
            "commit_timeout_s": 60.0,
            "canary": None,
            "on_canary_failure": "rollback",
        },
    }
    out = capsys.readouterr().out
    assert "committed version 3 (step_3) blake3:abababababab on 1 worker" in out
    assert "prepare 0.200 s" in out
    assert f"excluded, until healed: {ID_B}" in out


@pytest.mark.parametrize(
    ("canary", "words"),
    [
        (
            {"against": "trainer", "difference": 0.000423, "mismatch_kl": 1.26e-08, "tolerance": 0.05},
            "2 workers scored, largest difference 0.00042, mismatch_kl 1.3e-08 from the trainer's values",
        ),
        ({}, "2 workers scored, no values to compare with"),
        ({"failed": 1}, "2 workers scored, 1 failed"),
        (
            {"failed": 2, "warning": "every worker failed"},
            "2 workers scored, 2 failed; warning: every worker failed",
        ),
    ],
)
def test_an_update_shows_its_canary(
    facade: Facade, capsys: pytest.CaptureFixture[str], canary: dict[str, Any], words: str
) -> None:
    facade.answers({**COMMITTED, "canary": {"action": "open", "scored": 2, "failed": 0, **canary}})
    assert main.run(["update", "ckpt"]) == 0
    assert f"  canary: {words}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("canary", "cell"),
    [
        ({"passed": True, "against": "nothing"}, "nothing to compare"),
        ({"passed": False, "against": "nothing", "reason": "unusable"}, "failed: unusable"),
        (
            {"passed": False, "against": "fleet", "reason": "fleet", "difference": 1.25, "mismatch_kl": 0.5},
            "failed: fleet, 1.2 fleet, kl 0.5",
        ),
    ],
)
def test_workers_show_their_canary(
    facade: Facade, capsys: pytest.CaptureFixture[str], canary: dict[str, Any], cell: str
) -> None:
    facade.answers({**HEAD, "workers": [{**state_row(ID_A), "canary": canary}]})
    for command in ("state", "workers"):
        assert main.run([command]) == 0
        assert f"  {cell}" in capsys.readouterr().out


@pytest.mark.parametrize("role", ["service", "worker"])
def test_a_key_that_can_not_steer_is_refused_before_a_connection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], role: str
) -> None:
    """A connection would wait for the buckets of a fleet that was never started."""
    folder = KeyFolder(tmp_path / "keys")
    folder.init("rlp", ["engine"])
    with socket.create_server(("127.0.0.1", 0)) as nats, ThreadPoolExecutor(1) as pool:
        nats.settimeout(0.0)
        key = ["--nats-nkey", str(folder.seed_of(role)), "--nats-url", f"nats://127.0.0.1:{nats.getsockname()[1]}"]
        for argv in (["pause"], ["resume"], ["update", "ckpt"], ["rollback", "one"], ["disable", ID_A]):
            assert main.run([*argv, *key]) == 1
            assert f"a key of the role {role} may not steer the fleet" in capsys.readouterr().err
        with pytest.raises(BlockingIOError):
            nats.accept()
        nats.settimeout(BOUND_S)
        reading = pool.submit(main.run, ["state", *key])
        connection, _ = nats.accept()
        connection.close()
        nats.close()
        assert reading.result(BOUND_S) == 1


@pytest.mark.parametrize("argv", [["pause"], ["ready"], ["ready", "--wait", "5s"], ["explain"]])
@pytest.mark.parametrize(
    "flag",
    [["--namespace", "staging"], ["--nats-ca", "ca.pem"], ["--nats-cert", "c.pem", "--nats-cert-key", "k.pem"]],
)
def test_a_flag_that_a_frontend_ignores_is_refused(
    facade: Facade, capsys: pytest.CaptureFixture[str], argv: list[str], flag: list[str]
) -> None:
    assert main.run([*argv, *flag]) == 2
    error = capsys.readouterr().err
    assert f"{flag[0]}: the frontend at --url ignores it" in error
    assert "fix: give --nats-url (or --over-nats)" in error
    assert facade.asked == []


def test_publish_beside_a_frontend_takes_the_files_for_nats(
    facade: Facade, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """object_store connects to NATS by these files. Here the command fails later: the directory is empty."""
    assert main.run(["publish", str(tmp_path), "--transport", "object_store", "--nats-ca", "ca.pem"]) == 1
    assert "ignores" not in capsys.readouterr().err


@pytest.mark.parametrize("components", [[], ["policy"], ["policy", "reward"]])
def test_ready_asks_at_once_and_then_lets_the_frontend_wait_for_the_rest_of_the_time(
    facade: Facade, capsys: pytest.CaptureFixture[str], components: list[str]
) -> None:
    error = {"code": "no_workers", "message": "there is no worker"}
    facade.answers({"status": "error", "error": error}, 503)
    assert main.run(["ready", "--wait", "1s", *(f"--component={name}" for name in components)]) == 1
    first, second, *_ = [one["query"] for one in facade.asked if one["path"] == "/v1/rl/ready"]
    assert first["wait_s"] == ["0.0"]
    assert 0 < float(second["wait_s"][0]) < 1
    assert [one.get("component") for one in (first, second)] == [
        [",".join(components)] if components else None
    ] * 2
    assert capsys.readouterr().err.count("not ready yet: there is no worker") == 1


def test_publish_refuses_a_namespace_beside_a_frontend(
    facade: Facade, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["publish", str(tmp_path), "--namespace", "staging"]) == 2
    assert "--namespace: the frontend at --url ignores it" in capsys.readouterr().err
    assert facade.asked == []


def test_a_switch_asks_at_the_address_of_the_variable_which_alone_asks_a_frontend(
    facade: Facade, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facade.answers({**HEAD, "workers": []})
    with socket.create_server(("127.0.0.1", 0)) as nats, ThreadPoolExecutor(1) as pool:
        nats.settimeout(BOUND_S)
        monkeypatch.setenv("RL_PLANE_NATS_URL", f"nats://user:geheim@127.0.0.1:{nats.getsockname()[1]}")
        assert main.run(["state"]) == 0
        assert len(facade.asked) == 1
        reading = pool.submit(main.run, ["state", "--over-nats", "--namespace", "staging"])
        connection, _ = nats.accept()
        connection.close()
        nats.close()
        assert reading.result(BOUND_S) == 1
    assert len(facade.asked) == 1
    assert "geheim" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "fix"),
    [
        (["state"], "set RL_PLANE_NATS_URL and give --over-nats, or give a key"),
        (["worker", "--engine", "fake"], "set RL_PLANE_NATS_URL, or give a key"),
    ],
)
def test_the_fix_of_a_password_in_a_flag_reaches_nats(
    capsys: pytest.CaptureFixture[str], argv: list[str], fix: str
) -> None:
    assert main.run([*argv, "--nats-url", "nats://user:geheim@127.0.0.1:9"]) == 2
    assert f"fix: {fix}" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["worker", "--engine", "fake"], ["frontend"]])
def test_a_process_with_another_roles_key_ends_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    folder = KeyFolder(tmp_path / "keys")
    folder.init("rlp", ["engine"])
    assert (
        main.run([*argv, "--nats-nkey", str(folder.seed_of("trainer")), "--nats-url", "nats://127.0.0.1:9"]) == 2
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert f"trainer.nk is a key of the role trainer, and this process has the role {argv[0]}" in line
    assert f"fix: name a key of the role {argv[0]}" in line


def test_update_takes_a_url_but_signatures_only_from_a_file(
    facade: Facade, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Signatures and headers come from a file, because a command line is seen by all."""
    facade.answers(COMMITTED)
    signed = {"urls": {"model.safetensors": "https://a.example/x?sig=1"}, "headers": {"A": "b"}}
    file = tmp_path / "signed.json"
    file.write_text(json.dumps(signed))
    assert main.run(["update", "https://a.example/step_1"]) == 0
    assert main.run(["update", "--source", str(file)]) == 0
    sent = [asked["body"]["transport"] for asked in facade.asked]
    assert sent == [{"backend": "http", "url": "https://a.example/step_1"}, {"backend": "http", **signed}]
    capsys.readouterr()
    for argv, words in (
        (["https://a.example/x?sig=1"], "--source"),
        (["https://u:p@a.example/x"], "--source"),
        (["ckpt", "--source", str(file)], "leave one of the two out"),
    ):
        assert main.run(["update", *argv]) == 2
        said = capsys.readouterr().err
        assert words in said
        assert "sig=1" not in said
    file.write_text("[]")
    assert main.run(["update", "--source", str(file)]) == 2
    assert "no JSON object" in capsys.readouterr().err


def test_a_canary_comes_from_a_file_or_is_off(facade: Facade, tmp_path: Path) -> None:
    facade.answers(COMMITTED)
    canary = {"sequences": [[1, 2, 3]], "expected": [[-0.5, -1]], "tolerance": 0.1}
    file = tmp_path / "canary.json"
    file.write_text(json.dumps(canary))
    argv = ["update", "ckpt", "--on-canary-failure", "warn", "--canary"]
    assert main.run([*argv, str(file)]) == 0
    assert main.run([*argv, "off"]) == 0
    assert main.run(["rollback", "step_1", "--canary", str(file)]) == 0
    policies = [asked["body"]["policy"] for asked in facade.asked]
    assert [policy["canary"] for policy in policies] == [canary, "off", canary]
    assert [policy["on_canary_failure"] for policy in policies] == ["warn", "warn", "rollback"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "canary.sequences: Field required"),
        (b"{", "this is not valid JSON"),
        (b"[]", "a JSON list, not an object; fix: send one JSON object"),
        (b'{"sequences": [[1]]}', "canary.sequences.0: "),
        (b'{"sequences": [[1, -2]]}', "canary.sequences.0.1: "),
        (b'{"sequences": [[1, 2]], "tokens": 1}', "canary.tokens: "),
        (
            b'{"sequences": [[1, 2, 3]], "expected": [[-1.0]]}',
            "canary.expected.0: sequence 0 has 3 tokens and 1 expected values; fix: give 2 values",
        ),
        (b'{"sequences": [[1, 2]], "expected": [[0.5]]}', "canary.expected.0.0: "),
        (b'{"sequences": [[1, 2]], "tolerance": 0}', "canary.tolerance: "),
        (b" " * 100_001, "has more than 100,000 bytes"),
        (None, "name an existing file, or `off`"),
    ],
)
def test_a_wrong_canary_file_is_refused_before_anything_is_sent(
    facade: Facade, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes | None, words: str
) -> None:
    file = tmp_path / "c.json"
    if content is not None:
        file.write_bytes(content)
    assert main.run(["update", "ckpt", "--canary", str(file)]) == 2
    err = capsys.readouterr().err
    assert str(file) in err
    assert words in err
    assert "; fix: " in err
    assert facade.asked == []


COMMITTED = {**HEAD, "version": VERSION, "workers": [], "excluded": [], "phases": {}}


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["--barrier", "rolling"], {"barrier": "rolling", "staging": "host"}),
        (["--staging", "none"], {"barrier": "strict", "staging": "none"}),
        (["--pause-mode", "retract"], {"pause_mode": "keep", "kv": "recompute"}),
        (["--pause-mode", "in_place"], {"pause_mode": "keep", "kv": "keep"}),
    ],
)
def test_update_sends_its_policy(facade: Facade, argv: list[str], wanted: dict[str, Any]) -> None:
    facade.answers(COMMITTED)
    assert main.run(["update", "ckpt", *argv]) == 0
    assert facade.asked[0]["body"]["policy"].items() >= wanted.items()
    assert "target" not in facade.asked[0]["body"]


@pytest.mark.parametrize("op", ["load", "swap", "unload"])
def test_update_sends_the_adapter_as_its_target(facade: Facade, op: str) -> None:
    facade.answers(COMMITTED)
    path = [] if op == "unload" else ["adapters/a"]
    assert main.run(["update", *path, "--adapter", "a", "--adapter-op", op]) == 0
    body = facade.asked[0]["body"]
    del body["policy"]
    assert body.pop("target") == {"kind": "lora", "op": op, "name": "a"}
    transport = {"backend": "filesystem", "path": os.path.abspath("adapters/a")}
    assert body == ({"transport": transport, "cast": False} if path else {})


def test_an_adapter_is_loaded_unless_said_otherwise(facade: Facade) -> None:
    facade.answers(COMMITTED)
    assert main.run(["update", "adapters/a", "--adapter", "a"]) == 0
    assert facade.asked[0]["body"]["target"]["op"] == "load"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "PATH"),
        (["--adapter", "a"], "PATH"),
        (["x", "--adapter", "a", "--adapter-op", "unload"], "PATH"),
        (["x", "--adapter-op", "swap"], "--adapter NAME"),
        (["x", "--adapter", "a", "--adapter-op", "eat"], "'load', 'swap', 'unload'"),
        (["x", "--barrier", "none"], "'strict', 'rolling'"),
        (["x", "--staging", "disk"], "'host', 'none'"),
    ],
)
def test_a_wrong_update_command_is_refused_and_not_sent(
    facade: Facade, capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    assert main.run(["update", *argv]) == 2
    assert words in capsys.readouterr().err
    assert facade.asked == []


def test_new_run_sends_its_component_and_prints_the_version(
    facade: Facade, capsys: pytest.CaptureFixture[str]
) -> None:
    version = {**VERSION, "sequence": 0, "label": "initial"}
    rows = [{"instance_id": ID_A, "incarnation": "i", "status": "ok"}]
    facade.answers({**COMMITTED, "version": version, "workers": rows})
    assert main.run(["new-run", "--component", "engine"]) == 0
    (asked,) = facade.asked
    assert (asked["method"], asked["path"]) == ("POST", "/v1/rl/new_run")
    assert asked["body"] == {"component": ["engine"]}
    out = capsys.readouterr().out
    assert out.startswith("began a new run with version 0 (initial) blake3:abababababab on 1 worker\n")


def _checks(*workers: tuple[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """A reply of `check_weights`: an instance id, and the result of each rank."""
    rows = [
        {"instance_id": name, "status": "ok", "ranks": [{"rank": at, **rank} for at, rank in enumerate(ranks)]}
        for name, ranks in workers
    ]
    return {**HEAD, "workers": rows}


def test_check_exits_with_1_if_checksums_differ(facade: Facade, capsys: pytest.CaptureFixture[str]) -> None:
    facade.answers(_checks((ID_A, [{"checksum": "11"}]), (ID_B, [{"checksum": "22"}])))
    assert main.run(["check"]) == 1
    assert facade.asked[0]["body"] == {"action": "checksum"}
    assert f"2 groups of workers differ: {ID_A} | {ID_B}. " in capsys.readouterr().out


def test_check_compares_each_rank_with_the_same_rank_of_other_workers(
    facade: Facade, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [{"checksum": "11"}, {"checksum": "22"}]
    facade.answers(_checks((ID_A, ranks), (ID_B, ranks)))
    assert main.run(["check"]) == 0
    assert "all workers have equal weights" in capsys.readouterr().out


def test_check_compares_no_workers_of_different_components(
    facade: Facade, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = _checks((ID_A, [{"checksum": "11"}]), (ID_B, [{"checksum": "22"}]))
    for row, component in zip(reply["workers"], ("policy", "reward"), strict=True):
        row["component"] = component
    facade.answers(reply)
    assert main.run(["check"]) == 0
    assert "differ" not in capsys.readouterr().out


def test_check_exits_with_1_if_a_worker_differs_from_its_snapshot(
    facade: Facade, capsys: pytest.CaptureFixture[str]
) -> None:
    facade.answers(_checks((ID_A, [{"match": True}]), (ID_B, [{"match": False, "mismatches": ["w"]}])))
    assert main.run(["check", "--action", "compare", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["workers"][1]["ranks"][0]["mismatches"] == ["w"]


def test_enable_and_disable_ask_for_each(facade: Facade, capsys: pytest.CaptureFixture[str]) -> None:
    facade.answers({**HEAD, "workers": [state_row(ID_A)]})
    assert main.run(["disable", ID_A, ID_B, ID_A]) == 0
    assert [asked["path"] for asked in facade.asked] == [
        "/v1/rl/workers",
        f"/v1/rl/workers/{ID_A}/disable",
        f"/v1/rl/workers/{ID_B}/disable",
    ]
    assert facade.asked[0]["query"] == {"workers": [f"{ID_A},{ID_B}"]}
    assert capsys.readouterr().out.startswith("disabled 2 workers in 0.500 s")


@pytest.mark.parametrize("op", ["enable", "disable"])
def test_no_worker_is_changed_if_one_of_them_is_not_there(
    facade: Facade, capsys: pytest.CaptureFixture[str], op: str
) -> None:
    facade.answers({"status": "error", "error": {"code": "not_found", "message": f"no worker {ID_B}"}}, 404)
    assert main.run([op, ID_A, ID_B]) == 1
    assert [asked["path"] for asked in facade.asked] == ["/v1/rl/workers"]
    assert f"no worker {ID_B}" in capsys.readouterr().err


def test_a_failed_change_says_which_workers_were_changed_before(
    facade: Facade, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = {**HEAD, "workers": [state_row(ID_A)]}
    facade.at_once = {"/v1/rl/workers": answer, f"/v1/rl/workers/{ID_A}/disable": answer}
    facade.answers({"workers": "none"})
    assert main.run(["disable", ID_A, ID_B]) == 1
    error = capsys.readouterr().err
    assert f"{ID_B}: " in error
    assert f"disable is done for {ID_A}" in error


def test_explain_asks_for_the_running_choices_of_one_request_and_component(
    facade: Facade, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {"nats": {"connected": True}, "component": "policy"}
    facade.answers({**HEAD, **about, "ready": True, "updates": [], "requests": [], "workers": []})
    assert main.run(["explain", "cmpl-1"]) == 1
    assert "knows no worker, update or request 'cmpl-1'" in capsys.readouterr().err
    (asked,) = [one for one in facade.asked if one["path"] == "/v1/rl/requests"]
    assert asked["query"] == {"component": ["policy"], "id": ["cmpl-1"]}


def test_an_error_names_the_field_once(facade: Facade, capsys: pytest.CaptureFixture[str]) -> None:
    token = {"message": "token 999 is too large", "field": "policy.canary.sequences.0.9", "fix": "use less"}
    facade.answers({"error": {"code": "invalid_request", **token}}, 400)
    assert main.run(["update", "x"]) == 1
    assert "error: policy.canary.sequences.0.9: token 999 is too large; fix" in capsys.readouterr().err
    facade.answers({"error": {"code": "invalid_request", "message": "wait_s is 9", "field": "body.wait_s"}}, 400)
    assert main.run(["update", "x"]) == 1
    assert "error: wait_s is 9; fix" in capsys.readouterr().err


def test_an_error_reply_is_one_line_and_exit_code_1(facade: Facade, capsys: pytest.CaptureFixture[str]) -> None:
    error = {"code": "invalid_weights", "message": "tensor x has\nanother shape", "field": "transport.path"}
    facade.answers(
        {"status": "error", "error": {**error, "fix": "publish it whole"}, "epoch": 7, "elapsed_s": 0.1}, 400
    )
    assert main.run(["update", "x"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "rl-plane: error: transport.path: tensor x has another shape; fix: publish it whole\n"
    assert main.run(["update", "x", "--json"]) == 1
    out, err = capsys.readouterr()
    shown = json.loads(out)
    assert shown["status"] == "error"
    assert shown["error"]["code"] == "invalid_weights"
    assert shown["error"]["field"] == "transport.path"
    assert shown["error"]["epoch"] == 7
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("unauthorized", 401, "RL_PLANE_ADMIN_KEY"),
        ("locked", 503, "when the other update has ended"),
        ("no_workers", 503, "repeat it in a moment"),
        ("deadline_exceeded", 504, "--timeout-s"),
        ("membership_changed", 409, "then repeat it"),
        ("never_heard_of", 500, "see the log"),
    ],
)
def test_an_error_without_a_fix_gets_one(
    facade: Facade, capsys: pytest.CaptureFixture[str], code: str, status: int, words: str
) -> None:
    facade.answers({"status": "error", "error": {"code": code, "message": "it is so."}}, status)
    assert main.run(["resume"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("rl-plane: error: it is so; fix: ")
    assert words in err


@pytest.mark.parametrize("code", ["bus_unreachable", "deadline_exceeded", "conflict"])
def test_the_fix_of_state_is_not_state(facade: Facade, capsys: pytest.CaptureFixture[str], code: str) -> None:
    facade.answers({"status": "error", "error": {"code": code, "message": "it is so"}}, 503)
    assert main.run(["state"]) == 1
    assert "rl-plane state" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "reply"),
    [(200, b"<html>"), (200, b"[]"), (200, b'{"a": 1}'), (502, b"<html>"), (404, b'{"detail": "x"}')],
)
def test_an_answer_of_another_server_says_to_check_the_address(
    facade: Facade, capsys: pytest.CaptureFixture[str], status: int, reply: bytes
) -> None:
    facade.status, facade.reply = status, reply
    assert main.run(["state"]) == 1
    assert "check the address (--url)" in capsys.readouterr().err


def test_a_redirect_does_not_take_the_key_along(facade: Facade, capsys: pytest.CaptureFixture[str]) -> None:
    other = Facade()
    try:
        facade.status, facade.headers = 307, {"Location": other.url + "/v1/rl/state"}
        assert main.run(["state", "--admin-key", "geheim"]) == 1
        assert other.asked == []
    finally:
        other.close()


def test_the_command_reports_that_no_frontend_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert main.run(["state", "--url", f"http://127.0.0.1:{free.getsockname()[1]}"]) == 1
    err = capsys.readouterr().err
    assert "no frontend answers at http://127.0.0.1:" in err
    assert "fix: start one (`rl-plane up`)" in err


def test_a_silent_frontend_is_waited_for_within_the_bound(
    facade: Facade, capsys: pytest.CaptureFixture[str]
) -> None:
    facade.delay.clear()
    assert main.run(["state", "--timeout-s", "0.3"]) == 1
    assert "within 0.3 s" in capsys.readouterr().err


def test_workers_that_start_and_exit_codes_are_listed_also_of_an_empty_fleet(
    facade: Facade, capsys: pytest.CaptureFixture[str]
) -> None:
    starting = starting_row(ID_A)
    left = {
        "instance_id": ID_B,
        "ago_s": 12.0,
        "reason": "connection",
        "why": "its connection to NATS has closed",
        "back": False,
        "exit_code": -9,
    }
    reply = {**HEAD, "ready": True, "pause_state": "running", "version": VERSION, "workers": [state_row(ID_A)]}
    lines = (f"{ID_A} starts since ", "vllm on gpu7, pid 4711: loading the model, 81 of 95 s")
    for op in ("state", "workers"):
        facade.answers({**reply, "starting": [starting], "left": [left]})
        assert main.run([op]) == 0
        out = capsys.readouterr().out
        assert all(line in out for line in lines)
        assert "SIGKILL: its connection to NATS has closed" in out
    error = {"code": "no_workers", "message": "0 of 1 workers", "starting": [starting], "left": [left]}
    facade.answers({"status": "error", "error": error}, 503)
    assert main.run(["state"]) == 1
    shown = capsys.readouterr()
    assert all(line in shown.out for line in lines)
    assert "0 of 1 workers" in shown.err
