"""The models: exact sizes, formulas against ones written out again here, and every way to run a forward pass."""

from __future__ import annotations

import math
import unittest.mock
from dataclasses import FrozenInstanceError, replace
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from smolcluster.compute.replica import compiled
from smolcluster.config.schema import Config
from smolcluster.models import GPT, GPTConfig, Qwen3Config, SimpleNN
from smolcluster.models.attention import attend, rotate
from smolcluster.models.gpt import Attention, FeedForward
from smolcluster.tasks.gpt import GPTTask

VOCAB, CONTEXT = 61, 24
GPT2 = GPTConfig(vocab_size=VOCAB, model_dim=48, num_layers=3, num_heads=4, max_seq_len=CONTEXT)
LLAMA = GPTConfig.llama(
    vocab_size=VOCAB, model_dim=48, num_layers=3, num_heads=6, num_kv_heads=2, ff_dim=80, max_seq_len=CONTEXT
)
QWEN2 = replace(LLAMA, qkv_bias=True, tie_head=False, rope_theta=1e6)
QWEN3 = Qwen3Config(  # heads wider than model_dim / num_heads
    vocab_size=VOCAB,
    model_dim=48,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=12,
    ff_dim=80,
    max_seq_len=CONTEXT,
)
FAMILIES = pytest.mark.parametrize("config", [GPT2, LLAMA, QWEN2, QWEN3], ids=["gpt2", "llama", "qwen2", "qwen3"])


def make(config: GPTConfig, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> GPT:
    """A model whose every parameter is away from its initial value, so that no term of a formula vanishes."""
    torch.manual_seed(seed)
    model = GPT(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def tokens(batch: int = 2, length: int = CONTEXT, *, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# ---- shapes and sizes


@pytest.mark.parametrize(
    ("size", "expected"),
    [("small", 124_439_808), ("medium", 354_823_168), ("large", 774_030_080), ("xl", 1_557_611_200)],
)
def test_gpt2_has_the_released_parameter_counts(size: str, expected: int) -> None:
    config = GPTConfig.gpt2(size)
    with torch.device("meta"):
        model = GPT(config)
    assert count(model) == expected == config.num_parameters
    assert all(parameter.is_meta for parameter in model.parameters())


LLAMA_SHAPES = {
    "SmolLM2-135M": ((49152, 576, 30, 9, 3, 1536), {}, 134_515_008),
    "TinyLlama-1.1B": ((32000, 2048, 22, 32, 4, 5632), {"tie_head": False}, 1_100_048_384),
    "Llama-2-7B": ((32000, 4096, 32, 32, 32, 11008), {"tie_head": False}, 6_738_415_616),
    "Qwen2-0.5B": ((151936, 896, 24, 14, 2, 4864), {"qkv_bias": True}, 494_032_768),
}


@pytest.mark.parametrize("name", LLAMA_SHAPES)
def test_llama_shapes_have_the_released_parameter_counts(name: str) -> None:
    shape, parts, expected = LLAMA_SHAPES[name]
    keys = ("vocab_size", "model_dim", "num_layers", "num_heads", "num_kv_heads", "ff_dim")
    config = GPTConfig.llama(**dict(zip(keys, shape, strict=True)), max_seq_len=2048, **parts)
    with torch.device("meta"):
        assert count(GPT(config)) == expected == config.num_parameters


@FAMILIES
def test_names_and_shapes_are_those_of_the_model(config: GPTConfig) -> None:
    for bias in ({}, {}) if config.qk_norm else ({"bias": True}, {"bias": False}):
        for tie_head in (True, False):
            changed = replace(config, tie_head=tie_head, **bias)
            built = [(name, tuple(tensor.shape)) for name, tensor in GPT(changed).state_dict().items()]
            assert list(changed.shapes().items()) == built


def test_automatic_values_are_filled_in() -> None:
    assert (GPT2.num_kv_heads, GPT2.ff_dim, GPT2.bias, GPT2.qkv_bias) == (4, 192, True, True)
    assert (LLAMA.bias, LLAMA.qkv_bias, QWEN2.bias, QWEN2.qkv_bias) == (False, False, False, True)
    automatic = GPTConfig.llama(vocab_size=8, model_dim=128, num_layers=1, num_heads=2, max_seq_len=8)
    assert (automatic.num_kv_heads, automatic.ff_dim) == (2, 384)
    with pytest.raises(FrozenInstanceError):
        automatic.ff_dim = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_dim": 50}, "model_dim 50 is not divisible by num_heads 4: .* such as 52"),
        ({"num_kv_heads": 3}, "num_heads 4 is not divisible by num_kv_heads 3: .* one of 1, 2, 4"),
        ({"position": "rotary", "model_dim": 12}, "model_dim 12 with num_heads 4 .* odd width 3.* multiple of 8"),
        ({"position": "alibi"}, "position 'alibi' is unknown: choose learned or rotary"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"ff_dim": -1}, "ff_dim is -1"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0"),
    ],
)
def test_an_impossible_shape_names_the_values_and_the_remedy(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(GPT2, **changes)


def test_a_qwen3_has_heads_of_any_even_width_and_no_other_choice() -> None:
    assert (QWEN3.head_dim, QWEN3.qkv_dim, replace(QWEN3, head_dim=0).head_dim) == (12, 120, 8)
    with pytest.raises(ValueError, match="head_dim is 7: it must be even"):
        replace(QWEN3, head_dim=7)
    with pytest.raises(ValueError, match="model_dim 50 is not divisible by num_heads 6"):
        replace(QWEN3, head_dim=0, model_dim=50)
    assert replace(QWEN3, model_dim=50).model_dim == 50
    with pytest.raises(TypeError, match="position"):
        Qwen3Config(vocab_size=8, model_dim=8, num_layers=1, num_heads=2, max_seq_len=8, position="learned")


def test_an_unknown_gpt2_size_lists_the_known() -> None:
    with pytest.raises(ValueError, match="'huge': choose small, medium, large, xl"):
        GPTConfig.gpt2("huge")


# ---- names and initial values

BLOCK_NAMES = {
    "gpt2": """attention_norm.weight attention_norm.bias attention.qkv.weight attention.qkv.bias attention.out.weight
        attention.out.bias mlp_norm.weight mlp_norm.bias mlp.up.weight mlp.up.bias mlp.down.weight mlp.down.bias""",
    "llama": """attention_norm.weight attention.qkv.weight attention.out.weight mlp_norm.weight
        mlp.up.weight mlp.down.weight""",
}
BLOCK_NAMES["qwen3"] = BLOCK_NAMES["llama"].replace(
    "qkv.weight", "qkv.weight attention.q_norm.weight attention.k_norm.weight"
)
BLOCK_NAMES["qwen2"] = BLOCK_NAMES["llama"].replace("qkv.weight", "qkv.weight attention.qkv.bias")
OUTER_NAMES = {
    "gpt2": "token_embedding.weight position_embedding.weight {blocks} norm.weight norm.bias",
    "llama": "token_embedding.weight {blocks} norm.weight",
    "qwen2": "token_embedding.weight {blocks} norm.weight lm_head.weight",
    "qwen3": "token_embedding.weight {blocks} norm.weight",
}


@pytest.mark.parametrize(("family", "config"), [("gpt2", GPT2), ("llama", LLAMA), ("qwen2", QWEN2), ("qwen3", QWEN3)])
def test_state_dict_names_are_stable(family: str, config: GPTConfig) -> None:
    blocks = " ".join(f"blocks.{i}.{name}" for i in range(3) for name in BLOCK_NAMES[family].split())
    assert list(GPT(config).state_dict()) == OUTER_NAMES[family].format(blocks=blocks).split()


def test_a_tied_head_is_the_embedding() -> None:
    tied, apart = GPT(LLAMA), GPT(replace(LLAMA, tie_head=False))
    assert count(apart) - count(tied) == VOCAB * LLAMA.model_dim
    x = torch.randn(1, 2, LLAMA.model_dim)
    torch.testing.assert_close(tied.head(x), tied.norm(x) @ tied.token_embedding.weight.T)
    torch.testing.assert_close(apart.head(x), apart.norm(x) @ apart.lm_head.weight.T)


@FAMILIES
def test_initial_values(config: GPTConfig) -> None:
    torch.manual_seed(0)
    model = GPT(replace(config, vocab_size=2000, model_dim=96, ff_dim=256))
    for name, parameter in model.named_parameters():
        if name.endswith(("out.weight", "down.weight")):
            assert parameter.std().item() == pytest.approx(0.02 / math.sqrt(6), rel=0.05), name
        elif parameter.ndim == 2:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name
        else:
            assert torch.all(parameter == (0.0 if name.endswith("bias") else 1.0)), name


@FAMILIES
def test_a_model_from_the_meta_device_needs_only_its_weights(config: GPTConfig) -> None:
    torch.manual_seed(3)
    direct = GPT(config)
    with torch.device("meta"):
        model = GPT(config)
    assert not list(model.buffers())
    model = model.to_empty(device="cpu")
    model.init_weights(generator=torch.Generator().manual_seed(3))
    assert torch.equal(model(tokens()), direct(tokens()))


# ---- the forward pass against a reference written out again, one head and one token at a time


def reference_norm(x: Tensor, module: nn.Module, config: GPTConfig) -> Tensor:
    if config.norm == "rmsnorm":
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.norm_eps) * module.weight
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + config.norm_eps) * module.weight + module.bias


def reference_turn(x: Tensor, position: int, config: GPTConfig) -> Tensor:
    """Rotary positions as complex numbers: pair (i, i + E/2) times e^(i p theta^(-2i/E))."""
    half = config.head_dim // 2
    angles = torch.tensor([position * config.rope_theta ** (-2 * i / config.head_dim) for i in range(half)])
    turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones(half, dtype=x.dtype), angles.to(x.dtype))
    return torch.cat((turned.real, turned.imag))


def reference_attention(x_TD: Tensor, module: Attention, config: GPTConfig) -> Tensor:
    width, out = config.head_dim, []
    qkv = module.qkv(x_TD).split(width, dim=-1)
    turn = reference_turn if config.position == "rotary" else lambda x, position, config: x
    for h in range(config.num_heads):
        kv = h // (config.num_heads // config.num_kv_heads)
        q, k, v = qkv[h], qkv[config.num_heads + kv], qkv[config.num_heads + config.num_kv_heads + kv]
        if config.qk_norm:
            q, k = reference_norm(q, module.q_norm, config), reference_norm(k, module.k_norm, config)
        rows = []
        for t in range(len(x_TD)):
            scores = [turn(q[t], t, config) @ turn(k[s], s, config) / math.sqrt(width) for s in range(t + 1)]
            rows.append(torch.stack(scores).softmax(0) @ v[: t + 1])
        out.append(torch.stack(rows))
    return module.out(torch.cat(out, dim=-1))


def reference_mlp(x: Tensor, module: FeedForward, config: GPTConfig) -> Tensor:
    h = module.up(x)
    if config.activation == "swiglu":
        gate, up = h[..., : config.ff_dim], h[..., config.ff_dim :]
        return module.down(gate / (1 + torch.exp(-gate)) * up)
    return module.down(0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))))


@FAMILIES
@torch.no_grad()
def test_logits_equal_the_reference(config: GPTConfig) -> None:
    model, sequence = make(config), tokens(1, 9)
    x = model.token_embedding.weight[sequence[0]]
    if config.position == "learned":
        x = x + model.position_embedding.weight[:9]
    for block in model.blocks:
        x = x + reference_attention(reference_norm(x, block.attention_norm, config), block.attention, config)
        x = x + reference_mlp(reference_norm(x, block.mlp_norm, config), block.mlp, config)
    head = model.token_embedding if config.tie_head else model.lm_head
    expected = reference_norm(x, model.norm, config) @ head.weight.T
    # Angles are made in fp32, so a rotary model in fp64 agrees to fp32's precision only.
    tolerance = 1e-12 if config.position == "learned" else 1e-6
    torch.testing.assert_close(model(sequence)[0], expected, rtol=tolerance, atol=tolerance)


def test_grouped_heads_equal_repeated_ones() -> None:
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    repeated = [x[:, [0, 0, 0, 1, 1, 1]] for x in (k, v)]
    expected = attend(q, *repeated, mask_TS=None, dropout=0.0)
    torch.testing.assert_close(attend(q, k, v, mask_TS=None, dropout=0.0), expected)


def test_rotary_scores_depend_on_distance_only() -> None:
    model = GPT(LLAMA)
    q, k = torch.randn(1, 1, 1, LLAMA.head_dim), torch.randn(1, 1, 1, LLAMA.head_dim)

    def score(q_position: int, k_position: int) -> Tensor:
        turned = [rotate(x, model.rope(p, 1, device=q.device)) for x, p in ((q, q_position), (k, k_position))]
        assert turned[0].norm().item() == pytest.approx(q.norm().item(), rel=1e-5)
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(9, 4), score(15, 10), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(score(3, 3), (q * k).sum(), rtol=1e-4, atol=1e-5)
    assert abs(score(9, 4) - score(9, 5)) > 1e-3


@FAMILIES
@torch.no_grad()
def test_a_later_token_never_changes_earlier_logits(config: GPTConfig) -> None:
    model, before = make(config), tokens()
    for position in (1, 11, CONTEXT - 1):
        after = before.clone()
        after[:, position] = (after[:, position] + 1) % VOCAB
        same = model(before) == model(after)
        assert same[:, :position].all()
        assert not same[:, position:].all(dim=-1).any()


# ---- the loss


@FAMILIES
def test_loss_is_the_mean_over_targets_that_count(config: GPTConfig) -> None:
    model, inputs, targets = make(config), tokens(), tokens(seed=2)
    targets[0, :7] = -100
    chosen = model(inputs).log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    expected = -chosen[targets != -100].mean()
    torch.testing.assert_close(model.loss(inputs, targets), expected, rtol=1e-10, atol=1e-12)


def test_loss_is_fp32_under_autocast_and_in_bf16() -> None:
    model = make(LLAMA, dtype=torch.float32)
    exact = model.loss(tokens(), tokens(seed=2))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(tokens()).dtype == torch.bfloat16
        mixed = model.loss(tokens(), tokens(seed=2))
    half = model.bfloat16().loss(tokens(), tokens(seed=2))
    assert mixed.dtype == half.dtype == torch.float32
    assert mixed.item() == pytest.approx(exact.item(), rel=0.02)
    assert half.item() == pytest.approx(exact.item(), rel=0.02)


# ---- other ways to run the same pass


@settings(max_examples=25, deadline=None)
@given(
    config=st.sampled_from([GPT2, LLAMA, QWEN2, QWEN3]),
    batch=st.integers(1, 3),
    cuts=st.sets(st.integers(1, CONTEXT - 1)) | st.just({*range(1, CONTEXT)}),
)
@torch.no_grad()
def test_a_cache_changes_nothing_however_the_tokens_are_cut(config: GPTConfig, batch: int, cuts: set[int]) -> None:
    model, sequence = make(config), tokens(batch)
    cache = model.new_cache(batch, CONTEXT + 3)
    edges = [0, *sorted(cuts), CONTEXT]
    pieces = [model(sequence[:, a:b], cache=cache) for a, b in pairwise(edges)]
    assert cache.length == CONTEXT
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(sequence), rtol=1e-6, atol=1e-6)


def test_a_cache_refuses_what_does_not_fit() -> None:
    model = GPT(LLAMA)
    cache = model.new_cache(2, 4)
    model(tokens(2, 3), cache=cache)
    with pytest.raises(ValueError, match="holds 3 of 4 tokens, 2 more do not fit"):
        model(tokens(2, 2), cache=cache)
    with pytest.raises(ValueError, match="for 2 sequences, this batch has 1"):
        model(tokens(1, 1), cache=cache)
    assert cache.length == 3


@FAMILIES
@torch.no_grad()
def test_attention_over_a_cache_excludes_cudnn(config: GPTConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN builds a plan for every new length: with a cache that is one for each token."""
    enabled: list[bool] = []
    plain = F.scaled_dot_product_attention

    def attention(*args: Tensor, **options: object) -> Tensor:
        enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return plain(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    model = make(config, dtype=torch.float32)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    model.generate(tokens()[:, :3], 3)
    assert enabled == [False] * 3 * model.num_layers
    enabled.clear()
    model(tokens())
    assert enabled == [before] * model.num_layers  # training has one length, and cuDNN may be the fastest


@FAMILIES
def test_too_many_tokens_are_refused(config: GPTConfig) -> None:
    with pytest.raises(ValueError, match=f"{CONTEXT + 1} tokens do not fit max_seq_len {CONTEXT}"):
        GPT(config)(tokens(1, CONTEXT + 1))


def test_a_cache_takes_the_type_attention_computes_in() -> None:
    model = make(LLAMA, dtype=torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cache = model.new_cache(2, CONTEXT)
        assert cache.layers[0][0].dtype == torch.bfloat16
        torch.testing.assert_close(model(tokens(), cache=cache), model(tokens()))


@torch.no_grad()
def test_a_cache_may_be_wider_than_the_model() -> None:
    model = make(LLAMA, dtype=torch.bfloat16)
    cache = model.new_cache(2, CONTEXT, dtype=torch.float32)
    assert torch.equal(model(tokens(), cache=cache), model(tokens()))


@FAMILIES
@torch.no_grad()
def test_stages_of_blocks_give_the_whole(config: GPTConfig) -> None:
    model, sequence = make(config), tokens()
    x = model.embed(sequence)
    for stage in (model.blocks[:1], model.blocks[1:]):
        x = model.run_blocks(x, stage)
    assert torch.equal(model.head(x), model(sequence))


@FAMILIES
def test_gradient_checkpointing_recomputes_and_changes_nothing(config: GPTConfig) -> None:
    model = make(replace(config, dropout=0.2), dtype=torch.float32).train()
    runs: list[int] = []
    for block in model.blocks:
        block.attention.register_forward_hook(lambda module, *_: runs.append(module.layer))
    losses, gradients = [], []
    for model.gradient_checkpointing in (False, True):
        torch.manual_seed(5)
        model.zero_grad()
        loss = model.loss(tokens(), tokens(seed=2))
        loss.backward()
        losses.append(loss.detach())
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert runs == [0, 1, 2] + [0, 1, 2, 2, 1, 0]
    assert torch.equal(*losses)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    # Dropout was really on: another seed gives another loss.
    torch.manual_seed(6)
    assert not torch.equal(model.loss(tokens(), tokens(seed=2)), losses[0])


@FAMILIES
def test_the_loss_compiles_into_one_graph(config: GPTConfig) -> None:
    model = make(config, dtype=torch.float32)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model.loss, fullgraph=True, dynamic=False, backend=backend)
    torch.testing.assert_close(compiled(tokens(), tokens(seed=2)), model.loss(tokens(), tokens(seed=2)))
    assert len(graphs) == 1


def task_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return GPTTask(Config()).loss(model, batch)


@FAMILIES
@pytest.mark.parametrize("recompute", [False, True])
def test_blocks_compile_once_for_all(config: GPTConfig, recompute: bool) -> None:
    model, reference = (make(config, dtype=torch.float64) for _ in range(2))
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    torch._dynamo.reset()
    model.gradient_checkpointing = recompute
    with (
        unittest.mock.patch("torch.compile", partial(torch.compile, backend=backend)),
        unittest.mock.patch("smolcluster.compute.replica.MIN_LAYERS_BY_REGION", 3),
    ):
        loss = compiled(model, task_loss)
    for _ in range(2):
        for each, of in ((model, loss), (reference, task_loss)):
            each.zero_grad()
            of(each, (tokens(), tokens(seed=2))).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    attention = [graph for graph in graphs if "scaled_dot_product_attention" in graph]
    assert len(attention) == 1  # for three blocks
    (tail,) = (graph for graph in graphs if "cross_entropy" in graph)
    assert "linear" in tail  # the head, and the loss of what it gives: apart they would take a fifth more time
    # Generation is not compiled: it would compile anew for every length.
    model.generate(tokens()[:, :2], 3, temperature=0)
    assert len([graph for graph in graphs if "scaled_dot_product_attention" in graph]) == 1


# ---- sampling


@FAMILIES
@pytest.mark.parametrize("prompt", [1, CONTEXT, CONTEXT + 5])
@torch.no_grad()
def test_greedy_generation_past_the_context(config: GPTConfig, prompt: int) -> None:
    model, start = make(config), tokens(2, prompt)
    new = 2 * CONTEXT
    # Without a cache: a window that grows to the limit, then is cut to its newer half.
    expected, window = start, start[:, -CONTEXT:]
    for _ in range(new):
        if window.size(1) > CONTEXT:
            window = window[:, -(CONTEXT // 2) :]
        token = model(window)[:, -1].argmax(-1, keepdim=True)
        expected, window = torch.cat((expected, token), 1), torch.cat((window, token), 1)
    assert torch.equal(model.generate(start, new, temperature=0), expected)
    assert torch.equal(model.generate(start, new, top_k=1), expected)


def test_sampling_is_reproducible_limited_and_leaves_the_mode_alone() -> None:
    model = make(replace(GPT2, dropout=0.5)).train()
    draws = [model.generate(tokens(2, 4), 12, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert draws[0].shape == (2, 16)
    assert torch.equal(draws[0][:, :4], tokens(2, 4))
    assert model.training
    model.eval()
    best = set(model(tokens(1, 4))[0, -1].topk(3).indices.tolist())
    last = model.generate(tokens(1, 4).repeat(200, 1), 1, top_k=3, generator=torch.Generator().manual_seed(0))[:, -1]
    assert set(last.tolist()) == best
    assert model.generate(tokens(1, 4), 0).shape == (1, 4)
    assert model.generate(tokens(1, 4), 2, top_k=10 * VOCAB).shape == (1, 6)


def test_generation_refuses_what_makes_no_sense() -> None:
    model = GPT(GPT2)
    with pytest.raises(ValueError, match="at least one token"):
        model.generate(tokens(1, 0), 1)
    for wrong in ({"temperature": -1.0}, {"top_k": 0}):
        with pytest.raises(ValueError, match="temperature must be at least 0, top_k at least 1"):
            model.generate(tokens(1, 2), 1, **wrong)


# ---- the classifier


def test_simple_nn_is_784_128_10() -> None:
    torch.manual_seed(0)
    model = SimpleNN()
    assert count(model) == 101_770
    assert list(model.state_dict()) == ["hidden.weight", "hidden.bias", "out.weight", "out.bias"]
    images = torch.rand(3, 1, 28, 28)
    logits = model(images)
    assert logits.shape == (3, 10)
    assert torch.equal(logits, model(images[:, 0]))
    assert torch.equal(logits, model(images.view(3, 784)))
    hidden = (images.view(3, 784) @ model.hidden.weight.T + model.hidden.bias).clamp(min=0)
    torch.testing.assert_close(logits, hidden @ model.out.weight.T + model.out.bias)
    labels = torch.tensor([1, 2, 3])
    torch.testing.assert_close(model.loss(images, labels), F.nll_loss(logits.log_softmax(-1), labels))


def test_simple_nn_names_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"shape \(3, 3\) holds 9 numbers, the model takes 784"):
        SimpleNN()(torch.rand(2, 3, 3))
    with pytest.raises(ValueError, match="hidden is 0"):
        SimpleNN(hidden=0)
