"""`smolcluster token`: the secret that the machines of a cluster share."""

from __future__ import annotations

import datetime
import importlib.util
import os
import socket
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from smolcluster.cli.screen import print_text
from smolcluster.errors import UserError

if TYPE_CHECKING:
    from smolcluster.comm.elastic.transport.security import TokenEntry, TokenFile

app = typer.Typer(
    no_args_is_help=True,
    epilog="Example: smolcluster token new",
)

SEND_TOKEN = "smolcluster token show --secret | ssh HOST smolcluster token add"


@app.command("new", epilog="Example: export SMOLCLUSTER_TOKEN=$(smolcluster token new --show-only)")
def new(
    show_only: Annotated[bool, typer.Option("--show-only", help="Print a new token and write no file.")] = False,
) -> None:
    """Make this machine's first token and write it to the token file."""
    from smolcluster.comm.elastic.transport.security import Credentials, new_token

    token = new_token()
    if show_only:
        typer.echo(token)
        return
    file = _file()
    if entries := file.entries():
        raise UserError(
            f"{file.path} already has a token, {_name(entries[0])}; `smolcluster token rotate` makes a new one and "
            "keeps the old until it is revoked"
        )
    file.add([_entry(token)])
    typer.echo(f"token    {token}")
    typer.echo(f"id       {Credentials(token).name}")
    typer.echo(f"written  {file.path}")
    typer.echo("\nEvery machine with the token may take part in your runs. Give it to the others:")
    typer.echo(f"    {SEND_TOKEN}")
    typer.echo("or run `smolcluster token add` there and paste it, or set SMOLCLUSTER_TOKEN there.")
    _print_notes()


@app.command("add", epilog="Example: smolcluster token show --secret | ssh pi5 smolcluster token add")
def add() -> None:
    """Add a token from another machine as the current one. It is read from standard input or a prompt."""
    from smolcluster.comm.elastic.transport.security import MAX_FILE_BYTES, Keyring, parse_tokens

    # Never an argument, which the process list and the shell's history would show.
    if sys.stdin.isatty():
        entries = parse_tokens(typer.prompt("token", hide_input=True), where="the given token")
    else:
        text = sys.stdin.buffer.read(MAX_FILE_BYTES).decode(errors="replace")
        entries = parse_tokens(text, where="standard input")
    if not entries:
        raise UserError("standard input: no token found; paste the output of `smolcluster token show --secret`")
    file = _file()
    both = [entry.token for entry in (*entries, *file.entries())]
    Keyring(both, source=str(file.path))  # refuses too many before anything is written
    file.add(entries)
    typer.echo(f"{', '.join(map(_name, entries))} written to {file.path}")
    _print_notes()


@app.command("show", epilog="Example: smolcluster token show")
def show(
    secret: Annotated[bool, typer.Option("--secret", help="Print the current token itself, and nothing else.")] = False,
) -> None:
    """Show which token a run started here would use: public id, certificate fingerprint, source."""
    from smolcluster.comm.elastic.transport.security import Keyring

    source, entries = _found()
    keyring = Keyring((entry.token for entry in entries), source=source)
    if secret:
        typer.echo(entries[0].token)
        return
    typer.echo(f"id           {keyring.current.name}")
    typer.echo(f"fingerprint  {keyring.current.fingerprint.hex()}")
    typer.echo(f"source       {source}")
    if others := keyring.credentials[1:]:
        typer.echo(f"accepted too {', '.join(known.name for known in others)}")


@app.command("list", epilog="Example: smolcluster token list")
def list_() -> None:
    """List the accepted tokens by public id, with their notes. The first is current."""
    source, entries = _found()
    typer.echo(f"in {source}:")
    for place, entry in enumerate(entries):
        what = "current" if place == 0 else "accepted"
        print_text(f"{_name(entry)}  {what:<8}  {entry.note}".rstrip())


@app.command("rotate", epilog="Example: smolcluster token rotate")
def rotate() -> None:
    """Make a new current token. The old ones are accepted until they are revoked."""
    from smolcluster.comm.elastic.transport.security import Keyring, new_token

    file = _file()
    old = file.entries()
    if not old:
        raise UserError(f"there is no token in {file.path} to replace; make the first with `smolcluster token new`")
    fresh = _entry(new_token())
    Keyring([fresh.token, *(entry.token for entry in old)], source=str(file.path))  # refuses too many
    file.add([fresh])
    typer.echo(f"{_name(fresh)} is current now; {', '.join(map(_name, old))} still accepted. Next steps:")
    typer.echo(f"  1. give the new token to every other machine: {SEND_TOKEN}")
    typer.echo("  2. wait for running runs to end, or restart them: a process keeps the tokens that it started with")
    typer.echo(f"  3. then, on every machine: smolcluster token revoke {_name(old[0])}")
    typer.echo("Machines that share any token can still connect: no downtime is needed.")
    _print_notes()


@app.command("revoke", epilog="Example: smolcluster token revoke 5f0c")
def revoke(
    name: Annotated[str, typer.Argument(metavar="ID", help="Public id of the token, or how it begins.")],
) -> None:
    """Stop accepting a token, from the next start on."""
    file = _file()
    entries = file.entries()
    matching = [entry for entry in entries if _name(entry).startswith(name.lower())]
    if len(matching) != 1:
        what = "fits several tokens" if matching else "is the id of no token"
        raise UserError(f"'{name}' {what} in {file.path}; known: {', '.join(map(_name, entries)) or 'none'}")
    (gone,) = matching
    if len(entries) == 1:
        raise UserError(
            f"{_name(gone)} is the only token in {file.path}: make a new one first with `smolcluster token rotate`, "
            "or delete the file to leave the cluster"
        )
    file.remove(gone.token)
    typer.echo(f"{_name(gone)} removed from {file.path}; current is {_name(file.entries()[0])}")
    if gone is entries[0]:
        typer.echo("It was the current one: machines that have only that one are refused.")
    typer.echo("Running processes keep the tokens that they started with: restart them if the token has leaked.")
    _print_notes()


def _file() -> TokenFile:
    from smolcluster.comm.elastic.transport.security import token_file

    return token_file(os.environ)


def _found() -> tuple[str, list[TokenEntry]]:
    from smolcluster.comm.elastic.transport.security import find_tokens, token_file

    found = find_tokens(None, os.environ)
    if found is None:
        raise UserError(
            f"there is no token: neither SMOLCLUSTER_TOKEN nor {token_file(os.environ).path}; "
            "make one with `smolcluster token new`, or copy one with `smolcluster token add`"
        )
    return found


def _name(entry: TokenEntry) -> str:
    from smolcluster.comm.elastic.transport.security import Credentials

    return Credentials(entry.token, where=entry.where).name


def _entry(token: str) -> TokenEntry:
    from smolcluster.comm.elastic.transport.security import TokenEntry

    return TokenEntry(token, note=f"made {datetime.date.today().isoformat()} on {socket.gethostname()}")


def _print_notes() -> None:
    if os.environ.get("SMOLCLUSTER_TOKEN", "").strip():
        typer.echo("note: SMOLCLUSTER_TOKEN is set here and is used instead of the token file")
    if importlib.util.find_spec("cryptography") is None:
        typer.echo("note: to use a token this machine needs: pip install 'smolcluster[cluster]'")
