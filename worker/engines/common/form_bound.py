"""The bound of the work that the form of a text (`structured_output`) may cause for one token.

The engine's scheduler takes each token into the grammar, and no request makes a token meanwhile. For a grammar with
many ways to make the same text this work grows with each token, without an end.
"""

from __future__ import annotations

from rl_plane.errors import InvalidRequest

TOKEN_S = 0.25
"""Seconds of processor time for one token. Grammars of schemas and expressions take less than a millisecond."""
TOO_AMBIGUOUS = "the form has too many ways to make this text"


def too_ambiguous() -> InvalidRequest:
    """The error of a request that has reached the bound."""
    return InvalidRequest(
        f"{TOO_AMBIGUOUS}: one token took more than {TOKEN_S:g} s",
        field="structured_output",
        fix="give a form in which each text can be made in one way",
    )
