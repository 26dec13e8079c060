"""Training with several workers."""

from tfswitch.consistency import Consistency
from tfswitch.train.worker import Worker

__all__ = ["Consistency", "Worker"]
