"""Checkpoints of Ray Train that refer to a save of the tables."""

import json
import os
import shutil
import tempfile
import warnings
import weakref
from typing import TYPE_CHECKING, Any

from tfswitch._types import KerasModel
from tfswitch.cluster import Cluster, default_cluster

if TYPE_CHECKING:
    from ray.train import Checkpoint

_TABLES = "tfswitch_tables.json"
_WEIGHTS = "dense.weights.h5"


def save_checkpoint(
    path: str | os.PathLike[str],
    model: KerasModel | None = None,
    *,
    cluster: Cluster | None = None,
    **options: Any,
) -> "Checkpoint":
    """Makes the servers save the tables, and returns a reference to the save.

    The rows do not pass through this process or Ray's storage.

    Args:
        path: As for `Cluster.save`: a folder that the servers share, or a URL.
            Each call makes one more save there.
        model: A Keras model whose dense weights go into the checkpoint.
        cluster: The cluster to use; by default that of `tfswitch.connect`.
        options: Options of `Cluster.save`. `keep` is how many saves stay: it
            must be at least the number of checkpoints that Ray keeps
            (`num_to_keep`).

    Returns:
        A checkpoint for `ray.train.report(metrics, checkpoint=...)`. Its folder
        is removed with the object.

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
            # Keras files lack the rows of tables. A warning of this is not
            # needed here.
            warnings.simplefilter("ignore", UserWarning)
            model.save_weights(os.path.join(folder, _WEIGHTS))
    return checkpoint


def restore_checkpoint(
    checkpoint: "Checkpoint",
    model: KerasModel | None = None,
    *,
    cluster: Cluster | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Restores the tables that a checkpoint refers to.

    Args:
        checkpoint: A checkpoint of `save_checkpoint`.
        model: A Keras model that gets the dense weights.
        cluster: The cluster to use; by default that of `tfswitch.connect`.
        options: Options of `Cluster.restore`.

    Returns:
        The result of `Cluster.restore`.

    Raises:
        ValueError: If `save_checkpoint` has not made the checkpoint, or it has
            no dense weights.
        KeyError: If the save was removed: see `keep` of `save_checkpoint`.
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
