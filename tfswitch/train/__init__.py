"""Training with several workers."""

from tfswitch.consistency import Consistency
from tfswitch.train.all_reduce import (
    all_reduce,
    uneven_batches,
    weighted_all_reduce,
)
from tfswitch.train.barrier import Barrier
from tfswitch.train.epoch_loop import epochs
from tfswitch.train.sync_group import SyncGroup
from tfswitch.train.sync_replicas_hook import (
    MonitoredTrainingSession,
    SyncReplicasHook,
)
from tfswitch.train.sync_replicas_optimizer import SyncReplicasOptimizer
from tfswitch.train.worker import Worker

__all__ = [
    "Barrier",
    "Consistency",
    "MonitoredTrainingSession",
    "SyncGroup",
    "SyncReplicasHook",
    "SyncReplicasOptimizer",
    "Worker",
    "all_reduce",
    "epochs",
    "uneven_batches",
    "weighted_all_reduce",
]
