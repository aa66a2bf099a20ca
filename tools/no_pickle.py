"""Check that no code uses pickle: find imports of it and of its relatives, and calls that pickle or unpickle internally.

python -m tools.no_pickle [FOLDER ...]      default: src
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
# torch.distributed's object collectives pickle; so do torch.save and an unrestricted torch.load, and numpy's object arrays.
CALLS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


def problems(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (f"{path}:{node.lineno}: imports {n}" for n in names if n.split(".")[0] in MODULES)
        if isinstance(node, ast.Call):
            yield from _bad_call(path, node)


def _bad_call(path: Path, node: ast.Call) -> Iterator[str]:
    called = ast.unparse(node.func)
    keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
    if called.split(".")[-1] in CALLS or called == "torch.save":
        yield f"{path}:{node.lineno}: {called} pickles"
    if called == "torch.load" and keywords.get("weights_only") != "True":
        yield f"{path}:{node.lineno}: torch.load without weights_only=True unpickles"
    if keywords.get("allow_pickle") == "True":
        yield f"{path}:{node.lineno}: {called} with allow_pickle=True"


def main() -> None:
    folders = [Path(a) for a in sys.argv[1:]] or [Path("src")]
    found = [p for folder in folders for path in sorted(folder.rglob("*.py")) for p in problems(path)]
    print("\n".join(found) if found else "no pickle")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
