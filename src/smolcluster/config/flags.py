"""The flags of commands, and the configuration keys that they override.

Names are those of the command's parameters: `hidden_size` is `--hidden-size`.
"""

from __future__ import annotations

from typing import Any

# The shorthands of the multi-node guide for model and training keys.
FLAGS: dict[str, str] = {
    "vocab_size": "model.vocab_size",
    "hidden_size": "model.model_dim",
    "attention_heads": "model.num_heads",
    "layers": "model.num_layers",
    "max_seq_length": "model.max_seq_len",
    "learning_rate": "training.learning_rate",
    "batch_size": "training.batch_size",
    "epochs": "training.epochs",
    "gradient_clip_norm": "training.grad_clip_norm",
    "save_interval": "training.checkpoint_steps",
    "mixed_precision": "training.precision",
    "use_gradient_checkpointing": "training.gradient_checkpointing",
}

COMMAND_FLAGS: dict[str, str] = {
    "strategy": "strategy.name",
    "workers": "cluster.num_workers",
    "plane": "cluster.plane",
    "bind": "cluster.bind",
    "port": "cluster.port",
    "steps": "training.steps",
    "seed": "training.seed",
    "profile": "training.profile",
    "draw_schedule": "strategy.draw_schedule",
    "device": "training.device",
    "precision": "training.precision",
    "data_root": "data.root",
}


def flag_overrides(**given: Any) -> dict[str, Any]:
    """`hidden_size=64` -> `{"model.model_dim": 64}`. Flags that were not given (None, or False for a switch) are left out."""
    keys = COMMAND_FLAGS | FLAGS
    overrides = {keys[flag]: value for flag, value in given.items() if value is not None and value is not False}
    if given.get("mixed_precision"):
        overrides[FLAGS["mixed_precision"]] = "bf16"
    return overrides


def flag_of(key: str) -> str | None:
    """`model.model_dim` -> `--hidden-size`."""
    for flag, name in (COMMAND_FLAGS | FLAGS).items():
        if name == key:
            return "--" + flag.replace("_", "-")
    return None
