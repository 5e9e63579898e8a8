"""`sft-file`: a trained checkpoint through the shared volume: pause, update, resume, other tokens; refused paths."""

from __future__ import annotations

from pathlib import Path

from deploy.smoke.checks import Measured, expect
from deploy.smoke.scene import Scene, samples_of
from deploy.smoke.trainer import SENTENCE, random_tokens
from deploy.smoke.updates import base_update


def run(scene: Scene) -> Measured:
    fleet, say = scene.fleet, scene.say
    trainer, old, before = scene.start(1000)
    fleet.refuse_strangers()
    say("both listeners want a key")

    new = trainer.learn(random_tokens(f"{scene.profile} 1", SENTENCE))
    path, label = scene.folder / "base_1", f"{scene.profile}_1"
    digest = trainer.save(path)
    say(f"published {path}, {digest}")
    with scene.updates.paused():
        version = scene.updates.apply(base_update(path, label, digest), may_die=True)
    say("paused, updated and resumed")

    expect(version["run"] == before["run"] and version["label"] == label, f"{label} in {before['run']}", version)
    expect(version["sequence"] == before["sequence"] + 1, "the next sequence", version)
    said = scene.check_says(new, version)
    expect(said != old.sentence(), "other tokens than before", said)
    say(f"{label!r} (sequence {version['sequence']}) on {fleet.workers} of {fleet.workers} workers says {said}")

    for wrong in (scene.folder / "nothing_here", Path("/etc")):
        error = fleet.rl("update_weights", base_update(wrong, "wrong"), status=400)["error"]
        say(f"refused {wrong}: {error['message']}")
    scene.check_says(new, version)
    say("the fleet serves on")
    completions = scene.sampled(version)
    return Measured(samples_of(new, completions), samples_of(old, completions))
