"""GGUF files: the bits of gguf's own unpacking, the logits of transformers, and nothing but ValueError from damage."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.gguf_files import random_weights, same_bits, write_gguf
from torch import Tensor

from smolcluster.models import GPT, GPTConfig, Qwen3Config
from smolcluster.models.gguf import _HEADER_LIMIT_BYTES, GGUF, KNOWN_TYPES, _unpack
from smolcluster.models.hugging_face import export_config, export_weights
from smolcluster.models.parts import MAX_LAYERS, part_of

gguf = pytest.importorskip("gguf", reason="pip install 'smolcluster[dev]'")

VOCAB, CONTEXT = 96, 24
GPT2 = GPTConfig(vocab_size=VOCAB, model_dim=64, num_layers=3, num_heads=4, max_seq_len=CONTEXT)
LLAMA = GPTConfig.llama(
    vocab_size=VOCAB, model_dim=64, num_layers=3, num_heads=4, num_kv_heads=2, ff_dim=96, max_seq_len=CONTEXT
)
SHAPES = {
    "gpt2": GPT2,
    "gpt2-untied": replace(GPT2, tie_head=False, norm_eps=1e-3),
    "llama": LLAMA,
    "llama-untied": replace(LLAMA, tie_head=False, rope_theta=1e5, norm_eps=1e-6, num_kv_heads=4),
    "llama-biases": replace(LLAMA, bias=True, qkv_bias=True),
    "qwen2": replace(LLAMA, qkv_bias=True, rope_theta=1e6),
    "qwen2-untied": replace(LLAMA, qkv_bias=True, tie_head=False, num_kv_heads=1),
    "qwen3": Qwen3Config(
        vocab_size=VOCAB,
        model_dim=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        ff_dim=96,
        max_seq_len=CONTEXT,
    ),
}
EVERY_SHAPE = pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())


def whole(file: GGUF, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return file.load(range(file.config.num_layers), first=True, last=True, dtype=dtype)


# ---- the same weights


@EVERY_SHAPE
def test_what_was_written_is_read(config: GPTConfig, tmp_path: Path) -> None:
    weights = random_weights(config)
    file = GGUF(write_gguf(tmp_path / "model.gguf", config, weights))
    assert file.config == config
    assert same_bits(whole(file), weights)
    narrow = whole(file, torch.float16)
    assert all(torch.equal(narrow[name], tensor.half()) for name, tensor in weights.items())


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_every_type_is_unpacked_as_gguf_does(kind: str, tmp_path: Path) -> None:
    config = SHAPES["qwen2"]  # rows in our order: parts can be compared as they are
    path = write_gguf(tmp_path / "model.gguf", config, random_weights(config), kind=kind)
    expected = {
        tensor.name: torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        for tensor in gguf.GGUFReader(path).tensors
    }
    found = whole(GGUF(path))
    assert torch.equal(found["token_embedding.weight"], expected["token_embd.weight"])
    for layer in range(config.num_layers):
        for ours, theirs in (
            ("attention.qkv", ("attn_q", "attn_k", "attn_v")),
            ("mlp.up", ("ffn_gate", "ffn_up")),
            ("attention.out", ("attn_output",)),
            ("mlp.down", ("ffn_down",)),
        ):
            joined = torch.cat([expected[f"blk.{layer}.{name}.weight"] for name in theirs])
            assert torch.equal(found[f"blocks.{layer}.{ours}.weight"], joined)


@pytest.mark.parametrize("kind", [kind for kind in KNOWN_TYPES if kind != "F32"])
def test_any_bytes_are_unpacked_as_gguf_does(kind: str) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    weights, size = gguf.GGML_QUANT_SIZES[quantization]
    packed = np.random.default_rng(0).integers(0, 256, (16, 512 // weights * size), dtype=np.uint8)
    places = {"Q4_0": (1,), "Q4_1": (1, 3), "Q8_0": (1,), "Q6_K": (209,), "F16": (1,), "BF16": (1,)}[kind]
    for place in places:  # the upper byte of each scale: no infinity, no NaN
        packed[:, place::size] &= 0x3F
    assert np.array_equal(_unpack(packed, kind), gguf.quants.dequantize(packed, quantization))


def test_large_tensors_are_unpacked_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_weights(LLAMA)
    file = GGUF(write_gguf(tmp_path / "model.gguf", LLAMA, weights))
    monkeypatch.setattr("smolcluster.models.gguf._CHUNK", 7 * LLAMA.model_dim)
    assert same_bits(whole(file), weights)


@EVERY_SHAPE
def test_parts_joined_are_the_whole(config: GPTConfig, tmp_path: Path) -> None:
    file = GGUF(write_gguf(tmp_path / "model.gguf", config, random_weights(config), kind="Q8_0"))
    joined: dict[str, Tensor] = {}
    for number in range(3):
        first, last = number == 0, number == 2
        part = file.load(range(number, number + 1), first=first, last=last)
        assert list(part) == part_of(config.shapes(), config, range(number, number + 1), first=first, last=last)
        for name, tensor in part.items():
            assert torch.equal(joined.setdefault(name, tensor), tensor)  # the embedding may be there twice
        assert ("token_embedding.weight" in part) == (first or (last and config.tie_head))
        assert ("lm_head.weight" in part) == (last and not config.tie_head)
    assert same_bits(joined, whole(file))
    assert file.load(range(1, 1), first=False, last=False) == {}
    with pytest.raises(ValueError, match="are not layers of a model that has 3"):
        file.load(range(2, 4), first=False, last=True)


# ---- the same logits


@EVERY_SHAPE
def test_logits_are_those_of_transformers(config: GPTConfig, tmp_path: Path) -> None:
    """In fp32 on both sides: only the order of sums differs."""
    transformers = pytest.importorskip("transformers", reason="pip install 'smolcluster[dev]'")
    file = GGUF(write_gguf(tmp_path / "model.gguf", config, random_weights(config), kind="F16"))
    weights = whole(file)
    model = GPT(config).eval()
    model.load_state_dict(weights)
    theirs = {**export_config(config), "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    settings_of = transformers.AutoConfig.for_model(**theirs)
    other = transformers.AutoModelForCausalLM.from_config(settings_of, dtype=torch.float32).eval()
    exported = {name: tensor.contiguous() for name, tensor in export_weights(config, weights).items()}
    missing = other.load_state_dict(exported, strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    other.tie_weights()
    tokens_BT = torch.randint(VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens_BT), other(tokens_BT).logits, atol=2e-4, rtol=1e-4)


# ---- what cannot be served


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"block_count": None}, "llama.block_count is missing"),
        ({"block_count": 2}, "block_count is 2, but the tensors have 3"),
        ({"block_count": 2**31 - 1}, "block_count is 2147483647, but the tensors have 3"),
        ({"embedding_length": 2**30}, "embedding_length is 1073741824, but the tensors have 64"),
        ({"vocab_size": 97}, "vocab_size is 97, but the tensors have 96"),
        ({"attention.head_count": 0}, "llama.attention.head_count is 0"),
        ({"attention.head_count": "four"}, "llama.attention.head_count is 'four'"),
        ({"attention.head_count_kv": 3}, "num_kv_heads 3"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon is nan"),
        ({"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ({"rope.scaling.type": "linear"}, "llama.rope.scaling.type is 'linear', which is not supported: only 'none'"),
        ({"rope.scaling.factor": 4.0}, "llama.rope.scaling.factor is 4.0"),
        ({"rope.dimension_count": 8}, "llama.rope.dimension_count is 8, which is not supported: only 16"),
        ({"attention.key_length": 32}, "llama.attention.key_length is 32"),
        ({"attention.sliding_window": 4096}, "llama.attention.sliding_window is 4096"),
        ({"expert_count": 8}, "llama.expert_count is 8"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(tmp_path: Path, values: dict[str, Any], told: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", LLAMA, random_weights(LLAMA), values=values)
    with pytest.raises(ValueError) as error:
        GGUF(path)
    assert told in str(error.value)
    assert str(path) in str(error.value)


def _add(name: str, *shape: int) -> Callable[[Any], None]:
    return lambda writer: writer.add_tensor(name, np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_add("rope_freqs.weight", 8), "rope_freqs.weight changes the rotary positions"),
        (_add("blk.0.attn_q_norm.weight", 16), "1 unexpected: blk.0.attn_q_norm.weight (16,)"),
        (_add("blk.1.attn_q.bias", 64), "1 unexpected: blk.1.attn_q.bias"),
        (_add("output.weight", 95, 64), "output.weight is (95, 64), not (96, 64)"),
        (lambda writer: writer.add_uint16("split.count", 2), "one of several files"),
    ],
)
def test_tensors_of_another_model_are_refused_by_name(tmp_path: Path, change: Callable[[Any], None], told: str) -> None:
    with pytest.raises(ValueError) as error:
        GGUF(write_gguf(tmp_path / "model.gguf", LLAMA, random_weights(LLAMA), change=change))
    assert told in str(error.value)


def test_qwen2_has_its_biases(tmp_path: Path) -> None:
    config = SHAPES["qwen2"]
    path = write_gguf(tmp_path / "model.gguf", config, random_weights(config))
    path.write_bytes(path.read_bytes().replace(b"blk.0.attn_q.bias", b"blk.0.attn_x.bias"))
    with pytest.raises(
        ValueError, match=r"1 missing: blk\.0\.attn_q\.bias \(64,\); 1 unexpected: blk\.0\.attn_x\.bias"
    ):
        GGUF(path)


def test_a_type_that_is_not_read_is_named_with_a_remedy(tmp_path: Path) -> None:
    config = replace(LLAMA, model_dim=256, tie_head=False)
    weights = random_weights(config)
    path = write_gguf(tmp_path / "model.gguf", config, weights, kind="Q4_0")
    raw = bytearray(path.read_bytes())
    # A block of 256 in Q4_K takes 144 bytes, as much as 8 blocks of 32 in Q4_0: only the number of the type differs.
    at = raw.index(b"output.weight") + len(b"output.weight") + 4 + 16
    assert struct.unpack_from("<I", raw, at) == (2,)
    struct.pack_into("<I", raw, at, 12)
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"output\.weight has the type Q4_K, which is not read here: only F32, .*Q8_0"):
        GGUF(path)
    struct.pack_into("<I", raw, at, 999)
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"output\.weight has the type 999"):
        GGUF(path)


def test_an_architecture_that_is_not_known_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="the architecture is 'mamba'; known: llama, qwen2, gpt2"):
        GGUF(tmp_path / "model.gguf")


def test_scales_that_are_no_numbers_are_found_where_they_are_loaded(tmp_path: Path) -> None:
    weights = random_weights(LLAMA)
    weights["blocks.1.mlp.down.weight"][5, 7] = torch.inf
    with np.errstate(all="ignore"):
        file = GGUF(write_gguf(tmp_path / "model.gguf", LLAMA, weights, kind="Q8_0"))
    file.load(range(1), first=True, last=False)
    with pytest.raises(ValueError, match=r"model\.gguf: blk\.1\.ffn_down\.weight contains NaN"):
        file.load(range(1, 2), first=False, last=False)


# ---- damage


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(ValueError, match=r"model\.gguf: cannot be read: No such file"):
        GGUF(path)
    with pytest.raises(ValueError, match="not a regular file"):
        GGUF(tmp_path)
    for contents, told in (
        (b"", "it is empty"),
        (b"GG", "begins with b'GG'"),
        (b"PK\3\4" + bytes(100), "not a GGUF file: it begins with b'PK"),
        (b"GGUF", "cut off or damaged in its header: the version"),
        (b"GGUF\0\0\0\3" + bytes(100), "GGUF version 50331648 is not read here: only 2 and 3, little-endian"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(100), "GGUF version 1 is not read"),
    ):
        path.write_bytes(contents)
        with pytest.raises(ValueError) as error:
            GGUF(path)
        assert told in str(error.value)


def header(*, tensors: int = 0, values: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, values) + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes, shape: tuple[int, ...], *, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


HUGE = 2**64 - 1


@pytest.mark.parametrize(
    ("contents", "told"),
    [
        (header(tensors=HUGE), f"{HUGE} tensors and 0 values do not fit"),
        (header(values=HUGE), f"0 tensors and {HUGE} values do not fit"),
        (header(values=1, rest=struct.pack("<Q", HUGE) + bytes(64)), "the name of a value takes"),
        (header(values=1, rest=text(b"k") + struct.pack("<IQ", 8, 2**40) + bytes(64)), "k takes 1099511627776 bytes"),
        (header(values=1, rest=text(b"k") + struct.pack("<IIQ", 9, 8, HUGE) + bytes(64)), "k says that it has"),
        (header(values=1, rest=text(b"k") + struct.pack("<IIQ", 9, 4, HUGE) + bytes(64)), "k takes 7378697629483820"),
        (header(values=1, rest=text(b"k") + struct.pack("<IIQ", 9, 9, 1) + bytes(64)), "k is a list of the type 9"),
        (header(values=1, rest=text(b"k") + struct.pack("<I", 77) + bytes(64)), "k has the type 77"),
        (header(values=1, rest=text(b"\xff\xfe") + bytes(64)), "is not UTF-8"),
        (header(values=2, rest=2 * (text(b"k") + struct.pack("<II", 4, 1)) + bytes(64)), "k is there twice"),
        (header(tensors=1, rest=tensor(b"t", (HUGE, HUGE))), "t has the shape"),
        (header(tensors=1, rest=tensor(b"t", (0, 4))), "t has the shape (4, 0)"),
        (header(tensors=1, rest=text(b"t") + struct.pack("<I", 2**32 - 1) + bytes(64)), "t has 4294967295 dimensions"),
        (header(tensors=1, rest=tensor(b"t", (2**30, 2**30))), "t is cut off"),
        (header(tensors=1, rest=tensor(b"t", (4,), offset=HUGE - 31)), "t is cut off"),
        (header(tensors=1, rest=tensor(b"t", (4,), offset=3) + bytes(64)), "not aligned"),
        (header(tensors=2, rest=tensor(b"t", (4,)) + tensor(b"u", (4,)) + bytes(99)), "u lies at 0, over another"),
        (
            header(tensors=2, rest=tensor(b"t", (4,)) + tensor(b"t", (4,), offset=32) + bytes(99)),
            "t is there twice",
        ),
        (
            header(values=1, rest=text(b"general.alignment") + struct.pack("<II", 4, 0) + bytes(64)),
            "general.alignment is 0",
        ),
    ],
)
def test_hostile_headers(tmp_path: Path, contents: bytes, told: str) -> None:
    (tmp_path / "model.gguf").write_bytes(contents)
    with pytest.raises(ValueError) as error:
        GGUF(tmp_path / "model.gguf")
    assert told in str(error.value)


def test_more_layers_than_any_model_has_are_not_laid_out(tmp_path: Path) -> None:
    """A small file can name as many blocks as it says to have: what they would be made of is not looked for."""
    count = MAX_LAYERS + 1

    def deep(writer: Any) -> None:
        for block in range(LLAMA.num_layers, count):
            writer.add_tensor(f"blk.{block}.x", np.zeros(1, np.float32))

    with pytest.raises(ValueError, match=f"block_count: {count} layers; at most {MAX_LAYERS} are supported"):
        GGUF(
            write_gguf(
                tmp_path / "model.gguf", LLAMA, random_weights(LLAMA), change=deep, values={"block_count": count}
            )
        )


def test_a_header_without_an_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    """A sparse file of 4 GiB, said to be one list of empty strings: their pointers alone would take as much again."""
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.write(header(values=1, rest=text(b"k") + struct.pack("<IIQ", 9, 8, 2**29 - 100)))
        file.truncate(2**32)
    with pytest.raises(ValueError, match=f"larger than {_HEADER_LIMIT_BYTES >> 20} MiB|k says that it has"):
        GGUF(path)


def test_a_file_that_was_cut_off_anywhere(tmp_path: Path) -> None:
    raw = write_gguf(tmp_path / "whole.gguf", LLAMA, random_weights(LLAMA)).read_bytes()
    path = tmp_path / "model.gguf"
    for size in {*range(0, 2500, 37), *range(2500, len(raw), 9973), len(raw) - 33}:
        path.write_bytes(raw[:size])
        with pytest.raises(ValueError, match=r"model\.gguf: "):
            GGUF(path)


@given(data=st.data())
def test_changed_bytes_end_in_a_value_error_or_in_a_model(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    folder = tmp_path_factory.getbasetemp()
    whole_file = folder / "fuzz-whole.gguf"
    if not whole_file.exists():
        write_gguf(whole_file, LLAMA, random_weights(LLAMA), kind="Q8_0")
    raw = bytearray(whole_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, 2600))] = data.draw(st.integers(0, 255))
    path = folder / "fuzz.gguf"
    path.write_bytes(raw)
    told = str(path)
    try:
        file = GGUF(path)
        file.load(range(file.config.num_layers), first=True, last=True)
    except ValueError as error:
        told = str(error)
    assert str(path) in told
