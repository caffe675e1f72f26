"""The language model example: its two command lines, its sizes, its data."""

from __future__ import annotations

import ast
import importlib
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

TINY = ["--size", "1m", "--max_steps", "12", "--precision", "32-true"]
FASTER = ["--data.block_size", "32", "--model.sample_length", "40"]


@pytest.fixture
def example(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``examples/train_lm.py`` as a module, with ``gpt`` beside it."""
    monkeypatch.syspath_prepend(str(repository / "examples"))
    return importlib.import_module("train_lm")


def run(repository: Path, *arguments: str) -> dict[str, str]:
    """Runs the example in the current folder; what it printed as sample and in its summary."""
    script = repository / "examples" / "train_lm.py"
    command = [sys.executable, str(script), *arguments, *FASTER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    sample, summary = done.stdout.split("--- sample\n")[1].split("\n\n--- summary\n")
    lines = (re.split(r"  +", line, maxsplit=1) for line in summary.splitlines())
    return {"sample": sample, **dict(lines)}


def losses(report: dict[str, str]) -> tuple[float, float]:
    """First and last."""
    first, last = re.findall(r"\d+\.\d+", report["train loss"])
    return float(first), float(last)


def load(report: dict[str, str]) -> dict[str, Any]:
    """The checkpoint that the summary names, read by torch's safe loader."""
    return torch.load(report["checkpoint"], weights_only=True)


def assert_it_learned(report: dict[str, str]) -> None:
    first, last = losses(report)
    assert first == pytest.approx(math.log(256), abs=0.2), "an untrained model guesses evenly"
    assert last < first - 1.0
    assert float(report["bits per byte"].split()[0]) < 7.0


def test_both_command_lines_and_both_strategies_agree(repository: Path) -> None:
    short = run(repository, *TINY, "--strategy=auto")
    long_options = [
        *("--config", str(repository / "examples" / "train_lm.yaml")),
        *("--trainer.strategy", "zero_offload", "--trainer.precision", "32-true"),
        *("--trainer.max_steps", "12", "--model.size", "1m"),
    ]
    long = run(repository, "fit", *long_options)

    assert short["strategy"] == "auto, 32-true"
    assert long["strategy"] == "zero_offload, 32-true"
    for report in (short, long):
        assert_it_learned(report)
        prompt = "The value of the expression "
        assert report["sample"].startswith(prompt)
        assert len(report["sample"]) > len(prompt)
    assert losses(long) == pytest.approx(losses(short), abs=2e-3)

    plain, offloaded = load(short), load(long)
    assert Path(short["checkpoint"]).parts[:2] == ("runs", "train_lm")
    assert plain["state_dict"].keys() == offloaded["state_dict"].keys()
    assert plain["global_step"] == offloaded["global_step"] == 12
    assert len(offloaded["optimizer_states"][0]["state"]) == len(plain["state_dict"])


@pytest.mark.slow
def test_mixed_precision_leaves_an_fp32_checkpoint_that_training_goes_on_from(
    repository: Path, tmp_path: Path
) -> None:
    options = ["--size", "1m", "--out", str(tmp_path / "elsewhere")]
    report = run(repository, *options, "--max_steps", "12")
    assert report["strategy"] == "zero_offload, bf16-mixed", "the defaults of train_lm.yaml"
    assert_it_learned(report)
    assert tmp_path / "elsewhere" in Path(report["checkpoint"]).parents
    assert {t.dtype for t in load(report)["state_dict"].values()} == {torch.float32}

    more = ["--max_steps", "16", "--strategy", "auto", "--ckpt_path", report["checkpoint"]]
    resumed = run(repository, *options, *more)
    assert losses(resumed)[0] < losses(report)[0] - 1.0
    assert load(resumed)["global_step"] == 16


def test_the_short_form_is_spelled_out(example: ModuleType) -> None:
    assert example.long_form([]) == ["fit"]
    assert example.long_form(["--size", "25m", "--max_steps=3", "--data.seed=2"]) == [
        *("fit", "--model.size", "25m", "--trainer.max_steps=3", "--data.seed=2")
    ]
    assert example.long_form(["validate", "--size", "25m"]) == ["validate", "--size", "25m"]


def test_the_yaml_names_the_strategy_and_only_known_options(
    example: ModuleType, repository: Path
) -> None:
    config = yaml.safe_load((repository / "examples" / "train_lm.yaml").read_text())
    assert config["trainer"]["strategy"] == "zero_offload"
    assert config["trainer"]["precision"] == "bf16-mixed"
    model, data = example.LanguageModel(**config["model"]), example.ReferenceText(**config["data"])
    assert model.hparams["context"] == data.hparams["block_size"]


def test_the_module_knows_nothing_of_offloading(repository: Path) -> None:
    tree = ast.parse((repository / "examples" / "train_lm.py").read_text())
    [module] = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "LanguageModel"]
    assert "offload" not in ast.unparse(module).lower()


def parameters_of(name: str) -> float:
    """What a size's name promises."""
    return float(name[:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]


def test_sizes_are_named_by_their_parameters(example: ModuleType) -> None:
    gpt = importlib.import_module("gpt")
    for name, shape in gpt.SIZES.items():
        with torch.device("meta"):
            model = gpt.GPT(shape)
        count = sum(p.numel() for p in model.parameters())
        assert count == pytest.approx(parameters_of(name), rel=0.1), name
    assert max(map(parameters_of, gpt.SIZES)) > 1e10


def test_the_model_cannot_see_the_future(example: ModuleType) -> None:
    gpt = importlib.import_module("gpt")
    torch.manual_seed(0)
    model = gpt.GPT(gpt.Shape(depth=2, width=128))
    text = torch.randint(256, (1, 12))
    changed = text.clone()
    changed[0, 8] += 1 - 2 * (changed[0, 8] == 255).long()
    same = torch.isclose(model(text), model(changed), atol=1e-6).all(dim=-1)[0]
    assert same.tolist() == [True] * 8 + [False] * 4


def test_the_order_of_bytes_matters(example: ModuleType) -> None:
    """Without positions, attention of one layer would not tell the order of earlier bytes."""
    gpt = importlib.import_module("gpt")
    torch.manual_seed(0)
    model = gpt.GPT(gpt.Shape(depth=1, width=128))
    torch.nn.init.normal_(model.blocks[0].attention.qkv.weight, std=0.2)
    text = torch.tensor([[1, 2, 3, 4, 5, 6]])
    swapped = torch.tensor([[2, 1, 3, 4, 5, 6]])
    assert not torch.allclose(model(text)[0, -1], model(swapped)[0, -1], atol=1e-5)


def test_the_loss_is_of_the_next_byte(example: ModuleType) -> None:
    model = example.LanguageModel(size="1m")
    text = torch.randint(255, (2, 9))

    class Successor(torch.nn.Module):
        """Sure that the next byte of ``text`` comes next."""

        def forward(self, seen: torch.Tensor) -> torch.Tensor:
            assert torch.equal(seen, text[:, :-1])
            return 50.0 * torch.nn.functional.one_hot(text[:, 1:], 256)

    model.model = Successor()
    assert float(model.loss(text)) < 1e-6
    text = text + 1
    assert float(model.loss(text)) < 1e-6


def test_norms_and_biases_do_not_decay_and_the_rate_warms_up_then_falls(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = example.LanguageModel(size="1m", weight_decay=0.3, warmup=0.1)
    trainer = type("Trainer", (), {"estimated_stepping_batches": 100})()
    monkeypatch.setattr(example.LanguageModel, "trainer", trainer)
    [optimizer], [schedule] = model.configure_optimizers()
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    exempt = {id(p) for p in plain["params"]}
    for name, parameter in model.named_parameters():
        assert (id(parameter) in exempt) == ("norm" in name or name.endswith("bias")), name
    assert schedule["interval"] == "step"
    rates = [model._learning_rate_factor(step) for step in range(101)]
    assert rates[0] < 0.1
    assert max(rates) == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.1)


def test_validation_text_is_never_trained_on(example: ModuleType) -> None:
    data, again = example.ReferenceText(), example.ReferenceText()
    assert torch.equal(data.train_text, again.train_text)
    assert torch.equal(data.val_text, again.val_text)
    train, val = example.to_text(data.train_text), example.to_text(data.val_text)
    assert 0.05 < len(val) / (len(train) + len(val)) < 0.2
    paragraphs = val.split("\n\n")
    assert not set(paragraphs) & set(train.split("\n\n"))
    # Short ones ("Note:") may well be a part of others; whole sentences may not.
    assert not [p for p in paragraphs if len(p) > 80 and p in train]


def test_batches_are_shifted_crops_and_the_same_for_the_same_seed(example: ModuleType) -> None:
    def first_batches(seed: int) -> torch.Tensor:
        torch.rand(1)  # whatever else draws random numbers
        loader = example.ReferenceText(block_size=16, batch_size=4, seed=seed).train_dataloader()
        return torch.stack([batch for batch, _ in zip(loader, range(3), strict=False)])

    batches = first_batches(1)
    assert batches.shape == (3, 4, 17)
    assert torch.equal(batches, first_batches(1))
    assert not torch.equal(batches, first_batches(2))
    text = example.to_text(example.ReferenceText().train_text)
    assert all(example.to_text(crop) in text for crop in batches.flatten(0, 1))


def test_validation_covers_the_text_once(example: ModuleType) -> None:
    data = example.ReferenceText(block_size=16)
    targets = torch.cat([batch[:, 1:].flatten() for batch in data.val_dataloader()])
    assert torch.equal(targets, data.val_text[1 : 1 + len(targets)].long())
    assert len(data.val_text) - len(targets) <= 16
