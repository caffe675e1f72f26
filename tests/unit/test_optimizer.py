"""The user's optimizer object: hooks, closures, schedulers and errors while offloaded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from optimizer_pairs import OPTIMIZERS, assert_same, offload, pair, step
from torch import nn


def loss_closure(module: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(torch.ones(4, 5)).square().mean()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("by_keyword", [True, False])
def test_closures_run_once_and_return_their_loss(name: str, by_keyword: bool) -> None:
    plain, ours = pair(OPTIMIZERS[name])
    for _ in range(5):
        losses = []
        for module, optimizer in (plain, ours):
            closure = loss_closure(module, optimizer)
            loss = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
            losses.append(float(loss.detach()))
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert_same(plain, ours, 1e-5)


def test_lr_scheduler_made_before_and_steps_counted(recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(5, 3)
    ours = copy.deepcopy(plain)
    runs = []
    for module, offloaded in ((plain, False), (ours, True)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        if offloaded:
            offload(module, optimizer)
        for seed in range(4):
            step(module, optimizer, seed)
            scheduler.step()
        runs.append([module, optimizer])
    assert_same(*runs)
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]


def test_post_hooks_of_the_user_see_the_updated_parameters() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5)
    seen: list[torch.Tensor] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(module.weight.detach().clone()))
    offload(module, optimizer)
    before = module.weight.detach().clone()
    step(module, optimizer, 0)
    assert torch.equal(seen[0], module.weight.detach())
    assert not torch.equal(seen[0], before)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_step_that_raised_leaves_the_next_one_whole(name: str) -> None:
    plain, ours = pair(OPTIMIZERS[name])

    def failing() -> torch.Tensor:
        raise KeyError("in the closure")

    with pytest.raises(KeyError):
        ours[1].step(failing)
    for seed in range(3):
        step(*plain, seed)
        step(*ours, seed)
    assert_same(plain, ours)


def test_an_optimizer_that_raises_after_the_closure_is_restored() -> None:
    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise KeyError("in the step")
            return super().step(closure)

    module = nn.Linear(2, 2)
    parameters = list(module.parameters())
    optimizer = Failing(parameters, lr=0.1)
    offload(module, optimizer)
    with pytest.raises(KeyError):
        step(module, optimizer, 0)
    optimizer.fails = False
    before = module.weight.detach().clone()
    step(module, optimizer, 1)
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
    assert not torch.equal(before, module.weight.detach())


@pytest.mark.parametrize("with_closure", [True, False])
def test_a_subclass_that_calls_super_steps_once(with_closure: bool) -> None:
    class Doubled(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)  # torch hooks its step from here on
    plain, ours = pair(lambda ps: Doubled(ps, lr=0.1, momentum=0.9))
    for seed in range(3):
        for run in (plain, ours):
            if with_closure:
                run[1].step(loss_closure(*run))
            else:
                step(*run, seed)
    assert_same(plain, ours)


def test_a_second_evaluation_of_the_closure_is_an_error_with_the_way_out() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            return closure()

    module = nn.Linear(5, 2)
    optimizer = Twice(module.parameters(), lr=0.1)
    offload(module, optimizer)
    with pytest.raises(RuntimeError, match=r"Twice evaluated its closure a second time.*once"):
        optimizer.step(loss_closure(module, optimizer))


def test_a_new_param_group_joins_in_mid_training() -> None:
    plain, ours = pair(OPTIMIZERS["adamw"])
    extra = nn.Linear(3, 2)
    for run in (plain, ours):
        step(*run, 0)
        head = copy.deepcopy(extra)
        run[0].append(head)
        run[1].add_param_group({"params": head.parameters(), "lr": 0.1})
        for seed in range(1, 4):
            step(*run, seed)
    assert_same(plain, ours)


def test_detached_it_is_a_plain_optimizer_again() -> None:
    torch.manual_seed(0)
    module = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    plain_module = copy.deepcopy(module)
    plain = torch.optim.AdamW(plain_module.parameters(), lr=1e-2)
    optimizer.register_step_pre_hook(lambda *_: None)
    offload(module, optimizer).detach()
    assert len(optimizer._optimizer_step_pre_hooks) == 1, "detach must remove its own hooks only"
    step(module, optimizer, 0)
    step(plain_module, plain, 0)
    assert_same([plain_module, plain], [module, optimizer])
