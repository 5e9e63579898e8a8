"""A training loop with FSDP2: every rank publishes, one tensor at a time is gathered, rank 0 sends.

rl-plane up --engine hf --workers 2 --model MODEL --weight-root WEIGHTS
torchrun --nproc-per-node 2 examples/fsdp2.py --model MODEL --root WEIGHTS
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from rl_plane.publish import WeightPublisher


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="the checkpoint that the fleet was started with")
    parser.add_argument("--fleet", default="http://127.0.0.1:8002", help="the facade")
    parser.add_argument("--root", required=True, help="a directory beneath the workers' weight roots")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--out", help="where the trained model is saved")
    args = parser.parse_args()

    dist.init_process_group("gloo")  # on GPUs: nccl, and "cuda" below
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)

    with WeightPublisher(model, args.fleet, root=args.root) as publisher:
        for step in range(1, args.steps + 1):
            tokens = torch.randint(model.config.vocab_size, (4, 16))  # each rank has its own
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            adam.step()
            adam.zero_grad()
            publication = publisher.publish(f"sharded_{step}")  # on every rank: gathering is collective
            if dist.get_rank() == 0:
                print(f"step {step}: the fleet serves {publication.result()['version']['label']}", flush=True)

    if args.out:
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=whole)
        if dist.get_rank() == 0:
            model.save_pretrained(args.out, state_dict=state)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
