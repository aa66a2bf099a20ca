"""Any model as a chain of layers: its forward is traced, and cut where few tensors are live.

    trace       forward runs once on fake tensors; every module and function that it calls is recorded (torch.fx)
    cut         between two of these, where few tensors are needed later, all of them with a gradient and one row per sample
    a layer     the steps between two cuts, with parameters; steps without any belong to the layer before

A module whose own forward cannot be traced is one step of the chain: only the outermost forward must be. A condition on shapes
is evaluated once; one on values cannot be traced. Uses of a shared weight stay in one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map_only

from smolcluster.errors import UserError
from smolcluster.parallel.stages import Layers, inputs_of
from smolcluster.tasks.base import Task

MAX_CROSSING = 3  # tensors that may cross a cut


class _Tracer(fx.Tracer):
    """Record the steps of a forward, with the result of each in `node.meta["value"]`, on the meta device."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.root, self.graph, self.tensor_attrs = model, fx.Graph(), {}
        self._evaluating = False

    def record(self, inputs: Sequence[Tensor]) -> fx.Graph:
        """Return the steps from the inputs to the output."""
        self._inputs = list(inputs)
        places = [self.create_proxy("placeholder", f"input_{i}", (), {}) for i in range(len(inputs))]
        assert isinstance(self.root, nn.Module)
        with self._calls_recorded():
            output = self.root.forward(*places)
        if not isinstance(output, fx.Proxy) or not isinstance(output.node.meta["value"], Tensor):
            raise ValueError("it does not return exactly one tensor")
        self.create_node("output", "output", (output.node,), {})
        return self.graph

    @contextmanager
    def _calls_recorded(self) -> Iterator[None]:
        original, tracer = nn.Module.__call__, self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if tracer._evaluating:
                return original(module, *args, **kwargs)
            return tracer.call_module(module, lambda *a, **k: original(module, *a, **k), args, kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Trace into a module, or record it as one step where it cannot be traced."""
        path = self.path_of_module(m)
        if not self.is_leaf_module(m, path):
            before = len(self.graph.nodes)
            try:
                return forward(*args, **kwargs)
            except Exception:  # noqa: BLE001 - whatever it is, it comes up again if it matters
                for node in reversed(list(self.graph.nodes)[before:]):
                    self.graph.erase_node(node)
        return self.create_proxy("call_module", path, args, kwargs)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter):
            assert isinstance(self.root, nn.Module)
            if not any(a is buffer for buffer in self.root.buffers()):
                raise ValueError("it creates a tensor; register that as a buffer")
        return super().create_arg(a)

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any) -> fx.Node:
        node = super().create_node(kind, target, args, kwargs, *more, **named)
        if kind == "placeholder":
            node.meta["value"] = self._inputs.pop(0)
        elif kind != "output":
            self._evaluating = True
            try:
                node.meta["value"] = run_step(self.root, node, lambda n: n.meta["value"])
            except BaseException:
                self.graph.erase_node(node)
                raise
            finally:
                self._evaluating = False
        return node

    def to_bool(self, obj: fx.Proxy) -> bool:
        value = obj.node.meta["value"]
        return super().to_bool(obj) if isinstance(value, Tensor) else bool(value)


def run_step(model: Any, node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    """Return the result of a step."""
    args, kwargs = map_arg(node.args, value_of), map_arg(node.kwargs, value_of)
    match node.op:
        case "call_module":
            return model.get_submodule(node.target)(*args, **kwargs)
        case "call_function":
            assert callable(node.target)
            return node.target(*args, **kwargs)
        case "call_method":
            first, *others = args
            return getattr(first, str(node.target))(*others, **kwargs)
        case _:
            return _attribute(model, str(node.target))


def _attribute(model: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)


class Segment(nn.Module):
    """Some steps of a traced model, with their modules under their names in the whole model."""

    def __init__(
        self, model: nn.Module, pieces: dict[bool, tuple[list[fx.Node], list[fx.Node], list[fx.Node]]]
    ) -> None:
        """`pieces`: what comes in, the steps, what goes out; for training and without."""
        super().__init__()
        self._pieces = pieces
        steps = [node for _, nodes, _ in pieces.values() for node in nodes]
        for kind in ("call_module", "get_attr"):  # whole modules first: they may have the others inside
            for path in sorted({str(node.target) for node in steps if node.op == kind}, key=len):
                self._adopt(model, path)

    def _adopt(self, model: nn.Module, path: str) -> None:
        holder: nn.Module = self
        *parents, name = path.split(".")
        for parent in parents:
            if parent not in holder._modules:
                holder.add_module(parent, nn.Module())
            holder = holder.get_submodule(parent)
        found, owner = _attribute(model, path), model.get_submodule(path.rpartition(".")[0])
        if hasattr(holder, name):
            return
        if isinstance(found, nn.Module):
            holder.add_module(name, found)
        elif isinstance(found, nn.Parameter):
            holder.register_parameter(name, found)
        else:
            holder.register_buffer(name, found, persistent=name not in owner._non_persistent_buffers_set)

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        takes, steps, gives = self._pieces[self.training]
        values: dict[fx.Node, Any] = dict(zip(takes, inputs, strict=True))
        for node in steps:
            values[node] = run_step(self, node, values.__getitem__)
        outputs = tuple(values[node] for node in gives)
        return outputs if len(outputs) > 1 else outputs[0]


class TracedLayers(Layers):
    """The layers of a traced model."""

    def __init__(self, graphs: dict[bool, fx.Graph], cuts: Sequence[int]) -> None:
        """`cuts`: layer l has the steps from `cuts[l]` to `cuts[l + 1]`."""
        self._graphs, self._cuts = graphs, cuts
        self.count = len(cuts) - 1

    def stage(self, model: nn.Module, layers: range, *, first: bool, last: bool) -> nn.Module:
        start, end = self._cuts[layers.start], self._cuts[layers.stop]
        pieces = {}
        for mode, graph in self._graphs.items():
            places, steps, output = _parts(graph)
            takes = places if start == 0 else live_at(graph, start)
            gives = output.all_input_nodes if end == len(steps) else live_at(graph, end)
            pieces[mode] = (takes, steps[start:end], gives)
        return Segment(model, pieces)


def _parts(graph: fx.Graph) -> tuple[list[fx.Node], list[fx.Node], fx.Node]:
    """Split the nodes into inputs, steps and output."""
    *nodes, output = graph.nodes
    places = [node for node in nodes if node.op == "placeholder"]
    return places, nodes[len(places) :], output


def live_at(graph: fx.Graph, position: int) -> list[fx.Node]:
    """Return the values that are live at `position`."""
    places, steps, output = _parts(graph)
    later = {*steps[position:], output}
    return [node for node in [*places, *steps[:position]] if any(user in later for user in node.users)]


def find_cuts(graph: fx.Graph, model: nn.Module, num_samples: int, *, at_least: int) -> list[int]:
    """Return the start of each layer, and the end of the last: cuts with the fewest tensors that give `at_least` layers."""
    _, steps, _ = _parts(graph)
    users: dict[int, list[int]] = {}  # of each weight: the steps that use it
    for number, node in enumerate(steps):
        for tensor in _weights(model, node):
            users.setdefault(id(tensor), []).append(number)
    weighted = sorted({number for numbers in users.values() for number in numbers})
    crossing = [live_at(graph, position) for position in range(len(steps))]
    cuts = [0, len(steps)]
    for limit in range(1, MAX_CROSSING + 1):
        places: dict[int, int] = {}  # by the number of steps with weights before it: the last such position
        for position in range(1, len(steps)):
            before = sum(number < position for number in weighted)
            apart = any(numbers[0] < position <= numbers[-1] for numbers in users.values())
            travels = len(crossing[position]) <= limit and all(_travels(n, num_samples) for n in crossing[position])
            if 0 < before < len(weighted) and not apart and travels:
                places[before] = position
        cuts = [0, *places.values(), len(steps)]
        if len(cuts) > at_least:
            break
    return cuts


def _weights(model: nn.Module, node: fx.Node) -> list[Tensor]:
    if node.op == "call_module":
        return list(model.get_submodule(str(node.target)).parameters())
    return [_attribute(model, str(node.target))] if node.op == "get_attr" else []


def _travels(node: fx.Node, num_samples: int) -> bool:
    """A tensor with a gradient and one row for each sample."""
    value = node.meta["value"]
    if node.op == "get_attr" or not isinstance(value, Tensor) or not value.ndim:
        return False
    return value.requires_grad and value.is_floating_point() and len(value) == num_samples


def trace_layers(task: Task, example: Callable[[int], Any], *, at_least: int) -> TracedLayers:
    """Return the task's model as a chain of layers. `example(n)` gives a batch of n samples."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model = task.model()

    def trace(num_samples: int, *, training: bool) -> fx.Graph:
        part = tree_map_only(Tensor, lambda t: t.to("meta"), example(num_samples))
        return _Tracer(model.train(training)).record(inputs_of(task, part))

    try:
        learning, other, still = trace(2, training=True), trace(3, training=True), trace(2, training=False)
    except Exception as error:
        raise _refusal(model, str(error).splitlines()[0] if str(error) else type(error).__name__) from error
    if str(learning) != str(other):
        raise _refusal(model, "its steps depend on the number of samples")
    kinds = [[(node.op, node.target) for node in graph.nodes] for graph in (learning, still)]
    if kinds[0] != kinds[1]:
        raise _refusal(model, "its steps differ between training and evaluation")
    graphs = {True: learning, False: still}
    cuts = find_cuts(learning, model, 2, at_least=at_least)
    chain = TracedLayers(graphs, cuts)
    whole = chain.stage(model, range(chain.count), first=True, last=True)
    unused = model.state_dict().keys() - whole.state_dict().keys()
    if unused:
        raise _refusal(model, f"{min(unused)} has no part in its forward")
    return chain


def _refusal(model: nn.Module, reason: str) -> UserError:
    return UserError(
        f"{type(model).__name__} cannot be cut into stages: its forward cannot be traced ({reason}). Fix that, make it an "
        "nn.Sequential, or give it num_layers and stage(layers, first=, last=); see models/protocols.py"
    )
