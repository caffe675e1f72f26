"""Checkpoints are torch's own, hold fp32 masters, and either run resumes the other's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from support import Classifier, assert_relative, batches, fit, make_trainer, one_batch, seeded
from torch.utils.data import DataLoader, Subset

STRATEGIES = ("auto", "zero_offload")


def scheduled(parameters: Any) -> Any:
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def saved(path: Path, strategy: str, precision: str = "32-true", steps: int = 10) -> dict[str, Any]:
    module = seeded(lambda: Classifier(scheduled))
    trainer = fit(module, strategy, precision, max_steps=steps, data=one_batch())
    trainer.save_checkpoint(path)
    return torch.load(path, weights_only=False)


def saved_in_training(
    path: Path, strategy: str, precision: str = "32-true", steps: int = 10
) -> dict[str, Any]:
    module = seeded(lambda: Classifier(scheduled))
    callback = ModelCheckpoint(path.parent, path.stem, every_n_train_steps=steps)
    options: dict[str, Any] = {"callbacks": callback, "enable_checkpointing": True}
    fit(module, strategy, precision, max_steps=steps, data=one_batch(), **options)
    return torch.load(path, weights_only=False)


def tensors(tree: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return {prefix: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {
        name: tensor
        for key, value in items
        if isinstance(value, (dict, list, torch.Tensor))
        for name, tensor in tensors(value, f"{prefix}.{key}").items()
    }


@pytest.mark.parametrize("save", [saved, saved_in_training])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_same_keys_shapes_and_dtypes_as_plain_lightning(
    tmp_path: Path, save: Any, precision: str
) -> None:
    plain = save(tmp_path / "plain.ckpt", "auto", precision)
    ours = save(tmp_path / "ours.ckpt", "zero_offload", precision)
    assert ours.keys() == plain.keys()
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        a, b = tensors(plain[part]), tensors(ours[part])
        assert b.keys() == a.keys()
        for name in a:
            assert (b[name].shape, b[name].dtype) == (a[name].shape, a[name].dtype), name
            assert b[name].device.type == "cpu"
            assert_relative(b[name], a[name], 1e-5 if precision == "32-true" else 0.2)
    groups = [c["optimizer_states"][0]["param_groups"] for c in (plain, ours)]
    assert groups[0] == groups[1]


def test_masters_are_saved_and_not_rounded_device_parameters(tmp_path: Path) -> None:
    checkpoint = saved_in_training(tmp_path / "ours.ckpt", "zero_offload", "bf16-mixed")
    weight = checkpoint["state_dict"]["net.0.weight"]
    assert not torch.equal(weight, weight.bfloat16().float())


def test_a_checkpoint_is_no_larger_than_plain_lightnings(tmp_path: Path) -> None:
    for strategy in STRATEGIES:
        saved_in_training(tmp_path / f"{strategy}.ckpt", strategy)
    sizes = [(tmp_path / f"{strategy}.ckpt").stat().st_size for strategy in STRATEGIES]
    assert sizes[1] <= 1.05 * sizes[0]


def test_weights_only_loading_works(tmp_path: Path) -> None:
    saved_in_training(tmp_path / "ours.ckpt", "zero_offload")
    checkpoint = torch.load(tmp_path / "ours.ckpt", weights_only=True)
    assert "net.0.weight" in checkpoint["state_dict"]


@pytest.mark.parametrize("first", STRATEGIES)
@pytest.mark.parametrize("second", STRATEGIES)
@pytest.mark.parametrize("save", [saved, saved_in_training])
def test_either_resumes_the_others_as_if_never_interrupted(
    tmp_path: Path, first: str, second: str, save: Any
) -> None:
    straight = seeded(lambda: Classifier(scheduled))
    fit(straight, "auto", max_steps=20, data=one_batch())

    path = tmp_path / "half.ckpt"
    save(path, first, steps=10)
    resumed = seeded(lambda: Classifier(scheduled), seed=99)
    trainer = fit(resumed, second, max_steps=20, ckpt_path=path, data=one_batch())
    assert trainer.global_step == 20
    assert len(resumed.losses) == 10
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert_relative(b.detach(), a.detach(), 2e-6)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_resumed_run_has_the_bits_of_the_run_that_went_on(tmp_path: Path, precision: str) -> None:
    straight = seeded(lambda: Classifier(scheduled))
    fit(straight, precision=precision, max_steps=20, data=one_batch())
    path = tmp_path / "half.ckpt"
    saved_in_training(path, "zero_offload", precision, steps=10)
    resumed = seeded(lambda: Classifier(scheduled), seed=99)
    fit(resumed, precision=precision, max_steps=20, ckpt_path=path, data=one_batch())
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_loss_scale_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "fp16.ckpt"
    trainer = fit(Classifier(), precision="16-mixed", max_steps=5)
    trainer.precision_plugin.loss_scale.scale = 4096.0
    trainer.save_checkpoint(path)
    resumed = fit(Classifier(), precision="16-mixed", max_steps=6, ckpt_path=path)
    state = resumed.precision_plugin.loss_scale.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (4096.0, 6)


def test_restoring_in_the_middle_of_a_run_reaches_masters_and_device(tmp_path: Path) -> None:
    """As the learning-rate finder does."""
    path = tmp_path / "start.ckpt"

    class Rewinding(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            trainer = self.trainer
            if batch_idx == 0:
                trainer.save_checkpoint(path)
            if batch_idx == 5:
                trainer._checkpoint_connector.resume_start(path)
                trainer._checkpoint_connector.restore_model()
                trainer._checkpoint_connector.restore_optimizers()
                trainer._checkpoint_connector.resume_end()

    rewound = seeded(Rewinding)
    fit(rewound, precision="bf16-mixed", max_steps=10)
    # From batch 5 on it is a run that starts afresh with that batch.
    fresh = seeded(Classifier)
    rest = DataLoader(Subset(batches().dataset, range(5 * 8, 10 * 8)), batch_size=8)
    fit(fresh, precision="bf16-mixed", max_steps=5, data=rest)
    assert rewound.losses[5:] == fresh.losses


def test_the_lr_finder_leaves_the_run_as_it_found_it() -> None:
    module = seeded(Classifier)
    module.lr = 1e-3
    before = {name: t.clone() for name, t in module.state_dict().items()}
    trainer = make_trainer(precision="bf16-mixed")
    finder = Tuner(trainer).lr_find(module, batches(), num_training=20)
    assert finder is not None
    assert len(finder.results["loss"]) == 20
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)
