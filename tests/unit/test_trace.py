from __future__ import annotations

from torch.profiler import ProfilerActivity, profile

from lightning_zoffload.trace import Phase, span


def test_span_names_its_phase() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler, span(Phase.HOST_UPDATE):
        pass
    assert [event.key for event in profiler.key_averages()] == ["zero_offload: host update"]
