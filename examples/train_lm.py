"""Trains a small GPT on English text, with any strategy.

    python examples/train_lm.py
    python examples/train_lm.py --strategy auto --precision 32-true --size 25m --max_steps 200

is short for Lightning's own command line, which takes every option of the Trainer as well:

    python examples/train_lm.py fit --config examples/train_lm.yaml --trainer.strategy auto

The defaults are in ``train_lm.yaml``. The module below is an ordinary LightningModule: which
strategy it trains under is one word in that file, or one option.
"""

from __future__ import annotations

import logging
import math
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from gpt import GPT, SIZES
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

import lightning_zoffload  # noqa: F401 - registers the strategies' names

CONFIG = Path(__file__).with_suffix(".yaml")

#: What the short form may say, and the option of Lightning's command line that it stands for.
SHORT = {
    "--strategy": "--trainer.strategy",
    "--precision": "--trainer.precision",
    "--max_steps": "--trainer.max_steps",
    "--size": "--model.size",
    "--out": "--trainer.logger.save_dir",
}


class LanguageModel(L.LightningModule):
    """Next-byte prediction, with AdamW and a warm-up and cosine schedule.

    Args:
        size: A name from ``gpt.SIZES``.
        context: Bytes to look back at when predicting.
        learning_rate: At the end of the warm-up; the cosine ends at a tenth of it.
        weight_decay: For matrices; norms and biases have none.
        warmup: The part of all steps during which the learning rate rises.
        sample_length: Bytes to write when predicting.
        top_k: Each of them is drawn from this many candidates.
    """

    def __init__(
        self,
        size: str = "10m",
        context: int = 64,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        warmup: float = 0.1,
        sample_length: int = 200,
        top_k: int = 5,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = GPT(SIZES[size])
        self.mean_loss = MeanMetric()

    def loss(self, text: Tensor) -> Tensor:
        logits = self.model(text[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.mean_loss.update(self.loss(batch), weight=len(batch))

    def on_validation_epoch_end(self) -> None:
        loss = self.mean_loss.compute()
        self.mean_loss.reset()
        self.log_dict({"val_loss": loss, "val_bits_per_byte": loss / math.log(2)}, prog_bar=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Continues the prompt."""
        count, context, top_k = (self.hparams[k] for k in ("sample_length", "context", "top_k"))
        return self.model.generate(batch, count, context, top_k)

    def configure_optimizers(self) -> Any:
        parameters = list(self.model.parameters())
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if p.ndim >= 2]},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            groups,
            lr=self.hparams["learning_rate"],
            betas=(0.9, 0.95),
            weight_decay=self.hparams["weight_decay"],
        )
        schedule = LambdaLR(optimizer, self._learning_rate_factor)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def _learning_rate_factor(self, step: int) -> float:
        total = self.trainer.estimated_stepping_batches
        warmup: float = max(1, self.hparams["warmup"] * total)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        return 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2


class Crops(Dataset[Tensor]):
    """Pieces of ``length`` bytes, one every ``stride`` bytes."""

    def __init__(self, text: Tensor, length: int, stride: int) -> None:
        self.pieces = text.unfold(0, length, stride)  # a view: no bytes are copied

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> Tensor:
        return self.pieces[index].long()


def to_bytes(text: str) -> Tensor:
    """The UTF-8 bytes of ``text``."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def to_text(symbols: Tensor) -> str:
    """The other way round; a model's bytes need not be valid UTF-8."""
    return bytes(symbols.tolist()).decode(errors="replace")


class ReferenceText(L.LightningDataModule):
    """The reference of the Python language, 0.4 MB of English that CPython brings along.

    Every tenth paragraph is for validation. Topics repeat some of each other's paragraphs, so each
    is taken once: else a part of the validation text would be trained on.

    Args:
        block_size: Bytes that the model sees.
        batch_size: Blocks per step.
        seed: Of the order of the training crops: every strategy sees the same batches.
        prompt: What predicting continues.
    """

    def __init__(
        self,
        block_size: int = 64,
        batch_size: int = 8,
        seed: int = 1,
        prompt: str = "The value of the expression ",
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        text = "\n\n".join(topics[name] for name in sorted(topics))
        paragraphs = list(dict.fromkeys(text.split("\n\n")))
        self.val_text = to_bytes("\n\n".join(paragraphs[::10]))
        del paragraphs[::10]
        self.train_text = to_bytes("\n\n".join(paragraphs))

    def train_dataloader(self) -> DataLoader[Tensor]:
        crops = Crops(self.train_text, self.hparams["block_size"] + 1, stride=1)
        order = torch.Generator().manual_seed(self.hparams["seed"])
        return DataLoader(crops, self.hparams["batch_size"], shuffle=True, generator=order)

    def val_dataloader(self) -> DataLoader[Tensor]:
        block_size = self.hparams["block_size"]
        crops = Crops(self.val_text, block_size + 1, stride=block_size)
        return DataLoader(crops, 4 * self.hparams["batch_size"])

    def predict_dataloader(self) -> DataLoader[Tensor]:
        prompt = to_bytes(self.hparams["prompt"])
        return DataLoader(Crops(prompt, len(prompt), stride=1))


class StepRecord(L.Callback):
    """Notes each step's loss and duration, for the summary."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any
    ) -> None:
        self.losses.append(float(outputs["loss"]))  # waits for the device
        self.seconds.append(time.perf_counter() - self.start)


class TrainCLI(LightningCLI):
    """Lightning's command line, where the model looks back as far as it was trained to."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.block_size", "model.context")


def long_form(arguments: Sequence[str]) -> list[str]:
    """Spells out the short form: ``--size 25m`` is ``fit --model.size 25m``."""
    if arguments and not arguments[0].startswith("-"):
        return list(arguments)
    options = (argument.partition("=") for argument in arguments)
    return ["fit", *(SHORT.get(name, name) + equals + value for name, equals, value in options)]


def quieten() -> None:
    """Hides what a reader can do nothing about; slicing bytes needs no loader processes."""
    for message in ("does not have many workers", "LeafSpec"):
        warnings.filterwarnings("ignore", message=f".*{message}")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


def summarize(cli: LightningCLI, record: StepRecord) -> None:
    """Validates and samples once more, and prints how the training went."""
    trainer = cli.trainer
    steps = trainer.global_step
    [metrics] = trainer.validate(cli.model, cli.datamodule, verbose=False)
    [sample] = trainer.predict(cli.model, cli.datamodule) or []
    print(f"\n--- sample\n{to_text(sample[0])}\n\n--- summary")
    strategy = cli.config.fit.trainer.strategy
    strategy = getattr(strategy, "class_path", strategy)  # options make it a class
    print(f"strategy        {strategy}, {trainer.precision}")
    print(f"parameters      {sum(p.numel() for p in cli.model.parameters()):,}")
    print(f"train loss      {record.losses[0]:.4f} -> {record.losses[-1]:.4f} in {steps} steps")
    print(f"bits per byte   {metrics['val_bits_per_byte']:.4f} on unseen text")
    print(f"seconds a step  {statistics.median(record.seconds):.3f} (median)")
    if isinstance(trainer.checkpoint_callback, ModelCheckpoint):
        print(f"checkpoint      {trainer.checkpoint_callback.best_model_path}")


def main() -> None:
    """Runs the command line."""
    if sys.argv[1:] == ["--help"]:
        print(__doc__, "\nThe short form knows", *SHORT)
        sys.exit()
    quieten()
    sys.argv[1:] = long_form(sys.argv[1:])
    record = StepRecord()
    defaults = {"default_config_files": [str(CONFIG)]}
    cli = TrainCLI(
        LanguageModel,
        ReferenceText,
        trainer_defaults={"callbacks": [record]},
        parser_kwargs=dict.fromkeys(TrainCLI.subcommands(), defaults),
    )
    if cli.subcommand == "fit":
        summarize(cli, record)


if __name__ == "__main__":
    main()
