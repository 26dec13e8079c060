"""Training with several workers."""

from tfswitch.consistency import Consistency
from tfswitch.train.all_reduce import uneven_batches, weighted_all_reduce
from tfswitch.train.barrier import Barrier
from tfswitch.train.sync_group import SyncGroup
from tfswitch.train.worker import Worker

__all__ = [
    "Barrier",
    "Consistency",
    "SyncGroup",
    "Worker",
    "uneven_batches",
    "weighted_all_reduce",
]
