"""Plain `nn.Module`s. They import nothing else of this package."""

from smolcluster.models.gpt import GPT, KVCache, next_token_loss
from smolcluster.models.gpt_config import GPTConfig
from smolcluster.models.simple_nn import SimpleNN

__all__ = ["GPT", "GPTConfig", "KVCache", "SimpleNN", "next_token_loss"]
