"""Next-token prediction on text, by any decoder of `models/registry.py`."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from smolcluster.config.schema import Config
from smolcluster.config.shape import shape_of
from smolcluster.data.cache import Progress
from smolcluster.data.text import TextData, open_text
from smolcluster.errors import UserError
from smolcluster.models import next_token_loss
from smolcluster.models.protocols import CompiledByBlock, Generative
from smolcluster.models.registry import build
from smolcluster.tasks.base import Task


class GPTTask(Task):
    perplexity = True

    def __init__(self, config: Config, *, progress: Progress | None = None) -> None:
        super().__init__(config)
        self.tokens_per_sample = config.model.max_seq_len
        self._progress = progress

    @property
    def name(self) -> str:
        return self.config.model.type

    @cached_property
    def text(self) -> TextData:
        return open_text(self.config.data, seq_len=self.config.model.max_seq_len, progress=self._progress)

    def model(self) -> nn.Module:
        c = self.config.model
        vocabulary = self.text.tokenizer.vocab_size
        if c.vocab_size is not None and c.vocab_size < vocabulary:
            raise UserError(
                f"model.vocab_size {c.vocab_size} is smaller than the {vocabulary} tokens of {self.text.tokenizer.name}; "
                "leave it null or raise it"
            )
        return build(shape_of(c, vocab_size=c.vocab_size or vocabulary))

    def train_data(self) -> Any:
        return self.text.train

    def val_data(self) -> Any:
        return self.text.val

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        tokens_BT, targets_BT = batch
        if isinstance(model, CompiledByBlock) and model.by_region:
            return model.loss(tokens_BT, targets_BT)
        return next_token_loss(model(tokens_BT), targets_BT)

    def count(self, batch: Any) -> float | Tensor | None:
        """Return None for plain text, where every token counts; a subclass with its own data may mask some."""
        own = type(self)
        if own.train_data is GPTTask.train_data and own.val_data is GPTTask.val_data:
            return None
        return super().count(batch)

    def targets(self, batch: Any) -> Tensor | None:
        targets_BT: Tensor = batch[1]
        return targets_BT

    def sample(self, model: nn.Module) -> tuple[str, str] | None:
        """Continue the first words of the validation text."""
        length = self.config.logging.sample_tokens
        if length == 0 or not isinstance(model, Generative):
            return None
        device = next(model.parameters()).device
        first, _ = self.text.val.batch(np.array([0]))
        prompt = first[:, : min(16, self.config.model.max_seq_len // 2)].to(device)
        generator = torch.Generator(device=device).manual_seed(self.config.training.seed or 0)
        written = model.generate(prompt, length, temperature=0.8, top_k=50, generator=generator)
        decode = self.text.tokenizer.decode
        return decode(prompt[0].tolist()), decode(written[0, prompt.shape[1] :].tolist())
