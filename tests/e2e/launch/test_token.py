"""`smolcluster token`: a token's life, from the first machine to its revocation."""

from __future__ import annotations

import io
import os
import re
import stat
import sys
from pathlib import Path

import pytest
from tests.e2e.command import Ended, Smol, run_here

from smolcluster.comm.elastic.transport.security import MAX_TOKENS, Credentials, new_token

TOKEN = re.compile(r"smol1_[A-Za-z0-9_-]{48}")
DOCS = Path(__file__).parents[3] / "docs" / "security.md"


class Machine:
    """One user's account: its own configuration folder. The command runs in this process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder, self._monkeypatch, self._capsys = folder, monkeypatch, capsys
        self._folder.mkdir()

    @property
    def file(self) -> Path:
        return self._folder / "smolcluster" / "token"

    def token(self, *arguments: str, given: str = "", **env: str) -> Ended:
        with self._monkeypatch.context() as patch:
            patch.chdir(self._folder)
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
            for name, value in (account(self._folder) | env).items():
                patch.setenv(name, value)
            return run_here(self._capsys, "token", *arguments)

    def ids(self) -> list[str]:
        return re.findall(r"^([0-9a-f]{16})  ", self.token("list").ok().out, flags=re.MULTILINE)


def account(folder: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(folder), "APPDATA": str(folder), "SMOLCLUSTER_TOKEN_FILE": ""}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Machine:
    monkeypatch.delenv("SMOLCLUSTER_TOKEN", raising=False)
    return Machine(tmp_path / "one", monkeypatch, capsys)


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Machine:
    return Machine(tmp_path / "two", monkeypatch, capsys)


def test_no_command_imports_torch(smol: Smol, guard: dict[str, str], tmp_path: Path) -> None:
    for command in ("new", "show", "list", "rotate"):
        smol.run("token", command, cwd=tmp_path, env=guard | account(tmp_path)).ok()


def test_a_token_from_the_first_machine_to_its_end(here: Machine, other: Machine) -> None:
    # Made once, kept for this user alone, and told how to hand it on.
    made = here.token("new").ok()
    (secret,) = TOKEN.findall(made.out)
    assert "smolcluster token show --secret | ssh HOST smolcluster token add" in made.out
    assert str(here.file) in made.out
    if os.name == "posix":
        assert stat.S_IMODE(here.file.stat().st_mode) == 0o600
        assert stat.S_IMODE(here.file.parent.stat().st_mode) == 0o700
    again = here.token("new")
    assert (again.status, again.out) == (2, "")
    assert "smolcluster token rotate" in again.err

    # Shown without the secret, unless that is asked for; then with nothing else.
    shown = here.token("show").ok()
    assert re.search(r"^fingerprint  [0-9a-f]{64}$", shown.out, flags=re.MULTILINE)
    assert f"source       {here.file}" in shown.out
    assert not TOKEN.search(shown.out)
    assert here.token("show", "--secret").ok().out == f"{secret}\n"

    # On the second machine: the same id and certificate.
    assert secret not in other.token("add", given=f"{secret}\n").ok().out
    assert other.token("show").ok().out.splitlines()[:2] == shown.out.splitlines()[:2]

    # Replaced: new first, old still there; on the other machine too.
    rotated = here.token("rotate").ok()
    assert not TOKEN.search(rotated.out)
    new, old = here.ids()
    assert f"smolcluster token revoke {old}" in rotated.out
    other.token("add", given=here.token("show", "--secret").ok().out).ok()
    assert other.ids() == [new, old]
    assert f"accepted too {old}" in other.token("show").ok().out

    # Revoked, by the beginning of its id; the last one stays.
    for place in (here, other):
        place.token("revoke", old[:10].upper()).ok()
        assert place.ids() == [new]
    last = here.token("revoke", new)
    assert last.status == 2
    assert "the only token" in last.err
    assert here.ids() == [new]


def test_a_token_that_is_only_shown_works_from_the_environment(here: Machine) -> None:
    out = here.token("new", "--show-only").ok().out
    assert TOKEN.fullmatch(out.strip())
    assert not here.file.exists()
    shown = here.token("show", SMOLCLUSTER_TOKEN=out).ok()
    assert "source       SMOLCLUSTER_TOKEN" in shown.out
    note = "SMOLCLUSTER_TOKEN is set here and is used instead"
    assert note in here.token("new", SMOLCLUSTER_TOKEN=out).ok().out
    assert here.file.exists()


def test_revoking_the_current_one_says_so(here: Machine) -> None:
    here.token("new").ok()
    here.token("rotate").ok()
    new, old = here.ids()
    ended = here.token("revoke", new).ok()
    assert f"current is {old}" in ended.out
    assert "It was the current one" in ended.out


def test_mistakes_leave_with_2_and_change_nothing(here: Machine) -> None:
    def refused(*arguments: str, given: str = "", **env: str) -> str:
        ended = here.token(*arguments, given=given, **env)
        assert (ended.status, ended.out) == (2, "")
        assert "Traceback" not in ended.err
        return ended.err

    assert "smolcluster token new" in refused("show")
    assert "smolcluster token new" in refused("list")
    assert "smolcluster token new" in refused("rotate")
    assert "known: none" in refused("revoke", "ab")
    assert "SMOLCLUSTER_TOKEN: this is not a cluster token" in refused("show", SMOLCLUSTER_TOKEN="hunter2")
    assert "no token found" in refused("add")
    assert "line 1: this is not a cluster token" in refused("add", given="hunter2\n")
    assert not here.file.exists()

    secret = here.token("new").ok().out.split()[1]
    typo = secret[:20] + ("A" if secret[20] != "A" else "B") + secret[21:]
    message = refused("add", given=typo)
    assert "typing mistake" in message
    assert typo[6:30] not in message
    here.token("rotate").ok()
    before = here.file.read_bytes()
    assert "fits several" in refused("revoke", "")
    assert "is the id of no token" in refused("revoke", "xyz")
    if os.name == "posix":
        here.file.chmod(0o644)
        for command in (("show",), ("rotate",), ("new",), ("revoke", "ab")):
            assert f"chmod 600 {here.file}" in refused(*command)
    assert here.file.read_bytes() == before


def test_a_token_is_kept_once_and_there_is_a_limit(here: Machine) -> None:
    tokens = [new_token() for _ in range(MAX_TOKENS + 1)]
    assert f"at most {MAX_TOKENS}" in here.token("add", given="\n".join(tokens)).err
    assert not here.file.exists()
    del tokens[-1]
    here.token("add", given="\n".join(tokens * 2)).ok()
    assert here.ids() == [Credentials(token).name for token in tokens]
    full = here.token("rotate")
    assert full.status == 2
    assert "smolcluster token revoke ID" in full.err


def test_the_page_names_commands_that_exist() -> None:
    named = set(re.findall(r"smolcluster token ([a-z]+)", DOCS.read_text(encoding="utf-8")))
    assert named == {"new", "add", "show", "list", "rotate", "revoke"}
