"""The files by which a process connects to NATS: what is wrong with each is one line with the fix, and no secret."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nkeys
import pytest

from rl_plane.bus.connect_errors import refusal_of, why_refused
from rl_plane.bus.credentials import Login, NatsCredentials
from rl_plane.bus.key_folder import KeyFolder
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.subjects import INBOX, key_of_inbox
from rl_plane.transports.base import TransportContext


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture
def seed() -> str:
    return str(nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER).decode())


def creds_text(seed: str, claims: dict[str, object]) -> str:
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return (
        f"-----BEGIN NATS USER JWT-----\nhead.{payload}.signature\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )


def refused(files: NatsCredentials, match: str, field: str) -> str:
    with pytest.raises(InvalidRequest, match=match) as error:
        files.load()
    assert error.value.facts["field"] == field
    assert "\n" not in error.value.message
    return str(error.value.facts["fix"])


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o666])
def test_a_key_that_others_can_read_is_refused(mode: int, tmp_path: Path, seed: str) -> None:
    path = written(tmp_path / "key", seed, mode)
    fix = refused(NatsCredentials(nkey=path), f"other users can read .* \\(mode {mode:04o}\\)", "nats_nkey")
    assert fix == f"chmod 600 {path}"
    refused(NatsCredentials(creds=written(tmp_path / "c", "", mode)), "other users can read", "nats_creds")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda path: path / "absent", "can't be read: No such file"),
        (lambda path: written(path / "empty", ""), "is empty"),
        (lambda path: written(path / "long", "x" * 100_000), "is too long"),
        (
            lambda path: written(path / "public", "UAKXU7WBYS6J3QD5TAML337MCGLE3H6KWHKNJRLUVECHT7YRP7QMRZKF"),
            "no seed",
        ),
        (lambda path: written(path / "account", "SAAJ3\n"), "no seed"),
        (lambda path: written(path / "short", "SUAJ3\n"), "no seed"),
        (lambda path: written(path / "odd", "SU!!!!\n"), "no seed"),
        (lambda path: path, "can't be read"),
    ],
)
def test_a_wrong_key_file_is_refused(make: Callable[[Path], Path], match: str, tmp_path: Path) -> None:
    assert refused(NatsCredentials(nkey=make(tmp_path)), match, "nats_nkey")


def test_a_key_of_a_folder_names_its_role_and_its_worker(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    folder.init("demo", ["engine"])
    made = folder.add("worker", "gpu-1")
    login = NatsCredentials(nkey=folder.seed_of(made.name)).load()
    assert (login.role, login.instance_id, login.public) == ("worker", made.instance_id, made.public)
    assert login.inbox == f"{INBOX}.{made.public}"
    assert key_of_inbox(f"{login.inbox}.x.1") == made.public
    assert str(login) == "a key of the role worker"
    assert NatsCredentials(nkey=folder.seed_of("worker")).load().instance_id is None
    proof = login.answer("nonce")
    assert proof["nkey"] == made.public
    nkeys.from_seed(folder.seed_of(made.name).read_bytes().split()[-1]).verify(
        b"nonce", base64.b64decode(proof["sig"])
    )


def test_a_credentials_file_proves_its_token(tmp_path: Path, seed: str) -> None:
    path = written(tmp_path / "user.creds", creds_text(seed, {"exp": int(time.time()) + 3600}))
    login = NatsCredentials(creds=path).load()
    assert login.answer("n").keys() == {"jwt", "sig"}
    assert login.public == nkeys.from_seed(seed.encode()).public_key.decode()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (lambda seed: creds_text(seed, {"exp": 1}), "has expired"),
        (lambda seed: seed, "holds no user's token"),
        (lambda seed: creds_text("", {}), "no seed"),
        (lambda seed: creds_text(seed, {"exp": "x"}), "holds no user's token"),
        (lambda seed: "-----BEGIN NATS USER JWT-----", "holds no user's token"),
    ],
)
def test_a_wrong_credentials_file_is_refused(
    text: Callable[[str], str], match: str, tmp_path: Path, seed: str
) -> None:
    assert refused(NatsCredentials(creds=written(tmp_path / "c", text(seed))), match, "nats_creds")


def test_certificates_must_be_there_and_fit(tmp_path: Path) -> None:
    text = written(tmp_path / "text", "no certificate")
    refused(NatsCredentials(ca=tmp_path / "absent"), "can't be read", "nats_ca")
    refused(NatsCredentials(ca=text), "holds no certificates", "nats_ca")
    refused(NatsCredentials(cert=text, cert_key=text), "no certificate and its private key", "nats_cert")
    open_key = written(tmp_path / "key", "x", 0o644)
    refused(NatsCredentials(cert=text, cert_key=open_key), "other users can read", "nats_cert_key")


def test_files_that_exclude_or_need_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="both an NKey and a credentials file"):
        NatsCredentials(nkey=tmp_path, creds=tmp_path)
    for files in ({"cert": tmp_path}, {"cert_key": tmp_path}):
        with pytest.raises(InvalidRequest, match="is given without"):
            NatsCredentials(**files)


def test_a_path_may_be_a_string(tmp_path: Path) -> None:
    files = NatsCredentials(str(tmp_path / "key"), ca=str(tmp_path / "ca"))
    assert files == NatsCredentials(nkey=tmp_path / "key", ca=tmp_path / "ca")
    refused(files, "can't be read", "nats_ca")


def test_a_path_of_another_type_is_refused() -> None:
    wrong: Any = b"key"
    with pytest.raises(InvalidRequest, match="creds is a bytes") as error:
        NatsCredentials(creds=wrong)
    assert error.value.facts == {"field": "nats_creds", "fix": "give a path: a string or a Path"}


def test_credentials_travel_to_the_ranks_of_an_engine_as_paths(tmp_path: Path) -> None:
    files = NatsCredentials(nkey=tmp_path / "key", ca=tmp_path / "ca")
    context = TransportContext((tmp_path,), credentials=files)
    wire = json.loads(json.dumps(context.to_wire()))
    assert TransportContext.from_wire(wire) == context


@pytest.mark.parametrize(
    ("url", "files", "wants"),
    [
        ("nats://h", {}, False),
        ("ws://h", {}, False),
        ("h:4222", {}, False),
        ("tls://h", {}, True),
        ("wss://h", {}, True),
        ("nats://h", {"ca": Path("ca")}, True),
        ("nats://h", {"cert": Path("c"), "cert_key": Path("k")}, True),
    ],
)
def test_a_url_or_a_certificate_asks_for_tls(url: str, files: dict[str, Path], wants: bool) -> None:
    assert NatsCredentials(**files).wants_tls(url) is wants


def test_a_refusal_names_the_subject_as_it_was_written() -> None:
    said = Exception("nats: 'permissions violation for publish to \"$kv.rlp_a_b_state.lock\"'")
    found = refusal_of(said, Login(), ["$KV.rlp_a_b_state.lock"])
    assert found is not None
    assert found[2].facts["subject"] == "$KV.rlp_a_b_state.lock"
    queue = Exception('nats: permissions violation for subscription to "a.b" using queue "q"')
    found = refusal_of(queue, Login())
    assert found is not None
    assert found[:2] == ("subscribe", "a.b")
    assert refusal_of(Exception("nats: timeout"), Login()) is None


def test_an_outage_is_no_refusal() -> None:
    for error in (
        TimeoutError(),
        ConnectionRefusedError(111, os.strerror(111)),
        Exception("nats: stale connection"),
    ):
        assert why_refused(error, "nats://h", Login(), NatsCredentials()) is None
