"""Says in words why NATS refuses a connection, a subject, or is refused itself. Pure."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterable

from rl_plane.bus.credentials import Login, NatsCredentials
from rl_plane.errors import PermissionDenied, Unauthorized

NO_TLS = "the server offers no TLS"
_DENIED = re.compile(r"permissions violation for (publish|subscription) to \"(\S+?)\"", re.IGNORECASE)


def refusal_of(
    error: Exception, login: Login, subjects: Iterable[str] = ()
) -> tuple[str, str, PermissionDenied] | None:
    """Reads what NATS has refused on a connection that stays: `publish` or `subscribe`, the subject, and the error.
    None: the error is another one. nats-py gives the subject in lower case, so `subjects` lists the real subjects, from
    which this function picks."""
    found = _DENIED.search(str(error))
    if found is None:
        return None
    verb = "publish" if found[1].lower() == "publish" else "subscribe"
    subject = next((each for each in subjects if each.lower() == found[2].lower()), found[2])
    words = f"{login} may not {verb} to {subject}"
    denied = PermissionDenied(
        f"NATS: {words}",
        subject=subject,
        role=login.role,
        fix="use a key of the role that may (docs/security.md has the table)",
    )
    return verb, found[2].lower(), denied


def why_refused(error: Exception, url: str, login: Login, credentials: NatsCredentials) -> Unauthorized | None:
    """The error of a connection that another try would not open. None: another try may."""
    words = str(error)
    if NO_TLS in words:
        return _refused(
            f"the server at {url} offers no TLS, so nothing was sent to it",
            "give the server a certificate, or use nats:// on a network that you trust",
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return _wrong_server(error, url, credentials)
    lower = words.lower()
    if "authentication expired" in lower:
        return _refused(
            f"the server at {url} says that the token of this process has expired",
            f"make {credentials.creds or 'the file of --nats-creds'} again for the same user: each connection reads it",
        )
    if "authorization violation" in lower or "authorizationerror" in lower:
        return _refused(
            f"the server at {url} does not know {login}" if login.public else f"the server at {url} wants a key",
            "the server must have this key: `rl-plane keys add`, then reload it"
            if login.public
            else "--nats-nkey FILE (RL_PLANE_NATS_NKEY) with a key of `rl-plane keys`, or a password in the URL",
        )
    if isinstance(error, ssl.SSLError) and "ALERT" in words:
        if "EXPIRED" in words:
            return _refused(
                f"the server at {url} says that this client's certificate has expired",
                "renew the certificate of --nats-cert",
            )
        if credentials.cert is None:
            return _refused(
                f"the server at {url} wants a client certificate", "--nats-cert FILE and --nats-cert-key FILE"
            )
        return _refused(
            f"the server at {url} does not accept the certificate {credentials.cert}",
            "use a certificate that the server's authority has signed",
        )
    return None


def _wrong_server(error: ssl.SSLCertVerificationError, url: str, credentials: NatsCredentials) -> Unauthorized:
    reason = error.verify_message
    if "expired" in reason:
        return _refused(f"the certificate of the server at {url} has expired", "renew the server's certificate")
    if "match" in reason or "mismatch" in reason:
        return _refused(
            f"the certificate of the server at {url} is for another name: {reason}",
            "use a name in the URL that the certificate has",
        )
    by = "the system's authorities" if credentials.ca is None else str(credentials.ca)
    return _refused(
        f"the certificate of the server at {url} is not signed by {by}: {reason}",
        "--nats-ca FILE (RL_PLANE_NATS_CA) with the certificate of the server's authority",
    )


def _refused(message: str, fix: str) -> Unauthorized:
    return Unauthorized(message, field="nats_url", fix=fix)
