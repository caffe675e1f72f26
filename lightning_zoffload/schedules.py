"""When an update runs, and what it does with the gradients' scale.

- *synchronous*: at the step, when all gradients have landed. Always possible; needed where
  something depends on all of them: clipping by norm, skipping on fp16 overflow, an optimizer that
  torch runs on all masters.
- *eager*: bucket by bucket in the last backward before the step, as gradients land; the new
  parameters go up at once, since backward needs the old ones no more. Same bits.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from lightning_zoffload.bucket import Bucket
from lightning_zoffload.grad_hooks import GradientHooks
from lightning_zoffload.host_update import GradientScaling
from lightning_zoffload.loss_scale import LossScale
from lightning_zoffload.slab import Segment
from lightning_zoffload.takeover import OptimizerShare
from lightning_zoffload.transfer import Transfer


def settle(
    share: OptimizerShare, loss_scale: LossScale, hooks: GradientHooks
) -> GradientScaling | None:
    """Decides a step from all its gradients: clipping, loss scale, skip.

    Returns:
        What happens to the gradients; ``None`` if there are none to apply.
    """
    buckets = [bucket for bucket in share.intake.all_buckets() if bucket.on_host]
    if not buckets:
        return None
    clipping = share.clipping
    scale = 1.0 if share.unscaled else loss_scale.scale
    factor, nonfinite = 1.0 / scale, False
    share.intake.wants_norm = loss_scale.skips_nonfinite or math.isfinite(clipping.max_norm)
    if share.intake.wants_norm:
        norm = _norm(buckets, hooks)
        nonfinite = not math.isfinite(norm)
        factor *= _clip_coefficient(norm / scale, clipping.max_norm)
    if loss_scale.settle(nonfinite):
        return None
    return GradientScaling(factor, clipping.clip_value)


def apply(
    share: OptimizerShare,
    scaling: GradientScaling,
    transfer: Transfer,
    bucket: Bucket,
    segments: set[Segment],
) -> None:
    """Updates some segments of a bucket tile by tile; each goes up as soon as it is done."""
    share.update.prepare(bucket, segments)
    for tile in bucket.tiles(segments, transfer.tile):
        share.update.update(bucket, tile, scaling)
        transfer.upload(bucket.exchange[tile], bucket.device[tile])
    share.update.finish(bucket)
    for segment in segments:
        # As after an update in place: torch then refuses a backward that would need the old values.
        torch.autograd.graph.increment_version(segment.parameter)


def start_eager(share: OptimizerShare, loss_scale: LossScale, transfer: Transfer) -> None:
    """Lets updates run as gradients land, where that gives the bits of a synchronous step.

    Not in the first step, which shows what parameters get several gradients in one backward.
    """
    clipping = share.clipping
    if (
        share.steps > 0
        and share.update.is_local
        and loss_scale.scale == 1.0
        and not loss_scale.skips_nonfinite
        and math.isinf(clipping.max_norm)
    ):
        scaling = GradientScaling(1.0, clipping.clip_value)
        share.intake.apply = partial(apply, share, scaling, transfer)


def _norm(buckets: list[Bucket], hooks: GradientHooks) -> float:
    sums = []
    for bucket in buckets:
        if bucket.square_sum is None:
            hooks.statistics_job(bucket)()
        sums.append(bucket.square_sum or 0.0)
    finite = all(map(math.isfinite, sums))
    return math.sqrt(math.fsum(sums)) if finite else sum(sums)


def _clip_coefficient(norm: float, max_norm: float) -> float:
    """``torch.nn.utils.clip_grad_norm_``'s factor; a NaN norm gives NaN, as there."""
    if math.isinf(max_norm):
        return 1.0
    coefficient = max_norm / (norm + 1e-6)
    return 1.0 if coefficient > 1.0 else coefficient
