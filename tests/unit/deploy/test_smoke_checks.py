"""The numbers and the labels by which the smoke profiles judge a fleet."""

from __future__ import annotations

import math

import pytest

from deploy.smoke.__main__ import main
from deploy.smoke.checks import AIM, Measured, Sample, SmokeFailed, mismatch_kl
from deploy.smoke.fleet import Json
from deploy.smoke.generation import Completion, span_label
from deploy.smoke.updates import KILL_NOW, adapter_update
from tests.support.paths import ROOT

VERSION = {"run": "r", "sequence": 3, "label": "three", "digest": "xxh3:03"}
TONE = {**VERSION, "sequence": 4, "label": "tone_1", "digest": "xxh3:04"}
ADAPTER = {"name": "tone", "version": TONE}


def apart(*distances: float) -> Sample:
    """Trainer minus engine, in nats."""
    return Sample([-2.0 + one for one in distances], [-2.0] * len(distances))


def test_mismatch_kl_is_that_of_prime_rl() -> None:
    def k3(d: float) -> float:
        return math.exp(d) - d - 1

    assert mismatch_kl([apart(0.0)]) == 0.0
    assert mismatch_kl([apart(0.3)]) == pytest.approx(k3(0.3))
    assert mismatch_kl([apart(-0.3)]) == pytest.approx(k3(-0.3))
    # Each sequence counts once, however many tokens it has.
    assert mismatch_kl([apart(0.3), apart(0.1, 0.1, -0.2)]) == pytest.approx(
        (k3(0.3) + (2 * k3(0.1) + k3(-0.2)) / 3) / 2
    )


def test_a_run_must_distinguish_right_weights_from_wrong_weights() -> None:
    near, far = apart(0.001, -0.001), apart(0.1)
    assert mismatch_kl([near]) < AIM < mismatch_kl([far])
    assert "over 2 tokens" in Measured([near], [far]).check()
    with pytest.raises(SmokeFailed, match="at most"):
        Measured([far], [far]).check()
    with pytest.raises(SmokeFailed, match="with other weights"):
        Measured([near], [near]).check()


def test_a_stream_is_put_together_from_its_chunks() -> None:
    first, second = (span_label({**VERSION, "sequence": one}) for one in (3, 4))
    begin, change = {**first, "start": 0, "end": 2}, {**second, "start": 3, "end": 4}
    made = Completion([5])
    made.add({"token_ids": [6, 7], "logprobs": {"token_logprobs": [-1.0, -2.0]}, "weight_versions": [begin]})
    made.add({"token_ids": [8], "logprobs": {"content": [{"logprob": -3.0}]}})  # as a chat has them
    assert made.spans == [begin]
    made.add({"token_ids": [9], "logprobs": {"token_logprobs": [-4.0]}, "weight_versions": [change]})
    assert made.spans == [begin, change]
    every = [{**begin, "end": 3}, change]
    made.add({"token_ids": [], "weight_versions": every, "finish_reason": "length"})
    assert (made.tokens, made.logprobs, made.spans) == ([6, 7, 8, 9], [-1.0, -2.0, -3.0, -4.0], every)
    with pytest.raises(SmokeFailed, match="all tokens labelled"):
        made.check(4, VERSION)
    with pytest.raises(SmokeFailed, match="a logprob for each token"):
        made.add({"token_ids": [1], "logprobs": None})


def test_a_wrong_label_fails() -> None:
    span = {**span_label(VERSION, ADAPTER), "start": 0, "end": 1}
    made = Completion([5], [6], [-1.0], [span], "length")
    made.check(1, VERSION, ADAPTER)
    wrong: tuple[tuple[Json, Json | None], ...] = (
        (VERSION, None),
        ({**VERSION, "digest": "xxh3:05"}, ADAPTER),
        (TONE, ADAPTER),
    )
    for version, adapter in wrong:
        with pytest.raises(SmokeFailed):
            made.check(1, version, adapter)


def test_without_keys_it_says_what_to_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RL_PLANE_ADMIN_KEY", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["sft-file"])
    assert ended.value.code == 2
    assert "RL_PLANE_ADMIN_KEY" in capsys.readouterr().err


def test_the_script_waits_for_what_the_smoke_prints() -> None:
    script = (ROOT / "deploy" / "smoke_with_kill.sh").read_text()
    waited = script.split("*'")[1].split("'")[0]
    assert waited in KILL_NOW


def test_an_adapter_update_is_one_of_the_target() -> None:
    body = adapter_update("swap", "tone", ROOT, "tone_2", "xxh3:00")
    assert body["target"] == {"kind": "lora", "op": "swap", "name": "tone"}
    assert body["transport"] == {"backend": "filesystem", "path": str(ROOT)}
