"""`smolcluster k8s`: manifests for Kubernetes, and their submission."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from smolcluster.cli import batch, options
from smolcluster.errors import UserError

EXAMPLES = """Examples:
smolcluster k8s gpt --strategy fsdp --nodes 4 --gpus 1 --image registry.example.org/smolcluster:cuda --claim runs --submit
smolcluster k8s gpt --strategy edp --nodes 8 --cpus 4 --memory 8GB --claim runs --out job.yaml
smolcluster k8s gpt --strategy fsdp --nodes 4 --gpus 8 --elastic 16:32 --claim runs | kubectl apply -f -
"""
_kubernetes = options.panel("Kubernetes")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions:
    """The fields of `smolcluster.launch.batch.kubernetes.KubernetesSettings` that are options as they are."""

    namespace: Annotated[str | None, _kubernetes(help="Default: kubectl's.")] = None
    claim: Annotated[
        str | None,
        _kubernetes(
            help="PersistentVolumeClaim that all pods can write, for runs and data. Default: none, all goes with the pods."
        ),
    ] = None
    secret: Annotated[
        str | None,
        _kubernetes(help="Elastic plane: the Secret that has the token, as `token`. Default: <name>-token."),
    ] = None
    max_restarts: Annotated[int, _kubernetes(help="Restarts before the run fails.")] = 10


@options.grouped
def k8s(
    run: batch.ClusterJobOptions,
    out: batch.Out = None,
    submit: batch.Submit = False,
    elastic: Annotated[
        str | None,
        batch.size(
            metavar="MIN:MAX",
            help="Mesh plane: continue with at least MIN workers when pods are lost; MAX are those of the job.",
        ),
    ] = None,
    image: batch.Image = None,
    token_from_file: Annotated[
        Path | None, _kubernetes(help="Write the Secret too, with the first token of this file.")
    ] = None,
    token_from_env: Annotated[
        bool, _kubernetes("--token-from-env", help="Write the Secret too, with SMOLCLUSTER_TOKEN.")
    ] = False,
    node_selector: Annotated[
        list[str] | None, _kubernetes(metavar="KEY=VALUE", help="Only on nodes with this label.")
    ] = None,
    *,
    wanted: KubernetesOptions,
) -> int:
    from smolcluster.launch.batch import kubernetes
    from smolcluster.launch.batch.containers import default_image
    from smolcluster.launch.prepare import is_task

    for source in run.sources or []:
        if is_task(source):
            kubernetes.check_task(source, image=image or "smolcluster:cpu")
    job = run.plan(elastic=elastic)
    token = _token(token_from_file, from_env=token_from_env)
    settings = kubernetes.KubernetesSettings(
        image=image or default_image(job),
        token=token,
        node_selector=tuple(map(kubernetes.parse_selector, node_selector or ())),
        **asdict(wanted),
    )
    text = kubernetes.render(job, settings)
    if token is not None and out is None and not submit:
        raise UserError("the token would be printed: write it to a file with --out FILE, or use --submit")
    if out is not None or not submit:
        batch.deliver(text, out, private=token is not None)
    if kubernetes.needs_token(job) and token is None:
        batch.note(f"the pods need the token; make its secret once: {kubernetes.secret_command(job, settings)}")
    if wanted.claim is None:
        batch.note("without --claim the run is lost with its pod")
    if submit:
        batch.submit_with(["kubectl", "apply", "-f", "-"], text=text, where="submit it where kubectl is set up")
    return 0


def _token(file: Path | None, *, from_env: bool) -> str | None:
    """Return the token that the flags ask for; None without them."""
    from smolcluster.comm.elastic.transport.security import TokenFile, find_tokens

    if file is not None and from_env:
        raise UserError("--token-from-file and --token-from-env: give one of them")
    if from_env:
        environment = {"SMOLCLUSTER_TOKEN": os.environ.get("SMOLCLUSTER_TOKEN", "")}
        if not environment["SMOLCLUSTER_TOKEN"].strip():
            raise UserError("--token-from-env: SMOLCLUSTER_TOKEN is not set")
        found = find_tokens(None, environment)
        return found[1][0].token if found else None
    if file is not None:
        entries = TokenFile(file).entries()
        if not entries:
            raise UserError(f"--token-from-file {file} contains no token; make one with `smolcluster token new`")
        return entries[0].token
    return None
