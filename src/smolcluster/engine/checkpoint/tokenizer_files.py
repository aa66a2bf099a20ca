"""The tokenizer and chat template of a model: files next to its weights, with Hugging Face's names.

RUN/tokenizer/
    tokenizer.json                   or vocab.json and merges.txt
    tokenizer_config.json, ...       special tokens, the chat template, stop tokens

`import` writes them, and a run whose `data.tokenizer` is a path has a copy. `train --resume` and `serve` read them, `export`
writes them next to the weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smolcluster.config.schema import DataConfig
from smolcluster.data.names import default_tokenizer
from smolcluster.data.tokenizers import GPT2_FILES, GPT2_NAMES, Tokenizer, find_gpt2_files, gpt2_cache_folder
from smolcluster.engine.run_dir import RunDir
from smolcluster.errors import UserError

DEFINITION, GENERATION = "tokenizer.json", "generation_config.json"
_OPTIONAL = ("tokenizer_config.json", "special_tokens_map.json", GENERATION, "chat_template.jinja")


def read_tokenizer(folder: Path) -> dict[str, bytes]:
    """Return the tokenizer's files in a model's folder, by name. Empty: the folder has no tokenizer."""
    pair = find_gpt2_files(folder)
    if (folder / DEFINITION).is_file():
        found = {DEFINITION: folder / DEFINITION}
    elif pair is not None:
        found = dict(zip(GPT2_FILES[1], pair, strict=True))
    else:
        return {}
    found |= {name: folder / name for name in _OPTIONAL if (folder / name).is_file()}
    try:
        return {name: path.read_bytes() for name, path in found.items()}
    except OSError as error:
        raise UserError(f"cannot read the tokenizer in {folder}: {error.strerror or error}") from error


def with_stop_tokens(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, bytes]:
    """Add the stop tokens of a model's config.json, unless a file of the tokenizer has them."""
    stop = config.get("eos_token_id")
    if not files or stop is None or GENERATION in files:
        return dict(files)
    return {**files, GENERATION: f"{json.dumps({'eos_token_id': stop})}\n".encode()}


def tokenizer_of(run: RunDir, data: DataConfig) -> dict[str, bytes]:
    """Return the files of the tokenizer that a run trains with. Empty: it has none (bytes, chars)."""
    if run.tokenizer.is_dir():
        return read_tokenizer(run.tokenizer)
    name = data.tokenizer or default_tokenizer(data.name)
    if name in GPT2_NAMES:
        root = data.tokenizer_root or data.root
        pair = find_gpt2_files(None if root is None else Path(root).expanduser(), gpt2_cache_folder(data.cache_dir))
        return {} if pair is None else read_tokenizer(pair[0].parent)
    return tokenizer_at(name)


def tokenizer_at(name: str) -> dict[str, bytes]:
    """Return the files of a tokenizer by its path. Empty: there is none, or it has another format."""
    path = Path(name).expanduser()
    if path.is_file():
        return read_tokenizer(path.parent) if path.name == DEFINITION else {}
    return read_tokenizer(path) if path.is_dir() else {}


def tokenizer_info(task: object) -> dict[str, Any]:
    """Return what a checkpoint records of a task's tokenizer. Empty: the task has none of ours."""
    tokenizer: Tokenizer | None = getattr(vars(task).get("text"), "tokenizer", None)  # opened with the data
    return {} if tokenizer is None else {"tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint}}


def check_tokenizer(info: Mapping[str, Any], task: object) -> None:
    """Raise UserError where a checkpoint was trained with another tokenizer."""
    before, now = info.get("tokenizer"), tokenizer_info(task).get("tokenizer")
    if not isinstance(before, dict) or now is None or before.get("fingerprint") == now["fingerprint"]:
        return
    raise UserError(
        f"this model was trained with the tokenizer {before.get('name')}, and data.tokenizer is now {now['name']}, which gives "
        f"other tokens; use data.tokenizer={before.get('name')}, or leave it out"
    )
