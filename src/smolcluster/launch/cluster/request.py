"""Parse the arguments of `up` into a cluster that can be deployed. Nothing is contacted here."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from smolcluster.comm.elastic.transport.security import TokenEntry, TokenFile, find_tokens, new_token
from smolcluster.config import Overrides, list_overrides, load_config, resolve
from smolcluster.config.schema import Config
from smolcluster.config.strategies import check_name
from smolcluster.data.names import HF_PREFIX
from smolcluster.errors import UserError
from smolcluster.launch.cluster.archive import pack_package, pack_user_files, requirements
from smolcluster.launch.cluster.control import Deployment
from smolcluster.launch.cluster.layout import (
    LOCAL,
    SERVING,
    TOKENIZER,
    ClusterLayout,
    ClusterRecord,
    as_record,
    from_record,
    plan_layout,
)
from smolcluster.launch.cluster.record import load_record, state_folder, writable
from smolcluster.launch.prepare import absolute_task, is_task, split_task, task_name, with_tokenizer

_SECRET = ("cluster.token", "logging.loki_url")  # keys that are not written to records


@dataclass(frozen=True, slots=True)
class ClusterRequest:
    """A parsed cluster file."""

    file: Path | None
    config: Config
    base: Path  # folder for relative paths

    @property
    def name(self) -> str:
        """The cluster's name: from its file, or the file's name in characters that folders and tmux allow."""
        if self.config.cluster.name is not None:
            return self.config.cluster.name
        return "local" if self.file is None else re.sub(r"[^A-Za-z0-9_-]+", "-", self.file.stem).strip("-") or "cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpArguments:
    """The arguments of an `up`, kept in the cluster's record for `up --resume`."""

    file: str | None  # None: this machine alone
    folder: str  # working directory of the command
    train: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    strategy: str | None = None
    steps: int | None = None
    workers: int | None = None

    def read(self) -> ClusterRequest:
        return read_cluster(
            None if self.file is None else Path(self.folder, self.file),
            train=self.train or (["gpt"] if self.file is None else []),
            overrides=[*self.overrides, ("strategy.name", self.strategy), ("training.steps", self.steps)],
            local_workers=self.workers,
            folder=Path(self.folder),
        )

    def merged_over(self, previous: UpArguments) -> UpArguments:
        """Return the earlier arguments, overridden by these."""
        return UpArguments(
            file=previous.file if self.file is None else str(Path(self.folder, self.file)),
            folder=self.folder if self.train else previous.folder,
            train=self.train or previous.train,
            overrides=[*previous.overrides, *self.overrides],
            strategy=self.strategy or previous.strategy,
            steps=self.steps or previous.steps,
            workers=self.workers or previous.workers,
        )

    def record(self) -> dict[str, Any]:
        """Return them for the record, without secrets."""
        kept = [text for text in self.overrides if text.partition("=")[0].strip() not in _SECRET]
        return asdict(replace(self, overrides=kept))

    @classmethod
    def recorded(cls, name: str | None) -> UpArguments | None:
        """Return those of the cluster of this name, or of the one started last."""
        with contextlib.suppress(KeyError, TypeError):
            return cls(**load_record(name)["said"])
        return None


def read_cluster(
    file: Path | None,
    *,
    train: Sequence[str] = (),
    overrides: Overrides = (),
    local_workers: int | None = None,
    folder: Path | None = None,
) -> ClusterRequest:
    """Merge what is trained, the cluster file and overrides, in this order. `train` replaces `run.train`, relative to `folder`
    (default: the working directory). No file: this machine alone."""
    overrides = list_overrides(overrides)
    folder = folder or Path.cwd()
    if file is None:
        base, own = folder, []
        own_name = socket.gethostname().partition(".")[0] or "here"
        overrides.append(("cluster.hosts", {own_name: {"address": LOCAL, "workers": local_workers or 2}}))
    else:
        if not file.is_file():
            raise UserError(f"{file}: no such file; `smolcluster cluster init` writes one")
        base, own = file.resolve().parent, [str(file)]
    given = train or load_config(own, overrides=overrides).run.train
    below, task = _sources([given] if isinstance(given, str) else given, folder if train else base)
    if task is not None:
        overrides.append(("task", task))
    config = resolve(load_config([*below, *own], overrides=overrides))
    config.strategy.name = check_name(config.strategy.name)
    _find_model(config, base)
    return ClusterRequest(file, config, base)


def _find_model(config: Config, base: Path) -> None:
    """Resolve a served model's path against the cluster file, if this machine leads: processes run in another folder."""
    hosts, model = config.cluster.hosts, config.run.serve
    lead = hosts.get(config.cluster.server or next(iter(hosts), ""))
    if model is not None and lead is not None and lead.address == LOCAL and (base / model).exists():
        config.run.serve = str((base / model).resolve())


def _sources(given: Sequence[str], base: Path) -> tuple[list[str], str | None]:
    """Return configuration sources with resolved paths, and the task, if there is one."""
    files: list[str] = []
    task: str | None = None
    for source in given:
        path, name = split_task(source)
        if is_task(source):
            task = absolute_task(f"{base / path}{name}")
        else:
            files.append(str(base / path) if (base / path).is_file() else source)
    return files, task


def plan_deployment(
    request: ClusterRequest, *, run: str | None = None, resume: bool = False, panes: bool = False
) -> Deployment:
    """Return all that `up` needs. `run`: an existing run to continue."""
    config, tokenizer = with_tokenizer(request.config, TOKENIZER)
    layout = plan_layout(config, name=request.name, run=run or new_run(config))
    return Deployment(
        layout=layout,
        package=pack_package(),
        files=pack_user_files(layout.config, request.base, tokenizer),
        requirements=requirements_of(layout),
        token=token_for(layout) if layout.needs_token else None,
        panes=panes,
        resume=resume,
    )


def requirements_of(layout: ClusterLayout) -> list[str]:
    """Return the requirements of its machines, for pip."""
    config, extras = layout.config, {"elastic": ["cluster"], SERVING: ["cluster", "serve"]}.get(layout.plane, [])
    chosen = {
        "prometheus": config.logging.prometheus_port is not None,
        "tensorboard": config.logging.tensorboard,
        "wandb": config.logging.wandb,
        "data": config.data.tokenizer not in (None, "bytes", "chars") or config.data.name.startswith(HF_PREFIX),
    }
    return requirements(extras=[*extras, *(extra for extra, wanted in chosen.items() if wanted)])


def new_run(config: Config) -> str:
    return f"{task_name(config)}-{config.strategy.name}-{datetime.now():%Y%m%d-%H%M%S}"


def token_for(layout: ClusterLayout) -> str:
    """Return this machine's token, or one made for this cluster and kept with its record."""
    found = find_tokens(layout.config.cluster.token, os.environ)
    if found is not None:
        return found[1][0].token
    with writable(state_folder()):
        file = own_tokens(layout.name)
        if not file.entries():
            file.add([TokenEntry(new_token())])
        return file.entries()[0].token


def own_tokens(name: str) -> TokenFile:
    """Return the token file of a cluster started without a token of this machine."""
    return TokenFile(state_folder() / f"{name}.token")


def known_cluster(name_or_file: str | None) -> ClusterRecord:
    """Return the cluster of this name or file, or the one started last."""
    is_file = name_or_file is not None and name_or_file.endswith((".yaml", ".yml"))
    request = read_cluster(Path(name_or_file)) if name_or_file is not None and is_file else None
    try:
        record = load_record(name_or_file if request is None else request.name)
    except UserError:
        if request is None:
            raise
        # No record on this machine: the file has the machines, and they have the state.
        record = as_record(plan_layout(request.config, name=request.name, run=""))
    try:
        return from_record(record)
    except ValueError as error:
        raise UserError(f"{record.get('name', name_or_file)}: {error}; start it again with `smolcluster up`") from error
