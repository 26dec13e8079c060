"""Which worker trains which data."""

from tfswitch.data.work_queue import Epoch, WorkItem, WorkItemLost, WorkQueue

__all__ = ["Epoch", "WorkItem", "WorkItemLost", "WorkQueue"]
