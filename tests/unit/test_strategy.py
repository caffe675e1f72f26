"""The strategy as the Trainer uses it: names, devices, life cycle, refusals."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from support import Classifier, batches, fit, make_trainer, seeded
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_zoffload import ZeroOffloadPrecision, ZeroOffloadStrategy


def test_name_alone_is_enough_and_precision_comes_along() -> None:
    trainer = L.Trainer(strategy="zero_offload", precision="bf16-mixed", accelerator="cpu")
    assert isinstance(trainer.strategy, ZeroOffloadStrategy)
    assert isinstance(trainer.precision_plugin, ZeroOffloadPrecision)
    assert trainer.precision == "bf16-mixed"
    assert trainer.strategy.root_device == torch.device("cpu")
    assert trainer.world_size == 1


def test_plain_trainer_on_cpu() -> None:
    trainer = L.Trainer(strategy="zero_offload", accelerator="cpu")
    assert trainer.precision == "32-true"


def test_options_reach_the_engine_config() -> None:
    strategy = ZeroOffloadStrategy(bucket_size=7, host_threads=1)
    assert (strategy.config.bucket_size, strategy.config.host_threads) == (7, 1)
    fit(Classifier(), strategy)


def test_delayed_name_says_not_yet_and_what_to_use() -> None:
    with pytest.raises(NotImplementedError, match="strategy='zero_offload'"):
        L.Trainer(strategy="zero_offload_delayed", accelerator="cpu")


@pytest.mark.parametrize("options", [{"devices": 2}, {"num_nodes": 2}])
def test_more_than_one_device_is_refused_with_the_way_out(options: dict[str, int]) -> None:
    name = next(iter(options))
    with pytest.raises(ValueError, match=f"{name}=1"):
        L.Trainer(strategy="zero_offload", accelerator="cpu", **options)


@pytest.mark.parametrize("precision", ["64-true", "transformer-engine"])
def test_unsupported_precision_is_refused_with_a_sentence(precision: str) -> None:
    # Lightning itself refuses transformer-engine where that library is absent.
    with pytest.raises((ValueError, ModuleNotFoundError), match=r"(?i)precision|transformer"):
        L.Trainer(strategy="zero_offload", precision=precision, accelerator="cpu")


def test_64_true_names_the_choices() -> None:
    with pytest.raises(ValueError, match=r"DoublePrecision.*32-true, bf16-mixed"):
        L.Trainer(strategy="zero_offload", precision="64-true", accelerator="cpu")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"])
def test_after_fit_module_and_optimizer_are_plain_again(precision: str) -> None:
    net = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    module = Classifier(net=net)
    parameters = list(module.parameters())
    trainer = fit(module, precision=precision)
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    for tensor in [*module.parameters(), *module.buffers()]:
        assert tensor.device.type == "cpu"
        assert tensor.dtype in (torch.float32, torch.int64)
    assert all(p.grad is None for p in module.parameters())
    (optimizer,) = trainer.strategy.optimizers
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    before = module.net[0].weight.detach().clone()
    module(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, module.net[0].weight.detach())


def test_training_runs_on_16_bit_parameters() -> None:
    class Spy(Classifier):
        seen: dict[str, torch.dtype]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.seen = {name: p.dtype for name, p in self.net.named_parameters()}

    module = Spy()
    fit(module, precision="bf16-mixed", max_steps=1)
    assert module.seen["0.weight"] is torch.bfloat16
    assert module.seen["1.weight"] is torch.float32


def test_gradients_are_there_for_hooks_and_edits_count() -> None:
    class Editing(Classifier):
        def on_after_backward(self) -> None:
            self.net[0].weight.grad.zero_()
            assert self.net[3].weight.grad is not None

    module = seeded(lambda: Editing(lambda ps: torch.optim.SGD(ps, lr=0.1)))
    before = module.net[0].weight.detach().clone()
    fit(module, max_steps=3)
    assert torch.equal(module.net[0].weight.detach(), before)


@pytest.mark.parametrize("hook", ["on_before_optimizer_step", "configure_gradient_clipping"])
def test_hooks_before_the_step_see_unscaled_fp16_gradients(hook: str) -> None:
    norms: list[float] = []

    def record(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])))

    def norms_of(strategy: str, precision: str) -> list[float]:
        norms.clear()
        module = seeded(type("Watching", (Classifier,), {hook: record}))
        fit(module, strategy, precision, max_steps=3)
        return list(norms)

    assert norms_of("zero_offload", "16-mixed") == pytest.approx(
        norms_of("auto", "32-true"), rel=0.02
    )


def test_metrics_buffers_and_evaluation_work() -> None:
    class WithMetric(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = MulticlassAccuracy(num_classes=3)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.accuracy(self(batch[0]), batch[1])
            self.log("accuracy", self.accuracy)

    module = WithMetric()
    trainer = fit(module, precision="bf16-mixed", max_steps=60, max_epochs=2)
    (after_fit,) = trainer.validate(module, batches(4), verbose=False)
    assert after_fit["accuracy"] > 0.8


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_evaluation_without_fit_predicts_alike_and_gives_the_module_back_exactly(
    precision: str,
) -> None:
    module = seeded(Classifier)
    before = {name: t.clone() for name, t in module.state_dict().items()}
    ours = make_trainer(precision=precision).predict(module, batches(4))
    plain = make_trainer("auto").predict(module, batches(4))
    assert torch.allclose(torch.cat(ours), torch.cat(plain), atol=0.03)
    assert (precision == "32-true") == torch.equal(torch.cat(ours), torch.cat(plain))
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)


def test_two_fits_in_a_row_go_on_where_the_first_ended() -> None:
    modules = []
    for name in ("auto", "zero_offload"):
        module = seeded(Classifier)
        trainer = fit(module, name, max_steps=-1, max_epochs=1)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, batches())
        assert trainer.global_step == 128
        modules.append(module)
    for a, b in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_an_error_in_training_hands_the_module_back() -> None:
    class Failing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                raise KeyError("in the user's code")
            return super().training_step(batch, batch_idx)

    module = Failing()
    with pytest.raises(KeyError):
        fit(module, precision="bf16-mixed")
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_no_optimizer_trains_nothing_as_plain_lightning() -> None:
    module = seeded(lambda: Classifier(lambda parameters: None))
    before = {name: t.clone() for name, t in module.state_dict().items()}
    with pytest.warns(UserWarning, match="returned `None`"):
        fit(module, precision="bf16-mixed", max_steps=3)
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)


def test_no_trainable_parameter_fails_as_plain_lightning() -> None:
    def message(strategy: str) -> str:
        module = Classifier()
        module.requires_grad_(False)
        with pytest.raises(RuntimeError) as caught:
            fit(module, strategy)
        return str(caught.value)

    assert message("zero_offload") == message("auto")


def test_lbfgs_is_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS"):
        fit(Classifier(lambda parameters: torch.optim.LBFGS(parameters)))


def test_a_sparse_embedding_is_refused_by_name() -> None:
    net = nn.Sequential(
        nn.Flatten(), nn.Embedding(9, 3, sparse=True), nn.Flatten(), nn.Linear(48, 3)
    )

    class Bytes(Classifier):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x.abs().long().clamp(max=8))

    with pytest.raises(RuntimeError, match=r"`net.1.weight` is sparse"):
        fit(Bytes(net=net))


def test_a_complex_parameter_is_refused_by_name() -> None:
    module = Classifier()
    module.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match="`phase` is complex"):
        fit(module)


def test_our_precision_under_another_strategy_is_refused() -> None:
    trainer = make_trainer("auto", plugins=ZeroOffloadPrecision("bf16-mixed"))
    with pytest.raises(ValueError, match="strategy='zero_offload'"):
        trainer.fit(Classifier(), batches())


def test_init_module_creates_fp32_on_the_host() -> None:
    trainer = make_trainer(precision="bf16-true")
    with trainer.init_module():
        module = Classifier()
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert {p.device.type for p in module.parameters()} == {"cpu"}


def test_manual_optimization_with_two_optimizers() -> None:
    class Manual(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                self.toggle_optimizer(optimizer)
                loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=0.1)
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.SGD(self.net[:2].parameters(), lr=0.1),
                torch.optim.AdamW(self.net[2:].parameters(), lr=0.01),
            ]

    plain, ours = seeded(Manual), seeded(Manual)
    fit(plain, "auto")
    fit(ours)
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
