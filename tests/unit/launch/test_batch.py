"""Job files for Slurm, Kubernetes and Compose: what is in them, and what is refused."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import pytest
import typer
import yaml

from smolcluster.cli import compose as cli_compose
from smolcluster.cli import k8s as cli_k8s
from smolcluster.cli import slurm as cli_slurm
from smolcluster.comm.elastic.transport.security import new_token
from smolcluster.config import load_config, resolve
from smolcluster.errors import SmolclusterError, UserError
from smolcluster.launch.batch import compose, containers, kubernetes, slurm
from smolcluster.launch.batch.job import BatchJob, plan_job
from smolcluster.launch.batch.text import parse_time, slurm_time, to_yaml

ROOT = Path(__file__).parents[3]
EDP = str(ROOT / "tests/fixtures/seeds/cluster_config_edp.yaml")
TASK = "/app/my_task.py:Mine"


def job(plane: str = "mesh", **overrides: Any) -> BatchJob:
    """As `plan_job` makes them, without asking the strategy."""
    fields = {k: overrides.pop(k) for k in tuple(overrides) if k in BatchJob.__dataclass_fields__}
    name = "edp" if plane == "elastic" else "allreduce"
    count = int(fields.get("nodes", 1)) * int(fields.get("workers_per_node", 1))
    config = resolve(load_config(["gpt"], overrides={"strategy.name": name, "cluster.num_workers": count} | overrides))
    default = {"name": f"gpt-{name}", "sources": ("gpt",), "strategy": name}
    return BatchJob(config=config, plane=plane, **default | fields)


# Times, sizes, YAML -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds", "slurm_writes"),
    [
        ("30", 1800, "00:30:00"),
        ("90", 5400, "01:30:00"),
        ("10:30", 630, "00:10:30"),
        ("1:30:00", 5400, "01:30:00"),
        ("100:00:00", 360000, "4-04:00:00"),
        ("2-12", 216000, "2-12:00:00"),
        ("2-12:30", 217800, "2-12:30:00"),
        ("1-00:00:05", 86405, "1-00:00:05"),
    ],
)
def test_time_limits(text: str, seconds: int, slurm_writes: str) -> None:
    assert parse_time(text) == seconds
    assert slurm_time(seconds) == slurm_writes
    assert parse_time(slurm_writes) == seconds


@pytest.mark.parametrize("text", ["", "soon", "0", "-5", "1:2:3", "1:00:00:00", "1h"])
def test_what_is_no_time_limit(text: str) -> None:
    with pytest.raises(UserError, match="is not a time limit"):
        parse_time(text)


AWKWARD = [
    *("on", "No", "y", "null", "~", "1e3", "0x1", "1_000", "012", "-1", "1:30", ".inf", "", " a", "a: b", "# c", "- d"),
    *("'", '"', "$(X)", "two\nlines\n", "no end\nof line", "trailing \nspace", "tab\there\n", "bücher\nline"),
    "a\u2028b",
    *("--run-dir", "./data", "/data/runs", "8192Mi", "*", "&a", "!x", "{a}", "[b]", "%", "@", "`", "|", ">"),
]


def test_yaml_says_what_was_meant_to_every_reader() -> None:
    text = to_yaml({"values": AWKWARD, "nested": {"list": [{"a": [1, True, None]}]}})
    assert yaml.safe_load(text) == {"values": AWKWARD, "nested": {"list": [{"a": [1, True, None]}]}}
    for word in ("on", "No", "y", "1e3", "8192Mi", "1:30"):
        assert f'- "{word}"\n' in text  # a reader of another version of YAML must not see a number or a truth in it
    same = ["x"]
    assert "&" not in to_yaml([same, same])


# What a job may be --------------------------------------------------------------------------------------------------


def test_a_job_from_what_the_user_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("training: {batch_size: 3}\n")
    said = {"strategy": "ClassicDP", "plane": "mesh", "steps": 7, "seed": 1, "memory": "16GB", "time": "1:00:00"}
    made = plan_job(["gpt", "mine.yaml"], override=["model.num_layers=2"], nodes=2, gpus=2, **said)
    assert made.name == "gpt-allreduce"
    assert (made.workers, made.workers_per_node) == (4, 2)  # one for each GPU
    assert made.config.training.batch_size == 3
    assert made.config.cluster.num_workers == 4
    assert made.sources == ("gpt", str(tmp_path / "mine.yaml"))
    assert made.overrides == ("model.num_layers=2", "cluster.plane=mesh")
    assert (made.memory_bytes, made.time_limit_s) == (16 * 10**9, 3600)
    assert not list(tmp_path.glob("runs"))
    own = tmp_path / "my_task.py"
    own.write_text("from smolcluster import Task\nclass Two_Words(Task):\n    pass\n")
    assert plan_job(["my_task.py:Two_Words"], nodes=2).name == "two-words-allreduce"
    assert plan_job(["my_task.py:Two_Words"]).sources == (f"{own}:Two_Words",)


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"nodes": 0}, "--nodes 0: at least 1"),
        ({"workers_per_node": 0}, "--workers-per-node 0: at least 1"),
        ({"gpus": -1}, "--gpus -1: at least 0"),
        ({"cpus": 0}, "--cpus 0: at least 1"),
        ({"gpus": 4, "workers_per_node": 1}, "3 would be idle; use 4 workers, or --gpus 1"),
        ({"memory": "much"}, "--memory 'much' is not a size"),
        ({"time": "long"}, "--time 'long'"),
        ({"name": "a job"}, "--name 'a job' is not a job name"),
        ({"name": "x" * 64}, "at most 63"),
        *(({"name": name}, f"--name '{name}'") for name in ("-a", ".a", "a/b", "a$b", "ä")),
        ({"strategy": "allredce"}, "did you mean 'allreduce'"),
        ({"strategy": "single", "nodes": 2}, "strategy single has one worker, not 2"),
        ({"strategy": "tensor", "nodes": 3}, "3"),
        ({"strategy": "edp", "plane": "mesh"}, "edp does not run on the mesh plane"),
        ({"strategy": "fsdp", "plane": "elastic", "override": ["strategy.fsdp_stage=3"]}, "stage"),
        ({"override": ["training.batch_sise=1"]}, "did you mean 'training.batch_size'"),
        ({"override": [f"cluster.token={new_token()}"]}, "a job file is no place for a secret"),
        ({"override": ["cluster.workers=[pi5]"]}, "names machines (pi5), but the batch system chooses them"),
        ({"sources": [EDP, "gpt"]}, "names machines (pi5, win, macbook, mini1), but the batch system chooses them"),
        ({"backend": "glo"}, "unknown backend 'glo'"),
        ({"backend": "gloo", "strategy": "edp"}, "--backend gloo is for the mesh plane"),
        ({"elastic": "2:8", "nodes": 4}, "the job has 4 workers; use --elastic 2:4"),
        ({"elastic": "two"}, "write MIN:MAX"),
        ({"elastic": "1:2", "nodes": 2, "strategy": "edp"}, "leave out --elastic"),
        ({"elastic": "1:2", "nodes": 2, "override": ["training.checkpoint_steps=0"]}, "saves none"),
    ],
)
def test_what_cannot_be_a_job(wish: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        plan_job(**{"sources": ["gpt"]} | wish)


def test_nothing_is_fetched_to_write_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOLCLUSTER_CACHE", str(tmp_path))
    opened: list[Any] = []
    monkeypatch.setattr("urllib.request.urlopen", lambda *a, **k: opened.append(a))
    assert plan_job(["gpt"], override=["data.name=wikitext"], strategy="tensor", nodes=2).workers == 2
    assert not opened


# Slurm --------------------------------------------------------------------------------------------------------------


def place_on_slurm(folder: Path = Path("/shared"), **settings: Any) -> slurm.SlurmSettings:
    fields = {"run_dir": folder / "runs/demo", "folder": folder, "python": "/shared/venv/bin/python"}
    return slurm.SlurmSettings(**fields | settings)


def directives(text: str) -> dict[str, str | None]:
    """The #SBATCH lines, before the first command."""
    head = re.split(r"^[^#\n]", text, maxsplit=1, flags=re.MULTILINE)[0]
    options = [
        shlex.split(line.removeprefix("#SBATCH "))[0] for line in head.splitlines() if line.startswith("#SBATCH ")
    ]
    assert text.count("#SBATCH") == len(options)
    return {name: value for name, _, value in (option.partition("=") for option in options)}


SLURM_JOBS = [
    job(),
    job(nodes=2, workers_per_node=4, cpus_per_worker=2, memory_bytes=16 * 10**9, time_limit_s=5400),
    job(nodes=2, gpus_per_node=2, workers_per_node=2, backend="nccl", steps=5, seed=0),
    job("elastic", nodes=2, workers_per_node=2, gpus_per_node=2),
    job("elastic", nodes=3, overrides=('data.root=it\'s $HOME/`x` "y"', "a=*")),
    job("elastic", nodes=2, task="/shared/a b/my_task.py:Mine"),
    job("elastic", **{"cluster.port": 5555}),
]


def test_the_options_of_sbatch() -> None:
    text = slurm.render(SLURM_JOBS[1], place_on_slurm(partition="gpu", account="me", options=("--exclusive",)))
    assert directives(text) == {
        "--job-name": "gpt-allreduce",
        "--nodes": "2",
        "--ntasks-per-node": "4",
        "--cpus-per-task": "2",
        "--mem": "15259M",
        "--time": "01:30:00",
        "--partition": "gpu",
        "--account": "me",
        "--chdir": "/shared",
        "--output": "/shared/gpt-allreduce-%j.out",
        "--open-mode": "append",
        "--requeue": "",
        "--signal": "B:USR1@120",
        "--exclusive": "",
    }
    assert directives(slurm.render(SLURM_JOBS[2], place_on_slurm()))["--gpus-per-node"] == "2"
    short = replace(SLURM_JOBS[0], time_limit_s=60)
    assert directives(slurm.render(short, place_on_slurm()))["--signal"] == "B:USR1@30"
    assert directives(slurm.render(short, place_on_slurm(grace_s=20)))["--signal"] == "B:USR1@20"


@pytest.mark.parametrize("requeue", [True, False])
@pytest.mark.parametrize("made", SLURM_JOBS, ids=range(len(SLURM_JOBS)))
def test_the_script_is_good_shell(made: BatchJob, requeue: bool, tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    token = folder / "token" if made.nodes == 3 else None
    settings = place_on_slurm(folder, requeue=requeue, token_file=token, setup=("module load cuda",))
    text = slurm.render(made, settings)
    assert text == slurm.render(made, settings)
    file = tmp_path / "job.sbatch"
    file.write_text(text, encoding="utf-8")
    subprocess.run(["bash", "-n", str(file)], check=True)
    if shutil.which("shellcheck"):
        checked = subprocess.run(
            ["shellcheck", "--exclude=SC2016", str(file)], capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stdout
    assert ("scontrol requeue" in text) == requeue
    assert not re.search(r"smol1_\w{20}", text)


STUB = """
import json, os, sys
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
sys.exit(int(os.environ.get("STATUS", "0")))
"""


def played(made: BatchJob, settings: slurm.SlurmSettings, folder: Path, **env: str) -> tuple[int, list[list[str]]]:
    """The script with commands that only note how they were called; its status, and the calls of Python and srun."""
    bin_folder, calls = folder / "bin", folder / "calls.jsonl"
    bin_folder.mkdir(exist_ok=True)
    calls.unlink(missing_ok=True)
    for name in ("srun", "scontrol", "scancel", "python"):
        (bin_folder / name).write_text(f"#!{sys.executable}\n{STUB}")
        (bin_folder / name).chmod(0o755)
    (bin_folder / "sleep").write_text("#!/bin/sh\nexec /bin/sleep 0.02\n")  # there is nobody to be waited for
    (bin_folder / "sleep").chmod(0o755)
    file = folder / "job.sh"
    file.write_text(slurm.render(made, replace(settings, python=str(bin_folder / "python"))))
    given = {"SLURM_JOB_ID": "17", "SLURMD_NODENAME": "n1"}
    given |= {"CALLS": str(calls), "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(file)], env=given | env, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    return done.returncode, [json.loads(line) for line in calls.read_text().splitlines()]


def test_the_script_begins_or_goes_on(tmp_path: Path) -> None:
    settings = place_on_slurm(tmp_path / "a b")
    run_dir = settings.run_dir
    made = replace(SLURM_JOBS[1], overrides=('data.root=it\'s $HOME/`x` "y"', "a=*"))
    status, calls = played(made, settings, tmp_path)
    (srun,) = calls
    python = srun.index(str(tmp_path / "bin/python"))
    assert {"--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=2", "--kill-on-bad-exit=0"} <= set(srun[:python])
    words = ["train", "gpt", "--strategy", "allreduce", "--workers", "8", "--override", *made.overrides]
    assert srun[python + 1 :] == ["-m", "smolcluster", *words, "--run-dir", str(run_dir), "--resume", "auto"]
    assert status == 0
    assert played(made, settings, tmp_path, STATUS="3")[0] == 3


def test_the_script_of_a_server_and_its_workers(tmp_path: Path) -> None:
    made = replace(SLURM_JOBS[3], time_limit_s=600)
    settings = place_on_slurm(tmp_path)
    status, calls = played(made, settings, tmp_path)
    token, *rest = calls
    assert token[1:] == ["-m", "smolcluster", "token", "new", "--show-only"]
    (server,) = [c for c in rest if c[0] == "python"]
    (workers,) = [c for c in rest if c[0] == "srun"]
    where = f"--run-dir {settings.run_dir} --resume auto --bind 0.0.0.0 --port 20017"
    assert " ".join(server[3:]) == f"server gpt --strategy edp --workers 4 {where}"
    assert workers[-1] == "n1:20017"
    assert '--device "cuda:$((SLURM_LOCALID % 2))"' in workers[-3]
    assert status == 0
    assert not list(tmp_path.glob("runs/*token*"))  # it was made for this job
    assert played(made, settings, tmp_path, STATUS="1")[0] == 1  # no token could be made
    _, calls = played(made, settings, tmp_path, SMOLCLUSTER_TOKEN="smol1_x")
    assert [c[0] for c in calls if "token" in c] == []
    _, calls = played(made, replace(settings, token_file=tmp_path / "mine"), tmp_path)
    assert [c[0] for c in calls if "token" in c] == []
    _, calls = played(SLURM_JOBS[5], settings, tmp_path)
    (workers,) = [c for c in calls if c[0] == "srun"]
    assert workers[-1] == "/shared/a b/my_task.py:Mine"
    assert workers[-2] == "--task"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"partition": "a b"}, "--partition 'a b' is not a name"),
        ({"account": ""}, "--account '' is not a name"),
        ({"options": ("exclusive",)}, "--sbatch 'exclusive': give one option of sbatch"),
        ({"options": ("--a\n--b",)}, "one option of sbatch"),
        ({"grace_s": 0}, "--grace 0"),
        ({"grace_s": 5400}, "less than --time"),
        ({"run_dir": Path("/a\nb")}, "choose another"),
        ({"folder": Path("/runs%j")}, "choose another"),
        ({"folder": Path("/it's")}, "choose another"),
    ],
)
def test_what_sbatch_would_not_take(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        slurm.render(SLURM_JOBS[1], place_on_slurm(**settings))


def test_all_nodes_must_see_the_files(tmp_path: Path) -> None:
    two = job(nodes=2)
    good = place_on_slurm()
    slurm.check(two, good)
    for wrong, said in (
        (replace(two, sources=("/tmp/mine.yaml",)), "CONFIG /tmp/mine.yaml: /tmp is local to each node"),
        (replace(two, sources=("/dev/shm/t.py:T",)), "give --shared /dev/shm if all nodes see that"),
        (job(nodes=2, **{"data.root": "/var/tmp/mnist"}), "data.root /var/tmp/mnist"),
        (job(nodes=2, **{"data.tokenizer_root": "/tmp/gpt2"}), "data.tokenizer_root /tmp/gpt2"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            slurm.check(wrong, good)
        slurm.check(replace(wrong, nodes=1), good)  # what one node has, it sees
    there = replace(good, run_dir=Path("/tmp/x/run"))
    with pytest.raises(UserError, match="--run-dir /tmp/x/run"):
        slurm.check(two, there)
    slurm.check(two, replace(there, shared=(Path("/tmp/x"),)))
    with pytest.raises(UserError, match="--run-dir"):
        slurm.check(two, replace(there, shared=(Path("/tmp/xy"),)))


def test_a_run_directory_is_not_taken_by_mistake(tmp_path: Path) -> None:
    settings = place_on_slurm(run_dir=tmp_path)
    slurm.check(job(), settings)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match="already holds a run; resume it with --resume"):
        slurm.check(job(), settings)
    slurm.check(job(), settings, resume=True)


def test_a_token_file_is_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "token"
    settings = place_on_slurm(run_dir=tmp_path / "run", token_file=file)
    with pytest.raises(UserError, match="the mesh plane use no token"):
        slurm.check(job(), settings)
    elastic = job("elastic")
    with pytest.raises(UserError, match="contains no token"):
        slurm.check(elastic, settings)
    file.write_text(new_token())
    file.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        slurm.check(elastic, settings)
    file.chmod(0o600)
    slurm.check(elastic, settings)


# Kubernetes ---------------------------------------------------------------------------------------------------------


def on_kubernetes(**settings: Any) -> kubernetes.KubernetesSettings:
    return kubernetes.KubernetesSettings(**{"image": "registry.example.org/smolcluster:cpu"} | settings)


KUBERNETES_JOBS = {
    "ranks": (job(nodes=4), on_kubernetes()),
    "gpus": (job(nodes=2, gpus_per_node=1, memory_bytes=8 * 2**30, time_limit_s=60), on_kubernetes(claim="runs.v1")),
    "several": (job(nodes=2, workers_per_node=2, cpus_per_worker=3), on_kubernetes(namespace="ml")),
    "restarted": (job(nodes=4, elastic=None), on_kubernetes(max_restarts=0)),
    "elastic": (job("elastic", nodes=3, gpus_per_node=1), on_kubernetes(claim="runs")),
    "token": (job("elastic", nodes=3), on_kubernetes(token=new_token(), secret="mine", namespace="ml")),
    "selector": (job("elastic", nodes=1, task=TASK), on_kubernetes(node_selector=(("gpu.kind/x", "1"),))),
}


@pytest.mark.parametrize("version", ["1.29", None])
@pytest.mark.parametrize("name", KUBERNETES_JOBS)
def test_manifests_are_valid_strictly(name: str, version: str | None) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    made, settings = KUBERNETES_JOBS[name]
    documents = list(yaml.safe_load_all(kubernetes.render(made, settings)))
    assert documents == list(kubernetes.manifests(made, settings))
    for document in documents:
        validate.validate(document, version or validate.latest_version(), strict=True)
    broken = documents[-1] | {"spek": 1}
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, version or validate.latest_version(), strict=True)


def kinds(made: BatchJob, settings: kubernetes.KubernetesSettings) -> dict[str, dict[str, Any]]:
    documents = list(yaml.safe_load_all(kubernetes.render(made, settings)))
    return {f"{d['kind']} {d['metadata']['name']}": d for d in documents}


def pods(documents: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for document in documents.values():
        if document["kind"] == "Job":
            yield document["spec"]["template"]["spec"]


def test_ranks_are_the_indexes_of_a_job() -> None:
    found = kinds(*KUBERNETES_JOBS["ranks"])
    name = "gpt-allreduce"
    assert list(found) == [f"ConfigMap {name}-config", f"Service {name}", f"NetworkPolicy {name}", f"Job {name}"]
    spec = found[f"Job {name}"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (4, 4, "Indexed")
    (pod,) = pods(found)
    service = found[f"Service {name}"]["spec"]
    assert pod["subdomain"] == name  # so that a pod is called gpt-allreduce-0.gpt-allreduce
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    assert service["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    (container,) = pod["containers"]
    assert container["command"] == ["smolcluster"]
    assert container["args"] == [
        *("train", "/etc/smolcluster/config.yaml", "--run-dir", f"/data/runs/{name}", "--resume", "auto"),
        *("--world-size", "4", "--rank", "$(JOB_COMPLETION_INDEX)"),
        *("--master-addr", f"{name}-0.{name}", "--master-port", "29500"),
        *("--override", "cluster.join_timeout=900"),  # one node may still pull the image
    ]
    assert "SMOLCLUSTER_TOKEN" not in str(found)
    config = found[f"ConfigMap {name}-config"]["data"]["config.yaml"]
    assert yaml.safe_load(config)["cluster"]["num_workers"] == 4


def test_several_workers_in_a_pod_are_started_by_a_launcher() -> None:
    (pod,) = pods(kinds(*KUBERNETES_JOBS["several"]))
    (container,) = pod["containers"]
    leader = "gpt-allreduce-0.gpt-allreduce"
    assert container["args"][-10:] == [
        *("--workers", "2", "--elastic", "4:4", "--rdzv-endpoint", f"{leader}:29400", "--max-restarts", "10"),
        *("--override", "cluster.join_timeout=900"),  # a pod has its name before its image
    ]
    assert {"name": "LEADER", "value": leader} in container["env"]
    key = {"secretKeyRef": {"name": "gpt-allreduce-token", "key": "token"}}  # the launchers know each other by it
    assert {"name": "SMOLCLUSTER_TOKEN", "valueFrom": key} in container["env"]
    assert container["resources"]["limits"] == {"cpu": "6", "memory": "8192Mi"}
    assert {"name": "OMP_NUM_THREADS", "value": "3"} in container["env"]
    wish = plan_job(["gpt"], nodes=4, elastic="2:4")
    (pod,) = pods(kinds(wish, on_kubernetes()))
    assert "2:4" in pod["containers"][0]["args"]


def test_a_server_and_workers_that_can_be_scaled() -> None:
    found = kinds(*KUBERNETES_JOBS["elastic"])
    assert list(found) == [
        *("ConfigMap gpt-edp-config", "Service gpt-edp-server", "Job gpt-edp-server", "Job gpt-edp-worker")
    ]
    server, worker = pods(found)
    assert found["Job gpt-edp-server"]["spec"]["completions"] == 1
    spec = found["Job gpt-edp-worker"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (3, 3, "Indexed")
    (container,) = worker["containers"]
    assert container["command"] + container["args"] == [
        *("smolcluster", "worker", "$(JOB_COMPLETION_INDEX)", "$(NODE_NAME)", "--server", "gpt-edp-server:65432")
    ]
    labels = found["Job gpt-edp-server"]["spec"]["template"]["metadata"]["labels"]
    selector = found["Service gpt-edp-server"]["spec"]["selector"]
    assert selector.items() <= labels.items()
    assert not selector.items() <= spec["template"]["metadata"]["labels"].items()
    assert "nvidia.com/gpu" not in server["containers"][0]["resources"]["limits"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert container["resources"]["requests"] == container["resources"]["limits"]
    tokens = [e for pod in (server, worker) for e in pod["containers"][0]["env"] if e["name"] == "SMOLCLUSTER_TOKEN"]
    assert [t["valueFrom"]["secretKeyRef"] for t in tokens] == [{"name": "gpt-edp-token", "key": "token"}] * 2
    (own,) = [pod for pod in pods(kinds(*KUBERNETES_JOBS["selector"])) if "worker" in pod["containers"][0]["args"]]
    assert own["containers"][0]["args"][-2:] == ["--task", TASK]
    assert own["nodeSelector"] == {"gpu.kind/x": "1"}


@pytest.mark.parametrize("name", KUBERNETES_JOBS)
def test_every_pod_is_harmless(name: str) -> None:
    for pod in pods(kinds(*KUBERNETES_JOBS[name])):
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert pod["restartPolicy"] == "Never"
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert writable >= {"/data", "/tmp"}
        assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


def test_what_a_pod_may_die_of() -> None:
    found = kinds(*KUBERNETES_JOBS["elastic"])
    rules = {name: found[f"Job gpt-edp-{name}"]["spec"]["podFailurePolicy"]["rules"] for name in ("server", "worker")}
    codes = {(r["action"], *r["onExitCodes"]["values"]) for r in rules["server"] if "onExitCodes" in r}
    assert codes == {("FailJob", 2), ("Ignore", 130)}
    codes = {(r["action"], *r["onExitCodes"]["values"]) for r in rules["worker"] if "onExitCodes" in r}
    assert codes == {("Ignore", 130)}  # one that is refused must not take the others with it
    assert found["Job gpt-edp-worker"]["spec"]["backoffLimit"] == 30
    assert kinds(*KUBERNETES_JOBS["gpus"])["Job gpt-allreduce"]["spec"]["activeDeadlineSeconds"] == 60
    server, worker = pods(found)
    assert server["terminationGracePeriodSeconds"] < worker["terminationGracePeriodSeconds"]
    assert "exec" not in server["containers"][0]["command"][2]


def test_the_token_is_in_a_secret_only_when_asked_for() -> None:
    made, settings = KUBERNETES_JOBS["token"]
    assert settings.token is not None
    found = kinds(made, settings)
    assert next(iter(found)) == "Secret mine"
    assert base64.b64decode(found["Secret mine"]["data"]["token"]).decode() == settings.token
    assert settings.token not in kubernetes.render(made, settings)
    without = kubernetes.render(made, replace(settings, token=None))
    assert "kind: Secret" not in without
    assert kubernetes.secret_command(made, replace(settings, secret=None)) == (
        "smolcluster token new --show-only | kubectl create secret generic gpt-edp-token --namespace ml "
        "--from-file=token=/dev/stdin"
    )


@pytest.mark.parametrize(
    ("made", "settings", "said"),
    [
        (job(name="Big"), {}, "--name 'Big' becomes a host name"),
        (job(name="1st"), {}, "a letter first"),
        (job(name="a" * 51), {}, "at most 50"),
        (job(), {"namespace": "a/b"}, "--namespace 'a/b' is not a namespace in Kubernetes"),
        (
            job(),
            {"namespace": "a.b"},
            "--namespace 'a.b' is not a namespace in Kubernetes: at most 63 lower-case letters",
        ),
        (job(), {"namespace": "a" * 64}, "at most 63"),
        (job(), {"namespace": "a-"}, "--namespace 'a-'"),
        (job(), {"claim": "A"}, "--claim 'A'"),
        (job(), {"image": "a b"}, "--image 'a b' is not an image name"),
        (job(), {"max_restarts": -1}, "--max-restarts -1"),
        (job(), {"token": "x"}, "the mesh plane use no token"),
        (job(), {"secret": "x"}, "the mesh plane use no token"),
        (job("elastic", workers_per_node=4, nodes=2), {}, "a pod is one worker; use --nodes 8 with --gpus 0"),
        (job(task="my_task.py:Mine"), {}, "such as /app/my_task.py:Mine"),
        (job(**{"data.root": "mnist"}), {}, "set data.root=/data/mnist"),
        (job(nodes=2, workers_per_node=2, **{"training.checkpoint_steps": 0}), {}, "saves none"),
    ],
)
def test_what_kubernetes_would_not_take(made: BatchJob, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        kubernetes.render(made, on_kubernetes(**settings))


def test_selectors() -> None:
    assert kubernetes.parse_selector("gpu.kind/x=a_1") == ("gpu.kind/x", "a_1")
    for wrong in ("x", "=y", "x=", "x=y z", "a=b=c"):
        with pytest.raises(UserError, match="is not a node label"):
            kubernetes.parse_selector(wrong)


# Compose ------------------------------------------------------------------------------------------------------------


def in_docker(**settings: Any) -> compose.ComposeSettings:
    fields = {"image": "smolcluster:cpu", "user": "1000:1000"}
    fields |= {"data": PurePath("data"), "token_file": PurePath("token")}  # type: ignore[dict-item]
    return compose.ComposeSettings(**fields | settings)


def composed(made: BatchJob, **settings: Any) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(compose.render(made, in_docker(**settings)))
    return found


COMPOSE_JOBS = [
    job("elastic", workers_per_node=2, gpus_per_node=1, cpus_per_worker=2, memory_bytes=4 * 2**30),
    job("elastic", task="/home/me/my_task.py:Mine"),
    job(workers_per_node=3),
]


def test_compose_files_are_valid(tmp_path: Path) -> None:
    pytest.importorskip("check_jsonschema", reason="pip install check-jsonschema")
    files = [tmp_path / f"{number}.yaml" for number in range(len(COMPOSE_JOBS))]
    for file, made in zip(files, COMPOSE_JOBS, strict=True):
        file.write_text(compose.render(made, in_docker()), encoding="utf-8")
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*check, *map(str, files)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    files[0].write_text(files[0].read_text().replace("cap_drop", "cap_drops"))
    assert subprocess.run([*check, str(files[0])], capture_output=True, check=False).returncode == 1


def test_a_server_and_workers_in_containers() -> None:
    found = composed(job("elastic", workers_per_node=2, gpus_per_node=2, cpus_per_worker=2, memory_bytes=4 * 2**30))
    assert list(found["services"]) == ["server", "worker-0", "worker-1"]
    server, *workers = found["services"].values()
    assert server["command"][-4:] == ["--bind", "0.0.0.0", "--port", "65432"]
    assert server["healthcheck"]["test"] == ["CMD-SHELL", containers.listens(65432)]
    assert server["healthcheck"]["start_period"] == "900s"  # `up` gives a container up that is not healthy after it
    assert "deploy" not in server
    for rank, worker in enumerate(workers):
        assert worker["entrypoint"] == ["smolcluster"]
        assert worker["command"] == ["worker", str(rank), f"worker-{rank}", "--server", "server:65432"]
        (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
        assert device["device_ids"] == [str(rank)]
        assert worker["depends_on"]["server"]["condition"] == "service_healthy"
    for service in found["services"].values():
        assert (service["read_only"], service["user"], service["cap_drop"]) == (True, "1000:1000", ["ALL"])
        assert service["secrets"] == ["token"]
        assert service["environment"]["SMOLCLUSTER_TOKEN_FILE"] == "/run/secrets/token"
        assert (service["cpus"], service["mem_limit"]) == (2, "4096m")
        assert service["networks"] == ["cluster"]
    assert found["networks"] == {"cluster": {}}
    assert found["secrets"] == {"token": {"file": "./token"}}


def test_ranks_in_containers() -> None:
    found = composed(job(workers_per_node=3), data=PurePath("/srv/data"))
    assert list(found["services"]) == ["rank-0", "rank-1", "rank-2"]
    assert "secrets" not in found
    for rank, service in enumerate(found["services"].values()):
        words = [*service["entrypoint"], *service["command"]]
        assert " ".join(words[-8:]) == f"--world-size 3 --rank {rank} --master-addr rank-0 --master-port 29500"
        assert words[words.index("--resume") + 1] == "auto"
        (volume,) = service["volumes"]
        assert (volume["source"], volume["target"]) == ("/srv/data", "/data")


def test_compose_fills_in_nothing_of_ours() -> None:
    """A dollar that is meant is written twice; what compose makes of the file is what we meant."""
    made = job("elastic", workers_per_node=1, **{"logging.project_name": "a $HOME b"})
    text = compose.render(made, in_docker())
    assert not re.search(r"(?<!\$)(\$\$)*\$(?!\$)", text)
    found = yaml.safe_load(text.replace("$$", "$"))
    assert found["services"]["server"]["entrypoint"][2] == compose.START
    assert "JOB_COMPLETION_INDEX" not in text  # that is Kubernetes'
    config = found["services"]["server"]["environment"]["CONFIG"]
    assert yaml.safe_load(config)["logging"]["project_name"] == "a $HOME b"


@pytest.mark.parametrize("made", COMPOSE_JOBS, ids=range(len(COMPOSE_JOBS)))
def test_docker_copies_nothing_into_a_container_that_is_read_only(made: BatchJob) -> None:
    """A config with content, and a secret that is no file, would have to be copied: Docker refuses to start those."""
    found = composed(made)
    assert "configs" not in found
    assert all(list(secret) == ["file"] for secret in found.get("secrets", {}).values())
    for service in found["services"].values():
        assert service["read_only"] is True
        assert "configs" not in service
        if containers.CONFIG in service["command"]:
            assert f'"$$CONFIG" >{containers.CONFIG}\n' in service["entrypoint"][2]
            assert containers.CONFIG.rpartition("/")[0] in service["tmpfs"]


def test_a_task_is_mounted() -> None:
    found = composed(job("elastic", task="/home/me/my work/my_task.py:Mine"))
    for service in found["services"].values():
        mount = service["volumes"][1]
        assert (mount["source"], mount["target"], mount["read_only"]) == ("/home/me/my work", "/app", True)
    assert found["services"]["worker-0"]["command"][-2:] == ["--task", "/app/my_task.py:Mine"]
    assert yaml.safe_load(found["services"]["server"]["environment"]["CONFIG"])["task"] == "/app/my_task.py:Mine"


@pytest.mark.parametrize(
    ("made", "settings", "said"),
    [
        (job(), {"user": "0:0"}, "--user '0:0'"),
        (job(), {"user": "me"}, "such as 1000:1000"),
        (job(name="A"), {}, "--name 'A'"),
        (job(), {"image": ""}, "--image ''"),
        (job(workers_per_node=3, gpus_per_node=2), {}, "use --workers 2, or --backend gloo"),
        (job(**{"data.root": "./mnist"}), {}, "data.root=/data/mnist"),
        (job(**{"data.tokenizer": "mine/tokenizer.json"}), {}, "data.tokenizer=/data/tokenizer.json"),
    ],
)
def test_what_docker_would_not_take(made: BatchJob, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        compose.render(made, in_docker(**settings))
    compose.render(job(workers_per_node=3, gpus_per_node=2, backend="gloo"), in_docker())


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="asks Linux")
def test_whether_a_port_is_listened_on() -> None:
    def listens(port: int) -> bool:
        return subprocess.run(["sh", "-c", containers.listens(port)], check=False, capture_output=True).returncode == 0

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert listens(port)
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert not listens(client.getsockname()[1])  # connected, that is something else
    assert not listens(port)


# The image ----------------------------------------------------------------------------------------------------------


def test_the_image_is_what_the_job_files_expect() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    final = text.rpartition("\nFROM ")[2]
    assert f"USER {containers.USER}:{containers.USER}" in final
    assert f"WORKDIR {containers.DATA}" in final
    assert 'ENTRYPOINT ["smolcluster"]' in final
    assert "pip install" not in final
    allowed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")
    }
    copied = {word for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE) for word in line.split()}
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(wheel["force-include"]) <= copied  # without them no wheel can be built, hence no image
    torch = re.search(r"sed -n '(.+?)' pyproject.toml", text)
    found = subprocess.run(
        ["sed", "-n", torch[1], "pyproject.toml"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"torch>=[\d.]+,<[\d.]+\n", found.stdout)


# The commands -------------------------------------------------------------------------------------------------------


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """sbatch, kubectl and docker that only note what they were given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "kubectl", "docker"):
        notes = f'echo "$@" >"{tmp_path}/{name}.args"\ncat >"{tmp_path}/{name}.stdin"\n'
        script = f"#!/bin/sh\n{notes}echo did {name}\nexit ${{FAIL:-0}}\n"
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return tmp_path


def test_slurm_writes_and_submits(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_slurm.slurm(["gpt"], nodes=2, shared=[programs]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/bash\n#SBATCH --job-name=gpt-allreduce\n")
    assert f"run_dir={Path.cwd()}/runs/gpt-allreduce\n" in text
    assert list(Path.cwd().iterdir()) == []
    assert cli_slurm.slurm(["gpt"], nodes=2, shared=[programs], submit=True) == 0
    assert Path("gpt-allreduce.sbatch").read_text() == text
    assert (programs / "sbatch.args").read_text() == "gpt-allreduce.sbatch\n"
    assert "did sbatch" in capsys.readouterr().out


def test_what_a_program_refuses_is_told(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(SmolclusterError, match="sbatch failed: did sbatch"):
        cli_slurm.slurm(["gpt"], submit=True)
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(UserError, match="kubectl is not installed here"):
        cli_k8s.k8s(["gpt"], submit=True)
    with pytest.raises(UserError, match="cannot be written"):
        cli_k8s.k8s(["gpt"], out=programs / "bin/sbatch/x")


def test_kubernetes_gets_the_stream(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_k8s.k8s(["gpt"], strategy="edp", nodes=2) == 0
    said = capsys.readouterr()
    assert "kubectl create secret generic gpt-edp-token" in said.err
    assert "without --claim the run is lost" in said.err
    assert not (programs / "kubectl.args").exists()
    assert cli_k8s.k8s(["gpt"], strategy="edp", nodes=2, claim="runs", submit=True) == 0
    assert (programs / "kubectl.args").read_text() == "apply -f -\n"
    given = list(yaml.safe_load_all((programs / "kubectl.stdin").read_text()))
    assert [d["kind"] for d in given] == ["ConfigMap", "Service", "Job", "Job"]


def test_the_token_is_never_printed(
    programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    token = new_token()
    hidden = base64.b64encode(token.encode()).decode()
    monkeypatch.setenv("SMOLCLUSTER_TOKEN", token)
    cli_k8s.k8s(["gpt"], strategy="edp")
    assert hidden not in capsys.readouterr().out  # it is there, and nobody asked for it
    with pytest.raises(UserError, match="the token would be printed"):
        cli_k8s.k8s(["gpt"], strategy="edp", token_from_env=True)
    cli_k8s.k8s(["gpt"], strategy="edp", token_from_env=True, submit=True)
    assert hidden in (programs / "kubectl.stdin").read_text()
    out = Path("job.yaml")
    out.touch(mode=0o644)
    cli_k8s.k8s(["gpt"], strategy="edp", token_from_env=True, out=out)
    assert hidden in out.read_text()
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    monkeypatch.delenv("SMOLCLUSTER_TOKEN")
    with pytest.raises(UserError, match="SMOLCLUSTER_TOKEN is not set"):
        cli_k8s.k8s(["gpt"], strategy="edp", token_from_env=True, out=out)
    with pytest.raises(UserError, match="contains no token"):
        cli_k8s.k8s(["gpt"], strategy="edp", token_from_file=Path("none"), out=out)
    with pytest.raises(UserError, match="give one of them"):
        cli_k8s.k8s(["gpt"], strategy="edp", token_from_file=Path("none"), token_from_env=True, out=out)
    shown = capsys.readouterr()
    assert hidden not in shown.out + shown.err
    assert token not in shown.out + shown.err


def test_a_path_of_the_image_stays_what_it_is(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is a link here, as /tmp and /home are on a Mac, need not be one there."""
    (programs / "elsewhere").mkdir()
    (programs / "app").symlink_to(programs / "elsewhere")
    task = f"{programs}/app/my_task.py:Mine"
    cli_k8s.k8s([task], strategy="edp")
    config, *_ = yaml.safe_load_all(capsys.readouterr().out)
    assert yaml.safe_load(config["data"]["config.yaml"])["task"] == task


def test_a_task_of_this_machine_is_not_in_a_pod(programs: Path) -> None:
    with pytest.raises(UserError, match=re.escape("such as /app/my_task.py:Mine")):
        cli_k8s.k8s(["my_task.py:Mine"])


def test_compose_tells_what_is_missing(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_compose.compose(["gpt"], strategy="edp", out=Path("there/compose.yaml")) == 0
    said = capsys.readouterr().err
    assert "before it starts: mkdir -p there/data" in said
    assert "token new --show-only > there/token)" in said
    cli_compose.compose(["gpt"], strategy="edp", data=Path("my data"), token_file=Path("my token"))
    said = capsys.readouterr().err
    assert "mkdir -p 'my data'" in said
    assert "> 'my token')" in said
    with pytest.raises(UserError, match="it would not start"):
        cli_compose.compose(["gpt"], strategy="edp", submit=True)
    Path("data").mkdir()
    Path("token").touch()
    assert cli_compose.compose(["gpt"], strategy="edp", submit=True) == 0
    assert (programs / "docker.args").read_text() == "compose -f compose.yaml up --detach\n"


def documented() -> list[list[str]]:
    page = (ROOT / "docs/batch.md").read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    return [shlex.split(line) for line in re.findall(r"^smolcluster (?:slurm|k8s|compose) .*", blocks, re.MULTILINE)]


@pytest.mark.parametrize("words", documented(), ids=" ".join)
def test_what_the_page_says_works(words: list[str], programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer()
    for name, module in (("slurm", cli_slurm), ("k8s", cli_k8s), ("compose", cli_compose)):
        app.command(name, epilog=module.EXAMPLES)(getattr(module, name))
    shared = ["--shared", str(programs)] if words[1] == "slurm" else []
    assert app(words[1:] + shared, standalone_mode=False) == 0
    written = [Path(words[words.index("--out") + 1])] if "--out" in words else []
    assert [path.exists() for path in written] == [True] * len(written)
    assert written or capsys.readouterr().out


def test_the_page_shows_each_command() -> None:
    assert {words[1] for words in documented()} == {"slurm", "k8s", "compose"}
