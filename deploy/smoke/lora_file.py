"""`lora-file`: an adapter is loaded, swapped in place and unloaded, and the base beneath it stays as it is."""

from __future__ import annotations

from deploy.smoke.checks import Measured, expect
from deploy.smoke.fleet import Json
from deploy.smoke.generation import sampling
from deploy.smoke.scene import Scene, samples_of
from deploy.smoke.trainer import PROMPT, SENTENCE, Trainer, adapted, random_tokens
from deploy.smoke.updates import adapter_update


def run(scene: Scene) -> Measured:
    fleet, say = scene.fleet, scene.say
    _, base, version = scene.start(2000)
    name = scene.folder.name  # new in each run
    trainer = Trainer.of_adapter(base)
    samples, control, said = [], [], [base.sentence()]
    for number, op in enumerate(("load", "swap"), 1):
        trainer.learn(random_tokens(f"{scene.profile} {number}", SENTENCE))
        path, label = scene.folder / f"tone_{number}", f"tone_{number}"
        body = adapter_update(op, name, path, label, trainer.save(path))
        adapter: Json = {"name": name, "version": scene.updates.apply(body, may_die=op == "swap")}
        committed = fleet.rl("weight_version")["adapters"].get(name)
        expect(committed == adapter["version"], f"{adapter['version']} as the adapter's version", committed)
        forward = adapted(base, path)
        said.append(scene.check_says(forward, version, adapter))
        say(f"{op} {label!r} (sequence {adapter['version']['sequence']}): {name} says {said[-1]}, as in PEFT")
        scene.check_says(base, version)
        completions = scene.sampled(version, adapter)
        samples += samples_of(forward, completions)
        control += samples_of(base, completions)
    expect(len(set(map(tuple, said))) == 3, "other tokens from the base and from each version", said)

    fleet.rl("update_weights", {"target": {"kind": "lora", "op": "unload", "name": name}})
    body = sampling(PROMPT, SENTENCE, model=name)
    status, reply = fleet.call(fleet.http_url, "/v1/completions", body)
    expect(status == 404, "HTTP 404 for the unloaded adapter", f"HTTP {status} {reply}")
    scene.check_says(base, version)
    say(f"unloaded {name}: requests for it get 404, and the base is unchanged")
    samples += samples_of(base, scene.sampled(version))
    return Measured(samples, control)
