"""Render manifests for Kubernetes 1.29 or newer, in one stream.

mesh plane          Service (headless), NetworkPolicy, Job (Indexed): pod i is rank i, rank 0 is at NAME-0.NAME
  --elastic, or     the same Job, where each pod runs `train --elastic` and pod 0 leads
  several workers
  in a pod
elastic plane       Service and Job of the server, Job (Indexed) of the workers, one in each pod; it can be scaled
always              ConfigMap: the resolved configuration; Secret: the token, only on request

a rank's pod is evicted   all save and end; a replacement starts and they resume; not counted as a failure
the server's is evicted   it gets no SIGTERM (_NO_SIGTERM); its workers wait, and its replacement resumes from the journal
a worker's is evicted     the others continue; a replacement joins
a rank dies               all restart from the last checkpoint, up to --max-restarts times
the server exits with     the Job fails at once: a restart would not fix a user error
  status 2
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from smolcluster.config import dump
from smolcluster.errors import UserError
from smolcluster.launch.batch import containers
from smolcluster.launch.batch.containers import CONFIG, DATA, SERVER_PORT, USER
from smolcluster.launch.batch.job import RANK_PORT, RENDEZVOUS_PORT, BatchJob, check_dns_name
from smolcluster.launch.batch.text import mebibytes, to_yaml
from smolcluster.launch.local.outcome import Interrupted
from smolcluster.launch.restart.plan import MAX_RESTARTS, ElasticRange, check_restartable

Manifest = dict[str, Any]

DEFAULT_MEMORY = 4 * 2**30  # for each worker
LONGEST_NAME = 50  # so that NAME-worker-1234 is still a host name
CONTAINER = "smolcluster"
KEY = "token"  # in the secret
INDEX = "$(JOB_COMPLETION_INDEX)"  # expanded by Kubernetes
PULL_S = 900  # join timeout, while other nodes still pull the image

# DNS has the name of pod 0 a little later than the pod starts; pod 0 must resolve it to detect that it leads.
_AWAIT_NAME = """\
until getent hosts "$LEADER" >/dev/null; do sleep 1; done
exec "$@"
"""
# At SIGTERM a server makes its workers exit, and they would not join its replacement. So it must receive none: a shell without
# a trap is PID 1 here, and the kernel delivers only SIGKILL to that.
_NO_SIGTERM = '"$@" || exit $?\n'
_NO_SIGTERM_S = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSettings:
    """Kubernetes' part of the job."""

    image: str
    namespace: str | None = None
    claim: str | None = None  # PersistentVolumeClaim that all pods can write; None: an emptyDir for each
    secret: str | None = None  # Secret with the token; None: NAME-token
    token: str | None = None  # None: write no Secret
    node_selector: tuple[tuple[str, str], ...] = ()
    max_restarts: int = MAX_RESTARTS

    def secret_name(self, job: BatchJob) -> str:
        return self.secret or f"{job.name}-token"


def check(job: BatchJob, settings: KubernetesSettings) -> None:
    check_dns_name(job.name, longest=LONGEST_NAME)
    if settings.namespace is not None and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", settings.namespace):
        rule = "at most 63 lower-case letters, digits and '-', without '.'"
        raise UserError(f"--namespace '{settings.namespace}' is not a namespace in Kubernetes: {rule}")
    for option, name in (("--claim", settings.claim), ("--secret", settings.secret)):
        if name is not None and not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", name):
            raise UserError(f"{option} '{name}' is not a name in Kubernetes: lower-case letters, digits, '-' and '.'")
    containers.check_image(settings.image)
    containers.check_paths(job)
    if settings.max_restarts < 0:
        raise UserError(f"--max-restarts {settings.max_restarts}: 0 or more")
    if job.plane == "elastic" and job.workers_per_node > 1:
        raise UserError(
            f"--workers-per-node {job.workers_per_node}: on the elastic plane a pod is one worker; use --nodes {job.workers} "
            f"with --gpus {min(1, job.gpus_per_node)}"
        )
    if not needs_token(job) and (settings.token or settings.secret):
        raise UserError("the ranks of the mesh plane use no token: remove --secret and --token-from-...")
    if job.task is not None:
        check_task(job.task, image=settings.image)
    if elastic_range(job) is not None:
        check_restartable(job.config, job.plane)


def check_task(task: str, *, image: str) -> None:
    """Refuse a relative path: it is on this machine, not in the image."""
    if not task.startswith("/"):
        raise UserError(
            f"the task {task} is a file on this machine: build an image that contains it (FROM {image}, COPY) and give its "
            f"path there, such as /app/{task.rpartition('/')[2]}"
        )


def parse_selector(text: str) -> tuple[str, str]:
    label = r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?"
    if not re.fullmatch(rf"({label}/)?{label}={label}", text):
        raise UserError(f"--node-selector '{text}' is not a node label, such as disktype=ssd")
    key, _, value = text.partition("=")
    return key, value


def render(job: BatchJob, settings: KubernetesSettings) -> str:
    """Return the manifests as one stream, dependencies first."""
    return "---\n".join(map(to_yaml, manifests(job, settings)))


def manifests(job: BatchJob, settings: KubernetesSettings) -> Iterator[Manifest]:
    check(job, settings)
    if settings.token is not None:
        data = {KEY: base64.b64encode(settings.token.encode()).decode()}
        yield _manifest("v1", "Secret", settings.secret_name(job), job, settings, type="Opaque", data=data)
    config = {CONFIG.rpartition("/")[2]: dump(job.config)}
    yield _manifest("v1", "ConfigMap", f"{job.name}-config", job, settings, data=config)
    if job.plane == "elastic":
        yield _service(job, settings, f"{job.name}-server", component="server", port=SERVER_PORT)
        yield _server(job, settings)
        yield _workers(job, settings)
    else:
        port = RENDEZVOUS_PORT if elastic_range(job) else RANK_PORT
        yield _service(job, settings, job.name, component="rank", port=port)
        yield _network_policy(job, settings)
        yield _ranks(job, settings)


def elastic_range(job: BatchJob) -> ElasticRange | None:
    """Return the `--elastic` range of the pods' launchers; None where each pod is one fixed rank."""
    if job.plane == "mesh" and job.elastic is None and job.workers_per_node > 1:
        return ElasticRange(min_workers=job.workers, max_workers=job.workers, local_workers=job.workers_per_node)
    return job.elastic


def needs_token(job: BatchJob) -> bool:
    """Return whether members authenticate by a token: on the elastic plane, and launchers of `train --elastic`."""
    return job.plane == "elastic" or elastic_range(job) is not None


def secret_command(job: BatchJob, settings: KubernetesSettings) -> str:
    """Return the command that makes the Secret without printing the token."""
    where = f" --namespace {settings.namespace}" if settings.namespace else ""
    create = f"kubectl create secret generic {settings.secret_name(job)}{where} --from-file={KEY}=/dev/stdin"
    return f"smolcluster token new --show-only | {create}"


# Objects


def _manifest(version: str, kind: str, name: str, job: BatchJob, settings: KubernetesSettings, **rest: Any) -> Manifest:
    metadata: Manifest = {"name": name}
    if settings.namespace is not None:
        metadata["namespace"] = settings.namespace
    metadata["labels"] = _labels(job)
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}


def _labels(job: BatchJob, *, component: str | None = None) -> dict[str, str]:
    labels = {"app.kubernetes.io/name": "smolcluster", "app.kubernetes.io/instance": job.name}
    return labels | ({"app.kubernetes.io/component": component} if component else {})


def _service(job: BatchJob, settings: KubernetesSettings, name: str, *, component: str, port: int) -> Manifest:
    """Return a headless Service, which gives pods DNS names, also before they are ready."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": _labels(job, component=component),
        "ports": [{"name": "smolcluster", "port": port}],
    }
    return _manifest("v1", "Service", name, job, settings, spec=spec)


def _network_policy(job: BatchJob, settings: KubernetesSettings) -> Manifest:
    """Return a NetworkPolicy for the job's pods only: torch.distributed does not authenticate its peers."""
    mine = {"podSelector": {"matchLabels": _labels(job)}}
    spec = {**mine, "policyTypes": ["Ingress"], "ingress": [{"from": [mine]}]}
    return _manifest("networking.k8s.io/v1", "NetworkPolicy", job.name, job, settings, spec=spec)


def _ranks(job: BatchJob, settings: KubernetesSettings) -> Manifest:
    leader = f"{job.name}-0.{job.name}"
    command = containers.train_command(job)
    start: str | None = None
    env = {}
    if (elastic := elastic_range(job)) is not None:
        start, env = _AWAIT_NAME, {"LEADER": leader}
        command += ["--workers", str(elastic.local_workers), "--elastic", str(elastic)]
        command += ["--rdzv-endpoint", f"{leader}:{RENDEZVOUS_PORT}", "--max-restarts", str(settings.max_restarts)]
    else:
        command += ["--world-size", str(job.workers), "--rank", INDEX]
        command += ["--master-addr", leader, "--master-port", str(RANK_PORT)]
    if "join_timeout" not in job.config.cluster.model_fields_set:
        command += ["--override", f"cluster.join_timeout={PULL_S}"]
    pod = _pod(job, settings, component="rank", command=command, start=start, env=env)
    pod["spec"]["subdomain"] = job.name
    return _job(job, settings, job.name, pod, pods=job.nodes, indexed=True)


def _server(job: BatchJob, settings: KubernetesSettings) -> Manifest:
    command = containers.server_command(job)
    pod = _pod(job, settings, component="server", command=command, start=_NO_SIGTERM, gpus=0)
    pod["spec"]["terminationGracePeriodSeconds"] = _NO_SIGTERM_S
    return _job(job, settings, f"{job.name}-server", pod, pods=1, fail_on=[UserError.exit_code])


def _workers(job: BatchJob, settings: KubernetesSettings) -> Manifest:
    server = f"{job.name}-server"
    command = containers.worker_command(job, rank=INDEX, host="$(NODE_NAME)", server=server, task=job.task)
    pod = _pod(job, settings, component="worker", command=command)
    node = {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    pod["spec"]["containers"][0]["env"].append(node)
    return _job(job, settings, f"{job.name}-worker", pod, pods=job.nodes, indexed=True)


def _job(
    job: BatchJob,
    settings: KubernetesSettings,
    name: str,
    pod: Manifest,
    *,
    pods: int,
    indexed: bool = False,
    fail_on: list[int] | None = None,
) -> Manifest:
    def ended(action: str, codes: list[int]) -> Manifest:
        return {"action": action, "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": codes}}

    rules = [ended("FailJob", fail_on)] if fail_on else []
    rules.append({"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]})
    rules.append(ended("Ignore", [Interrupted.exit_code]))
    spec: Manifest = {"completions": pods, "parallelism": pods}
    if indexed:
        spec["completionMode"] = "Indexed"
    spec["backoffLimit"] = settings.max_restarts * pods  # when one rank dies all pods fail, and each counts
    if job.time_limit_s is not None:
        spec["activeDeadlineSeconds"] = job.time_limit_s
    spec["podFailurePolicy"] = {"rules": rules}
    spec["template"] = pod
    return _manifest("batch/v1", "Job", name, job, settings, spec=spec)


def _pod(
    job: BatchJob,
    settings: KubernetesSettings,
    *,
    component: str,
    command: list[str],
    start: str | None = None,
    env: dict[str, str] | None = None,
    gpus: int | None = None,
) -> Manifest:
    """`start` is a shell script that ends in the command."""
    gpus = job.gpus_per_node if gpus is None else gpus
    variables: list[Manifest] = [
        {"name": name, "value": value} for name, value in (containers.environment(job) | (env or {})).items()
    ]
    if needs_token(job):
        key = {"name": settings.secret_name(job), "key": KEY}
        variables.append({"name": "SMOLCLUSTER_TOKEN", "valueFrom": {"secretKeyRef": key}})
    volumes, mounts = _volumes(job, settings, gpus=gpus)
    container = {
        "name": CONTAINER,
        "image": settings.image,
        "command": ["/bin/sh", "-euc", start, "start"] if start else command[:1],
        "args": command if start else command[1:],
        "env": variables,
        "resources": _resources(job, gpus=gpus),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": containers.GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }
    if settings.node_selector:
        spec["nodeSelector"] = dict(settings.node_selector)
    if gpus:
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return {"metadata": {"labels": _labels(job, component=component)}, "spec": spec}


def _volumes(job: BatchJob, settings: KubernetesSettings, *, gpus: int) -> tuple[list[Manifest], list[Manifest]]:
    """The volumes of a pod, and where its container mounts them."""
    data = {"persistentVolumeClaim": {"claimName": settings.claim}} if settings.claim else {"emptyDir": {}}
    volumes: list[Manifest] = [
        {"name": "config", "configMap": {"name": f"{job.name}-config"}},
        {"name": "data", **data},
        {"name": "tmp", "emptyDir": {}},
    ]
    mounts: list[Manifest] = [
        {"name": "config", "mountPath": CONFIG.rpartition("/")[0], "readOnly": True},
        {"name": "data", "mountPath": DATA},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if gpus:  # NCCL needs more shared memory than the default 64 MB
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    return volumes, mounts


def _resources(job: BatchJob, *, gpus: int) -> Manifest:
    """Return equal requests and limits: such pods are evicted last."""
    workers = job.workers_per_node
    memory = job.memory_bytes if job.memory_bytes is not None else DEFAULT_MEMORY * workers
    wanted = {"cpu": str((job.cpus_per_worker or 1) * workers), "memory": f"{mebibytes(memory)}Mi"}
    if gpus:
        wanted["nvidia.com/gpu"] = str(gpus)
    return {"requests": wanted, "limits": wanted}
