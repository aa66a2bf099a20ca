"""What a user may say: seed files load as printed, mistakes are named with their place, `resolve` fills in the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tools.reference import pages

from smolcluster.config import Config, builtin_configs, canonical_strategy, dump, flag_overrides, load_config, resolve
from smolcluster.config.checks import conflicts
from smolcluster.config.flags import FLAGS
from smolcluster.config.names import FLAT, known_keys, nearest
from smolcluster.config.tree import to_yaml
from smolcluster.errors import UserError

ROOT = Path(__file__).parents[3]
SEEDS = ROOT / "tests" / "fixtures" / "seeds"


def changed(config: Config) -> dict[str, Any]:
    """What differs from the defaults, by dotted name."""
    plain = config.model_dump(exclude_defaults=True)
    return {f"{section}.{key}": value for section, keys in plain.items() for key, value in keys.items()}


def write(folder: Path, text: str, name: str = "my.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def error(*sources: str, **kwargs: Any) -> list[str]:
    """The lines of the error that loading these gives."""
    with pytest.raises(UserError) as caught:
        load_config(sources, **kwargs)
    return str(caught.value).splitlines()


# Files as the first documents print them


HOSTS = {"mini1": "10.10.0.1", "macbook": "10.10.0.1", "pi5": "192.168.50.1", "win": "10.10.0.1"}
MACHINES = {
    "cluster.host_ip": HOSTS,
    "cluster.num_workers": 3,
    "cluster.workers": ["pi5", "win", "macbook"],
    "cluster.server": "mini1",
    "cluster.seed": 42,
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "cluster_config_edp",
            MACHINES
            | {"strategy.name": "edp", "strategy.worker_update_interval": 10, "strategy.use_quantization": False},
        ),
        (
            "cluster_config_syncps",
            MACHINES | {"strategy.name": "syncps", "strategy.worker_update_interval": 4, "strategy.timeout": 0.1},
        ),
        ("cluster_config_classicdp", {"strategy.name": "classicdp", "strategy.staleness_bound": 5}),
        ("cluster_config_fsdp", {"strategy.name": "fsdp", "strategy.fsdp_stage": 1, "strategy.staleness_bound": 5}),
        (
            "nn_config",
            {
                "training.batch_size": 32,
                "training.learning_rate": 0.001,
                "training.epochs": 2,
                "training.track_gradients": True,
                "strategy.polyak_alpha": 0.5,
                "model.type": "simplenn",
                "data.name": "mnist",
            },
        ),
        (
            "gpt_config",
            {
                "model.ff_dim": 1024,
                "model.dropout": 0.1,
                "lr_schedule.min_lr": 6e-5,
                "data.tokenizer": "openai-community/gpt2",
                "logging.project_name": "smolcluster-gpt-wikitext2",
            },
        ),
    ],
)
def test_seed_files_load_as_printed(name: str, expected: dict[str, Any]) -> None:
    assert changed(load_config([SEEDS / f"{name}.yaml"])) == expected


def test_seed_files_say_their_defaults_too() -> None:
    """Values that equal our defaults do not show as changed; read them once more by name."""
    nn = load_config([SEEDS / "nn_config.yaml"])
    assert (nn.training.eval_steps, nn.training.grad_clip_norm) == (200, 1.0)
    assert (nn.model.input_dim, nn.model.hidden, nn.model.out) == (784, 128, 10)
    gpt = load_config([SEEDS / "gpt_config.yaml"])
    assert gpt.training.learning_rate == 6e-4
    assert (gpt.training.batch_size, gpt.training.epochs, gpt.training.weight_decay) == (None, None, 0.01)
    assert (gpt.model.model_dim, gpt.model.num_layers, gpt.model.num_heads, gpt.model.max_seq_len) == (256, 6, 4, 128)
    assert load_config([SEEDS / "cluster_config_edp.yaml"]).cluster.port == 65432


@pytest.mark.parametrize("name", ["cluster_config_edp", "cluster_config_syncps", "cluster_config_fsdp"])
def test_builtin_cluster_files_are_those_of_the_documents(name: str) -> None:
    assert load_config([name]) == load_config([SEEDS / f"{name}.yaml"])


def test_builtin_mnist_is_nn_config() -> None:
    # polyak_alpha is for syncps alone and would be warned of everywhere else
    assert load_config(["mnist"], overrides=["polyak_alpha=0.5"]) == load_config([SEEDS / "nn_config.yaml"])


def test_every_builtin_loads_and_resolves() -> None:
    names = {"default", "gpt", "gpt2-small", "llama-tiny", "mnist", "wikitext2", "cluster_config_classicdp"}
    assert names <= set(builtin_configs())
    for name in builtin_configs():
        assert not list(conflicts(resolve(load_config([name]))))


def test_default_needs_no_download_and_two_workers() -> None:
    config = resolve(load_config(["default"]))
    assert (config.data.name, config.data.tokenizer, config.cluster.num_workers) == ("embedded", "bytes", 2)


# Merging


def test_sources_then_overrides(tmp_path: Path) -> None:
    first = write(tmp_path, "training: {steps: 1, epochs: 1, batch_size: 1}\ncluster: {workers: [a, b]}", "1.yaml")
    second = write(tmp_path, "training: {steps: 2, epochs: 2}\ncluster: {workers: [c]}", "2.yaml")
    config = load_config(
        [first, second],
        overrides=["training.steps=3", "epochs=4", ("training.steps", 5), ("training.epochs", None)],
    )
    assert (config.training.steps, config.training.epochs, config.training.batch_size) == (5, 4, 1)
    assert config.cluster.workers == ["c"]


def test_hosts_merge(tmp_path: Path) -> None:
    path = write(tmp_path, "host_ip: {a: 10.0.0.1}")
    config = load_config([path], overrides=["host_ip.pi5.local=10.0.0.5", "cluster.host_ip={b: 10.0.0.2}"])
    assert config.cluster.host_ip == {"a": "10.0.0.1", "pi5.local": "10.0.0.5", "b": "10.0.0.2"}


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("training.learning_rate=3e-4", "training.learning_rate", 3e-4),
        ("training.steps=1e3", "training.steps", 1000),
        ("strategy=EDP", "strategy.name", "EDP"),
        ("model=SimpleNN", "model.type", "simplenn"),
        ("dataset.name=MNIST", "data.name", "mnist"),
        ("data=hf:Owner/Name", "data.name", "hf:Owner/Name"),
        ("batch_size=8", "training.batch_size", 8),
        ("batch_size.pi5=8", "cluster.batch_size", {"pi5": 8}),
        ("num_epochs=3", "training.epochs", 3),
        ("gradient_clipping.enabled=false", "training.grad_clip_norm", None),
        ("gradient_clipping.max_norm=0.5", "training.grad_clip_norm", 0.5),
        ("training.grad_clip_norm=", "training.grad_clip_norm", None),
        ("seed=0", "cluster.seed", 0),
        ("workers=[on, no]", "cluster.workers", ["on", "no"]),
        ("track_gradients=yes", "training.track_gradients", True),
        ("logging.level=debug", "logging.level", "DEBUG"),
        ("use_quantization=true", "strategy.use_quantization", True),
        ("strategy.options.a.b=1", "strategy.options", {"a": {"b": 1}}),
        ("training.device=cuda:1", "training.device", "cuda:1"),
    ],
)
def test_overrides(override: str, key: str, value: Any) -> None:
    assert changed(load_config([], overrides=[override])) == {key: value}


@pytest.mark.parametrize("text", ["", "# nothing\n", "training:\n", "---\n...\n", "training: {}\n"])
def test_a_file_that_sets_nothing_leaves_the_earlier_one_alone(tmp_path: Path, text: str) -> None:
    first, second = write(tmp_path, "training: {steps: 7}", "1.yaml"), write(tmp_path, text, "2.yaml")
    assert changed(load_config([first, second])) == {"training.steps": 7}


def test_null_means_the_default_where_null_is_no_value() -> None:
    config = load_config(["cluster_config_edp"], overrides=["workers=null", "num_workers=2", "host_ip=null", "port="])
    assert (config.cluster.workers, config.cluster.host_ip, config.cluster.port) == ([], {}, 65432)


def test_clipping_switched_on_again(tmp_path: Path) -> None:
    off = write(tmp_path, "gradient_clipping: {enabled: false, max_norm: 0.5}")
    on = ["gradient_clipping.enabled=true"]
    assert load_config([off]).training.grad_clip_norm is None
    assert load_config([off], overrides=on).training.grad_clip_norm == 1.0
    assert load_config([], overrides=["training.grad_clip_norm=0.5", *on]).training.grad_clip_norm == 0.5


def test_a_strategy_named_anywhere_beats_the_file_name(tmp_path: Path) -> None:
    named = write(tmp_path, "strategy: fsdp")
    assert load_config([named, "cluster_config_edp"]).strategy.name == "fsdp"
    assert load_config(["cluster_config_edp"], overrides={"strategy.name": "single"}).strategy.name == "single"
    both = load_config(["cluster_config_edp", "cluster_config_syncps"])
    assert both.strategy.name == "syncps"


def test_windows_notepad_files_load(tmp_path: Path) -> None:
    path = tmp_path / "notepad.yaml"
    path.write_bytes(b"\xef\xbb\xbftraining:\r\n  steps: 3\r\n")
    assert load_config([path]).training.steps == 3


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("ClassicDP", "allreduce"),
        ("ddp", "allreduce"),
        ("All-Reduce", "allreduce"),
        ("SynchronousPS", "syncps"),
        ("sync_ps", "syncps"),
        ("EDP", "edp"),
        ("model_parallelism", "pipeline"),
        ("MP", "pipeline"),
        ("ZeRO", "fsdp"),
        ("My_Own", "My_Own"),
    ],
)
def test_strategy_aliases(alias: str, name: str) -> None:
    assert canonical_strategy(alias) == name


# Mistakes


def test_every_mistake_is_listed_once_with_its_place(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
trainin:
  batch_size: 16
model:
  learning_rate: 6e-4
  type: resnet
training:
  batch_size: true
  betas: [0.9, 2]
num_epochs: 0
cluster:
  workers: [1]
""",
    )
    assert error(path, overrides=["training.steps=many", ("model.model_dim", 0)]) == [
        f"{path}:2: trainin.batch_size = 16: unknown key; did you mean 'training.batch_size'?",
        f"{path}:4: model.learning_rate = 0.0006: unknown key; did you mean 'training.learning_rate'?",
        f"{path}:5: model.type = 'resnet': must be gpt, qwen3 or simplenn",
        f"{path}:7: training.batch_size = true: must be a whole number, at least 1, or null",
        f"{path}:8: training.betas[1] = 2: must be a number, at least 0 and below 1",
        f"{path}:9: num_epochs (training.epochs) = 0: must be a whole number, at least 1, or null",
        f"{path}:11: cluster.workers[0] = 1: must be text; put quotes around it",
        "--override: training.steps = 'many': must be a whole number, at least 1, or null",
        "--hidden-size: model.model_dim = 0: must be a whole number, at least 1",
    ]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("training:\n  steps: [1\n", 3, "not YAML"),
        ("training:\n\tsteps: 1\n", 2, "not YAML"),
        ("a: 1\n---\nb: 2\n", 2, "not YAML"),
        ("training:\n  steps: \0\n", 2, "not YAML"),
        ("training:\n  steps: 1\n  steps: 2\n", 3, "training.steps: given twice"),
        ("batch_size: 1\ntraining:\n  batch_size: 2\n", 3, "training.batch_size: given twice, here and as batch_size"),
        ("training:\n  batch_size: 2\nbatch_size: 1\n", 3, "batch_size: given twice"),
        ("strategy:\n  options: &x\n    a: *x\n", 3, "may not contain itself"),
        ("data:\n  root: !!python/name:os.system x\n", 2, "tag !!python/name:os.system"),
        ("training:\n  <<: {steps: 1}\n", 2, "merge keys"),
        ("training:\n  [a]: 1\n", 2, "complex keys"),
        ("- 1\n", 1, "a configuration is a mapping"),
        ("just text\n", 1, "a configuration is a mapping"),
        ("training: 5\n", 1, "training = 5: must be a mapping"),
        ("gradient_clipping: 5\n", 1, "gradient_clipping = 5: must be a mapping"),
        ("gradient_clipping:\n  enabled: maybe\n", 2, "must be true or false"),
        ("gradient_clipping:\n  norm: 1\n", 2, "gradient_clipping.norm = 1: unknown key"),
        ("gradient_clipping:\n  max_norm: -1\n", 2, "gradient_clipping.max_norm (training.grad_clip_norm) = -1"),
        ("learning_rate: .inf\n", 1, "training.learning_rate"),
        ("learning_rate: .nan\n", 1, "training.learning_rate"),
        (f"training:\n  steps: {'9' * 5000}\n", 2, "training.steps"),
        (
            "training: {eval_samples: 50, eval_batches: 3}\n",
            1,
            "eval_batches = 3: and training.eval_samples = 50; leave",
        ),
        (
            "host_ip:\n  a: x\n  b: x\nworkers:\n  - a\n  - c\n",
            6,
            "cluster.workers[1] 'c' is not in host_ip; known: a, b",
        ),
        ("hosts:\n  a:\n    environment: {'A=B': x}\n", 3, "'A=B' is no variable"),
        *(
            (f"cluster:\n  name: '{name}'\n", 2, "is no name for a cluster")
            for name in ("../../x", "a.b", "a:b", "$(touch x)", "")
        ),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, line: int, words: str) -> None:
    path = write(tmp_path, text)
    (message,) = error(path)
    assert message.startswith(f"{path}:{line}: ")
    assert words in message


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"a: \xff\xfe")
    assert "not UTF-8" in error(str(path))[0]
    assert "cannot be read" in error(str(tmp_path))[0]


def test_files_that_would_take_for_ever(tmp_path: Path) -> None:
    """Aliases that grow, and brackets without end."""
    bomb = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 1}]" for n in range(12))
    (message,) = error(write(tmp_path, bomb))
    assert "more than 100000 values" in message
    (message,) = error(write(tmp_path, "a: " + "[" * 5000))
    assert "nested too deep" in message or "not YAML" in message


def test_what_may_be_a_password_is_not_shown(tmp_path: Path) -> None:
    (message,) = error(write(tmp_path, "logging:\n  loki_ulr: https://me:secret@loki.example.org\n"))
    assert "secret" not in message
    assert "https://loki.example.org" in message


def test_a_missing_file_names_the_builtin_ones() -> None:
    (message,) = error("gptt")
    assert "did you mean 'gpt'?" in message
    assert all(name in message for name in ("default", "mnist", "cluster_config_edp"))


def test_several_broken_sources_are_all_named(tmp_path: Path) -> None:
    path = write(tmp_path, "a: [")
    lines = error("nosuch.yaml", path, overrides=["novalue", "=1", "data.root=[", "trainin.steps=1"])
    assert [line.split(": ")[0] for line in lines] == ["nosuch.yaml", f"{path}:1"] + ["--override"] * 4


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (["model.num_heads=3"], "model: model_dim 256 is not divisible by num_heads 3"),
        (["model.num_heads=4", "model.num_kv_heads=3"], "model: num_heads 4 is not divisible by num_kv_heads 3"),
        (["model.model_dim=12", "model.position=rotary"], "heads of odd width 3"),
        (["lr_schedule.min_lr=1"], "lr_schedule.min_lr = 1: must not exceed training.learning_rate = 0.0006"),
        (["num_workers=2", "workers=[a]"], "cluster.num_workers = 2: but workers lists 1 (a)"),
        (["host_ip={a: x}", "server=b"], "cluster.server 'b' is not in host_ip; known: a"),
        (["workers=[a]", "batch_size={b: 4}"], "cluster.batch_size: 'b' is not a host here; known: a"),
        (["strategy.layer_distribution=[3, 4]"], "sums to 7, not to model.num_layers = 6"),
        (["use_quantization=true", "codec=topk"], "leave one of them out"),
        (["strategy=diloco", "strategy.codec=topk"], "override: strategy.codec = 'topk': diloco takes one of fp32"),
        (["strategy=diloco", "strategy.fragments=4"], "override: strategy.fragments is 4, which must divide"),
        (["strategy=diloco", "strategy.fragments=4"], "strategy.inner_steps, 30; set inner_steps to 32"),
        # Of several types: the most precise error.
        (["batch_size=lots"], "batch_size (training.batch_size) = 'lots': must be a whole number, at least 1, or null"),
        (["batch_size={pi5: no}"], "(cluster.batch_size.pi5) = 'no': must be a whole number, at least 1, or auto"),
        (["cluster.batch_size=5"], "= 5: must be auto, or a mapping of names, each to a whole number, "),
        (["plane=flat"], "plane (cluster.plane) = 'flat': must be mesh or elastic, or null"),
    ],
)
def test_rules_between_keys(override: list[str], words: str) -> None:
    (message,) = error(overrides=override)
    assert message.startswith("--override: ")
    assert words in message


def test_a_conflict_points_at_what_came_last() -> None:
    (message,) = error("gpt", overrides={"training.learning_rate": 1e-6})
    assert message.startswith("--learning-rate: lr_schedule.min_lr")


def test_gpt_keys_are_unused_on_a_simplenn() -> None:
    assert load_config(["mnist"], overrides=["model.num_heads=3"]).model.num_heads == 3


def test_the_token_is_never_shown() -> None:
    lines = error(overrides=["cluster.token=12345", "cluster.tokn=s3cret", "cluster.token.x=s3cret"])
    assert lines
    assert not any("12345" in line or "s3cret" in line for line in lines)
    config = load_config([], overrides=["token=s3cret"])
    assert config.cluster.token == "s3cret"
    assert "s3cret" not in dump(config) + repr(config)
    assert "SMOLCLUSTER_TOKEN" in dump(config)


@given(st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1), st.text("abcdefghijklmnopqrstuvwxyz_"))
def test_an_unknown_key_always_names_a_known_one(section: str, key: str) -> None:
    name = f"{section}.{key}" if key else section
    if section in Config.model_fields or section in FLAT or section == "dataset":  # which is `data`
        return
    (message,) = error(overrides=[f"{name}=1"])
    assert f": {name} = " in message
    assert "unknown key" in message
    named = message.split("'")[-2]
    assert named in known_keys() or named in Config.model_fields


@given(st.sampled_from(known_keys()), st.integers(0, 20), st.sampled_from("abcxyz"))
def test_one_wrong_letter_is_understood(key: str, position: int, letter: str) -> None:
    section, _, leaf = key.rpartition(".")
    if len(leaf) < 5:
        return
    position %= len(leaf)
    misspelt = leaf[:position] + letter + leaf[position + 1 :]
    assert nearest(f"{section}.{misspelt}" if section else misspelt)[0] == key


# Resolving


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["model.max_seq_len=128"], "training.batch_size", 32),
        (["model.max_seq_len=64"], "training.batch_size", 32),
        (["model.max_seq_len=256"], "training.batch_size", 16),
        (["model.max_seq_len=1024"], "training.batch_size", 4),
        (["model.max_seq_len=100000"], "training.batch_size", 1),
        (["model.max_seq_len=1024", "model=SimpleNN"], "training.batch_size", 32),
        (["training.batch_size=7"], "training.batch_size", 7),
        (["data.name=wikitext"], "training.epochs", 30),
        (["data.name=wikitext-103"], "training.epochs", 30),
        (["data.name=snli"], "training.epochs", 20),
        (["data.name=mnist"], "training.epochs", 2),
        ([], "training.epochs", 1),
        (["training.steps=5"], "training.epochs", None),
        ([], "training.seed", 42),
        (["cluster.seed=0"], "training.seed", 0),
        (["cluster.seed=1", "training.seed=0"], "training.seed", 0),
        (["training.seed=3"], "cluster.seed", 3),
        (["training.learning_rate=0.5"], "lr_schedule.min_lr", 0.05),
        (["lr_schedule.min_lr=0"], "lr_schedule.min_lr", 0.0),
        (["model.model_dim=64"], "model.ff_dim", 256),
        (["model.model_dim=256", "model.activation=swiglu"], "model.ff_dim", 704),
        (["model.model_dim=192", "model.activation=swiglu"], "model.ff_dim", 512),
        ([], "model.num_kv_heads", 4),
        ([], "model.bias", True),
        (["model.norm=rmsnorm"], "model.bias", False),
        (["model.norm=rmsnorm", "model.bias=true"], "model.bias", True),
        ([], "cluster.num_workers", 1),
        (["workers=[a, b]"], "cluster.num_workers", 2),
        ([], "logging.project_name", "smolcluster"),
        (["data=wikitext"], "logging.project_name", "smolcluster-gpt-wikitext2"),
        (["data=wikitext-2"], "logging.project_name", "smolcluster-gpt-wikitext2"),
        (["data=wikitext-103"], "logging.project_name", "smolcluster"),
        ([], "data.tokenizer", "bytes"),
        (["data=text"], "data.tokenizer", "bytes"),
        (["data=snli"], "data.tokenizer", "gpt2"),
        (["data=mnist"], "data.tokenizer", None),
        (["data.tokenizer=openai-community/gpt2"], "data.tokenizer", "gpt2"),
        ([], "training.checkpoint_steps", 200),
        (["training.checkpoint_steps=0"], "training.checkpoint_steps", 0),
        (["training.eval_steps=0"], "training.checkpoint_steps", None),
        (["training.eval_steps=0"], "training.eval_steps", None),
        (["training.grad_clip_norm=0"], "training.grad_clip_norm", None),
        (["strategy=Classic-DP"], "strategy.name", "allreduce"),
    ],
)
def test_resolve(overrides: list[str], key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    config = load_config([], overrides=overrides)
    before = config.model_copy(deep=True)
    assert getattr(getattr(resolve(config), section), name) == value
    assert config == before


# Any configuration


TEXT = st.text(max_size=12) | st.sampled_from(
    ["6e-4", "1_000", "yes", "null", "~", "- a", "a: b", "'", "\ufeff", "1:30"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


SCHEMA = Config.model_json_schema()


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a part of the JSON schema allows."""
    if "$ref" in schema:
        inner = SCHEMA["$defs"][schema["$ref"].split("/")[-1]]["properties"]
        return st.fixed_dictionaries({}, optional={key: values(part) for key, part in inner.items()})
    if "anyOf" in schema:
        return st.one_of([values(option) for option in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    match schema["type"]:
        case "integer":
            high = schema.get("maximum", schema.get("exclusiveMaximum", 10**9 + 1) - 1)
            return st.integers(schema["minimum"], high)
        case "number":
            low = schema.get("minimum", schema.get("exclusiveMinimum"))
            high = schema.get("maximum", schema.get("exclusiveMaximum"))
            ends = {"exclude_min": "exclusiveMinimum" in schema, "exclude_max": "exclusiveMaximum" in schema}
            return st.floats(low, high, **ends, allow_nan=False, allow_infinity=False)
        case "array" if "prefixItems" in schema:
            return st.tuples(*(values(item) for item in schema["prefixItems"]))
        case "array":
            return st.lists(values(schema["items"]), max_size=3)
        case "object":
            inner = schema["additionalProperties"]
            return st.dictionaries(TEXT, JSON if inner is True else values(inner), max_size=3)
        case kind:
            return {"boolean": st.booleans(), "string": TEXT, "null": st.none()}[kind]


SECTION_OF = {name: part["$ref"].split("/")[-1] for name, part in SCHEMA["properties"].items() if "$ref" in part}
KEYS = {
    f"{section}.{key}": values(part)
    for section, definition in SECTION_OF.items()
    for key, part in SCHEMA["$defs"][definition]["properties"].items()
}
# Keys that must agree with one another: left as they are here, tested above.
TIED = {"model.model_dim", "model.num_heads", "model.num_kv_heads", "strategy.layer_distribution", "strategy.codec"}
TIED |= {"training.best", "training.learning_rate", "lr_schedule.min_lr", "cluster.num_workers", "cluster.token"}
TIED |= {"cluster.server", "cluster.host_ip", "cluster.batch_size", "cluster.buffer_size"}
TIED |= {"cluster.hosts", "cluster.links", "cluster.name", "model.type", "model.options"}
TIED |= {"logging.loki_url"}  # a password in it is not written
FREE = {key: part for key, part in KEYS.items() if key not in TIED}
SUBSETS = st.fixed_dictionaries({}, optional=FREE)


@example({"strategy.options": {"\x85": None}})
@example({"strategy.options": {"": float("inf")}})
@given(SUBSETS)
def test_any_overrides_round_trip(tmp_path_factory: pytest.TempPathFactory, given_values: dict[str, Any]) -> None:
    config = load_config([], overrides=given_values)
    overrides = [f"{key}={to_yaml(value)}" for key, value in given_values.items() if value is not None]
    assert load_config([], overrides=overrides) == config
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    path.write_text(dump(config), encoding="utf-8", newline="\n")
    assert load_config([path]) == config


@settings(deadline=None, max_examples=30)
@given(st.dictionaries(TEXT, TEXT, min_size=1, max_size=4), st.data())
def test_any_hosts_round_trip(
    tmp_path_factory: pytest.TempPathFactory, hosts: dict[str, str], data: st.DataObject
) -> None:
    named = st.sampled_from(sorted(hosts))
    plain = {
        "host_ip": hosts,
        "workers": data.draw(st.lists(named, max_size=3)),
        "server": data.draw(named),
        "batch_size": data.draw(st.dictionaries(named, st.integers(1, 99))),
    }
    path = tmp_path_factory.getbasetemp() / "hosts.yaml"
    path.write_text(to_yaml(plain), encoding="utf-8", newline="\n")
    config = load_config([path])
    assert config.cluster.model_dump(include=set(plain)) == plain
    path.write_text(dump(config), encoding="utf-8", newline="\n")
    assert load_config([path]) == config


@given(SUBSETS)
def test_resolving_twice_changes_nothing(given_values: dict[str, Any]) -> None:
    config = resolve(load_config([], overrides=given_values))
    assert resolve(config) == config


def test_dump_keeps_the_order_of_the_schema() -> None:
    lines = dump(Config()).splitlines()
    assert [line.rstrip(":") for line in lines if not line.startswith(" ")][:-1] == list(SECTION_OF)
    assert lines[-1] == "task: null"


# The schema and its page


def test_json_schema_is_whole() -> None:
    json.dumps(SCHEMA, allow_nan=False)
    assert set(SECTION_OF.values()) | {"HostConfig", "LinkConfig"} == set(SCHEMA["$defs"])
    for part in (SCHEMA, *SCHEMA["$defs"].values()):
        assert part["additionalProperties"] is False
        for name, field in part["properties"].items():
            # A section's description stands in its definition.
            described = SCHEMA["$defs"][SECTION_OF[name]] if "$ref" in field else field
            assert described.get("description"), name
            assert {"type", "anyOf", "enum", "$ref"} & set(field), name


@pytest.mark.parametrize(
    ("overrides", "length"),
    [
        ({"training.epochs": 3}, (3, None)),
        (["num_epochs=3"], (3, None)),
        ([], (None, 300)),
        (["training.epochs=null"], (None, 300)),
        (["training.epochs=3", ("training.steps", 7)], (3, 7)),  # both are said there: steps win
        (["training.steps=7", ("training.epochs", 3)], (3, 7)),
    ],
)
def test_epochs_of_the_command_line_count_where_a_file_has_steps(
    overrides: Any, length: tuple[int | None, int | None]
) -> None:
    training = resolve(load_config(["default"], overrides=overrides)).training
    assert (training.epochs, training.steps) == length


def test_steps_of_a_file_win_over_epochs_of_files(tmp_path: Path) -> None:
    first, second = (write(tmp_path, f"training: {{{text}: 5}}", f"{text}.yaml") for text in ("steps", "epochs"))
    assert load_config([first, second]).training.steps == 5


@pytest.mark.parametrize(
    ("file", "overrides", "samples"),
    [
        ("{eval_samples: 50, batch_size: 4}", [], 50),
        ("{eval_batches: 3, batch_size: 4}", [], 12),
        ("{eval_batches: 3}", ["training.batch_size=5"], 15),
        ("{eval_samples: 50, batch_size: 4}", ["training.eval_batches=2"], 8),
        ("{eval_batches: 3, batch_size: 4}", ["training.eval_samples=7"], 7),
        ("{eval_samples: 50}", ["training.eval_batches=null"], None),
        ("{eval_batches: 3}", ["training.eval_samples=null"], None),
    ],
)
def test_eval_batches_are_samples(tmp_path: Path, file: str, overrides: list[str], samples: int | None) -> None:
    """Of the batch size; what is said last holds."""
    config = resolve(load_config([write(tmp_path, f"training: {file}")], overrides=overrides))
    assert (config.training.eval_samples, config.training.eval_batches) == (samples, None)
    again = resolve(load_config([write(tmp_path, dump(config), "again.yaml")]))
    assert again.training.eval_samples == samples


@pytest.mark.parametrize("page", pages(ROOT / "docs"), ids=lambda page: page.stem)
def test_generated_pages_are_up_to_date(page: Path) -> None:
    now, then = page.read_text(encoding="utf-8"), pages(ROOT / "docs")[page]
    assert now == then, "run: python -m tools.reference docs"


# Flags


def test_flags_set_keys() -> None:
    given_flags = dict.fromkeys(FLAGS) | {"hidden_size": 64, "layers": 2, "mixed_precision": True}
    assert flag_overrides(**given_flags) == {"model.model_dim": 64, "model.num_layers": 2, "training.precision": "bf16"}
    assert flag_overrides(mixed_precision=False, use_gradient_checkpointing=False) == {}
    assert flag_overrides(use_gradient_checkpointing=True) == {"training.gradient_checkpointing": True}
    zeros = {"training.checkpoint_steps": 0, "training.grad_clip_norm": 0.0}
    assert flag_overrides(save_interval=0, gradient_clip_norm=0.0) == zeros
    assert set(FLAGS.values()) <= set(known_keys())


def test_configuration_does_not_import_torch() -> None:
    code = "import sys, smolcluster.config, tools.reference; sys.exit('torch' in sys.modules)"
    paths = [str(ROOT / "src"), *sys.path]
    run = subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}; {code}"], timeout=300)
    assert run.returncode == 0


# Values of several types


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("batch_size=auto", "auto"),
        ("cluster.batch_size=AUTO", "auto"),
        ("batch_size.pi5=auto", {"pi5": "auto"}),
        ("batch_size={pi5: 8, win: auto}", {"pi5": 8, "win": "auto"}),
    ],
)
def test_batch_sizes_may_be_automatic(override: str, expected: object) -> None:
    config = load_config([], overrides=[override])
    assert config.cluster.batch_size == expected
    assert config.training.batch_size is None
    assert resolve(config).cluster.batch_size == expected


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("checkpoint.interval", "training.checkpoint_steps"),
        ("checkpoint.steps", "training.checkpoint_steps"),
        ("training.checkpoint_interval", "training.checkpoint_steps"),
        ("save.every", "training.checkpoint_steps"),
        ("eval.interval", "training.eval_steps"),
        ("log.interval", "logging.log_interval"),
        ("logging.interval", "logging.log_interval"),
        ("optimizer.lr", "training.learning_rate"),
        ("data.batch_size", "training.batch_size"),
        ("model.learning_rate", "training.learning_rate"),
        ("modl.num_layers", "model.num_layers"),
        ("model.dim", "model.model_dim"),
        ("model.hidden_size", "model.model_dim"),
        ("training.warmup", "lr_schedule.warmup_iters"),
        ("warmup_steps", "lr_schedule.warmup_iters"),
        ("data.path", "data.root"),
    ],
)
def test_an_unknown_key_suggests_what_was_meant(written: str, meant: str) -> None:
    """A section that there is not may be a word of the key, and words have synonyms."""
    near, likeness = nearest(written)
    assert near == meant
    assert likeness > 0.6
