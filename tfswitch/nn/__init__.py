"""Losses that predict ids of a table, computed on samples of the ids."""

from tfswitch.nn.sampled_losses import nce_loss, sampled_softmax_loss
from tfswitch.nn.samplers import (
    LogUniformSampler,
    SampledValues,
    Sampler,
    UnigramSampler,
)

__all__ = [
    "LogUniformSampler",
    "SampledValues",
    "Sampler",
    "UnigramSampler",
    "nce_loss",
    "sampled_softmax_loss",
]
