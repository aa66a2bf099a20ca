"""A model in Hugging Face's layout: config.json, safetensors, tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smolcluster.data.tokenizers import Gpt2Tokenizer, find_gpt2_files
from smolcluster.errors import UserError
from smolcluster.models.hugging_face import CONFIG, Folder, read_json
from smolcluster.serve.engine.model_source import ModelSource, fingerprint_of, sampled_hash
from smolcluster.serve.text.conversation import ChatTokenizer
from smolcluster.serve.text.vocabulary import BytewiseVocabulary, JsonVocabulary


class FolderSource(ModelSource):
    def __init__(self, path: Path) -> None:
        path = path.resolve()
        self._folder = Folder(path)
        self.name = path.name
        self.config, self._load = self._folder.config, self._folder.load
        self.reference = {"kind": "hugging_face", "path": str(path)}
        self._note_files(self._folder.files)
        self.fingerprint = fingerprint_of(
            [part for file in self._folder.files for part in (file.name, *sampled_hash(file))]
        )

    def text(self) -> ChatTokenizer:
        folder = self._folder.path
        if (folder / "tokenizer.json").is_file():
            return self._checked(folder_tokenizer(folder / "tokenizer.json"))
        files = find_gpt2_files(folder)
        if files is None:
            raise UserError(
                f"{folder} has no tokenizer.json, so text cannot be tokenized; copy the model's tokenizer.json there "
                "(an export of a run on bytes or characters has none: serve the run itself)"
            )
        return self._checked(bytewise_tokenizer(Gpt2Tokenizer(*files)))


def folder_tokenizer(file: Path) -> ChatTokenizer:
    """Read tokenizer.json and the chat settings in its folder."""
    folder = file.parent
    definition = _read_options(file)
    vocabulary = JsonVocabulary(definition, where=str(file))
    options = _read_options(folder / "tokenizer_config.json")
    special = _read_options(folder / "special_tokens_map.json") | options
    known = {marker.text: marker.token for marker in vocabulary.markers}
    names = {
        key: text for key in ("bos_token", "eos_token", "unk_token", "pad_token") if (text := _name(special.get(key)))
    }
    ends = {known[names["eos_token"]]} if names.get("eos_token") in known else set()
    for place in ("generation_config.json", CONFIG):
        value = _read_options(folder / place).get("eos_token_id")
        numbers = value if isinstance(value, list) else [value]
        ends |= {number for number in numbers if isinstance(number, int) and 0 <= number < vocabulary.size}
    bos = known.get(names.get("bos_token", ""))
    begins = options.get("add_bos_token", _adds_first(definition, names.get("bos_token")))
    return ChatTokenizer(
        vocabulary,
        template=_template(folder, options),
        first=[bos] if begins and bos is not None else [],
        stop_tokens=frozenset(ends),
        names=names,
    )


def _template(folder: Path, options: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{file}: cannot be read: {error}") from error
    found = options.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _name(value: Any) -> str | None:
    """Return the text of a special token."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def _adds_first(definition: Mapping[str, Any], bos: str | None) -> bool:
    """Return whether the post-processor puts `bos` before every text."""
    step = definition.get("post_processor")
    steps = step.get("processors") if isinstance(step, dict) and step.get("type") == "Sequence" else [step]
    for one in steps if isinstance(steps, list) else ():
        if isinstance(one, dict) and one.get("type") == "TemplateProcessing":
            single = one.get("single")
            begin = single[0] if isinstance(single, list) and single else None
            first = begin.get("SpecialToken") if isinstance(begin, dict) else None
            return bos is not None and isinstance(first, dict) and first.get("id") == bos
    return False


def _read_options(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file; empty if there is none."""
    try:
        return read_json(path) if path.is_file() else {}
    except ValueError as error:
        raise UserError(str(error)) from error


def bytewise_tokenizer(tokenizer: Any) -> ChatTokenizer:
    end = getattr(tokenizer, "end_of_text", None)
    return ChatTokenizer(BytewiseVocabulary(tokenizer), stop_tokens=frozenset() if end is None else frozenset([end]))
