"""`smolcluster compose`: a compose file for Docker, and its start."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

from smolcluster.cli import batch, options
from smolcluster.errors import UserError

EXAMPLES = """Examples:
smolcluster compose gpt --strategy edp --workers 3 --out compose.yaml
smolcluster compose gpt --strategy fsdp --workers 2 --gpus 2 --submit
docker compose up
"""
_docker = options.panel("Docker")


@options.grouped
def compose(
    run: batch.JobOptions,
    out: batch.Out = None,
    submit: batch.Submit = False,
    workers: Annotated[int, batch.size(help="Workers, each in a container.")] = 2,
    gpus: batch.Gpus = 0,
    cpus: batch.Cpus = None,
    memory: Annotated[str | None, batch.size(metavar="SIZE", help="Memory of each container, such as 4GB.")] = None,
    image: batch.Image = None,
    data: Annotated[Path, _docker(help="Folder for runs and data; it must exist.")] = Path("data"),
    token_file: Annotated[Path, _docker(help="Elastic plane: the token of the run.")] = Path("token"),
    user: Annotated[
        str | None,
        _docker(metavar="UID:GID", help="User of the containers, who must be able to write there. Default: you."),
    ] = None,
) -> int:
    from smolcluster.launch.batch import compose as batch_compose
    from smolcluster.launch.batch.containers import USER, default_image

    job = run.plan(workers_per_node=workers, gpus=gpus, cpus=cpus, memory=memory)
    root = not hasattr(os, "getuid") or os.getuid() == 0
    owner = user or (f"{USER}:{USER}" if root else f"{os.getuid()}:{os.getgid()}")
    settings = batch_compose.ComposeSettings(
        image=image or default_image(job), user=owner, data=data, token_file=token_file
    )
    text = batch_compose.render(job, settings)
    if submit and out is None:
        out = Path("compose.yaml")
    batch.deliver(text, out)
    base = out.parent if out else Path()
    missing = _missing(job.plane, data=base / data, token_file=base / token_file, hand_to=owner if root else None)
    for line in missing:
        batch.note(f"before it starts: {line}")
    if submit:
        if missing:
            raise UserError("--submit: it would not start; see above")
        batch.submit_with(["docker", "compose", "-f", str(out), "up", "--detach"], where="install Docker")
    return 0


def _missing(plane: str, *, data: Path, token_file: Path, hand_to: str | None) -> list[str]:
    """Commands that make what the containers need and is not there. What root makes must be handed to their user."""
    commands = []
    folder, token = shlex.quote(str(data)), shlex.quote(str(token_file))
    if not data.is_dir():
        commands.append(f"mkdir -p {folder}" + (f" && chown {hand_to} {folder}" if hand_to else ""))
    if plane == "elastic" and not token_file.is_file():
        make = f"(umask 077; smolcluster token new --show-only > {token})"
        commands.append(make + (f" && chown {hand_to} {token}" if hand_to else ""))
    return commands
