"""Map one source's keys, as written, to the sections of the schema.

The first cluster files and nn_config.yaml are flat (`batch_size: 32`, `worker_update_interval: 10`); overrides are
dotted (`training.batch_size=16`). Both spellings are accepted in files and in overrides.
"""

from __future__ import annotations

from smolcluster.config.describe import show
from smolcluster.config.names import FLAT, SECTIONS, SHORTHAND
from smolcluster.config.schema import HostConfig, TrainingConfig
from smolcluster.config.tree import ConfigNode, Problem

# Mappings whose keys are host names, which may contain dots: host_ip.pi5.local=10.0.0.5
_BY_HOST = {("cluster", "host_ip"), ("cluster", "batch_size"), ("cluster", "buffer_size")}
_HOST_KEYS = set(HostConfig.model_fields)

_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def into_sections(source: ConfigNode, *, below: ConfigNode) -> tuple[ConfigNode, list[Problem]]:
    """Return the values under `section.key`. `below`: the values set so far. Unknown keys stay as they are."""
    problems: list[Problem] = []
    tree: dict[str, ConfigNode] = {}
    clipping: dict[str, ConfigNode] = {}
    for key, node in source.children():
        path = _canonical(tuple(key.split(".")), node)
        if path[0] == "gradient_clipping":
            clipping |= dict(node.children()) if len(path) == 1 else {".".join(path[1:]): node}
            if len(path) == 1 and not isinstance(node.value, dict | None):
                text = f"{node.name} = {show(node.plain())}: must be a mapping with enabled and max_norm"
                problems.append(Problem(node.place, text))
        elif len(path) == 1 and path[0] in SECTIONS and node.value is None:
            pass  # an empty section
        else:
            _insert(tree, path, node, problems)
    if clipping:
        _insert_clipping(tree, clipping, below, problems)
    return ConfigNode(tree, source.place, source.name), problems


def _canonical(path: tuple[str, ...], node: ConfigNode) -> tuple[str, ...]:
    """Return the path of a key."""
    head, *rest = path
    head = "data" if head == "dataset" else head
    if head in SECTIONS:
        if not rest and head in SHORTHAND and isinstance(node.value, str):
            rest = [SHORTHAND[head]]
        path = (head, *rest)
    elif head == "batch_size" and (rest or isinstance(node.value, dict) or str(node.value).lower() == "auto"):
        path = ("cluster", "batch_size", *rest)
    elif head in FLAT:
        path = (*FLAT[head], *rest)
    if path[:2] in _BY_HOST and len(path) > 3:
        path = (*path[:2], ".".join(path[2:]))
    if path[:2] == ("cluster", "hosts") and len(path) > 4 and path[-1] in _HOST_KEYS:
        path = (*path[:2], ".".join(path[2:-1]), path[-1])
    return path


def _insert(tree: dict[str, ConfigNode], path: tuple[str, ...], node: ConfigNode, problems: list[Problem]) -> None:
    """Insert a node into the tree. Reports a key that one source gives twice, in the same or another spelling."""
    head, *rest = path
    there = tree.get(head)
    if rest:
        if there is None:
            there = tree[head] = ConfigNode({}, node.place, head)
        if isinstance(there.value, dict):
            _insert(there.value, tuple(rest), node, problems)
            return
    elif there is None:
        tree[head] = node
        return
    elif isinstance(there.value, dict) and isinstance(node.value, dict):
        for key, child in node.children():
            _insert(there.value, (key,), child, problems)
        return
    problems.append(Problem(node.place, f"{node.name}: given twice, here and as {there.name} at {there.place}"))


def _insert_clipping(
    tree: dict[str, ConfigNode], clipping: dict[str, ConfigNode], below: ConfigNode, problems: list[Problem]
) -> None:
    """`gradient_clipping: {enabled, max_norm}` is training.grad_clip_norm; switched off it is null."""
    for key, node in clipping.items():
        if key not in ("enabled", "max_norm"):
            text = f"{node.name} = {show(node.plain())}: unknown key; gradient_clipping has enabled and max_norm"
            problems.append(Problem(node.place, text))
    path = ("training", "grad_clip_norm")
    enabled, source = clipping.get("enabled"), clipping.get("max_norm")
    if enabled is not None and enabled.value is not None:
        on = _BOOLEANS.get(str(enabled.value).lower())
        below_node = below.find(path)
        if on is None:
            text = f"{enabled.name} = {show(enabled.plain())}: must be true or false"
            problems.append(Problem(enabled.place, text))
        elif not on:
            source = ConfigNode(None, enabled.place, enabled.name)
        elif source is None and below_node is not None and below_node.value is None:
            default = TrainingConfig.model_fields["grad_clip_norm"].default
            source = ConfigNode(default, enabled.place, enabled.name)
    if source is not None:
        _insert(tree, path, source, problems)
