"""A model in a GGUF file, with the tokenizer in its header."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from smolcluster.errors import MissingExtra, UserError
from smolcluster.models.gguf import GGUF
from smolcluster.serve.engine.model_source import ModelSource, fingerprint_of, sampled_hash
from smolcluster.serve.text.conversation import ChatTokenizer
from smolcluster.serve.text.vocabulary import flag, gguf_definition, gguf_vocabulary

log = logging.getLogger(__name__)

# End-of-turn and end-of-text tokens.
_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "<end_of_turn>",
    "</s>",
)


_KINDS_OF_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # name here: name in the header


class GGUFSource(ModelSource):
    def __init__(self, path: Path, *, name: str | None = None, reference: dict[str, str] | None = None) -> None:
        path = path.resolve()
        self._file = GGUF(path)
        self.name = name or path.stem
        self.config, self._load = self._file.config, self._file.load
        self.reference = reference or {"kind": "gguf", "path": str(path)}
        self._note_files([path])
        self.fingerprint = fingerprint_of([self._file.header_sha256, *sampled_hash(path)])

    @classmethod
    def open(cls, path: Path) -> GGUFSource:
        """Open a GGUF file. Raises UserError if it is not one."""
        try:
            return cls(path)
        except (ValueError, OSError) as error:
            raise UserError(f"cannot import {path}: {error}") from error

    def text(self) -> ChatTokenizer:
        given = self._file.metadata
        vocabulary = gguf_vocabulary(given, where=str(self._file.path))
        ends = {self._token(key) for key in ("eos", "eot", "eom")} - {None}
        special = {marker.text: marker.token for marker in vocabulary.markers if marker.special}
        ends |= {special[text] for text in _ENDS if text in special}
        template = given.get("tokenizer.chat_template")
        names, bos = self._names(), self._token("bos")
        return self._checked(
            ChatTokenizer(
                vocabulary,
                template=template if isinstance(template, str) else None,
                first=[bos] if self._begins() and bos is not None else [],
                first_in_chat=True,
                stop_tokens=frozenset(token for token in ends if token is not None),
                names=names,
            )
        )

    def tokenizer_files(self) -> dict[str, bytes]:
        """Return the tokenizer of the header as the files of a Hugging Face folder. Empty if it is not supported."""
        given = self._file.metadata
        try:
            definition = gguf_definition(given, where=str(self._file.path))
            stop = sorted(self.text().stop_tokens)
        except MissingExtra:
            raise
        except UserError as error:
            log.warning("exporting without a tokenizer: %s", error)
            return {}
        options: dict[str, Any] = {**self._names(), "add_bos_token": self._begins()}
        if isinstance(template := given.get("tokenizer.chat_template"), str):
            options["chat_template"] = template
        files = {
            "tokenizer.json": definition,
            "tokenizer_config.json": options,
            "generation_config.json": {"eos_token_id": stop},
        }
        return {name: f"{json.dumps(content, ensure_ascii=False)}\n".encode() for name, content in files.items()}

    def _token(self, key: str) -> int | None:
        given = self._file.metadata
        value = given.get(f"tokenizer.ggml.{key}_token_id")
        return value if isinstance(value, int) and 0 <= value < len(given["tokenizer.ggml.tokens"]) else None

    def _names(self) -> dict[str, str]:
        tokens = {kind: self._token(key) for kind, key in _KINDS_OF_TOKENS.items()}
        texts = self._file.metadata["tokenizer.ggml.tokens"]
        return {f"{kind}_token": texts[number] for kind, number in tokens.items() if number is not None}

    def _begins(self) -> bool:
        """Return whether every prompt begins with bos."""
        given = self._file.metadata
        begins = given.get("tokenizer.ggml.model") == "llama" or given.get("tokenizer.ggml.pre") == "llama-bpe"
        try:
            return flag(given, "tokenizer.ggml.add_bos_token", default=begins) and self._token("bos") is not None
        except UserError as error:
            raise UserError(f"{self._file.path}: {error}") from error
