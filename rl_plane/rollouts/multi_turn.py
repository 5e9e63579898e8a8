"""Several turns of one conversation as tokens: each prompt begins with all tokens of the turn before.

Text that is rendered again may become other tokens, with other logprobs. A trainer therefore keeps the tokens of the
reply (`prompt_token_ids`, `token_ids`), and appends to them.
"""

from __future__ import annotations

from collections.abc import Sequence

from rl_plane.errors import InvalidRequest


def next_prompt(
    prompt: Sequence[int], completion: Sequence[int], more: Sequence[int], end: Sequence[int] = ()
) -> list[int]:
    """The next turn's prompt: the last turn's tokens and more.

    Args:
        prompt: The last turn's prompt.
        completion: The last turn's completion.
        more: The new tokens, such as a tool's answer and the head of a reply.
        end: The tokens that close an assistant's turn in the model's template. The completion may have some of them
            already, such as its stop token. The missing ones are added.
    """
    made, closing = list(completion), list(end)
    had = next((n for n in range(min(len(made), len(closing)), 0, -1) if made[-n:] == closing[:n]), 0)
    return [*prompt, *made, *closing[had:], *more]


def check_next_prompt(prompt: Sequence[int], completion: Sequence[int], following: Sequence[int]) -> None:
    """InvalidRequest unless the prompt `following` begins with all tokens of the last turn, and has more."""
    before, given = [*prompt, *completion], list(following)
    differs = next((at for at, (one, other) in enumerate(zip(before, given, strict=False)) if one != other), None)
    if differs is None and len(given) > len(before):
        return
    if differs is None:
        what = f"it has {len(given)} tokens, and the turn before has {len(before)}"
    else:
        what = f"its token {differs} is {given[differs]}, and was {before[differs]}"
    raise InvalidRequest(
        f"the prompt does not continue the turn before: {what}",
        field="prompt_token_ids",
        fix="build it by next_prompt, from the tokens of the last reply",
    )
