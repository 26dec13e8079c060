"""The callbacks of tfswitch."""

from tfswitch.keras.callbacks.backup_and_restore import BackupAndRestore
from tfswitch.keras.callbacks.export_tables import ExportTables
from tfswitch.keras.callbacks.global_metrics import GlobalMetrics
from tfswitch.keras.callbacks.sync_epochs import SyncEpochs
from tfswitch.keras.callbacks.table_metrics import TableMetrics
from tfswitch.keras.callbacks.trace_steps import TraceSteps

__all__ = [
    "BackupAndRestore",
    "ExportTables",
    "GlobalMetrics",
    "SyncEpochs",
    "TableMetrics",
    "TraceSteps",
]
