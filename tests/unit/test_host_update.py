"""The two host updates on one bucket, against torch's optimizer on plain fp32 parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_pairs import OPTIMIZERS, assert_same, pair, step
from support import assert_relative
from torch import nn

from lightning_zoffload import CheckpointMismatchError
from lightning_zoffload.config import OffloadConfig
from lightning_zoffload.host_update import HostUpdate, MasterUpdate
from lightning_zoffload.native_update import NativeUpdate, choose_update

NATIVE = {
    "adamw",
    "adam_l2",
    "adamw_fused",
    "adamw_foreach",
    "adamw_tensor_lr",
    "amsgrad",
    "maximize",
    "sgd",
    "sgd_plain",
    "adagrad",
    "lion",
}


def choose(optimizer: torch.optim.Optimizer) -> HostUpdate:
    return choose_update(optimizer, torch.float32, None)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_follow_torch_in_parameters_and_state(name: str) -> None:
    plain, ours = pair(OPTIMIZERS[name])
    for seed in range(20):
        step(*plain, seed)
        step(*ours, seed)
    assert_same(plain, ours)


@pytest.mark.parametrize("name", ["adamw", "sgd", "amsgrad", "lion", "adagrad"])
def test_a_parameter_without_gradient_is_left_alone_and_its_count_stands(name: str) -> None:
    plain, ours = pair(OPTIMIZERS[name])
    for seed, skip in enumerate(["0.bias", "", "1.weight", "0.bias", "0.bias", ""]):
        step(*plain, seed, skip)
        step(*ours, seed, skip)
        assert_same(plain, ours)


@pytest.mark.parametrize(
    "name", ["adamw", "adagrad", "amsgrad", "sgd", "sgd_plain", "lion", "nadam"]
)
def test_state_dicts_go_both_ways_with_torch(name: str) -> None:
    plain, ours = pair(OPTIMIZERS[name])
    for seed in range(3):
        step(*plain, seed)
        step(*ours, seed)
    plain_state = copy.deepcopy(plain[1].state_dict())
    plain[1].load_state_dict(copy.deepcopy(ours[1].state_dict()))
    ours[1].load_state_dict(plain_state)
    for seed in range(3, 6):
        step(*plain, seed)
        step(*ours, seed)
    assert_same(plain, ours)


def test_loading_a_fresh_state_starts_afresh() -> None:
    plain, ours = pair(OPTIMIZERS["adamw"])
    fresh = copy.deepcopy(plain[1].state_dict())
    for seed in range(3):
        step(*ours, seed)
        step(*plain, seed)
    ours[1].load_state_dict(copy.deepcopy(fresh))
    plain[1].load_state_dict(copy.deepcopy(fresh))
    step(*plain, 9)
    step(*ours, 9)
    assert_same(plain, ours)


def test_the_native_update_is_nearer_to_fp64_than_torchs_own() -> None:
    plain, ours = pair(OPTIMIZERS["adamw"])
    torch.manual_seed(0)
    exact = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double()
    exact_run = [exact, OPTIMIZERS["adamw"](exact.parameters())]
    for seed in range(50):
        for module, optimizer in (plain, ours, exact_run):
            step(module, optimizer, seed)

    def error(module: nn.Module) -> float:
        pairs = zip(module.parameters(), exact.parameters(), strict=True)
        return max(float((a.detach().double() - b.detach()).abs().max()) for a, b in pairs)

    assert error(ours[0]) < error(plain[0])


def test_choice_is_native_for_what_the_kernel_knows_and_torch_for_the_rest() -> None:
    parameters = [nn.Parameter(torch.zeros(1))]
    for name, make in OPTIMIZERS.items():
        expected = NativeUpdate if name in NATIVE else MasterUpdate
        assert type(choose(make(parameters))) is expected, name


def test_a_subclass_with_its_own_formula_is_not_taken_for_adam() -> None:
    class Negated(torch.optim.AdamW):
        pass

    update = choose(Negated([nn.Parameter(torch.zeros(1))]))
    assert isinstance(update, MasterUpdate)


def test_lbfgs_is_refused_with_an_alternative() -> None:
    with pytest.raises(ValueError, match=r"LBFGS.*AdamW"):
        choose(torch.optim.LBFGS([nn.Parameter(torch.zeros(1))]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state.pop("exp_avg"), "`0.weight` has no `exp_avg`"),
        (
            lambda state: state.update(exp_avg_sq=torch.zeros(2, 2)),
            r"`exp_avg_sq` of `0.weight` has shape \(2, 2\), expected \(7, 5\)",
        ),
    ],
)
def test_state_of_another_model_is_refused_by_name(
    damage: Callable[[dict[str, Any]], Any], message: str
) -> None:
    plain, ours = pair(OPTIMIZERS["adamw"])
    step(*plain, 0)
    state = plain[1].state_dict()
    damage(state["state"][0])
    with pytest.raises(CheckpointMismatchError, match=message):
        ours[1].load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "change", "missing"),
    [
        ("adamw", {"amsgrad": True}, "max_exp_avg_sq"),
        ("sgd_plain", {"momentum": 0.9}, "momentum_buffer"),
    ],
)
def test_state_that_is_needed_too_late_is_refused_at_the_step(
    name: str, change: dict[str, Any], missing: str
) -> None:
    plain, ours = pair(OPTIMIZERS[name])
    state = plain[1].state_dict()
    state["param_groups"][0].update(change)
    ours[1].load_state_dict(state)
    with pytest.raises(ValueError, match=f"`{missing}` is needed .* `configure_optimizers`"):
        step(*ours, 0)


@pytest.mark.parametrize("name", ["maximize", "amsgrad", "sgd"])
def test_options_may_be_switched_off_in_mid_training(name: str) -> None:
    plain, ours = pair(OPTIMIZERS[name])
    for seed in range(6):
        for module, optimizer in (plain, ours):
            if seed == 3:
                off = {"maximize": False, "amsgrad": False, "momentum": 0.0, "nesterov": False}
                group = optimizer.param_groups[0]
                group.update({key: value for key, value in off.items() if key in group})
            step(module, optimizer, seed)
    for a, b in zip(plain[0].parameters(), ours[0].parameters(), strict=True):
        assert_relative(b.detach(), a.detach(), 2e-6)


@pytest.mark.parametrize("name", sorted(NATIVE - {"sgd_plain"}))
def test_bf16_moments_follow_torch_at_their_resolution(name: str) -> None:
    config = OffloadConfig(moment_dtype="bfloat16")
    plain, ours = pair(OPTIMIZERS[name], config)
    for seed in range(20):
        step(*plain, seed)
        step(*ours, seed)
    kept = [t for state in ours[1].state.values() for k, t in state.items() if k != "step"]
    assert {t.dtype for t in kept} == {torch.bfloat16}
    for a, b in zip(plain[0].parameters(), ours[0].parameters(), strict=True):
        # Twenty steps of 1e-2, each off by bf16's 2^-8; Lion's sign may turn.
        assert (a.detach() - b.detach()).abs().max() < (0.1 if name == "lion" else 0.01)
    plain[1].load_state_dict(copy.deepcopy(ours[1].state_dict()))
    for state in plain[1].state.values():
        assert all(t.dtype is torch.float32 for t in state.values())
    step(*plain, 20)
