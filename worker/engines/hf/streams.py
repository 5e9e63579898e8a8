"""Requests in the generation loop of the `hf` engine, and how the next token of each is chosen."""

from __future__ import annotations

import math
import random
from typing import Any

import torch

from rl_plane.protocol.generation import FinishReason, GenerateRequest
from rl_plane.protocol.prompt_tops import PromptPlace, PromptTops
from rl_plane.protocol.routed_experts import RoutedExperts
from rl_plane.protocol.versions import WeightVersion
from worker.engines.common.pieces import Piece, PieceQueue, Top
from worker.engines.common.spans import Label
from worker.engines.hf.constraints import Constraint

MIN_P = 1e-300
"""A probability below any that a token can have. It stands for a `min_p` of 0, which bars no token and has no
logarithm."""

SCORED_ROWS = 64
"""Rows of a prompt's logits that are widened to float32 at once. With a large vocabulary, all rows would take much
memory."""

NO_PLACE = PromptPlace(None, [])
"""A token of the prompt that the model has not scored yet."""

MIN_TEMPERATURE = 1e-5
"""Lower temperatures overflow float32. At this one, every choice but an exact tie is greedy already."""


class HfStream:
    """One request. `pieces` belongs to the event loop, everything else to the generation thread."""

    def __init__(self, key: str, request: GenerateRequest, prompt: list[int], eos: frozenset[int]) -> None:
        """`eos`: the tokens that end a text, unless the request says otherwise."""
        self.key = key
        """The library's id for the request: a caller may use its own id again before the library has forgotten the old
        request."""
        self.request = request
        self.prompt = prompt
        self.stop = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else eos)
        self.constraint = Constraint.of(request, prompt, eos)
        self.made: list[int] = []
        self.pieces = PieceQueue()
        self.done = False
        self.kv: WeightVersion | None = None
        """The base weights that have computed the oldest part of the KV, if they have been replaced since."""
        self._prompt_logprobs: list[float | None] = [None] * len(prompt) if request.prompt_logprobs else []
        self._prompt_places = [NO_PLACE] * (len(prompt) - 1) if request.prompt_logprobs else []
        self._routed = 0  # rows of experts that it has
        self._fresh = Piece()
        # One draw per token, from a generator of its own: the rest of the batch changes nothing.
        self._random = random.Random(request.seed)

    @property
    def truncated(self) -> bool:
        return self.request.top_p < 1.0 or self.request.top_k > 0 or self.request.min_p > 0

    def draw(self) -> float:
        """A uniform number in (0, 1]."""
        return 1.0 - self._random.random()

    @property
    def scores_prompt(self) -> bool:
        """The request asks for prompt logprobs, and has not got them yet."""
        return self.request.prompt_logprobs and not self.made

    def restart(self) -> None:
        """Starts again at the prompt's first token. What was sent with tokens stays sent."""
        self.kv = None
        if not self.made:
            self._routed, self._fresh.routed = 0, None

    def route(self, start: int, rows: RoutedExperts) -> None:
        """Takes the experts of the tokens from `start` on. Some tokens come again if the cache ran full and KV was
        computed again."""
        fresh = rows.cut(self._routed - start)
        self._routed += fresh.tokens
        self._fresh.routed = RoutedExperts.joined([self._fresh.routed, fresh])

    def score(self, start: int, logits: torch.Tensor) -> None:
        """Takes the logits of the prompt from its token `start` on: [tokens, vocabulary]. Each row scores the next
        token."""
        following = self.prompt[start + 1 : start + 1 + len(logits)]
        wanted = torch.tensor(following, dtype=torch.int64, device=logits.device)
        at = start
        for tokens, rows in zip(wanted.split(SCORED_ROWS), logits[: len(wanted)].split(SCORED_ROWS), strict=True):
            wide = rows.float()
            self._prompt_logprobs[at + 1 : at + 1 + len(tokens)] = _logprobs(wide, tokens).tolist()
            self._prompt_places[at : at + len(tokens)] = _places(wide, tokens, self.request.prompt_top_logprobs)
            at += len(tokens)

    def is_finite(self, logprob: float) -> bool:
        """Whether the next token's logprob is finite, and, with the first token, those of the prompt."""
        prompt = self._prompt_logprobs[1:] if self.scores_prompt else []
        return all(value is not None and math.isfinite(value) for value in (logprob, *prompt))

    def push(self, token: int, logprob: float, top: Top, label: Label) -> None:
        if self.scores_prompt:
            self._fresh.prompt_logprobs = self._prompt_logprobs
            self._fresh.prompt_tops = PromptTops.of(self.request.prompt_top_logprobs, self._prompt_places)
        self._fresh.token_ids.append(token)
        self._fresh.logprobs.append(logprob)
        self._fresh.labels.append(label)
        if self.request.top_logprobs:
            self._fresh.tops.append(top)
        self.made.append(token)
        if token in self.stop:
            self.end("stop")
        elif len(self.made) >= self.request.max_tokens:
            self.end("length")

    def end(self, reason: FinishReason) -> None:
        self.done = True
        self._fresh.finish_reason = reason

    def take(self) -> Piece:
        piece, self._fresh = self._fresh, Piece()
        return piece


def choose(logits: torch.Tensor, streams: list[HfStream]) -> tuple[list[int], torch.Tensor]:
    """Returns the next token of each row, and the logits that it was drawn from: divided by the temperature, and -inf
    for each token that was barred."""
    logits = _constrained(logits, streams)
    chosen = logits.argmax(dim=-1)
    drawn_from = logits.clone() if any(stream.request.temperature > 0 for stream in streams) else logits
    # A row's path depends on its own request only, or its rounding would depend on its neighbours.
    for truncated in (False, True):
        rows = [
            row
            for row, stream in enumerate(streams)
            if stream.request.temperature > 0 and stream.truncated == truncated
        ]
        if rows:
            chosen[rows], drawn_from[rows] = _sample(logits[rows], [streams[row] for row in rows], truncated)
    return chosen.tolist(), drawn_from


def chosen_logprobs(logits: torch.Tensor, tokens: list[int]) -> list[float]:
    """The log-softmax of each row's token."""
    found: list[float] = _logprobs(logits, torch.tensor(tokens, device=logits.device)).tolist()
    return found


def score_batch(model: Any, sequences: list[list[int]]) -> list[list[float]]:
    """The logprob of each token after the first of its sequence, by one forward without a cache. Tokens that pad the
    shorter sequences change nothing, since no token attends to a later one."""
    longest = max(map(len, sequences))
    filled = torch.tensor([sequence + [0] * (longest - len(sequence)) for sequence in sequences])
    with torch.inference_mode():
        logits = model(input_ids=filled.to(model.device), use_cache=False).logits
        scores = []
        for row, sequence in zip(logits, sequences, strict=True):
            following = torch.tensor(sequence[1:], device=row.device)
            scores.append(_logprobs(row[: len(following)].float(), following).tolist())
        return scores


def _places(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> list[PromptPlace]:
    """The rank of each row's token, and the row's likeliest tokens."""
    ranks = (logits >= logits.gather(1, tokens[:, None])).sum(dim=-1).tolist()  # as vLLM counts, equal ones too
    tops = _tops(logits, count) if count else [[] for _ in ranks]
    return [PromptPlace(rank, top) for rank, top in zip(ranks, tops, strict=True)]


def _tops(logits: torch.Tensor, count: int) -> list[Top]:
    values, tokens = (logits - logits.logsumexp(dim=-1, keepdim=True)).topk(count, dim=-1)
    rows = zip(tokens.tolist(), values.tolist(), strict=True)
    return [list(zip(ids, logprobs, strict=True)) for ids, logprobs in rows]


def likeliest(logits: torch.Tensor, streams: list[HfStream]) -> list[Top]:
    """The likeliest tokens of each row that asks for them, with their log-softmax."""
    found: list[Top] = [[] for _ in streams]
    for row, stream in enumerate(streams):
        if count := min(stream.request.top_logprobs, logits.shape[1]):
            found[row] = _tops(logits[row : row + 1], count)[0]
    return found


def _constrained(logits: torch.Tensor, streams: list[HfStream]) -> torch.Tensor:
    if all(stream.constraint is None for stream in streams):
        return logits
    logits = logits.clone()
    for row, stream in zip(logits, streams, strict=True):
        if stream.constraint is not None:
            stream.constraint.apply(row, stream.made)
    return logits


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.gather(1, tokens[:, None]).squeeze(1) - logits.logsumexp(dim=-1)


def _sample(logits: torch.Tensor, streams: list[HfStream], truncated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse transform sampling, with one uniform number per row. Returns the tokens, and the logits that they were
    drawn from."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    temperature = column([max(stream.request.temperature, MIN_TEMPERATURE) for stream in streams])
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature.float()
    vocab_size = logits.shape[1]
    if truncated:
        logits, order = logits.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(vocab_size, device=logits.device)
        top_k = column([stream.request.top_k or vocab_size for stream in streams])
        logits = logits.masked_fill(rank >= top_k, -math.inf)
        # The likeliest token has 0.
        least = column([math.log(max(stream.request.min_p, MIN_P)) for stream in streams])
        logits = logits.masked_fill(logits < least, -math.inf)
    probs = logits.softmax(dim=-1)
    if truncated:
        mass_before = probs.cumsum(dim=-1, dtype=torch.float64) - probs
        barred = mass_before >= column([stream.request.top_p for stream in streams])
        probs, logits = probs.masked_fill(barred, 0.0), logits.masked_fill(barred, -math.inf)
    reached = probs.cumsum(dim=-1, dtype=torch.float64)
    # The first token that reaches a draw in (0, total] has a probability above 0. With NaN no token does: the index
    # stays in range, and the caller sees the logprob.
    wanted = column([stream.draw() for stream in streams]) * reached[:, -1:]
    index = torch.searchsorted(reached, wanted).clamp_(max=vocab_size - 1)
    if not truncated:
        return index.squeeze(1), logits
    return order.gather(1, index).squeeze(1), torch.empty_like(logits).scatter(1, order, logits)
