"""Muon against a plain loop, and which parameters it takes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from smolcluster.compute.muon import mark_matrices, newton_schulz, split_parameters
from smolcluster.compute.optim import load_named_state, make_optimizer, named_state, without_state
from smolcluster.config.schema import TrainingConfig
from smolcluster.errors import UserError
from smolcluster.models import GPT, GPTConfig
from smolcluster.parallel.placement import Shape

CONFIG = TrainingConfig(optimizer="muon", learning_rate=0.02, weight_decay=0.1)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(11, 6),
        nn.Linear(6, 8),
        nn.Linear(8, 8),
        nn.Unflatten(-1, (2, 2, 2)),
        nn.Conv2d(2, 3, 2),
        nn.Flatten(),
        nn.Linear(3, 5),
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for step in range(steps):
        tokens = torch.arange(11).roll(step)
        nn.functional.cross_entropy(model(tokens), tokens % 5).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def orthogonalized(g: Tensor) -> Tensor:
    """The iteration as the paper has it, for one matrix."""
    x = g.mT if g.shape[0] > g.shape[1] else g
    x = x / x.norm()
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if g.shape[0] > g.shape[1] else x


def test_steps_equal_a_hand_written_loop() -> None:
    ours, plain = network(), network()
    train(ours, make_optimizer(ours, CONFIG))

    matrices = [plain[1].weight, plain[2].weight, plain[4].weight]  # type: ignore[union-attr]
    vectors = [p for p in plain.parameters() if p.ndim == 1]
    others = [plain[0].weight, plain[6].weight]  # type: ignore[union-attr]
    adamw = torch.optim.AdamW(
        [{"params": others, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.02,
        betas=(0.9, 0.95),
        fused=True,
    )
    momenta = [torch.zeros_like(m) for m in matrices]

    class Loop(torch.optim.Optimizer):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            adamw.step()
            with torch.no_grad():
                for matrix, momentum in zip(matrices, momenta, strict=True):
                    assert isinstance(matrix, nn.Parameter)
                    assert matrix.grad is not None
                    momentum.mul_(0.95).add_(matrix.grad)
                    update = orthogonalized((matrix.grad + 0.95 * momentum).flatten(1)).view_as(matrix)
                    rows, columns = matrix.flatten(1).shape
                    matrix.mul_(1 - 0.02 * 0.1).sub_(update, alpha=0.02 * 0.2 * math.sqrt(max(rows, columns)))

    train(plain, Loop(plain.parameters(), {}))
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6, msg=name)


def test_singular_values_end_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((3, 16, 64), (2, 64, 16), (1, 32, 32)):
        values = torch.linalg.svdvals(newton_schulz(torch.randn(shape)))
        assert 0.3 < float(values.min()) <= float(values.max()) < 1.3
    # A batch computes what each matrix alone does, and a matrix of zeros stays one.
    x = torch.randn(4, 8, 12)
    torch.testing.assert_close(newton_schulz(x)[2], newton_schulz(x[2:3])[0])
    assert not newton_schulz(torch.zeros(1, 4, 4)).any()


@pytest.mark.parametrize("tie_head", [True, False])
def test_embeddings_the_output_layer_and_vectors_are_left_to_adamw(tie_head: bool) -> None:
    model = GPT(GPTConfig(vocab_size=9, model_dim=8, num_layers=2, num_heads=2, max_seq_len=4, tie_head=tie_head))
    names = {p: name for name, p in model.named_parameters()}
    matrices, others = ({names[p] for p in part} for part in split_parameters(model))
    assert matrices == {n for n, p in model.named_parameters() if n.startswith("blocks.") and p.ndim == 2}
    assert matrices | others == set(names.values())
    shape = Shape.of(model, CONFIG)
    kept = sum(t.numel() for key, t in stepped(model).items() if not key.startswith("step/"))
    assert shape.optimizer_bytes(4 * shape.parameters) == 4 * kept


def stepped(model: nn.Module) -> dict[str, Tensor]:
    optimizer = make_optimizer(model, CONFIG)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return named_state(model, optimizer)


def test_a_part_of_a_model_takes_what_the_whole_takes() -> None:
    whole = network()
    mark_matrices(whole)
    part = nn.Sequential(*list(whole)[:3])  # type: ignore[arg-type]
    matrices, _ = split_parameters(part)
    assert [id(p) for p in matrices] == [id(part[1].weight), id(part[2].weight)]


def test_a_flag_on_the_device_leaves_a_step_out() -> None:
    """As torch's fused optimizers read it: the replica sets it where the host does not wait for the gradients."""
    model = network()
    optimizer = make_optimizer(model, CONFIG)
    train(model, optimizer, steps=2)
    before = {n: t.clone() for n, t in {**model.state_dict(), **named_state(model, optimizer)}.items()}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    optimizer.step()
    for name, tensor in {**model.state_dict(), **named_state(model, optimizer)}.items():
        assert torch.equal(tensor, before[name]), name


def test_state_by_name_is_put_back_and_another_optimizers_is_refused() -> None:
    one, two = network(), network()
    first, second = make_optimizer(one, CONFIG), make_optimizer(two, CONFIG)
    train(one, first)
    two.load_state_dict(one.state_dict())
    load_named_state(two, second, {key: tensor.clone() for key, tensor in named_state(one, first).items()})
    train(one, first)
    train(two, second)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert without_state(two, second, named_state(two, second)) == []
    assert sorted(without_state(two, second, [])) == sorted(name for name, _ in two.named_parameters())
    adamw = make_optimizer(two, CONFIG.model_copy(update={"optimizer": "adamw"}))
    with pytest.raises(UserError, match=r"has Muon's state .* and this run uses AdamW"):
        load_named_state(two, adamw, named_state(one, first))
    three = network()
    adamw = make_optimizer(three, CONFIG.model_copy(update={"optimizer": "adamw"}))
    train(three, adamw)
    with pytest.raises(UserError, match=r"has AdamW's state .* and this run uses Muon"):
        load_named_state(two, second, named_state(three, adamw))
