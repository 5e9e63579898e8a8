"""Credentials for NATS: they show who a process is, and whether the server is the right one.

`NatsCredentials` has paths only, so it may travel to child processes and be printed. `Login` is what a connection makes
of them: it reads the files, signs the server's nonce, and makes the TLS context.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rl_plane._util.extras import missing_module
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.subjects import INBOX

ROLE, INSTANCE_ID = "role", "instance-id"
"""The notes in a key file of `rl-plane keys`, on lines such as `# role: worker`."""
TLS_SCHEMES = ("tls", "wss")
MAX_FILE_BYTES = 1 << 16
"""A key, a token or a certificate has a few kilobytes."""


@dataclass(frozen=True, slots=True, init=False)
class NatsCredentials:
    """The files by which a process connects to NATS. All of them are optional."""

    nkey: Path | None = None
    """The seed of an NKey, such as `rl-plane keys` makes."""
    creds: Path | None = None
    """A user's token and seed in one file (`.creds`), as `nsc` makes it."""
    ca: Path | None = None
    """The certificates of the authorities that may have signed the server's. None: the system's."""
    cert: Path | None = None
    """The client's own certificate, for a server that asks for one."""
    cert_key: Path | None = None
    """The private key of `cert`."""

    def __init__(
        self,
        nkey: Path | str | None = None,
        creds: Path | str | None = None,
        ca: Path | str | None = None,
        cert: Path | str | None = None,
        cert_key: Path | str | None = None,
    ) -> None:
        files = {"nkey": nkey, "creds": creds, "ca": ca, "cert": cert, "cert_key": cert_key}
        for name, path in files.items():
            object.__setattr__(self, name, _as_path(name, path))  # the fields are frozen
        if self.nkey is not None and self.creds is not None:
            raise InvalidRequest(
                "both an NKey and a credentials file are given", field="nats_creds", fix="give one of them"
            )
        if (self.cert is None) != (self.cert_key is None):
            given, missing = ("nats_cert", "nats_cert_key") if self.cert else ("nats_cert_key", "nats_cert")
            raise InvalidRequest(f"{given} is given without {missing}", field=missing, fix="give both, or neither")

    def to_wire(self) -> dict[str, str]:
        paths = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: str(path.absolute()) for name, path in paths.items() if path is not None}

    @classmethod
    def from_wire(cls, wire: Mapping[str, str]) -> NatsCredentials:
        return cls(**wire)

    def wants_tls(self, url: str) -> bool:
        """Reports whether a connection without TLS is refused."""
        return urlsplit(url).scheme in TLS_SCHEMES or self.ca is not None or self.cert is not None

    def load(self) -> Login:
        """Reads the key, and checks the other files. InvalidRequest: a file is missing, wrong, or open to others."""
        if self.ca is not None or self.cert is not None:
            self.tls_context()
        if self.creds is not None:
            return _login_of_creds(self.creds)
        return _login_of_nkey(self.nkey) if self.nkey is not None else Login()

    def tls_context(self) -> ssl.SSLContext:
        """Makes the TLS context from the files as they are now."""
        if self.ca is not None:
            _read(self.ca, "nats_ca")
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except ssl.SSLError as error:
            raise InvalidRequest(
                f"{self.ca} holds no certificates", field="nats_ca", fix="give the authority's certificate in PEM"
            ) from error
        if self.cert is not None and self.cert_key is not None:
            _read(self.cert, "nats_cert")
            _read(self.cert_key, "nats_cert_key", secret=True)
            try:
                # A key with a password would otherwise make OpenSSL ask on the terminal.
                context.load_cert_chain(self.cert, self.cert_key, password=lambda: b"")
            except (ssl.SSLError, ValueError) as error:
                raise InvalidRequest(
                    f"{self.cert} and {self.cert_key} are no certificate and its private key",
                    field="nats_cert",
                    fix="give both in PEM, the key without a password",
                ) from error
        return context


def _as_path(name: str, path: Any) -> Path | None:
    if path is None or isinstance(path, Path):
        return path
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidRequest(
            f"{name} is a {type(path).__name__}", field=f"nats_{name}", fix="give a path: a string or a Path"
        )
    return Path(path)


NO_CREDENTIALS = NatsCredentials()


class Login:
    """The proof by which NATS lets a connection in."""

    def __init__(
        self,
        seed: bytes | None = None,
        jwt: str | None = None,
        notes: Mapping[str, str] | None = None,
        file: Path | None = None,
    ) -> None:
        notes = notes or {}
        self.file = file
        self.jwt = jwt
        self.role = notes.get(ROLE)
        """The role that the key file names. None: it names none."""
        self.instance_id = notes.get(INSTANCE_ID)
        """The worker that this key belongs to. None: it may be any."""
        self._pair = _key_pair(seed) if seed is not None else None
        self.public = self._pair.public_key.decode() if self._pair is not None else None

    @property
    def inbox(self) -> str:
        """The prefix of the subjects on which this connection receives answers."""
        return f"{INBOX}.{self.public}" if self.public is not None else INBOX

    def __str__(self) -> str:
        if self.role is not None:
            return f"a key of the role {self.role}"
        return "this key" if self.public is not None else "a connection without a key"

    def answer(self, nonce: str) -> dict[str, str]:
        """The fields of CONNECT that prove this key. {}: there is no key."""
        if self._pair is None:
            return {}
        signature = base64.b64encode(self._pair.sign(nonce.encode())).decode()
        who = {"jwt": self.jwt} if self.jwt is not None else {"nkey": str(self.public)}
        return {**who, "sig": signature}


def _key_pair(seed: bytes) -> Any:
    """ValueError: this is no seed."""
    try:
        import nkeys
    except ModuleNotFoundError as error:
        raise missing_module(error) from error
    try:
        return nkeys.from_seed(seed)
    except Exception as error:  # nkeys has several kinds, without a base
        raise ValueError("no seed") from error


def _login_of_nkey(path: Path) -> Login:
    text = _read(path, "nats_nkey", secret=True)
    lines = (line[1:].partition(":") for line in text.splitlines() if line.startswith("#"))
    notes = {key.strip(): value.strip() for key, sign, value in lines if sign}
    return _checked_login(text, path, "nats_nkey", None, notes)


def _login_of_creds(path: Path) -> Login:
    text = _read(path, "nats_creds", secret=True)
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if "BEGIN NATS USER JWT" in line]
    jwt = lines[starts[0] + 1].strip() if starts and starts[0] + 1 < len(lines) else ""
    try:
        payload = jwt.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        expires = int(claims.get("exp", 0))
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        raise InvalidRequest(
            f"{path} holds no user's token", field="nats_creds", fix="give a .creds file, as `nsc` makes it"
        ) from error
    if expires and expires <= time.time():
        raise InvalidRequest(
            f"the token in {path} has expired", field="nats_creds", fix="make a new one (`nsc generate creds`)"
        )
    return _checked_login(text, path, "nats_creds", jwt, {})


def _checked_login(text: str, path: Path, field: str, jwt: str | None, notes: Mapping[str, str]) -> Login:
    seeds = [line.strip() for line in text.splitlines() if line.startswith("SU")]
    try:
        return Login(seeds[0].encode(), jwt, notes, path)
    except (IndexError, ValueError) as error:
        raise InvalidRequest(
            f"{path} holds no seed of a user's NKey",
            field=field,
            fix="give a file with a line that begins with SU",
        ) from error


def _read(path: Path, field: str, secret: bool = False) -> str:
    """Reads a file. `secret`: no other user may read it. A group may, if the file belongs to another user: then the
    group is how this process reads it."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(MAX_FILE_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        raise InvalidRequest(
            f"{path} can't be read: {error.strerror}", field=field, fix="name a file that this user can read"
        ) from error
    closed = stat.S_IRWXO | stat.S_IWGRP | (stat.S_IRGRP if status.st_uid == os.geteuid() else 0)
    if secret and status.st_mode & closed:
        raise InvalidRequest(
            f"other users can read {path} (mode {stat.S_IMODE(status.st_mode):04o})",
            field=field,
            fix=f"chmod 600 {path}",
        )
    if not data or len(data) > MAX_FILE_BYTES:
        raise InvalidRequest(
            f"{path} is {'empty' if not data else 'too long'}", field=field, fix="name the right file"
        )
    return data.decode(errors="replace")
