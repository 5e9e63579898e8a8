"""A training loop for a LoRA adapter of PEFT: only the adapter travels, and requests name it as their model.

rl-plane up --engine hf --workers 2 --model MODEL --weight-root WEIGHTS
python examples/peft_lora.py --model MODEL --root WEIGHTS
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from rl_plane.publish import WeightPublisher


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="the checkpoint that the fleet serves")
    parser.add_argument("--fleet", default="http://127.0.0.1:8002", help="the facade")
    parser.add_argument("--root", required=True, help="a directory beneath the workers' weight roots")
    parser.add_argument("--adapter", default="policy", help="how requests call the adapter")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--out", help="where the trained adapter is saved")
    args = parser.parse_args()

    base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    config = LoraConfig(
        r=8, lora_alpha=32, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, config)
    adam = torch.optim.Adam((weight for weight in model.parameters() if weight.requires_grad), lr=5e-2)

    with WeightPublisher(model, args.fleet, adapter=args.adapter, root=args.root) as publisher:
        for step in range(1, args.steps + 1):
            tokens = torch.randint(base.config.vocab_size, (4, 16))
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            adam.step()
            adam.zero_grad()
            version = publisher.publish(f"{args.adapter}_{step}").result()["version"]  # loaded, then swapped
            print(f"step {step}: the fleet serves {version['label']}", flush=True)
    if args.out:
        model.save_pretrained(args.out)


if __name__ == "__main__":
    main()
