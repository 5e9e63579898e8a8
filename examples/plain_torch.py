"""A training loop in plain torch: the fleet serves the weights of each step, and the next step computes meanwhile.

rl-plane up --engine hf --workers 2 --model MODEL --weight-root WEIGHTS
python examples/plain_torch.py --model MODEL --root WEIGHTS
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM

from rl_plane.publish import WeightPublisher


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="the checkpoint that the fleet was started with")
    parser.add_argument("--fleet", default="http://127.0.0.1:8002", help="the facade")
    parser.add_argument("--root", required=True, help="a directory beneath the workers' weight roots")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", help="where the trained model is saved")
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    with WeightPublisher(model, args.fleet, root=args.root) as publisher:
        publication = publisher.publish("step_0")  # from here on the engines have the trainer's weights
        for step in range(1, args.steps + 1):
            tokens = torch.randint(model.config.vocab_size, (4, 16))  # yours come from the fleet
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            publication.wait_read()  # the weights of the step before may be on their way still: don't change them
            adam.step()
            adam.zero_grad()
            publication = publisher.publish(f"step_{step}", wait=False)
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
        version = publication.result()["version"]
    print(f"the fleet serves {version['label']}, {version['digest']}")
    if args.out:
        model.save_pretrained(args.out)


if __name__ == "__main__":
    main()
