"""`python -m benchmarks`: the list; `python -m benchmarks NAME`: one of them."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import BENCHMARKS
from benchmarks.harness import Session
from smolcluster.errors import SmolclusterError, unknown_name

RESULTS = Path(__file__).parent / "results"


def listing() -> str:
    width = max(map(len, BENCHMARKS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in BENCHMARKS.items()]
    return "\n".join(
        [
            "usage: python -m benchmarks NAME [--repeats 5] [--quick] [--out FOLDER]",
            "",
            *lines,
            "",
            "Each has --help. Example: python -m benchmarks p7 --quick",
        ]
    )


def parse(name: str, arguments: Sequence[str]) -> tuple[argparse.Namespace, Session]:
    module = importlib.import_module(f"benchmarks.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=module.__doc__,
        epilog=f"Example: {module.EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repeats", type=int, help="repeats, of which the median counts (default: 5; quick: 2)")
    parser.add_argument("--quick", action="store_true", help="as little as shows that it works; nothing is kept")
    parser.add_argument("--out", type=Path, help="folder for the JSON (default: benchmarks/results; quick: none)")
    module.add_arguments(parser)
    parsed = parser.parse_args(arguments)
    repeats = parsed.repeats if parsed.repeats is not None else 2 if parsed.quick else 5
    if repeats < 1:
        parser.error(f"--repeats {repeats}: at least 1 is needed")
    parsed.main = module.run
    return parsed, Session(name, repeats=repeats, quick=parsed.quick)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark. Exit status: 0 measured, 1 it failed, 2 it cannot run here or the input is wrong."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(listing())
        return 0
    name, *rest = arguments
    try:
        if name not in BENCHMARKS:
            raise unknown_name("benchmark", name, BENCHMARKS)
        parsed, session = parse(name, rest)
        parsed.main(session, parsed)
    except SmolclusterError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    folder = parsed.out or (None if parsed.quick else RESULTS)
    if folder is None:
        print("a quick run: these figures are not kept")
    else:
        print(f"raw samples: {session.write(folder).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
