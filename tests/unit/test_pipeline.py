"""Gradients through the whole pipeline, beside plain torch, with copies at awkward times."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optimizer_pairs import engine_on
from pipelines import PIPELINES, LateStreams, LateWorker, stream_transfer
from support import assert_relative
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from lightning_zoffload import full_grad, master_param, optimizer_state
from lightning_zoffload.config import OffloadConfig
from lightning_zoffload.engine import OffloadEngine
from lightning_zoffload.host_worker import ThreadWorker
from lightning_zoffload.optimizer import OffloadedStep
from lightning_zoffload.takeover import Clipping
from lightning_zoffload.transfer import InlineTransfer

Make = Callable[[Any], Optimizer]
MAKERS: dict[str, Make] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2, initial_accumulator_value=0.1),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3),
}


class Zoo(nn.Module):
    """Tied, unused, 0-dim, empty, channels_last and one parameter larger than a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False).to(memory_format=torch.channels_last)
        self.gain = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Parameter(torch.randn(5))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embedding.weight
        self.transposed = nn.Parameter(torch.randn(8, 8).t())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) @ self.transposed
        x = x + self.conv(x.unsqueeze(1)).mean(1)
        x = self.norm(x.to(self.norm.weight.dtype)).to(x.dtype) * self.gain + self.empty.sum()
        return self.head(x).float().square().mean()


def tokens(seed: int) -> Tensor:
    return torch.randint(30, (2, 6), generator=torch.Generator().manual_seed(seed))


class Run:
    """A module with its optimizer; with a pipeline, offloaded."""

    def __init__(
        self,
        module: nn.Module,
        make: Make = MAKERS["adamw"],
        pipeline: str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        self.module = module
        self.optimizer = make(module.parameters())
        self.engine: OffloadEngine | None = None
        if pipeline is not None:
            transfer, worker = PIPELINES[pipeline]()
            config = OffloadConfig(**{"bucket_size": 128, **options})
            self.engine = engine_on(
                module,
                self.optimizer,
                config=config,
                dtype=dtype,
                transfer=transfer,
                worker=worker,
            )
            OffloadedStep(self.optimizer, self.engine)

    def automatic_step(self, *losses: Callable[[nn.Module], Tensor]) -> None:
        """As Lightning's loop: the last micro-batch's backward runs in the step's closure."""
        self.optimizer.zero_grad()
        for loss in losses[:-1]:
            self.backward(loss)
        self.optimizer.step(lambda: self.backward(losses[-1]))

    def backward(self, loss: Callable[[nn.Module], Tensor]) -> float:
        value = loss(self.module)
        if self.engine is None:
            value.backward()
        else:
            with self.engine.backward(automatic=True, clipping=Clipping()):
                value.backward()
        return float(value.detach())

    def close(self) -> None:
        if self.engine is not None:
            self.engine.release()


def pair(module: nn.Module, pipeline: str, **options: Any) -> tuple[Run, Run]:
    make = options.pop("make", MAKERS["adamw"])
    ours = copy.deepcopy(module)
    return Run(module, make), Run(ours, make, pipeline, **options)


def assert_same(plain: Run, ours: Run, tolerance: float = 3e-6) -> None:
    for (name, a), b in zip(plain.module.named_parameters(), ours.module.parameters(), strict=True):
        assert not b.isnan().any(), name
        # Of 1, the size of a parameter: single ones may pass through zero.
        assert torch.allclose(b, a, rtol=tolerance, atol=tolerance), name


@pytest.fixture(params=PIPELINES)
def pipeline(request: pytest.FixtureRequest) -> str:
    return request.param


def zoo() -> Zoo:
    torch.manual_seed(0)
    return Zoo()


@pytest.mark.parametrize("schedule", ["auto", "synchronous"])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("bucket_size", [17, 128, 2**20])
def test_trains_as_torch(pipeline: str, name: str, bucket_size: int, schedule: str) -> None:
    make = MAKERS[name]
    plain, ours = pair(zoo(), pipeline, make=make, bucket_size=bucket_size, schedule=schedule)
    for seed in range(4):
        for run in (plain, ours):
            run.automatic_step(lambda m, seed=seed: m(tokens(seed)))
        assert all(p.grad is None for p in ours.module.parameters())
    ours.close()
    assert_same(plain, ours)


@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_eager_has_the_bits_of_synchronous(
    pipeline: str, dtype: torch.dtype, micro_batches: int, moment_dtype: str
) -> None:
    results = []
    for schedule, size in (("auto", 100), ("synchronous", 2**20)):
        options = {"dtype": dtype, "moment_dtype": moment_dtype, "bucket_size": size}
        run = Run(zoo(), MAKERS["adamw"], pipeline, schedule=schedule, **options)
        for seed in range(4):
            losses = [lambda m, s=s: m(tokens(s)) for s in range(seed, seed + micro_batches)]
            run.automatic_step(*losses)
        run.close()
        results.append([p.detach() for p in run.module.parameters()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_eager_updates_and_uploads_in_backward() -> None:
    """After the first step, which learns."""
    run = Run(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), pipeline="inline")
    assert run.engine is not None
    uploaded: list[int] = []

    def loss(module: nn.Module) -> Tensor:
        value = module(torch.ones(1, 8)).square().mean()
        first = module[0].weight
        first.register_hook(lambda g: uploaded.append(run.engine.transfer.bytes_up))
        return value

    before = run.engine.transfer.bytes_up
    run.automatic_step(loss)
    assert uploaded == [before]
    run.automatic_step(loss)
    assert uploaded[1] - before > run.engine.transfer.bytes_up - uploaded[1]


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_bytes_over_the_bus(pipeline: str, place: str, micro_batches: int) -> None:
    """2n + 2 per 16-bit parameter if gradients add up on the host, 4 if on the device."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    run = Run(
        module, pipeline=pipeline, dtype=torch.bfloat16, accumulate_on=place, bucket_size=5000
    )
    assert run.engine is not None
    transfer = run.engine.transfer
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    for _ in range(2):
        before = transfer.bytes_down, transfer.bytes_up
        run.automatic_step(*[lambda m: m(x).float().sum()] * micro_batches)
        numel = 3 * 64 * 64
        down = 2 * micro_batches if place == "host" else 2
        assert transfer.bytes_down - before[0] == down * numel
        assert transfer.bytes_up - before[1] == 2 * numel
    run.close()


def test_micro_batches_add_up_in_fp32(pipeline: str) -> None:
    """bf16 gradients of 1 and then many of 2**-9 would stay 1 if added up in bf16."""
    module = nn.Linear(1, 100, bias=False)
    run = Run(module, lambda ps: torch.optim.SGD(ps, lr=1.0), pipeline, torch.bfloat16)
    assert run.engine is not None
    before = run.engine.masters[module.weight].clone()
    gradients = [1.0] + [2.0**-9] * 8
    losses = [lambda m, g=g: (m.weight * g).float().sum() for g in gradients]
    run.automatic_step(*losses)
    moved = before - run.engine.masters[module.weight]
    assert torch.allclose(moved, torch.full_like(moved, sum(gradients)), atol=1e-6)
    run.close()


def test_accumulators_come_with_the_second_micro_batch_and_go(pipeline: str) -> None:
    run = Run(zoo(), pipeline=pipeline)
    assert run.engine is not None
    (share,) = run.engine._shares.values()
    buckets = share.intake.all_buckets()

    def accumulators() -> int:
        return sum(bucket.has_accumulator for bucket in buckets)

    loss = [lambda m: m(tokens(0))]
    run.automatic_step(*loss)
    assert accumulators() == 0
    run.automatic_step(*loss * 2)
    assert accumulators() > 0
    run.automatic_step(*loss)
    assert accumulators() == 0
    run.close()


@pytest.mark.parametrize("bucket_size", [17, 2**20])
@pytest.mark.parametrize("place", ["host", "device"])
def test_accumulates_as_torch_with_parameters_that_come_and_go(
    pipeline: str, place: str, bucket_size: int
) -> None:
    plain, ours = pair(zoo(), pipeline, accumulate_on=place, bucket_size=bucket_size)
    losses: list[Callable[[nn.Module], Tensor]] = [
        lambda m: m(tokens(0)),
        lambda m: m.unused.square().sum() + m.gain,
        lambda m: m(tokens(1)) + m.unused.sum(),
        lambda m: m.conv.weight.square().sum(),
    ]
    for order in ([0, 1, 2], [1, 3], [0, 0, 0, 3], [3], [2, 1]):
        for run in (plain, ours):
            run.automatic_step(*[losses[i] for i in order])
    ours.close()
    assert_same(plain, ours)


class Reused(nn.Module):
    """One module in several checkpointed segments: its gradient comes in several parts."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.shared = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = checkpoint(self.shared, x, use_reentrant=self.reentrant).tanh()
        return x.square().mean()


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_module_reused_under_checkpointing(
    pipeline: str, reentrant: bool, micro_batches: int
) -> None:
    torch.manual_seed(0)
    plain, ours = pair(Reused(reentrant), pipeline, bucket_size=64)
    for seed in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        for run in (plain, ours):
            run.automatic_step(*[lambda m, x=x: m(x)] * micro_batches)
    ours.close()
    assert_same(plain, ours)


def nested(module: nn.Module, x: Tensor) -> None:
    with torch.enable_grad():
        module(x).sum().backward()


def test_a_nested_backward(pipeline: str) -> None:
    """A hook in backward that runs a backward of its own into the same parameters."""

    def loss(module: nn.Module) -> Tensor:
        x = torch.ones(2, 8)
        middle = module[0](x)
        middle.register_hook(lambda g: nested(module[1], x))
        return module[1](middle).square().mean()

    torch.manual_seed(0)
    plain, ours = pair(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), pipeline, bucket_size=8)
    for _ in range(3):
        for run in (plain, ours):
            run.automatic_step(loss)
    ours.close()
    assert_same(plain, ours)


def test_several_backwards_in_one_step_without_a_word_to_the_engine(pipeline: str) -> None:
    plain, ours = pair(zoo(), pipeline)
    for seed in range(3):
        for run in (plain, ours):
            run.optimizer.zero_grad()
            run.module(tokens(seed)).backward()
            (run.module(tokens(seed + 1)) + run.module.unused.sum()).backward()
            run.module.conv.weight.square().sum().backward()
            run.optimizer.step()
    ours.close()
    assert_same(plain, ours)


def test_a_surprising_second_gradient_after_an_eager_update_is_an_error() -> None:
    torch.manual_seed(0)
    run = Run(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), pipeline="inline", bucket_size=8)
    x = torch.ones(1, 8)
    for _ in range(2):
        run.automatic_step(lambda m: m(x).sum())

    def surprising(module: nn.Module) -> Tensor:
        middle = module[0](x)
        middle.register_hook(lambda g: nested(module[1], x))
        return module[1](middle).sum()

    with pytest.raises(RuntimeError, match=r"second gradient of `1.*schedule='synchronous'"):
        run.automatic_step(surprising)


def test_a_backward_that_needs_updated_parameters_is_refused_by_torch() -> None:
    torch.manual_seed(0)
    run = Run(nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), pipeline="inline", bucket_size=8)
    x = torch.ones(1, 8)

    def loss(module: nn.Module) -> Tensor:
        middle = module[0](x) @ module[1].weight.detach()
        return module[1](middle).sum()

    run.automatic_step(loss)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run.automatic_step(loss)


LOOKS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "clip_grad_norm": lambda ps: nn.utils.clip_grad_norm_(ps, 1e-3),
    "in place": lambda ps: [p.grad.mul_(0.5) for p in ps],
    "through data": lambda ps: [p.grad.data.add_(1.0) for p in ps],
    "assigned": lambda ps: [setattr(p, "grad", torch.full_like(p, 0.1)) for p in ps],
    "cleared": lambda ps: [setattr(p, "grad", None) for p in ps[:3]],
    "zeroed": lambda ps: [p.grad.zero_() for p in ps],
    "one only": lambda ps: ps[4].grad.sub_(1.0),
    "added": lambda ps: [p.grad.add_(torch.ones_like(p)) for p in ps],
    "read": lambda ps: [float(p.grad.norm()) for p in ps],
}


@pytest.mark.parametrize("bucket_size", [17, 2**20])
@pytest.mark.parametrize("look", LOOKS)
def test_p_grad_is_there_when_looked_at_and_edits_count(
    pipeline: str, look: str, bucket_size: int
) -> None:
    plain, ours = pair(zoo(), pipeline, make=MAKERS["sgd"], bucket_size=bucket_size)
    seen = []
    for seed in range(3):
        for run in (plain, ours):
            run.optimizer.zero_grad()
            run.module(tokens(seed)).backward()
            trained = [p for p in run.module.parameters() if p.grad is not None and p.numel()]
            seen.append(LOOKS[look](trained))
            if seed == 1:  # more comes after the look
                run.module(tokens(7)).backward()
            run.optimizer.step()
        if look == "read":
            assert seen[-1] == pytest.approx(seen[-2], rel=1e-5)
    ours.close()
    assert_same(plain, ours)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_any_kind_drops_what_was_taken(pipeline: str, set_to_none: bool) -> None:
    plain, ours = pair(zoo(), pipeline, make=MAKERS["sgd"])
    for seed in range(3):
        for run in (plain, ours):
            run.module(tokens(9)).backward()
            if seed == 1:
                run.module.zero_grad(set_to_none=set_to_none)
            else:
                run.optimizer.zero_grad(set_to_none=set_to_none)
            run.module(tokens(seed)).backward()
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=set_to_none)
    ours.close()
    assert_same(plain, ours)


def test_what_is_on_the_host_can_be_read(pipeline: str) -> None:
    plain, ours = pair(zoo(), pipeline, bucket_size=17)
    for seed in range(2):
        for run in (plain, ours):
            run.optimizer.zero_grad()
            run.module(tokens(seed)).backward()
            run.module(tokens(seed + 1)).backward()
        for a, b in zip(plain.module.parameters(), ours.module.parameters(), strict=True):
            gradient = full_grad(b)
            assert (gradient is None) == (a.grad is None)
            if a.grad is not None and a.numel():
                assert gradient is not None
                assert_relative(gradient, a.grad, 1e-6)
        for run in (plain, ours):
            run.optimizer.step()
        for a, b in zip(plain.module.parameters(), ours.module.parameters(), strict=True):
            assert full_grad(b) is None
            state, expected = optimizer_state(b), plain.optimizer.state.get(a, {})
            assert state.keys() == expected.keys()
            if a.numel():
                assert_relative(master_param(b), a.detach(), 3e-6)
                for key, value in expected.items():
                    assert_relative(state[key], value, 3e-6)
    parameter = next(ours.module.parameters())
    ours.close()
    with pytest.raises(ValueError, match="not trained by zero_offload"):
        master_param(parameter)


def test_a_gradient_kept_beyond_the_step_says_so() -> None:
    run = Run(zoo(), pipeline="inline")
    run.module(tokens(0)).backward()
    gradient = run.module.conv.weight.grad
    run.optimizer.step()
    with pytest.raises(RuntimeError, match=r"gradient of `conv.weight` has been used"):
        gradient.norm()


def test_staging_buffers_are_few_whatever_the_order_of_gradients(pipeline: str) -> None:
    """Gradients that come from the ends of all buckets by turns open more buckets than buffers."""
    module = nn.ParameterList(nn.Parameter(torch.zeros(64)) for _ in range(24))
    plain, ours = pair(module, pipeline, bucket_size=256)
    order = [i for j in range(4) for i in range(j, 24, 4)]
    for _ in range(3):
        for run in (plain, ours):
            for i in order:
                (run.module[i] * (i + 1)).sum().backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
    transfer = ours.engine.transfer if ours.engine else None
    if not isinstance(transfer, InlineTransfer):
        assert transfer is not None
        assert sorted(buffer.nbytes for buffer, _ in transfer._free) == [1024, 1024]
    ours.close()
    assert_same(plain, ours)


def test_uploads_wait_for_compute_that_still_reads_the_old_parameters() -> None:
    streams = LateStreams()
    module = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    transfer, worker = stream_transfer(streams), LateWorker()
    engine = engine_on(module, optimizer, transfer=transfer, worker=worker)
    OffloadedStep(optimizer, engine)
    before, seen = module.weight.detach().clone(), []
    module(torch.ones(1, 4)).sum().backward()
    streams.enqueue(
        streams.compute, lambda: seen.append(module.weight.detach().clone()), module.weight.data
    )
    optimizer.step()
    streams.record(streams.compute).synchronize()
    assert torch.equal(seen[0], before)
    assert not torch.equal(module.weight.detach(), before)


def test_a_failure_in_the_worker_is_raised_by_the_step_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(zoo(), pipeline="thread")
    assert run.engine is not None
    (share,) = run.engine._shares.values()

    def failing(*args: Any) -> None:
        raise OSError("in the worker")

    run.automatic_step(lambda m: m(tokens(0)))
    monkeypatch.setattr(share.update, "update", failing)
    with pytest.raises(OSError, match="in the worker") as raised:
        run.automatic_step(lambda m: m(tokens(0)))
    assert any(entry.name == "failing" for entry in raised.traceback)
    run.close()


def test_a_worker_runs_in_order_and_ends() -> None:
    worker, seen = ThreadWorker(), []
    for i in range(50):
        worker.submit(lambda i=i: seen.append(i))
    worker.drain()
    assert seen == list(range(50))
    worker.close()


def test_masters_written_while_gradients_wait_lose_none(pipeline: str) -> None:
    plain, ours = pair(zoo(), pipeline, make=MAKERS["sgd"])
    values = {name: torch.randn(p.shape) for name, p in plain.module.named_parameters()}
    values["head.weight"] = values["embedding.weight"]
    for run in (plain, ours):
        run.module(tokens(0)).backward()
    plain.module.load_state_dict(values)
    assert ours.engine is not None
    with ours.engine.masters_in_module(write=True):
        ours.module.load_state_dict(values)
    for run in (plain, ours):
        run.optimizer.step()
    ours.close()
    assert_same(plain, ours)


@given(
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=3), min_size=1, max_size=8),
    order=st.randoms(use_true_random=False),
    bucket_size=st.integers(1, 300),
    name=st.sampled_from(list(PIPELINES)),
    micro_batches=st.integers(1, 3),
)
def test_any_parameters_in_any_order(
    shapes: list[list[int]], order: Any, bucket_size: int, name: str, micro_batches: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    plain, ours = pair(
        nn.ParameterList(parameters), name, make=MAKERS["sgd"], bucket_size=bucket_size
    )
    with closing(ours):  # hypothesis may break off in the middle
        for _ in range(2):
            parts = [
                [(i, float(i + k + 1)) for i in range(len(shapes)) if order.random() < 0.8]
                for k in range(micro_batches)
            ]
            for part in parts:
                order.shuffle(part)
            for run in (plain, ours):
                for part in parts:
                    for i, factor in part:
                        (run.module[i] * factor).sum().backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
    assert_same(plain, ours)
