"""Text for other programs: conservative YAML, times and sizes."""

from __future__ import annotations

import re
from typing import Any

import yaml

from smolcluster.errors import UserError

# Everything but plain words is quoted: YAML 1.1 reads `on` as true, other readers 1e3 as a number.
_WORD = re.compile(r"(--|\./)?[A-Za-z/][A-Za-z0-9_./:-]*")
_NO_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)  # indent lists below their key


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    if "\n" in value and not re.search(r"[ \t]\n|[^\n\x20-\x7e]", value):
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|")
    plain = _WORD.fullmatch(value) and value.lower() not in _NO_WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if plain else '"')


_Dumper.add_representer(str, _text)


def to_yaml(value: Any) -> str:
    """Return one document, with keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def parse_time(text: str) -> int:
    """Return the seconds of a Slurm time limit: `90` (minutes), `1:30:00`, `2-12:00:00` (days first)."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d\d))?(?::(\d\d))?", text.strip())
    seconds = 0
    if found is not None:
        days, *rest = found.groups()
        numbers = [int(number) for number in rest if number is not None]
        if days is None and len(numbers) < 3:  # minutes, or minutes and seconds
            numbers.insert(0, 0)
        hours, minutes, more = (*numbers, 0, 0)[:3]
        seconds = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + more
    if seconds < 1:
        raise UserError(
            f"--time '{text}' is not a time limit; give 30 (minutes), 1:30:00 (hours) or 2-12:00:00 (days first)"
        )
    return seconds


def slurm_time(seconds: int) -> str:
    """Format seconds as Slurm does: `1-02:00:00`."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{f'{days}-' if days else ''}{hours:02}:{minutes:02}:{seconds:02}"


def mebibytes(num_bytes: int) -> int:
    """Round up to MiB."""
    return -(-num_bytes // 2**20)
