"""Commands in the README and docs/: every one parses, and those that need no other machine run.

A command that trains is run with `--dry-run`: data, model, placement and the plan of exchanges, but no step.
"""

from __future__ import annotations

import re
import shlex
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml

from smolcluster.cli import build_app, main, spread_overrides
from smolcluster.parallel.placement import Node, Shape

pytestmark = pytest.mark.usefixtures("warm")
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
COMMAND = re.compile(
    r"^(?:[\w.-]+[$#] +)?(?:[A-Z_]+=\S+ )*(?:smolcluster|torchrun -m smolcluster) ([a-z][^|\n]*)", re.MULTILINE
)
# They wait for other machines or for input, need a run, data or a cluster of the reader, or take long (`plan`).
OF_OTHERS = re.compile(
    r"--resume|--world-size|--rdzv-endpoint|--dashboard|--profile|data\.root=path|wandb|max_seq_len=32768|gpt2-small|"
    r"^(?:server|worker|up|status|logs|down|join|plan|serve|stage|chat|generate|cluster|dashboard|top|doctor|export|import|"
    r"bench|token (?!new)|train\s+the)"
)


class Told(NamedTuple):
    page: str
    words: str


def told() -> list[Told]:
    found = []
    for page in PAGES:
        for _, block in BLOCK.findall(page.read_text(encoding="utf-8")):
            for words in COMMAND.findall(block.replace("\\\n", " ")):
                words = re.sub(r"\s#\s.*", "", words).strip()
                found.append(Told(str(page.relative_to(ROOT)), words))
    return [command for command in found if "launcher: no torch" not in command.words]


ON_PAGES = told()
TOLD = list({command.words: command for command in reversed(ON_PAGES)}.values())  # each on its first page

RUN = [command for command in TOLD if not OF_OTHERS.search(command.words)]


def test_links_lead_to_files() -> None:
    links = [
        (page, target) for page in PAGES for target in re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8"))
    ]
    missing = [
        (page.name, target) for page, target in links if ":" not in target and not (page.parent / target).exists()
    ]
    assert missing == []


def test_links_lead_to_headings() -> None:
    def anchors(page: Path) -> set[str]:
        text = BLOCK.sub("", page.read_text(encoding="utf-8"))
        headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    links = [
        (page, *link)
        for page in PAGES
        for link in re.findall(r"\]\(((?:[\w./-]+\.md)?)#([\w-]+)\)", page.read_text(encoding="utf-8"))
    ]
    assert len(links) > 30
    assert [
        (page.name, target, anchor)
        for page, target, anchor in links
        if anchor not in anchors(page.parent / target if target else page)
    ] == []


def test_tests_that_are_named_exist() -> None:
    """`test_x.py`, `test_x`, and in tables of faults `x_of_five_words_or_more` for `test_x_of_five_words_or_more`."""
    files = list((ROOT / "tests").rglob("*.py"))
    known = {file.name for file in files}
    known |= {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text(encoding="utf-8"))}
    quoted = [
        (page.name, name.rpartition("/")[2])
        for page in PAGES
        for name in re.findall(r"`([\w/.]+)`", BLOCK.sub("", page.read_text(encoding="utf-8")))
    ]
    named = [(page, name) for page, name in quoted if re.fullmatch(r"test_\w+(\.py)?|[a-z0-9]+(_[a-z0-9]+){4,}", name)]
    named = [(page, name) for page, name in named if not name.startswith("smolcluster_")]  # names in Prometheus
    assert len(named) > 50
    assert [(page, name) for page, name in named if not {name, f"test_{name}"} & known] == []


def test_files_that_the_architecture_names_exist() -> None:
    known = {file.name for file in (ROOT / "src").rglob("*.py")}
    page = BLOCK.sub("", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"))
    assert set(re.findall(r"`(\w+\.py)`", page)) <= known


def block_of(page: str, *, language: str, containing: str) -> str:
    blocks = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    (text,) = (text for name, text in blocks if name == language and containing in text)
    return str(text)


def test_there_is_much_to_try() -> None:
    assert len(TOLD) > 70
    assert len(RUN) > 30


@pytest.mark.parametrize("command", TOLD, ids=lambda command: command.words)
def test_a_command_of_the_docs_exists(command: Told) -> None:
    """Parse its arguments and options; run nothing."""
    parser: Any = typer.main.get_command(build_app())
    words = spread_overrides(shlex.split(command.words))
    context = parser.make_context("smolcluster", words)
    while hasattr(parser, "commands"):
        words = [*context._protected_args, *context.args]
        name, parser, words = parser.resolve_command(context, words)
        context = parser.make_context(name, words, parent=context)


@pytest.mark.usual(when=lambda command: "/strategies/" not in command.page)
@pytest.mark.parametrize("command", RUN, ids=lambda command: command.words)
def test_a_command_of_the_docs_works(
    command: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run it in a folder with the files that the pages mention."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SMOLCLUSTER_TOKEN", raising=False)
    (tmp_path / "my_task.py").write_text(
        block_of("README.md", language="python", containing="class Sine").replace("Sine", "MyTask")
        + "\n\nSine = MyTask\n"
    )
    (tmp_path / "my.yaml").write_text("training: {steps: 3}\n")
    (tmp_path / "my_book.txt").write_text("It was a dark night. " * 400)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "cluster.yaml").write_text("workers: [a, a, b, b]\n")
    words = shlex.split(command.words)
    words += {"train": ["--dry-run"], "slurm": ["--shared", str(tmp_path)]}.get(words[0], [])
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0, capsys.readouterr().err
    said = capsys.readouterr()
    assert said.out or said.err


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_comments_behind_commands_stand_in_one_column(page: Path) -> None:
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        lines = [re.match(r"(\S.*?) +# ", line) for line in block.splitlines() if language in ("", "sh")]
        found = [(line.end(1), line.end() - 2, line.string) for line in lines if line]
        column = statistics.mode([at for _, at, _ in found] or [0])
        assert [text for end, at, text in found if at != column and end < column - 1] == []


@pytest.mark.parametrize("page", ["README.md", "docs/quick-start.md", "docs/dashboard.md", "docs/cluster.md"])
def test_a_laptop_can_train_what_the_first_pages_train(page: str) -> None:
    """`gpt` takes hours on two cores: the first pages must not train it."""
    commands = [command.words.split() for command in ON_PAGES if command.page == page]
    started = [words for words in commands if words[0] in ("train", "server") and "--dry-run" not in words]
    assert started
    assert not [words for words in started if words[1:2] in (["gpt"], ["gpt2-small"], ["wikitext2"])]


def test_the_cluster_file_of_the_readme(tmp_path: Path) -> None:
    text = block_of("README.md", language="yaml", containing="hosts:")
    (tmp_path / "cluster.yaml").write_text(text)
    assert set(yaml.safe_load(text)["hosts"]) == {"mini1", "mini2", "pi5"}
    with pytest.raises(SystemExit) as ended:
        main(["config", "check", str(tmp_path / "cluster.yaml")])
    assert ended.value.code == 0


@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="not a checkout")
def test_what_uv_sync_writes_is_ignored() -> None:
    """CONTRIBUTING.md explains why there is no lock file."""
    assert subprocess.run(["git", "check-ignore", "--quiet", "uv.lock"], cwd=ROOT, check=False).returncode == 0


def test_the_strategies_that_are_shown_are_strategies() -> None:
    """They run in the order of the page; each implements all that its base requires."""
    page = (ROOT / "docs/strategies/index.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "shown"}
    for language, block in BLOCK.findall(
        page[page.index("## Which class to begin with") : page.index("## The conformance")]
    ):
        if language == "python":
            exec(block, names)
    nodes = [Node(name=name) for name in "ab"]
    for shown, base in (("FedAvg", "LocalSteps"), ("Outer", "LocalSteps"), ("Signum", "AllReduce")):
        strategy = names[shown]
        assert issubclass(strategy, names[base])
        assert not strategy.__abstractmethods__
        cost, usual = (s.plan(s.Config(), nodes, Shape(parameters=100)).cost for s in (strategy, names["AllReduce"]))
        assert cost.states_bytes >= usual.states_bytes + 400, "it keeps a set of tensors more"
