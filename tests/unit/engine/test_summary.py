"""The joined reports of a run's ranks."""

from __future__ import annotations

from typing import Any

from smolcluster.engine.summary import join_ranks


def report(own_steps: int, loss: float) -> dict[str, Any]:
    counts = ("samples", "tokens", "own_samples", "own_tokens", "busy_s", "bytes_sent", "bytes_received")
    more = ("staleness_sum", "staleness_max", "stale_rejected", "skipped", "peak_memory_bytes")
    made = {"role": "worker", "step": own_steps, "own_steps": own_steps, "loss": loss, "batch_samples": 1}
    return dict.fromkeys(counts + more, 0) | made


def test_a_run_that_was_stopped_before_its_first_step_has_no_loss() -> None:
    assert join_ranks([report(0, float("nan"))])["train_loss"] is None
    assert join_ranks([report(0, float("nan")), report(2, 3.0), report(2, 4.0)])["train_loss"] == 3.5
