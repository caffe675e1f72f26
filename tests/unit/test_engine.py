"""Clipping, loss scale, ownership and hand-back of the engine, without Lightning."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from optimizer_pairs import engine_on
from support import assert_relative
from torch import nn
from torch.optim import Optimizer

from lightning_zoffload import HostMemoryError
from lightning_zoffload.config import OffloadConfig
from lightning_zoffload.engine import OffloadEngine
from lightning_zoffload.host_memory import HostBuffer
from lightning_zoffload.loss_scale import ConstantLossScale, DynamicLossScale, LossScale
from lightning_zoffload.optimizer import OffloadedStep
from lightning_zoffload.takeover import Clipping

CPU = torch.device("cpu")


def make_engine(
    module: nn.Module,
    *optimizers: Optimizer,
    dtype: torch.dtype = torch.float32,
    loss_scale: LossScale | None = None,
    bucket_size: int = 2**20,
    config: OffloadConfig | None = None,
) -> OffloadEngine:
    config = config or OffloadConfig(bucket_size=bucket_size)
    engine = engine_on(module, *optimizers, config=config, dtype=dtype, loss_scale=loss_scale)
    for optimizer in optimizers:
        OffloadedStep(optimizer, engine)
    return engine


def set_gradients(module: nn.Module, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        gradient = torch.randn(parameter.shape, generator=generator) * factor
        parameter.grad = gradient.to(parameter.dtype)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 50), nn.Linear(50, 7), nn.Linear(7, 2))


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("bucket_size", [1, 400, 2**20])
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_clips_by_norm_as_torch(
    max_norm: float, bucket_size: int, optimizer_class: type[Optimizer]
) -> None:
    plain, ours = net(), net()
    # A large eps makes the Adam update depend on the gradient's size.
    options = {"lr": 0.1, **({"eps": 1.0} if optimizer_class is torch.optim.AdamW else {})}
    plain_optimizer = optimizer_class(plain.parameters(), **options)  # type: ignore[arg-type]
    our_optimizer = optimizer_class(ours.parameters(), **options)  # type: ignore[arg-type]
    engine = make_engine(ours, our_optimizer, bucket_size=bucket_size)
    for _ in range(3):
        set_gradients(plain)
        set_gradients(ours)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        plain_optimizer.step()
        engine.clip_next_step(our_optimizer, Clipping(max_norm=max_norm))
        our_optimizer.step()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert_relative(b.detach(), a.detach(), 1e-6)


def test_a_zero_eps_leaves_no_nan_behind_in_the_padding() -> None:
    """Adam divides zero by zero there; the norm of the next gradients must not see it."""
    plain, ours = net(), net()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), eps=0.0)
    our_optimizer = torch.optim.AdamW(ours.parameters(), eps=0.0)
    engine = make_engine(ours, our_optimizer)
    for _ in range(3):
        set_gradients(plain)
        set_gradients(ours)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        plain_optimizer.step()
        engine.clip_next_step(our_optimizer, Clipping(max_norm=0.5))
        our_optimizer.step()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert_relative(b.detach(), a.detach(), 1e-6)


def test_clips_by_value_as_torch() -> None:
    plain, ours = net(), net()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    our_optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    engine = make_engine(ours, our_optimizer)
    set_gradients(plain)
    set_gradients(ours)
    torch.nn.utils.clip_grad_value_(plain.parameters(), 0.3)
    plain_optimizer.step()
    engine.clip_next_step(our_optimizer, Clipping(clip_value=0.3))
    our_optimizer.step()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert_relative(b.detach(), a.detach(), 1e-6)


def test_clipping_lasts_for_one_step() -> None:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    engine = make_engine(module, optimizer)
    engine.clip_next_step(optimizer, Clipping(max_norm=1e-9))
    moved = []
    for _ in range(2):
        before = module[0].weight.detach().clone()
        set_gradients(module)
        optimizer.step()
        moved.append(float((module[0].weight.detach() - before).abs().max()))
    assert moved[0] < 1e-8 < 0.1 < moved[1]


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_loss_scale_is_taken_out_and_an_overflow_touches_nothing(
    optimizer_class: type[Optimizer],
) -> None:
    scale = DynamicLossScale(1024.0)
    plain, ours = net(), net()
    plain_optimizer = optimizer_class(plain.parameters(), lr=0.1)  # type: ignore[call-arg]
    our_optimizer = optimizer_class(ours.parameters(), lr=0.1)  # type: ignore[call-arg]
    make_engine(ours, our_optimizer, loss_scale=scale)

    set_gradients(plain)
    plain_optimizer.step()
    set_gradients(ours, scale.scale)
    our_optimizer.step()
    before = copy.deepcopy(ours.state_dict()), copy.deepcopy(our_optimizer.state_dict())

    set_gradients(ours, scale.scale)
    ours[2].bias.grad[1] = math.inf
    our_optimizer.step()
    assert scale.scale == 512.0
    torch.testing.assert_close(
        (ours.state_dict(), our_optimizer.state_dict()), before, rtol=0, atol=0
    )
    assert all(p.grad is None for p in ours.parameters())

    set_gradients(plain)
    plain_optimizer.step()
    set_gradients(ours, scale.scale)
    our_optimizer.step()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert_relative(b.detach(), a.detach(), 1e-6)


def test_gradients_can_be_unscaled_early_once() -> None:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    engine = make_engine(module, optimizer, loss_scale=ConstantLossScale(8.0))
    before = module[0].weight.detach().clone()
    set_gradients(module, 8.0)
    engine.unscale_gradients(optimizer)
    engine.unscale_gradients(optimizer)
    gradient = module[0].weight.grad.clone()
    optimizer.step()
    assert torch.equal(module[0].weight.detach(), before - gradient)


def test_without_loss_scale_a_nan_goes_through_as_in_torch() -> None:
    module = net()
    optimizer = torch.optim.AdamW(module.parameters())
    engine = make_engine(module, optimizer)
    set_gradients(module)
    module[0].weight.grad[0, 0] = math.nan
    engine.clip_next_step(optimizer, Clipping(max_norm=1.0))
    optimizer.step()
    assert all(torch.isnan(p).all() for p in module.parameters())


def test_a_step_without_gradients_changes_nothing() -> None:
    module, scale = net(), DynamicLossScale(4.0, growth_interval=1)
    optimizer = torch.optim.AdamW(module.parameters())
    make_engine(module, optimizer, loss_scale=scale)
    before = copy.deepcopy(module.state_dict())
    optimizer.step()
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert scale.scale == 4.0
    assert optimizer.state_dict()["state"] == {}


def test_frozen_parameters_stay_the_users_until_they_get_a_gradient() -> None:
    module = net()
    module[0].requires_grad_(False)
    frozen = module[0].weight.data_ptr()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    engine = make_engine(module, optimizer, dtype=torch.bfloat16)
    assert module[0].weight.data_ptr() == frozen
    assert module[0].weight.dtype is torch.float32
    assert module[0].weight not in engine.masters

    module[0].requires_grad_(True)
    before = module[0].weight.detach().clone()
    set_gradients(module)
    optimizer.step()
    assert module[0].weight.dtype is torch.bfloat16
    master = engine.masters[module[0].weight]
    assert torch.all(master != before)
    assert float((master - before).abs().max()) == pytest.approx(0.1, rel=0.02)


def test_masters_are_fp32_where_the_device_has_16_bit_and_small_steps_add_up() -> None:
    module = nn.Linear(1, 1, bias=False)
    module.weight.data.fill_(1.0)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    engine = make_engine(module, optimizer, dtype=torch.bfloat16)
    for _ in range(100):
        module.weight.grad = torch.ones(1, 1, dtype=torch.bfloat16)
        optimizer.step()
    assert engine.masters[module.weight].item() == pytest.approx(0.99, rel=1e-5)
    assert module.weight.item() == torch.tensor(0.99).bfloat16().item()


def test_masters_written_reach_the_device() -> None:
    module = net()
    engine = make_engine(module, torch.optim.AdamW(module.parameters()), dtype=torch.bfloat16)
    values = {name: torch.randn(p.shape) for name, p in module.named_parameters()}
    with engine.masters_in_module(write=True):
        module.load_state_dict(values)
    for name, parameter in module.named_parameters():
        assert torch.equal(engine.masters[parameter], values[name])
        assert torch.equal(parameter.detach(), values[name].bfloat16())


def test_released_parameters_are_the_fp32_masters() -> None:
    module = net()
    optimizer = torch.optim.AdamW(module.parameters())
    engine = make_engine(module, optimizer, dtype=torch.bfloat16)
    set_gradients(module)
    optimizer.step()
    masters = {p: m.clone() for p, m in engine.masters.items()}
    engine.release()
    for parameter, master in masters.items():
        assert torch.equal(parameter.detach(), master)
        assert parameter.grad is None


def test_a_parameter_in_two_optimizers_is_refused_by_name_and_nothing_is_touched() -> None:
    module = net()
    before = {p: p.data_ptr() for p in module.parameters()}
    shared = [torch.optim.AdamW(module.parameters()), torch.optim.SGD([module[1].weight])]
    with pytest.raises(ValueError, match=r"`1.weight` belongs to two optimizers"):
        make_engine(module, *shared)
    assert {p: p.data_ptr() for p in module.parameters()} == before


@pytest.mark.parametrize(("moment_dtype", "per_parameter"), [("float32", 14), ("bfloat16", 10)])
def test_too_little_memory_is_told_before_anything_is_taken(
    monkeypatch: pytest.MonkeyPatch, moment_dtype: str, per_parameter: int
) -> None:
    """Masters, moments and exchange, and the device's copy, which is on the host here too."""
    module = nn.Linear(1024, 64, bias=False)
    numel = 1024 * 64
    needed = numel * (per_parameter + 2 - 4)  # the fp32 parameters are given up
    optimizer = torch.optim.AdamW(module.parameters())
    before = module.weight.data_ptr()
    config = OffloadConfig(moment_dtype=moment_dtype)
    monkeypatch.setattr("lightning_zoffload.host_memory.available_memory", lambda: needed - 1)
    with pytest.raises(HostMemoryError, match=f"needs {needed:,} bytes"):
        make_engine(module, optimizer, dtype=torch.bfloat16, config=config)
    assert module.weight.data_ptr() == before
    monkeypatch.setattr("lightning_zoffload.host_memory.available_memory", lambda: needed)
    make_engine(module, optimizer, dtype=torch.bfloat16, config=config)


def test_the_memory_of_all_optimizers_is_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = nn.ModuleList([nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)])
    needed = 2 * 64 * 64 * (14 + 2 - 4)
    optimizers = [torch.optim.AdamW(module.parameters()) for module in modules]
    before = modules[0].weight.data_ptr()
    monkeypatch.setattr("lightning_zoffload.host_memory.available_memory", lambda: needed - 1)
    with pytest.raises(HostMemoryError, match=f"needs {needed:,} bytes"):
        make_engine(modules, *optimizers, dtype=torch.bfloat16)
    assert modules[0].weight.data_ptr() == before


def test_memory_refused_half_way_leaves_the_module_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    module = net()
    before = {p: p.detach().clone() for p in module.parameters()}
    built = []

    class ScarceBuffer(HostBuffer):
        def __init__(self, numel: int, dtype: torch.dtype, **options: Any) -> None:
            built.append(numel)
            if len(built) > 8:
                raise HostMemoryError("scarce")
            super().__init__(numel, dtype, **options)

    monkeypatch.setattr("lightning_zoffload.slab.HostBuffer", ScarceBuffer)
    with pytest.raises(HostMemoryError):
        make_engine(
            module, torch.optim.AdamW(module.parameters()), dtype=torch.bfloat16, bucket_size=1
        )
    for parameter, value in before.items():
        assert torch.equal(parameter.detach(), value)


@pytest.mark.parametrize(
    ("parameter", "error", "message"),
    [
        (torch.zeros(2, dtype=torch.complex64), TypeError, "`odd` is complex"),
        (torch.zeros(2, dtype=torch.float64), TypeError, "`odd` is fp64"),
        (torch.zeros(2, device="meta"), ValueError, "`odd` is on the meta device"),
    ],
)
def test_unsupported_parameters_are_refused_by_name(
    parameter: torch.Tensor, error: type[Exception], message: str
) -> None:
    module = nn.Linear(2, 2)
    module.odd = nn.Parameter(parameter)
    own = module.weight.data_ptr()
    with pytest.raises(error, match=message):
        make_engine(module, torch.optim.AdamW(module.parameters()))
    assert module.weight.data_ptr() == own


def test_a_sparse_gradient_is_refused_by_name() -> None:
    module = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.AdamW(module.parameters())
    make_engine(module, optimizer)
    with pytest.raises(RuntimeError, match=r"gradient of `weight` is sparse.*sparse=False"):
        module(torch.tensor([1, 2])).sum().backward()
