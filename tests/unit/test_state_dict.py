from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zoffload.state_dict import split_state, swapped_data, to_host


def test_swapped_data_gives_a_modules_state_dict_other_values_under_its_own_names() -> None:
    module = nn.Linear(2, 2).bfloat16()
    masters = {p: torch.full(p.shape, 1.00001) for p in module.parameters()}
    own = {p: p.data_ptr() for p in module.parameters()}
    with swapped_data(masters):
        state = module.state_dict()
    assert {name: t.dtype for name, t in state.items()} == dict.fromkeys(
        ("weight", "bias"), torch.float32
    )
    assert torch.equal(state["weight"], torch.full((2, 2), 1.00001))
    assert {p: p.data_ptr() for p in module.parameters()} == own
    assert module.weight.dtype is torch.bfloat16


def test_swapped_data_restores_after_an_error() -> None:
    module = nn.Linear(2, 2)
    own = module.weight.data_ptr()
    with pytest.raises(KeyError), swapped_data({module.weight: torch.zeros(2, 2)}):
        raise KeyError
    assert module.weight.data_ptr() == own


def test_split_state_pairs_states_with_parameters_in_group_order() -> None:
    a, b, c = (nn.Parameter(torch.zeros(n)) for n in (1, 2, 3))
    optimizer = torch.optim.AdamW([{"params": [a]}, {"params": [b, c]}])
    a.grad, c.grad = torch.ones(1), torch.ones(3)
    optimizer.step()
    without_state, states = split_state(optimizer.state_dict())
    assert without_state["state"] == {}
    assert without_state["param_groups"] == optimizer.state_dict()["param_groups"]
    assert [None if s is None else s["exp_avg"].numel() for s in states] == [1, None, 3]


def test_to_host_casts_as_torch_does_for_fp32_parameters() -> None:
    state = to_host(
        {
            "step": torch.tensor(3.0, dtype=torch.float64),
            "exp_avg": torch.ones(2, dtype=torch.bfloat16),
            "count": torch.ones(2, dtype=torch.int64),
            "flag": True,
        }
    )
    assert state["step"].dtype is torch.float64
    assert state["exp_avg"].dtype is torch.float32
    assert state["count"].dtype is torch.int64
    assert state["flag"] is True
