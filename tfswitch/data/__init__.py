"""Distributes training data among workers, and reads rows ahead."""

from tfswitch.data.prefetch import prefetch_embeddings
from tfswitch.data.step_shares import step_shares
from tfswitch.data.work_queue import Epoch, WorkItem, WorkItemLost, WorkQueue

__all__ = [
    "Epoch",
    "WorkItem",
    "WorkItemLost",
    "WorkQueue",
    "prefetch_embeddings",
    "step_shares",
]
