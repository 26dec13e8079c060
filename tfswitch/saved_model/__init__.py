"""Saves trained models as SavedModels, which need no trainer to serve."""

from tfswitch.saved_model._loaded_models import (
    ServedState,
    refresh,
    resume,
    roll_back,
    state,
    watch,
)
from tfswitch.saved_model._save import save

__all__ = [
    "ServedState",
    "refresh",
    "resume",
    "roll_back",
    "save",
    "state",
    "watch",
]
