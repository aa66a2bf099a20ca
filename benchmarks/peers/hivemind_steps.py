"""One peer of hivemind: averages gradients with the others at every global batch, in fp32.

python -m benchmarks.peers.hivemind_steps SEED WIDTH LAYERS HEADS CONTEXT BATCH GLOBAL [ADDRESS ...]

Prints a line with its addresses, then one with each epoch (a step of all peers). Tokens are random: nothing is read.
"""

from __future__ import annotations

import sys

import hivemind
import torch
import torch.nn.functional as F

from smolcluster.models import GPT, GPTConfig


def main() -> None:
    seed, model_dim, num_layers, num_heads, max_seq_len, batch_size, global_batch = map(int, sys.argv[1:8])
    torch.set_num_threads(1)
    dht = hivemind.DHT(initial_peers=sys.argv[8:], start=True)
    print(*dht.get_visible_maddrs(), flush=True)
    torch.manual_seed(0)
    shape = GPTConfig(
        vocab_size=256, model_dim=model_dim, num_layers=num_layers, num_heads=num_heads, max_seq_len=max_seq_len
    )
    model = GPT(shape)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="p3",
        batch_size_per_step=batch_size,
        target_batch_size=global_batch,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95)),
        params=model.parameters(),
        matchmaking_time=0.5,
        averaging_timeout=15.0,
    )
    torch.manual_seed(seed)
    epoch = -1
    while True:
        tokens = torch.randint(256, (batch_size, max_seq_len + 1))
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.local_epoch != epoch:
            epoch = optimizer.local_epoch
            print(epoch, flush=True)


if __name__ == "__main__":
    main()
