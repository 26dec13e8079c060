"""Servers and workers as actors of Ray (docs/ray.md).

Ray places, supervises and restarts the processes. Needs `tfswitch[ray]`.
"""

try:
    import ray as _ray  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise ImportError(
        "tfswitch.ray needs Ray: `pip install 'tfswitch[ray]'`"
    ) from error

from tfswitch.ray.checkpoints import restore_checkpoint, save_checkpoint
from tfswitch.ray.servers import Servers, start_servers
from tfswitch.ray.workers import (
    Workers,
    WorkersLost,
    run_workers,
    start_workers,
)

__all__ = [
    "Servers",
    "Workers",
    "WorkersLost",
    "restore_checkpoint",
    "run_workers",
    "save_checkpoint",
    "start_servers",
    "start_workers",
]
