"""DDP for elastic torchrun: load the last checkpoint, train, save every few steps.

torchrun ... -m benchmarks.peers.elastic_ddp FOLDER EVERY WIDTH LAYERS HEADS CONTEXT BATCH

Rank 0 adds a line to FOLDER/steps.txt for each step it has taken: the time, the step, the process. Checkpoints hold weights and
optimizer state, are written beside the old one and renamed. Tokens are random: nothing is read.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from smolcluster.models import GPT, GPTConfig


def main() -> None:
    folder, every = Path(sys.argv[1]), int(sys.argv[2])
    model_dim, num_layers, num_heads, max_seq_len, batch_size = map(int, sys.argv[3:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lead = dist.get_rank() == 0
    torch.manual_seed(0)
    shape = GPTConfig(
        vocab_size=256, model_dim=model_dim, num_layers=num_layers, num_heads=num_heads, max_seq_len=max_seq_len
    )
    model = DistributedDataParallel(GPT(shape), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)

    checkpoint, step = folder / "checkpoint.pt", 0
    if checkpoint.is_file():
        saved = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]

    with (folder / "steps.txt").open("a", encoding="ascii", buffering=1) as steps:
        while True:
            tokens = torch.randint(256, (batch_size, max_seq_len + 1))
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if lead:
                steps.write(f"{time.time()} {step} {os.getpid()}\n")
                if step % every == 0:
                    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, folder / "new.pt")
                    (folder / "new.pt").replace(checkpoint)


if __name__ == "__main__":
    main()
