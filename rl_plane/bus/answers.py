"""The subject for the answer to a message: every process of the plane that answers asks here."""

from __future__ import annotations

from nats.aio.msg import Msg

from rl_plane.protocol.subjects import INBOX


def answer_subject(message: Msg) -> str:
    """The inbox in which the sender of the message waits for an answer. Empty: there is none, so don't answer.

    NATS checks to which subject a client publishes, but not which subject the client names for the answer. An answer
    to any other subject would let the sender write there with the permissions of the process that answers."""
    return message.reply if message.reply.startswith(f"{INBOX}.") else ""
