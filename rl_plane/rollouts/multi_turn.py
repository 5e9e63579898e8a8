"""Several turns of one conversation as tokens: each prompt begins with all the tokens of the turn before it.

Text that is rendered anew may become other tokens than those that were made, with other logprobs. So a trainer keeps
the tokens, the prompt and the completion as the reply has them (`prompt_token_ids`, `token_ids`), and adds to them.
"""

from __future__ import annotations

from collections.abc import Sequence

from rl_plane.errors import InvalidRequest


def next_prompt(
    prompt: Sequence[int], completion: Sequence[int], more: Sequence[int], end: Sequence[int] = ()
) -> list[int]:
    """The next turn's prompt: the last turn's tokens and `more`, such as a tool's answer and the head of a reply.

    `end`: what closes an assistant's turn in the model's template. A completion has the stop token that ended it, and
    none if it was cut (`length`, `abort`): what it lacks of `end` is added, and nothing twice.
    """
    made, closing = list(completion), list(end)
    had = next((n for n in range(min(len(made), len(closing)), 0, -1) if made[-n:] == closing[:n]), 0)
    return [*prompt, *made, *closing[had:], *more]


def check_next_prompt(prompt: Sequence[int], completion: Sequence[int], following: Sequence[int]) -> None:
    """InvalidRequest unless the prompt `following` begins with the last turn's tokens, and goes on."""
    before, given = [*prompt, *completion], list(following)
    differs = next((at for at, (one, other) in enumerate(zip(before, given, strict=False)) if one != other), None)
    if differs is None and len(given) > len(before):
        return
    if differs is None:
        what = f"it has {len(given)} tokens, and the turn before it {len(before)}"
    else:
        what = f"its token {differs} is {given[differs]}, and was {before[differs]}"
    raise InvalidRequest(
        f"the prompt does not go on from the turn before it: {what}",
        field="prompt_token_ids",
        fix="build it by next_prompt, from the tokens of the last reply",
    )
