from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_zoffload.transfer import InlineTransfer


def test_inline_copies_are_complete_counted_and_named_in_the_profile() -> None:
    gradient, exchange = torch.randn(33).bfloat16(), torch.zeros(33, dtype=torch.bfloat16)
    parameter = torch.zeros(33, dtype=torch.bfloat16)
    transfer = InlineTransfer()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        staging = transfer.lend(exchange)
        assert staging is not None
        transfer.stage(gradient, staging)
        transfer.download(staging, exchange).synchronize()
        transfer.upload(exchange, parameter)
    assert torch.equal(exchange, gradient)
    assert torch.equal(parameter, exchange)
    assert (transfer.bytes_down, transfer.bytes_up) == (66, 66)
    names = {event.key for event in profiler.key_averages()}
    assert {"zero_offload: gradient down", "zero_offload: parameter up"} <= names
