"""Plain `nn.Module`s. They import nothing else of this package. torch is imported with the first model that is named.

protocols.py      interfaces that a model implements to be pipelined, sharded, served
registry.py       the architectures by name; architecture.py: the record of each, defined next to its config
gpt.py            the decoder, with its KV cache: GPT-2, Llama, Qwen2 and, with the shape of qwen3.py, Qwen3
                  gpt_config.py: its configuration; gpt_names.py: names in other formats; gpt_tensor.py: tensor parallel plan
attention.py      attention and rotary positions
parts.py          a range of layers; ragged.py: a batch of pieces of many sequences
simple_nn.py      a two-layer classifier
hugging_face.py, gguf.py    models in files of other formats
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smolcluster.models.gpt import GPT, KVCache, next_token_loss
    from smolcluster.models.gpt_config import GPTConfig
    from smolcluster.models.qwen3 import Qwen3Config
    from smolcluster.models.simple_nn import SimpleNN

__all__ = ["GPT", "GPTConfig", "KVCache", "Qwen3Config", "SimpleNN", "next_token_loss"]
_PLACES = {
    "GPT": "gpt",
    "GPTConfig": "gpt_config",
    "KVCache": "gpt",
    "Qwen3Config": "qwen3",
    "SimpleNN": "simple_nn",
    "next_token_loss": "gpt",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
