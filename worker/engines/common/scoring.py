"""Scores: the logprobs of given token sequences under the weights that an engine holds. Every engine checks its input
and output here."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from rl_plane.errors import EngineFailed, InvalidRequest, Unavailable
from worker.engines.common.token_checks import check_vocabulary

MIN_TOKENS = 2
"""The fewest tokens of a sequence. The first token gets no score, so a shorter sequence would have none."""
MAX_TOKENS = 256
"""The most tokens of a sequence. A canary of this length passes every layer many times, and its logits still fit beside
a full GPU."""
MAX_SEQUENCES = 32
"""The most sequences of one call. A canary has a few. The fleet is paused while the engine scores all of them."""

LOGPROB_FLOOR = -10_000.0
"""The lowest score. It replaces -inf, which JSON does not have, and everything below. Logprobs of a usable model are
far above it."""

NOT_A_NUMBER = "the engine computes NaN: a token's logprob is not a number"


def check_sequences(sequences: Sequence[Sequence[int]], vocab_size: int, max_model_len: int) -> list[list[int]]:
    """Returns the sequences as lists. Raises InvalidRequest for a sequence that the engine can't score."""
    if not 1 <= len(sequences) <= MAX_SEQUENCES:
        raise InvalidRequest(
            f"{len(sequences)} sequences are given", field="sequences", fix=f"give 1 to {MAX_SEQUENCES}"
        )
    # An engine counts one more: the token that a request for the sequence would make.
    longest = min(MAX_TOKENS, max_model_len - 1)
    for number, sequence in enumerate(sequences):
        field = f"sequences.{number}"
        if not MIN_TOKENS <= len(sequence) <= longest:
            raise InvalidRequest(
                f"the sequence has {len(sequence)} tokens",
                field=field,
                fix=f"give {MIN_TOKENS} to {longest} token ids",
            )
        if (lowest := min(sequence)) < 0:
            raise InvalidRequest(f"token {lowest} is negative", field=field, fix=f"use ids below {vocab_size}")
        check_vocabulary(field, list(sequence), vocab_size)
    return [list(sequence) for sequence in sequences]


def check_memory(released: Collection[str]) -> None:
    """Raises Unavailable if memory is released. `released`: the tags of the released memory."""
    if released:
        raise Unavailable(f"memory is released ({', '.join(sorted(released))}): score again after resume_memory")


def in_batches(
    sequences: Sequence[list[int]], tokens: int, places: int = MAX_SEQUENCES
) -> Iterator[list[list[int]]]:
    """Yields the sequences in their order, at most `places` at a time. Padded to its longest sequence, a batch has at
    most `tokens` tokens, or it is one sequence."""
    batch: list[list[int]] = []
    longest = 0
    for sequence in sequences:
        longest = max(longest, len(sequence))
        if batch and (len(batch) == places or longest * (len(batch) + 1) > tokens):
            yield batch
            batch, longest = [], len(sequence)
        batch.append(sequence)
    if batch:
        yield batch


def checked_scores(scores: Sequence[Sequence[float]], sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Returns the scores as the worker reports them: finite, and one for each token after the first of its sequence."""
    if [len(row) for row in scores] != [len(sequence) - 1 for sequence in sequences]:
        raise EngineFailed(f"the engine gave {[len(row) for row in scores]} scores")
    if any(math.isnan(value) for row in scores for value in row):
        raise EngineFailed(NOT_A_NUMBER)
    return [[max(float(value), LOGPROB_FLOOR) for value in row] for row in scores]
