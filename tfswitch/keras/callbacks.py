"""The callbacks, in the place where `keras.callbacks` has Keras's."""

from tfswitch.keras.checkpoint import Checkpoint
from tfswitch.keras.export_tables import ExportTables
from tfswitch.keras.global_metrics import GlobalMetrics
from tfswitch.keras.sync_epochs import SyncEpochs

__all__ = ["Checkpoint", "ExportTables", "GlobalMetrics", "SyncEpochs"]
