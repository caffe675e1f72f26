"""Makes the strategy names known to Lightning's registry.

``lightning`` and ``pytorch_lightning`` are two copies of one code base with a registry each. Our
strategy is a subclass of the first one's, so the second gets entries that say so; without them
its Trainer would only say that the name is invalid. It is never imported from here: its import
redirects Lightning's log messages.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

from lightning.pytorch.strategies import StrategyRegistry

from lightning_zoffload.strategy import ZeroOffloadStrategy

NAMES = (ZeroOffloadStrategy.strategy_name, f"{ZeroOffloadStrategy.strategy_name}_delayed")

_OTHER_STRATEGIES = "pytorch_lightning.strategies"


def register() -> None:
    """Registers ``zero_offload`` and ``zero_offload_delayed``; a second call changes nothing."""
    if ZeroOffloadStrategy.strategy_name in StrategyRegistry:
        return
    ZeroOffloadStrategy.register_strategies(StrategyRegistry)
    if _OTHER_STRATEGIES in sys.modules:
        _register_refusals(sys.modules[_OTHER_STRATEGIES])
    else:
        sys.meta_path.insert(0, _RefuseOnImport())


class _RefuseOnImport(MetaPathFinder):
    """Adds the refusals once ``pytorch_lightning.strategies`` has been imported by someone."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _OTHER_STRATEGIES:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_then_register(module: ModuleType) -> None:
            execute(module)
            _register_refusals(module)

        spec.loader.exec_module = execute_then_register  # type: ignore[method-assign]
        return spec


def _register_refusals(strategies: Any) -> None:
    for name in NAMES:
        strategies.StrategyRegistry.register(name, _refuse, description="needs lightning.pytorch")


def _refuse(**_: Any) -> NoReturn:
    raise TypeError(
        "`zero_offload` is a strategy of the `lightning` package, but this Trainer comes from"
        " `pytorch_lightning`. Import Trainer, LightningModule and callbacks from"
        " `lightning.pytorch` (`import lightning as L`)."
    )
