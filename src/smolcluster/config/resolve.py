"""Resolve automatic values, and write a `Config` as YAML.

`resolve` fills in what does not depend on data; the vocabulary size, for example, needs the tokenizer.
"""

from __future__ import annotations

from typing import Any

from smolcluster.config.describe import hide_credentials
from smolcluster.config.schema import Config
from smolcluster.config.shape import shape_of
from smolcluster.config.strategies import ALONE, canonical_strategy
from smolcluster.config.tree import to_yaml
from smolcluster.models.registry import ARCHITECTURES, to_plain

DEFAULT_SEED = 42
_EPOCHS = {"wikitext": 30, "snli": 20, "mnist": 2}
_WIKITEXT2 = {"wikitext", "wikitext-2", "wikitext2"}
_TOKENIZERS = {"embedded": "bytes", "text": "bytes", "mnist": None}
_GPT2 = {"openai-community/gpt2", "gpt2"}


def resolve(config: Config) -> Config:
    """Return a copy with automatic values made explicit. Idempotent."""
    config = config.model_copy(deep=True)
    _resolve_model(config)
    _resolve_training(config)
    _resolve_data(config)

    on_hosts = sum(host.workers for host in config.cluster.hosts.values())
    config.cluster.num_workers = config.cluster.num_workers or len(config.cluster.workers) or on_hosts or 1
    if "name" not in config.strategy.model_fields_set and config.cluster.num_workers == 1:
        config.strategy.name = ALONE
    config.strategy.name = canonical_strategy(config.strategy.name)
    return config


def _resolve_model(config: Config) -> None:
    model = config.model
    if model.type in ARCHITECTURES:
        automatic = to_plain(shape_of(model, vocab_size=model.vocab_size or 1))
        for key in {"num_kv_heads", "ff_dim", "bias"} & automatic.keys():
            setattr(model, key, automatic[key])


def _resolve_training(config: Config) -> None:
    training, cluster = config.training, config.cluster
    if training.batch_size is None:
        tokens_fit = max(1, min(32, 4096 // config.model.max_seq_len))
        training.batch_size = 32 if config.model.type == "simplenn" else tokens_fit
    if training.eval_batches is not None:
        training.eval_samples, training.eval_batches = training.eval_batches * training.batch_size, None
    if training.epochs is None and training.steps is None:
        training.epochs = next((n for name, n in _EPOCHS.items() if config.data.name.startswith(name)), 1)

    # Not `or`: 0 is a valid seed.
    seeds = [seed for seed in (training.seed, cluster.seed) if seed is not None]
    training.seed = cluster.seed = seeds[0] if seeds else DEFAULT_SEED

    # 0 and null both mean "off": normalize to null.
    training.grad_clip_norm = training.grad_clip_norm or None
    training.eval_steps = training.eval_steps or None
    if training.checkpoint_steps is None:
        training.checkpoint_steps = training.eval_steps
    if config.lr_schedule.min_lr is None:
        config.lr_schedule.min_lr = float(f"{training.learning_rate / 10:.12g}")  # 6e-05, not 5.9999999999999995e-05


def _resolve_data(config: Config) -> None:
    data = config.data
    if data.tokenizer is None:
        data.tokenizer = _TOKENIZERS.get(data.name, "gpt2")
    elif data.tokenizer in _GPT2:
        data.tokenizer = "gpt2"
    if config.logging.project_name is None:
        on_wikitext2 = config.model.type == "gpt" and data.name in _WIKITEXT2
        config.logging.project_name = "smolcluster-gpt-wikitext2" if on_wikitext2 else "smolcluster"


def public_dict(config: Config) -> dict[str, Any]:
    """Return the configuration as plain values for files and trackers, without the token and passwords."""
    plain = config.model_dump(mode="json")
    plain["cluster"]["token"] = None
    if config.logging.loki_url is not None:
        plain["logging"]["loki_url"] = hide_credentials(config.logging.loki_url)
    return plain


def dump(config: Config) -> str:
    """Return YAML that loads back to the same `Config`, except the token and passwords, which are never written."""
    public = public_dict(config)
    note = "# cluster.token is not written to files: give it in SMOLCLUSTER_TOKEN\n" if config.cluster.token else ""
    if public["logging"]["loki_url"] != config.logging.loki_url:
        note += "# the login of logging.loki_url is not written to files: give user:password in SMOLCLUSTER_LOKI_AUTH\n"
    return note + to_yaml(public)
