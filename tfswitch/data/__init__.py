"""Distributes the training data among workers."""

from tfswitch.data.work_queue import Epoch, WorkItem, WorkItemLost, WorkQueue

__all__ = ["Epoch", "WorkItem", "WorkItemLost", "WorkQueue"]
