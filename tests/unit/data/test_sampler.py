"""The sampling law: N workers together read, at every step, what one worker with the whole batch reads."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolcluster.data.sampler import Sampler, ShardedSampler
from smolcluster.errors import UserError

sizes = st.integers(1, 60)
seeds = st.integers(0, 2**63 - 1)
batches = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def stream(num_samples: int, seed: int, length: int) -> list[int]:
    """The stream written out epoch by epoch, the slow and obvious way."""
    sampler = Sampler(num_samples, seed=seed)
    epochs = -(-length // num_samples) if length else 0
    return [int(i) for e in range(epochs) for i in sampler.order(e)][:length]


def test_the_order_never_changes():
    # A change here changes every run ever resumed: it must be meant.
    epochs = [[7, 1, 6, 4, 3, 5, 0, 2], [4, 5, 3, 0, 2, 7, 1, 6], [6, 0, 7, 2, 5, 1, 4, 3]]
    assert Sampler(8, seed=42).indices(0, 24).tolist() == [n for epoch in epochs for n in epoch]
    large = Sampler(10007, seed=2**63 - 1).indices(3 * 10007 - 5, 10007)
    sha256 = hashlib.sha256(large.astype("<i8").tobytes()).hexdigest()
    assert sha256 == "27a511b9a9a1480d3603c1dce42ce157047a65b5b599ba4ae4ac5fb672868545"


@given(sizes, seeds, st.integers(0, 2**40))
def test_an_epoch_has_every_sample_once(num_samples, seed, epoch):
    indices = Sampler(num_samples, seed=seed).indices(epoch * num_samples, num_samples)
    assert indices.dtype == np.int64
    assert sorted(indices.tolist()) == list(range(num_samples))


@given(sizes, seeds, st.integers(0, 200), st.integers(0, 200))
def test_any_part_of_the_stream_can_be_read(num_samples, seed, start, count):
    assert (
        Sampler(num_samples, seed=seed).indices(start, count).tolist()
        == stream(num_samples, seed, start + count)[start:]
    )


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(Sampler(50, seed=s).order(e).tolist()) for s in range(4) for e in range(4)}
    assert len(orders) == 16


def test_indices_are_the_callers_to_change():
    sampler = Sampler(10, seed=0)
    first = sampler.indices(0, 10)
    expected = first.copy()
    first[:] = 0
    assert np.array_equal(sampler.indices(0, 10), expected)


@given(sizes, seeds, batches, st.integers(1, 6))
def test_workers_together_read_what_one_reads(num_samples, seed, counts, steps):
    single = ShardedSampler(Sampler(num_samples, seed=seed), counts=[sum(counts)], shard=0)
    workers = [ShardedSampler(Sampler(num_samples, seed=seed), counts=counts, shard=r) for r in range(len(counts))]
    for _ in range(steps):
        parts = [w.next() for w in workers]
        assert [len(p) for p in parts] == counts
        assert np.array_equal(np.concatenate(parts), single.next())
    assert {w.position for w in workers} == {single.position} == {steps * sum(counts)}


@given(sizes, seeds, batches, batches, st.integers(0, 5), st.integers(1, 5))
def test_a_run_resumes_with_any_number_of_workers(num_samples, seed, before, after, steps_before, steps_after):
    read: list[int] = []
    states: list[dict[str, int]] = []
    for shard in range(len(before)):
        worker = ShardedSampler(Sampler(num_samples, seed=seed), counts=before, shard=shard)
        for _ in range(steps_before):
            worker.next()
        states.append(worker.state_dict())
    assert all(s == states[0] for s in states)

    workers = [ShardedSampler(Sampler(num_samples, seed=seed), counts=after, shard=r) for r in range(len(after))]
    for worker in workers:
        worker.load_state_dict(states[0])
    for _ in range(steps_after):
        read += [int(i) for w in workers for i in w.next()]
    start, total = steps_before * sum(before), steps_after * sum(after)
    assert read == stream(num_samples, seed, start + total)[start:]


@given(sizes, seeds, st.integers(0, 500))
def test_the_position_may_be_any_number(num_samples, seed, position):
    worker = ShardedSampler(Sampler(num_samples, seed=seed), counts=[3], shard=0)
    worker.load_state_dict({"position": position, "seed": seed, "num_samples": num_samples})
    assert worker.next().tolist() == stream(num_samples, seed, position + 3)[position:]
    assert worker.state_dict() == {"position": position + 3, "seed": seed, "num_samples": num_samples}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"num_samples": 99}, "99 samples.*has 100"),
        ({"seed": 8}, "seed 8.*seed 7.*training.seed=8"),
        ({"position": -1}, "negative"),
    ],
)
def test_another_dataset_or_seed_is_refused(changed, says):
    worker = ShardedSampler(Sampler(100, seed=7), counts=[4], shard=0)
    with pytest.raises(UserError, match=says):
        worker.load_state_dict(worker.state_dict() | changed)
    assert worker.position == 0


def test_nonsense_is_refused():
    with pytest.raises(UserError, match="no samples"):
        Sampler(0, seed=1)
    with pytest.raises(UserError, match="seed -1"):
        Sampler(1, seed=-1)
    sampler = Sampler(10, seed=1)
    with pytest.raises(ValueError):
        sampler.indices(-1, 1)
    for counts, shard in (([], 0), ([4, 0], 0), ([4], 1)):
        with pytest.raises(ValueError):
            ShardedSampler(sampler, counts=counts, shard=shard)
