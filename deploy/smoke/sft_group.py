"""`sft-group`: the trainer forms a group with the workers, and broadcasts its weights to all of them at once."""

from __future__ import annotations

from deploy.smoke.checks import Measured, expect
from deploy.smoke.fleet import Json
from deploy.smoke.scene import Scene, samples_of
from deploy.smoke.trainer import SENTENCE, Forward, random_tokens
from rl_plane.errors import PlaneError
from rl_plane.publish import Progress, WeightPublisher

BUCKET_BYTES = 256 << 10
"""Small, so that the tiny model has several buckets and a worker can die between two of them."""


def run(scene: Scene) -> Measured:
    trainer, new, version = scene.start(3000)
    old, last = new, False

    def wait_for_kill(progress: Progress) -> None:
        """Runs on the thread that sends, between two buckets."""
        between = progress.phase == "sending" and 0 < progress.buckets < progress.of_buckets
        if last and between and scene.kill.pending:
            scene.kill.wait(f"{progress.buckets} of {progress.of_buckets} buckets are sent")

    with WeightPublisher(
        trainer.model,
        scene.fleet.rl_url,
        admin_key=scene.fleet.admin_key,
        transport=scene.backend,
        options={"host": scene.host},
        workers=scene.fleet.workers,
        bucket_bytes=BUCKET_BYTES,
        progress=wait_for_kill,
    ) as publisher:
        for number in (1, 2):
            last = number == 2
            old, new = new, trainer.learn(random_tokens(f"{scene.profile} {number}", SENTENCE))
            version = _published(scene, publisher, f"{scene.profile}_{number}", old, version)
            said = scene.check_says(new, version)
            scene.say(f"broadcast {version['label']!r} by {scene.backend}: every worker says {said}")
    completions = scene.sampled(version)
    return Measured(samples_of(new, completions), samples_of(old, completions))


def _published(scene: Scene, publisher: WeightPublisher, label: str, old: Forward, before: Json) -> Json:
    """Publishes the trainer's weights, a second time if a worker was killed meanwhile. Returns the version."""
    may_die = scene.kill.pending
    try:
        reply = publisher.publish(label).result()
        expect(not reply["excluded"], "no worker excluded", reply)
    except PlaneError as error:
        if not may_die or scene.kill.pending:
            raise
        scene.say(f"undone: {error}")
        scene.check_survivors(old, before)
        scene.say(f"the others serve {before['label']!r}")
        # The new process can't fetch what was broadcast. It stays closed until it has taken part in the next broadcast.
        scene.fleet.wait_members()
        scene.say("the worker is back")
        reply = publisher.publish(label).result()
    version: Json = reply["version"]
    return version
