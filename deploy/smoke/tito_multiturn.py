"""`tito-multiturn`: conversations of several turns in tokens, over an update of the base in their middle.

Each turn's prompt is exactly the tokens of the turn before and an answer. So a conversation is one sequence of tokens,
and one forward of the trainer gives the logprobs of all its turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

from deploy.smoke.checks import Measured, Sample, SmokeFailed, expect
from deploy.smoke.fleet import Json
from deploy.smoke.generation import Completion, Route, Stream, complete, sampling, span_label
from deploy.smoke.scene import Scene
from deploy.smoke.trainer import SENTENCE, Forward, Trainer, adapted, random_tokens
from deploy.smoke.updates import adapter_update, base_update
from rl_plane import check_next_prompt, next_prompt

TURNS = 4
"""Two before the update, and two after it."""
TURN_TOKENS = 16
ANSWER_TOKENS = 6
STREAM_TOKENS = 4000
"""More than a stream makes while an update comes. The client ends it."""
AROUND = 8
"""The tokens that a stream must have from the weights before an update, and from those after it."""


@dataclass
class Conversation:
    """One conversation, with the base or with an adapter, by one route, unary or streamed."""

    name: str
    route: Route
    streamed: bool
    adapter: Json | None
    tokens: list[int]
    turns: list[tuple[int, Completion, int]] = field(default_factory=list)
    """For each turn: the length of its prompt, what was made, and the number of the base that made it."""

    def take_turn(self, scene: Scene, version: Json, number: int) -> None:
        model = {} if self.adapter is None else {"model": self.adapter["name"]}
        body = sampling(self.tokens, TURN_TOKENS, self.route, seed=len(self.tokens), **model)
        if self.streamed:
            with Stream(scene.fleet, body, self.route) as stream:
                made = stream.read_all()
        else:
            (made,) = complete(scene.fleet, body, self.route)
        made.check(TURN_TOKENS, version, self.adapter)
        self.turns.append((len(self.tokens), made, number))
        answer = random_tokens(f"{self.name} {len(self.turns)}", ANSWER_TOKENS)
        following = next_prompt(self.tokens, made.tokens, answer)
        check_next_prompt(self.tokens, made.tokens, following)
        expect(following == self.tokens + made.tokens + answer, "the turn as a prefix of the next", following)
        self.tokens = following

    def sample(self, forwards: list[Forward]) -> Sample:
        """Returns the conversation's logprobs, where base number `n` of a turn is `forwards[n]`. Each of these computes
        the whole conversation once."""
        whole = [one.logprobs(self.tokens[:1], self.tokens[1:]) for one in forwards]
        trainer, inference = [], []
        for start, made, number in self.turns:
            trainer += whole[number][start - 1 : start - 1 + len(made.tokens)]
            inference += made.logprobs
        return Sample(trainer, inference)


def run(scene: Scene) -> Measured:
    say = scene.say
    trainer, first, before = scene.start(4000)
    player = Trainer.of_adapter(first)
    player.learn(random_tokens(f"{scene.profile} adapter", SENTENCE))
    folder, name = scene.folder / "player", scene.folder.name  # the name is new in each run
    loaded = scene.updates.apply(adapter_update("load", name, folder, "player_1", player.save(folder)))
    adapter: Json = {"name": name, "version": loaded}
    second = trainer.learn(random_tokens(f"{scene.profile} 1", SENTENCE))
    forwards = {False: [first, second], True: [adapted(one, folder) for one in (first, second)]}

    conversations = list(_conversations(adapter))
    for _ in range(TURNS // 2):
        _all_take_turns(scene, conversations, before, 0)
    say(f"{TURNS // 2} turns of {len(conversations)} conversations under {before['label']!r}")
    after, streams = _update_under_streams(scene, trainer, before, adapter)
    for _ in range(TURNS // 2):
        _all_take_turns(scene, conversations, after, 1)
    say(f"{TURNS // 2} more turns under {after['label']!r}; each turn is the prefix of the next")

    samples, control = [], []
    for conversation in conversations:
        right = forwards[conversation.adapter is not None]
        samples.append(conversation.sample(right))
        control.append(conversation.sample(right[::-1]))
    for made, with_adapter in streams:
        samples.append(_sample(made, forwards[with_adapter], after))
        control.append(_sample(made, forwards[with_adapter][::-1], after))
    scene.fleet.rl("update_weights", {"target": {"kind": "lora", "op": "unload", "name": name}})
    return Measured(samples, control)


def _conversations(adapter: Json) -> Iterator[Conversation]:
    routes: tuple[Route, ...] = ("completions", "chat/completions")
    for route in routes:
        for streamed in (False, True):
            for model in (None, adapter):
                name = f"{route} {'streamed' if streamed else 'unary'} {'adapter' if model else 'base'}"
                yield Conversation(name, route, streamed, model, random_tokens(name, ANSWER_TOKENS))


def _all_take_turns(scene: Scene, conversations: list[Conversation], version: Json, number: int) -> None:
    for conversation in conversations:
        conversation.take_turn(scene, version, number)


def _update_under_streams(
    scene: Scene, trainer: Trainer, before: Json, adapter: Json
) -> tuple[Json, list[tuple[Completion, bool]]]:
    """Updates the base while a stream of it and a stream of the adapter run. Returns the new version and what both
    streams made, which is labelled with both versions. A stream whose worker is killed continues at another worker."""
    fleet = scene.fleet
    path, label = scene.folder / "base_1", f"{scene.profile}_1"
    body = base_update(path, label, trainer.save(path))
    models: tuple[Json | None, ...] = (None, adapter)
    with ExitStack() as stack:
        streams: list[tuple[Stream, Json | None]] = []
        for model in models:
            named = {} if model is None else {"model": model["name"]}
            prompt = random_tokens(f"stream {named}", ANSWER_TOKENS)
            request = sampling(prompt, STREAM_TOKENS, migrate=True, seed=0, **named)
            streams.append((stack.enter_context(Stream(fleet, request)), model))
        for stream, _ in streams:
            stream.read_until(lambda made: len(made.tokens) >= AROUND, "its first tokens")
        with scene.updates.paused():
            after = scene.updates.apply(body, may_die=True)
        for stream, model in streams:
            old, new = span_label(before, model), span_label(after, model)
            stream.read_until(lambda made, new=new: _count(made, new) >= AROUND, "tokens of the new weights")  # type: ignore[misc]
            fleet.rl("abort_requests", {"request_ids": [stream.id]})
            made = stream.read_all()
            expect(made.finish_reason == "abort", "finish_reason abort", made.finish_reason)
            spans = [{key: span[key] for key in span if key not in ("start", "end")} for span in made.spans]
            expect(spans == [old, new], "tokens of the old weights, then of the new ones", made.spans)
            ends = [0, *(span["end"] for span in made.spans)]
            expect(ends[:-1] == [span["start"] for span in made.spans], "spans without a gap", made.spans)
            expect(ends[-1] == len(made.tokens), "spans over all tokens", made.spans)
            scene.say(
                f"a stream of {model['name'] if model else 'the base'} continues over the update: {ends[1]} tokens of "
                f"{before['label']!r}, then {ends[2] - ends[1]} of {after['label']!r}, by {len(made.workers)} worker(s)"
            )
    return after, [(stream.completion, model is not None) for stream, model in streams]


def _count(made: Completion, label: Json) -> int:
    """Returns how many tokens were made since the label's span began."""
    starts = [span["start"] for span in made.spans if label.items() <= span.items()]
    return len(made.tokens) - starts[0] if starts else 0


def _sample(made: Completion, forwards: list[Forward], after: Json) -> Sample:
    """Returns a stream's logprobs: the tokens before the update by the first forward, those after it by the second."""
    change = next((span["start"] for span in made.spans if span["sequence"] == after["sequence"]), None)
    if change is None:
        raise SmokeFailed(f"no token of {after['label']}: {made.spans}")
    first, second = (one.logprobs(made.prompt, made.tokens) for one in forwards)
    return Sample(first[:change] + second[change:], made.logprobs)
