"""What a member may claim that its gradient weighs."""

from __future__ import annotations

from collections.abc import Sequence

from smolcluster.data.leases import Range
from smolcluster.engine.elastic.weight_claims import Claims

LEASE = [Range(0, 3), Range(10, 1)]


def test_where_samples_count_nobody_claims_more_than_its_lease() -> None:
    claims = Claims(lambda _: None)
    assert claims.rejection_reason(LEASE, 4) is None
    assert claims.rejection_reason(LEASE, 4.5) == "it claims that 4.5 targets count in 4 samples, where at most 4 can"
    assert claims.rejection_reason([Range(4, 8)], 8) is None


def test_a_claim_is_counted_again_only_if_it_is_larger_than_all_before() -> None:
    counted: list[Sequence[Range]] = []

    def count(ranges: Sequence[Range]) -> float:
        counted.append(ranges)
        return 10.0 * sum(part.count for part in ranges)

    claims = Claims(count)
    assert claims.rejection_reason(LEASE, 40) is None
    assert claims.rejection_reason([Range(20, 2)], 15) is None
    assert claims.rejection_reason([Range(30, 2)], 20) is None
    assert counted == [LEASE]
    assert claims.rejection_reason(LEASE, 2.0**50) is not None
    assert claims.rejection_reason(LEASE, 2.0**50) is not None, "a refused claim is no measure for the next"
    assert claims.rejection_reason(LEASE, 40) is None


def test_few_targets_may_be_more_when_they_are_read_at_random() -> None:
    claims = Claims(lambda _: 0.0)
    assert claims.rejection_reason(LEASE, 4.0) is None, "one for each sample"
    assert claims.rejection_reason(LEASE, 5.0) is not None


def test_no_samples_weigh_nothing() -> None:
    claims = Claims(lambda _: 10.0)
    assert claims.rejection_reason([], 0.0) is None
    assert claims.rejection_reason([], 1.0) == "it claims that 1 targets count, and no samples are leased to it"
