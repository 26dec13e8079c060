"""Servers and workers as actors of Ray (docs/ray.md).

Ray places, supervises and restarts the processes. This package needs
`tfswitch-ps[ray]`.
"""

from tfswitch._connection import (
    _ray_addresses,  # noqa: F401  First: it says how to install Ray.
)
from tfswitch.ray.checkpoints import restore_checkpoint, save_checkpoint
from tfswitch.ray.servers import Servers, get_servers, start_servers
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
    "get_servers",
    "restore_checkpoint",
    "run_workers",
    "save_checkpoint",
    "start_servers",
    "start_workers",
]
