"""`--profile`: a profile of some steps.

For the chosen steps and ranks, in `profile/` of the run directory:

    rank0.pt.trace.json     every operator and kernel on a time line; open it in ui.perfetto.dev or chrome://tracing, or with
                            TensorBoard's profiler
    rank0.txt               the operators that took longest

and one line on the screen for each of these ranks: the share of computing and the share of waiting for others.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from smolcluster.compute.timing import Span
from smolcluster.errors import UserError

TOP = 25  # operators in the table
_WAITING = ("_c10d_functional::wait", "c10d::", "gloo:", "nccl:")


def steps_of(text: str) -> range:
    """`10` is step 10; `10:13` are steps 10, 11, 12 and 13."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise UserError(f"training.profile = '{text}': write a step or the first and the last, such as 10 or 10:13")
    return range(first, last + 1)


class Profiler:
    def __init__(
        self, steps: range, folder: Path, *, rank: int, device: torch.device, notify: Callable[[str], None]
    ) -> None:
        self._steps, self._folder, self._rank, self._device, self._notify = steps, folder, rank, device, notify
        self._profile: profile | None = None
        self._spans: list[tuple[Span, Span | None]] = []
        self._began: Span | None = None

    def before(self, step: int) -> None:
        if step == self._steps.start or (step in self._steps and self._profile is None):
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()
        if self._profile is not None:
            self._began = Span(self._device)

    def after(self, step: int, comm: Span | None, *, last: bool) -> None:
        """`comm`: communication of this step. `last`: the run ends here."""
        if self._profile is None or self._began is None:
            return
        self._spans.append((self._began.end(), comm))
        if step + 1 not in self._steps or last:
            self._profile.stop()
            self._write(self._profile)
            self._profile = None

    def _write(self, profiled: profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._folder / f"rank{self._rank}.pt.trace.json"
        profiled.export_chrome_trace(str(trace))
        by = "self_cuda_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        averages = profiled.key_averages()
        table = averages.table(sort_by=by, row_limit=TOP)
        (self._folder / f"rank{self._rank}.txt").write_text(table, encoding="utf-8")
        total = sum(span.seconds() for span, _ in self._spans)
        waited = sum(comm.seconds() for _, comm in self._spans if comm is not None)
        spent = {e.key: getattr(e, "self_device_time_total" if "cuda" in by else by) for e in averages}
        # What torch's engine waits for inside forward and backward.
        waited = min(total, waited + sum(time for key, time in spent.items() if key.startswith(_WAITING)) / 1e6)
        top = sorted(spent, key=lambda key: -spent[key])[:3]
        whole = max(sum(spent.values()), 1)
        named = ", ".join(f"{key} {spent[key] / whole:.0%}" for key in top)
        count = len(self._spans)
        self._notify(
            f"profile of {count} step{'s' * (count > 1)}: {1e3 * total / count:.1f} ms a step, "
            f"{1 - waited / total:.0%} computing, {waited / total:.0%} waiting for others; most: {named}; {trace}"
        )
        self._spans.clear()
