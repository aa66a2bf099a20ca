"""The least that a script with 2 processes does for its first training step: torchrun, gloo, DDP, one step, one line.

torchrun --standalone --nproc-per-node 2 -m benchmarks.peers.first_step WIDTH LAYERS HEADS CONTEXT BATCH

The batch has random tokens: nothing is read, logged or saved.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from smolcluster.models import GPT, GPTConfig


def main() -> None:
    model_dim, num_layers, num_heads, max_seq_len, batch_size = map(int, sys.argv[1:])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    shape = GPTConfig(
        vocab_size=256, model_dim=model_dim, num_layers=num_layers, num_heads=num_heads, max_seq_len=max_seq_len
    )
    model = DistributedDataParallel(GPT(shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    tokens = torch.randint(256, (batch_size, max_seq_len + 1))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step 1/1  loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
