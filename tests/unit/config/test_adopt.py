"""What a worker takes over from a server that it dialled, and what only its owner decides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from smolcluster.cli.join import describe_access
from smolcluster.cli.options import OwnerOptions
from smolcluster.config import Config, load_config, public_dict, resolve
from smolcluster.config.names import SECTIONS, known_keys
from smolcluster.engine.elastic.adopted_config import FROM_SERVER, _is_plain, adopt, read_plan
from smolcluster.errors import UserError
from smolcluster.launch.join.worker import local_overrides, worker_spec

RUN = "0123456789abcdef"


def served(**overrides: Any) -> dict[str, Any]:
    """The configuration of a server, as it sends it."""
    return public_dict(
        resolve(load_config([], overrides={key.replace("__", "."): value for key, value in overrides.items()}))
    )


def adopted(
    theirs: Mapping[str, Any], given: Mapping[str, Any] | None = None, *, own: Config | None = None, strategy: str = ""
) -> Config:
    return adopt(theirs, own=own, given=given or {}, strategy=strategy, rank=0, server="mini1:7")


# The allow-list


def test_no_key_of_the_server_can_name_a_file_an_address_or_code() -> None:
    """Free text is taken over for these keys alone, and each of them is checked."""
    text = {
        key
        for key in FROM_SERVER
        for section, _, name in [key.partition(".")]
        if not _is_plain(SECTIONS[section].model_fields[name].annotation)
    }
    assert text == {"strategy.name", "cluster.workers", "data.name"}
    assert {key.partition(".")[0] for key in FROM_SERVER} == {
        *("model", "training", "lr_schedule", "strategy", "cluster", "data", "logging")
    }
    assert {key for key in FROM_SERVER if key.startswith(("data.", "logging."))} == {
        *("data.name", "data.val_fraction", "logging.log_interval")
    }


EVIL: dict[str, Any] = {
    "data.root": "/home/me/.ssh",
    "data.cache_dir": "/home/me/.config",
    "data.tokenizer_root": "/etc",
    "data.download": False,
    "logging.loki_url": "http://evil:3100",
    "logging.prometheus_port": 9464,
    "logging.prometheus_host": "0.0.0.0",
    "logging.wandb": True,
    "logging.tensorboard": True,
    "logging.project_name": "theirs",
    "logging.level": "DEBUG",
    "training.device": "cuda:7",
    "training.profile": "1:2",
    "strategy.draw_schedule": True,
    "cluster.bind": "0.0.0.0",
    "cluster.port": 1,
    "cluster.host_ip": {"a": "b"},
    "cluster.buffer_size": {"pi5": 1 << 40},
    "cluster.token": "smol1_theirs",
    "run.train": "evil.yaml",
    "run.files": ["/etc/passwd"],
}


@pytest.mark.parametrize("own", [None, resolve(Config.model_validate({}))], ids=["by hand", "with a configuration"])
def test_what_touches_files_network_or_code_stays_the_owners(own: Config | None) -> None:
    theirs = served(training__learning_rate=0.25 if own is None else None)
    for key, value in EVIL.items():
        if own is not None and key in ("training.profile", "strategy.draw_schedule"):
            continue  # refused: they differ
        section, _, name = key.partition(".")
        theirs[section][name] = value
    config = adopted(theirs, own=own)
    plain, mine = config.model_dump(mode="json"), (own or Config.model_validate({})).model_dump(mode="json")
    assert config.training.learning_rate == (0.25 if own is None else mine["training"]["learning_rate"])
    for key in set(known_keys()) - FROM_SERVER - {"task", "data.tokenizer"}:
        section, _, name = key.partition(".")
        assert plain[section][name] == mine[section][name], key


def test_numbers_come_from_the_server_and_flags_of_the_worker_win() -> None:
    theirs = served(
        training__learning_rate=0.5, model__model_dim=64, training__precision="bf16", cluster__num_workers=3
    )
    config = adopted(theirs, {"training.device": "cpu", "training.precision": "fp32", "logging.log_interval": 3})
    assert (config.training.learning_rate, config.model.model_dim, config.cluster.num_workers) == (0.5, 64, 3)
    assert (config.training.device, config.training.precision, config.logging.log_interval) == ("cpu", "fp32", 3)


# Data


@pytest.mark.parametrize("name", ["text", "wikitext", "wikitext-103", "snli", "mnist"])
def test_data_in_files_is_read_only_where_its_owner_says_so(name: str) -> None:
    theirs = served(data__name=name, data__root="/home/me/.ssh", data__tokenizer="bytes", model__type="simplenn")
    with pytest.raises(UserError, match=rf"--data-root FOLDER .*--override data\.name={name} "):
        adopted(theirs)
    config = adopted(theirs, {"data.root": "/data"})
    assert (config.data.name, config.data.root) == (name, "/data")
    config = adopted(theirs, {"data.name": name})
    assert (config.data.name, config.data.root) == (name, None)
    with pytest.raises(UserError, match="started for 'embedded'"):
        adopted(theirs, {"data.name": "embedded"})


def test_a_dataset_of_the_hub_is_named_by_the_owner() -> None:
    """The name is an address, and may be a folder of this machine."""
    theirs = served(data__name="hf:/home/me/.ssh", data__tokenizer="bytes")
    for given in ({}, {"data.root": "/data"}):
        with pytest.raises(UserError, match=r"start this worker with --override data\.name=hf:/home/me/\.ssh"):
            adopted(theirs, given)
    assert adopted(theirs, {"data.name": "hf:/home/me/.ssh"}).data.name == "hf:/home/me/.ssh"


def test_a_tokenizer_in_files_is_named_by_the_owner() -> None:
    for name in ("bytes", "chars"):
        assert adopted(served(data__tokenizer=name)).data.tokenizer == name
    with pytest.raises(UserError, match=r"--override data\.tokenizer=gpt2"):
        adopted(served(data__tokenizer="gpt2"))
    with pytest.raises(UserError, match=r"--override data\.tokenizer=PATH"):
        adopted(served(data__tokenizer="/home/me/.ssh/id_ed25519"), {"data.tokenizer_root": "/t"})
    assert adopted(served(data__tokenizer="gpt2"), {"data.tokenizer_root": "/t"}).data.tokenizer == "gpt2"
    assert adopted(served(data__tokenizer="gpt2", data__name="wikitext"), {"data.root": "/w"}).data.tokenizer == "gpt2"
    mine = adopted(served(data__tokenizer="/theirs/tokenizer.json"), {"data.tokenizer": "/mine/tokenizer.json"})
    assert mine.data.tokenizer == "/mine/tokenizer.json"
    with pytest.raises(UserError, match="this worker was given 'bytes'"):
        adopted(served(data__tokenizer="/theirs/tokenizer.json"), {"data.tokenizer": "bytes"})


def test_a_configuration_of_the_workers_own_names_its_data() -> None:
    own = resolve(
        load_config([], overrides={"data.name": "text", "data.root": "/mine", "data.tokenizer": "/mine/t.json"})
    )
    theirs = served(data__name="text", data__root="/theirs", data__tokenizer="/theirs/t.json")
    data = adopted(theirs, own=own).data
    assert (data.name, data.root, data.tokenizer) == ("text", "/mine", "/mine/t.json")
    with pytest.raises(UserError, match=r"data\.name is 'text' on rank 0 and 'wikitext' on the server at mini1:7"):
        adopted(served(data__name="wikitext"), own=own)


# Code


def test_a_task_comes_from_the_owner() -> None:
    theirs = served(task="/tmp/evil.py:Evil")
    for own in (None, resolve(Config.model_validate({}))):
        with pytest.raises(UserError, match=r"code is not sent: .*--task FILE\.py:Class"):
            adopted(theirs, own=own)
    assert adopted(theirs, {"task": "/mine/task.py:Task"}).task == "/mine/task.py:Task"
    assert adopted(theirs, own=resolve(load_config([], overrides={"task": "/mine/t.py"}))).task == "/mine/t.py"
    with pytest.raises(UserError, match="the server at mini1:7 trains without one"):
        adopted(served(), {"task": "/mine/task.py:Task"})


def test_a_strategy_of_another_package_comes_from_the_owner() -> None:
    theirs = served(strategy__name="edp") | {"strategy": {"name": "theirs", "options": {"path": "/etc"}}}
    for strategy in ("", "theirs"):
        with pytest.raises(UserError, match=r"not one of smolcluster's own; .*worker RANK HOSTNAME CONFIG"):
            adopted(theirs, strategy=strategy)
    own = resolve(load_config([], overrides={"strategy.name": "theirs", "strategy.options": {"path": "/etc"}}))
    assert adopted(public_dict(own), own=own).strategy.options == {"path": "/etc"}
    with pytest.raises(UserError, match="runs the strategy edp and this worker was started for syncps"):
        adopted(served(strategy__name="edp"), strategy="syncps")


# The message


@pytest.mark.parametrize(
    "damage",
    [
        *({"run": run} for run in ("../../etc", 7)),
        *({"total_steps": steps} for steps in (0, True, "9", 10**30)),
        *({"config": config} for config in ([], {"model": 1}, {"modle": {}}, {"model": {"model_dmi": 1}})),
    ],
)
def test_a_plan_that_cannot_be_used_is_refused(damage: dict[str, Any]) -> None:
    plan = {"run": RUN, "total_steps": 9, "config": served()}
    assert read_plan(plan).total_steps == 9
    with pytest.raises(ValueError, match=r"run|steps|configuration|same version"):
        read_plan(plan | damage)


def test_a_value_that_cannot_be_names_its_key() -> None:
    theirs = served()
    theirs["training"]["betas"] = ["x" * 10_000, 1]
    with pytest.raises(UserError, match=r"the server at mini1:7 sent training\.betas") as caught:
        adopted(theirs)
    assert len(str(caught.value)) < 500


# From the command line


def test_a_task_may_be_named_like_a_configuration() -> None:
    spec = worker_spec(1, "pi5", server="mini1:7", sources=["my_task.py:MyTask"])
    assert spec.overrides == {"task": f"{Path('my_task.py').absolute()}:MyTask"}
    assert spec.config == {}
    with pytest.raises(UserError, match="one task at a time"):
        worker_spec(1, "pi5", server="mini1:7", sources=["a.py"], task="b.py")


def test_launchers_pass_on_what_a_worker_does_not_take_from_its_server() -> None:
    overrides = {"data.name": "text", "data.root": "my data", "training.device": "cpu", "training.learning_rate": 0.5}
    config = resolve(load_config([], overrides=overrides | {"logging.loki_url": "http://me:pw@127.0.0.1:3100"}))
    assert local_overrides(config, same_machine=False) == [
        *('data.name="text"', 'data.root="my data"', 'training.device="cpu"')
    ]
    assert 'logging.loki_url="http://127.0.0.1:3100"' in local_overrides(config, same_machine=True)
    assert local_overrides(resolve(load_config(["gpt"])), same_machine=False) == []
    given = worker_spec(0, "pi5", server="a:1", overrides=local_overrides(config, same_machine=True)).overrides
    assert adopted(public_dict(config), given).data.root == "my data"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "none of its files"),
        (["data.root=/home/me"], "the files of /home/me, whose content training can reveal"),
        (["data.name=wikitext-2"], "the data wikitext-2 in its cache folder"),
    ],
)
def test_an_offer_says_which_files_it_gives(overrides: list[str], expected: str) -> None:
    spec = worker_spec(0, "pi5", server="a:1", overrides=overrides)
    offered = describe_access(OwnerOptions(override=overrides), spec.overrides)
    assert expected in offered
    assert ("none of its files" in offered) is (not overrides)
