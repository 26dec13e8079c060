"""Checkpoints of Ray Train that refer to a save of the tables."""

import json
import os
import shutil
import tempfile
import warnings
import weakref
from typing import TYPE_CHECKING, Any

from tfswitch.cluster import Cluster, default_cluster

if TYPE_CHECKING:
    from ray.train import Checkpoint

_TABLES = "tfswitch_tables.json"
_WEIGHTS = "dense.weights.h5"


def save_checkpoint(
    path: str | os.PathLike[str],
    model: Any = None,
    *,
    cluster: Cluster | None = None,
    **options: Any,
) -> "Checkpoint":
    """Saves the tables where the servers are, and returns a reference to it.

    The rows do not pass this process, nor Ray's storage.

    Args:
        path: As of `Cluster.save`: a folder that the servers share, or a URL.
            Each call is one more save there.
        model: A Keras model whose dense weights go into the checkpoint.
        cluster: By default that of `tfswitch.connect`.
        options: Of `Cluster.save`. `keep` says how many saves stay: no fewer
            than Ray keeps checkpoints (`num_to_keep`).

    Returns:
        For `ray.train.report(metrics, checkpoint=...)`. Its folder is removed
        when the object is gone.

    Raises:
        OSError, RuntimeError, ValueError: As `Cluster.save`.

    Example:

    >>> checkpoint = None
    >>> if worker.is_chief:
    ...     checkpoint = tsw.ray.save_checkpoint("/shared/run/tables", model)
    >>> ray.train.report({"loss": loss}, checkpoint=checkpoint)
    """
    from ray.train import Checkpoint

    cluster = default_cluster() if cluster is None else cluster
    report = cluster.save(path, **options)
    folder = tempfile.mkdtemp(prefix="tfswitch-")
    checkpoint = Checkpoint.from_directory(folder)
    weakref.finalize(checkpoint, shutil.rmtree, folder, ignore_errors=True)
    with open(os.path.join(folder, _TABLES), "w", encoding="utf-8") as file:
        json.dump({"path": os.fspath(path), "save": report["save"]}, file)
    if model is not None:
        with warnings.catch_warnings():
            # That the rows are not in the file.
            warnings.simplefilter("ignore", UserWarning)
            model.save_weights(os.path.join(folder, _WEIGHTS))
    return checkpoint


def restore_checkpoint(
    checkpoint: "Checkpoint",
    model: Any = None,
    *,
    cluster: Cluster | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Restores the tables that a checkpoint refers to.

    Args:
        checkpoint: One of `save_checkpoint`.
        model: Gets the dense weights.
        cluster: By default that of `tfswitch.connect`.
        options: Of `Cluster.restore`.

    Returns:
        As `Cluster.restore`.

    Raises:
        ValueError: If the checkpoint is another one, or has no dense weights.
        KeyError: If the save is there no more: see `keep` of `save_checkpoint`.
        OSError: As `Cluster.restore`.
    """
    cluster = default_cluster() if cluster is None else cluster
    with checkpoint.as_directory() as folder:
        try:
            with open(os.path.join(folder, _TABLES), encoding="utf-8") as file:
                tables = json.load(file)
        except FileNotFoundError as error:
            raise ValueError(
                f"{checkpoint!r} has no file {_TABLES}: it was not made by "
                "tfswitch.ray.save_checkpoint"
            ) from error
        weights = os.path.join(folder, _WEIGHTS)
        if model is not None and not os.path.exists(weights):
            raise ValueError(
                f"{checkpoint!r} has no dense weights; pass `model` to "
                "tfswitch.ray.save_checkpoint, or none here"
            )
        report = cluster.restore(tables["path"], save=tables["save"], **options)
        if model is not None:
            model.load_weights(weights)
        return report
