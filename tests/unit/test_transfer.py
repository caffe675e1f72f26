from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_zoffload.transfer import InlineTransfer


def test_copies_are_complete_cast_and_named_in_the_profile() -> None:
    gradient, exchange = torch.randn(33), torch.zeros(33, dtype=torch.bfloat16)
    parameter = torch.zeros(33, dtype=torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        InlineTransfer().download(gradient, exchange)
        InlineTransfer().upload(exchange, parameter)
    assert torch.equal(exchange, gradient.bfloat16())
    assert torch.equal(parameter, exchange)
    names = {event.key for event in profiler.key_averages()}
    assert {"zero_offload: gradient down", "zero_offload: parameter up"} <= names
