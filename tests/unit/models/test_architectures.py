"""Architectures are found by name and used by protocol: by configurations, imports, exports and serving."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from smolcluster.config import Config, dump, load_config, resolve
from smolcluster.config.shape import section_of, shape_of
from smolcluster.engine.checkpoint.export_hf import export_run, write_folder
from smolcluster.engine.checkpoint.import_hf import import_model
from smolcluster.errors import UserError
from smolcluster.models import GPT, GPTConfig, Qwen3Config, SimpleNN, protocols
from smolcluster.models.architecture import Architecture
from smolcluster.models.hugging_face import export_config, export_weights
from smolcluster.models.protocols import CachedPiece, DecoderConfig
from smolcluster.models.registry import ARCHITECTURES, architecture_of, build, from_plain, to_plain
from smolcluster.parallel.stages import layers_of
from smolcluster.serve.engine.sources import find_source
from smolcluster.serve.engine.stage_model import Row, StageModel

SHARED = {"vocab_size": 61, "model_dim": 48, "num_layers": 3, "num_heads": 6, "num_kv_heads": 2, "max_seq_len": 24}
SHAPES: dict[str, DecoderConfig] = {
    "gpt": GPTConfig(**SHARED, tie_head=False),
    "qwen3": Qwen3Config(**SHARED, head_dim=12, rope_theta=1e6),
}
EVERY_SHAPE = pytest.mark.parametrize("shape", [SHAPES[name] for name in ARCHITECTURES], ids=ARCHITECTURES.keys())
OFFERS = ("Pipelined", "TensorSharded", "SequenceSharded", "Recomputable", "CompiledByBlock", "Generative", "Ragged")
CPU = torch.device("cpu")


def make(shape: DecoderConfig) -> nn.Module:
    """Every parameter away from its initial value."""
    torch.manual_seed(0)
    model = build(shape).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def served(weights: dict[str, Tensor], shape: DecoderConfig, tokens: Tensor, *, cut: int) -> Tensor:
    """The logits behind each token, from two stages that are given one token after the other."""
    parts = [
        StageModel(shape, layers, first=first, last=not first, weights=weights, device=CPU, dtype=torch.float32)
        for layers, first in ((range(cut), True), (range(cut, shape.num_layers), False))
    ]
    found = []
    for start in range(len(tokens)):
        x = tokens[start : start + 1]
        for part in parts:
            x = part.run([Row(sequence=0, start=start, count=1, logits=True)], x)
        found.append(x[0])
    return torch.stack(found)


# ---- by name


@EVERY_SHAPE
def test_a_shape_is_written_and_read(shape: DecoderConfig, tmp_path: Path) -> None:
    assert from_plain(architecture_of(shape).name, to_plain(shape)) == shape
    path = tmp_path / "config.yaml"
    path.write_text(dump(Config(model=section_of(shape))), encoding="utf-8")
    read = load_config([path])
    assert shape_of(read.model, vocab_size=shape.vocab_size) == shape
    assert shape_of(resolve(read).model, vocab_size=shape.vocab_size) == shape


@EVERY_SHAPE
def test_names_and_shapes_are_those_of_the_model(shape: DecoderConfig) -> None:
    built = {name: tuple(tensor.shape) for name, tensor in build(shape).state_dict().items()}
    assert shape.shapes() == built
    assert shape.num_parameters == sum(parameter.numel() for parameter in build(shape).parameters())


def test_automatic_values_are_those_of_the_architecture() -> None:
    model = resolve(load_config([], overrides=["model.type=qwen3"])).model
    assert (model.ff_dim, model.num_kv_heads, model.bias) == (704, 4, None)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["position=rotary"], "position is rotary, which a qwen3 does not have: leave it out"),
        (["bias=true"], "bias is True, which a qwen3 does not have"),
        (["options.head_dm=8"], "a qwen3 has no options.head_dm: its own are head_dim"),
        (["options.model_dim=8"], "a qwen3 has no options.model_dim"),
        (["options.head_dim=7"], "head_dim is 7: it must be even"),
        (["options.head_dim=8", "type=gpt"], "a gpt has no options.head_dim: it has none of its own"),
    ],
)
def test_what_an_architecture_does_not_have_is_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(UserError, match="--override: model: ") as error:
        load_config([], overrides=["model.type=qwen3", *(f"model.{one}" for one in overrides)])
    assert told in str(error.value)


# ---- by protocol


@EVERY_SHAPE
def test_an_architecture_offers_everything(shape: DecoderConfig) -> None:
    model = build(shape)
    assert all(isinstance(model, getattr(protocols, name)) for name in OFFERS)
    assert isinstance(model.stage(range(1), first=True, last=False), protocols.Ragged)


def test_a_plain_module_offers_nothing() -> None:
    assert not any(isinstance(SimpleNN(), getattr(protocols, name)) for name in OFFERS)
    assert layers_of(SimpleNN()) is None


@EVERY_SHAPE
@torch.no_grad()
def test_a_folder_is_imported_served_and_exported(shape: DecoderConfig, tmp_path: Path) -> None:
    if isinstance(shape, GPTConfig) and shape.position == "learned":
        shape = replace(shape, num_kv_heads=shape.num_heads)  # as GPT-2's
    model = make(shape)
    theirs, tensors = export_config(shape), export_weights(shape, model.state_dict())
    write_folder(tmp_path / "folder", theirs, tensors)
    assert import_model(tmp_path / "folder", tmp_path / "run") == (shape, None)

    source = find_source(str(tmp_path / "run"))
    weights = source.load(range(shape.num_layers), first=True, last=True, dtype=torch.float32, device="cpu")
    tokens = torch.randint(shape.vocab_size, (9,), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(served(weights, source.config, tokens, cut=1), model(tokens[None])[0])

    exported = export_run(tmp_path / "run", tmp_path / "out")
    assert exported.architecture == theirs["architectures"][0]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert (tmp_path / "out" / "config.json").read_bytes() == (tmp_path / "folder" / "config.json").read_bytes()


# ---- a decoder that shares nothing with ours


@dataclass(frozen=True, kw_only=True)
class MeanConfig:
    vocab_size: int
    model_dim: int
    num_layers: int
    max_seq_len: int
    num_heads: int = 1
    num_kv_heads: int = 1
    tie_head: bool = False

    @property
    def head_dim(self) -> int:
        return self.model_dim

    @property
    def num_parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes().values())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        table, square = (self.vocab_size, self.model_dim), (self.model_dim, self.model_dim)
        blocks = {f"blocks.{layer}.weight": square for layer in range(self.num_layers)}
        return {"token_embedding.weight": table, **blocks, "lm_head.weight": table}

    def cuts(self, name: str) -> list[int]:
        raise NotImplementedError


class Mean(nn.Module):
    """Each layer adds a projection of the mean of all tokens so far, which is all that its cache is for."""

    def __init__(self, config: MeanConfig, layers: range | None = None) -> None:
        super().__init__()
        self.config, dim = config, config.model_dim
        self.token_embedding = nn.Embedding(config.vocab_size, dim)
        layers = range(config.num_layers) if layers is None else layers
        self.blocks = nn.ModuleDict({str(layer): nn.Linear(dim, dim, bias=False) for layer in layers})
        self.lm_head = nn.Linear(dim, config.vocab_size, bias=False)

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x: Tensor = self.token_embedding(tokens_BT)
        for block in self.blocks.values():
            x = x + block(x.cumsum(1) / torch.arange(1, x.size(1) + 1)[:, None])
        return self.lm_head(x)

    def stage(self, layers: range, *, first: bool, last: bool) -> nn.Module:
        part = Mean(self.config, layers)
        if not first:
            del part.token_embedding
        if not last:
            del part.lm_head
        return part

    def embed_pieces(self, tokens_N: Tensor, pieces: Sequence[CachedPiece]) -> Tensor:
        return self.token_embedding(tokens_N)

    def run_pieces(self, x_ND: Tensor, pieces: Sequence[CachedPiece]) -> Tensor:
        for layer, block in enumerate(self.blocks.values()):
            means = []
            for piece, new in zip(pieces, x_ND.split([piece.count for piece in pieces]), strict=True):
                seen, end = piece.cache[layer, 1, 0], piece.start + piece.count
                seen[piece.start : end] = new
                means += [seen[:at].mean(0) for at in range(piece.start + 1, end + 1)]
            x_ND = x_ND + block(torch.stack(means))
        return x_ND

    def head(self, x_ND: Tensor) -> Tensor:
        return self.lm_head(x_ND)


@torch.no_grad()
def test_a_decoder_of_its_own_is_built_cut_and_served(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Architecture(name="mean", config=MeanConfig, model=f"{__name__}:Mean", families=(), layouts=())
    monkeypatch.setitem(ARCHITECTURES, "mean", record)
    shape = MeanConfig(vocab_size=13, model_dim=8, num_layers=3, max_seq_len=16)
    model = make(shape)
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == shape.shapes()
    assert from_plain("mean", to_plain(shape)) == shape
    layers = layers_of(model)
    assert layers.count == 3
    assert not isinstance(model, protocols.TensorSharded | protocols.SequenceSharded | GPT)
    tokens = torch.randint(13, (9,), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(served(model.state_dict(), shape, tokens, cut=2), model(tokens[None])[0])
