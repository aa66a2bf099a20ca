"""Text for a language model: find it, tokenize it once, map it, split it into training and validation windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from smolcluster.config.schema import DataConfig
from smolcluster.data.cache import Progress, Tokens, cache_root, cached_tokens
from smolcluster.data.dataset import TokenDataset
from smolcluster.data.download import fetch
from smolcluster.data.names import default_tokenizer
from smolcluster.data.sources import Sources, TextSource, find_sources
from smolcluster.data.tokenizers import GPT2_NAMES, Tokenizer, find_gpt2_files, gpt2_cache_folder, load_tokenizer

GPT2_MIRROR = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


@dataclass(frozen=True)
class TextData:
    train: TokenDataset
    val: TokenDataset
    tokenizer: Tokenizer


def open_text(config: DataConfig, *, seq_len: int, progress: Progress | None = None) -> TextData:
    """Return windows of `seq_len` tokens of the text that `config` names."""
    sources = find_sources(config, progress=progress)
    tokenizer = _open_tokenizer(config, sources, progress=progress)
    tokens = _tokens(sources.train, tokenizer, config=config, progress=progress)
    if sources.validation is None:
        # Hold out the end, not random windows: neighbouring text would leak into validation.
        cut = round(len(tokens) * (1 - config.val_fraction))
        train, val = tokens[:cut], tokens[cut:]
    else:
        train, val = tokens, _tokens(sources.validation, tokenizer, config=config, progress=progress)
    return TextData(
        train=TokenDataset(train, seq_len, what=f"the training part of {config.name}"),
        val=TokenDataset(val, seq_len, what=f"the validation part of {config.name}"),
        tokenizer=tokenizer,
    )


def _open_tokenizer(config: DataConfig, sources: Sources, *, progress: Progress | None) -> Tokenizer:
    name = config.tokenizer or default_tokenizer(config.name)
    place = config.tokenizer_root or config.root
    root = Path(place).expanduser() if place is not None else None
    cache = gpt2_cache_folder(config.cache_dir)
    if name in GPT2_NAMES and config.download and find_gpt2_files(root, cache) is None:
        for file, sha256 in GPT2_SHA256.items():
            fetch([f"{GPT2_MIRROR}/{file}"], cache / file, sha256=sha256, progress=progress)
    return load_tokenizer(name, root=root, text=sources.whole_text, cache_dir=config.cache_dir)


def _tokens(source: TextSource, tokenizer: Tokenizer, *, config: DataConfig, progress: Progress | None) -> Tokens:
    return cached_tokens(
        cache_root(config.cache_dir),
        source_hash=source.content_hash(),
        tokenizer=tokenizer,
        chunks=_reporting(source, progress),
    )


def _reporting(source: TextSource, progress: Progress | None) -> Callable[[], Iterator[str]]:
    """Wrap the source's pieces so that progress is reported after each."""
    if progress is None:
        return source.chunks

    def chunks() -> Iterator[str]:
        done, name = 0, f"tokenize {source.name}"
        for text in source.chunks():
            yield text
            done += len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
            if done != source.total_bytes:
                progress(name, done, source.total_bytes)
        progress(name, done, done)

    return chunks
