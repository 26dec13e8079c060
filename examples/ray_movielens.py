"""Trains on MovieLens latest-small with servers and workers of Ray.

    python examples/ray_movielens.py             # Ray on this machine
    python examples/ray_movielens.py --ray=auto --data_dir=/shared/movielens \\
        --secrets=/run/secrets
    tfswitch launch --servers=2 --workers=3 \\
        examples/ray_movielens.py --without_ray

A work queue hands out the ratings in pieces, so that workers may join
and leave: each rating counts once in each epoch. The last command trains the
same model without Ray.
"""

import pathlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import app, flags
from distributed import movielens

import tfswitch as tsw

_RAY = flags.DEFINE_string(
    "ray", "local", "The address of a Ray cluster. local: one of this machine."
)
_WITHOUT_RAY = flags.DEFINE_bool(
    "without_ray", False, "Be one of the workers that TF_CONFIG describes."
)
_SERVERS = flags.DEFINE_integer("servers", 2, "How many servers.")
_WORKERS = flags.DEFINE_integer("workers", 3, "How many workers.")
_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "A folder that all nodes share. None: a temporary one."
)
_SECRETS = flags.DEFINE_string(
    "secrets",
    None,
    "A folder on all nodes with server.pem, server.key and tokens, for servers "
    "that other machines reach. Clients use TFSWITCH_TLS_CA, "
    "TFSWITCH_TLS_SERVER_NAME and TFSWITCH_TOKEN_FILE; the token needs the "
    "role admin, to make the work queue.",
)
_SERVER_RESOURCE = flags.DEFINE_string(
    "server_resource", "CPU", "A server takes 1 of this resource of Ray."
)
_EPOCHS = flags.DEFINE_integer("epochs", 3, "How often to see all ratings.")
_MAX_RATINGS = flags.DEFINE_integer(
    "max_ratings", None, "Take only so many ratings."
)

BATCH_SIZE = 256
PIECE = 10 * BATCH_SIZE  # Ratings of an item of the queue.


def train(epochs: int, max_ratings: int | None) -> dict[str, Any]:
    """Trains as one of the workers.

    Returns:
        "samples" of all workers, "seconds" since all had joined, and of the
        first worker "auc".
    """
    ratings, valid = movielens.read(max_ratings)
    worker = tsw.train.Worker(consistency="bsp")
    keras.utils.set_random_seed(movielens.SEED)
    model = movielens.build_model(worker.consistency)
    model.compile(
        tsw.keras.ParameterServerOptimizer(
            tsw.optimizers.Adam(movielens.LEARNING_RATE),
            consistency=worker.consistency,
            worker=worker,
        ),
        "binary_crossentropy",
    )

    def read(piece: str, offset: int) -> Iterator[tuple[Any, Any]]:
        """Yields batches of a piece, after the ratings that count already."""
        end = min(int(piece) + PIECE, len(ratings.ids))
        for begin in range(int(piece) + offset, end, BATCH_SIZE):
            yield tuple(
                ratings.rows(slice(begin, min(begin + BATCH_SIZE, end)))
            )

    pieces = [str(begin) for begin in range(0, len(ratings.ids), PIECE)]
    queue = tsw.data.WorkQueue(
        pieces, epochs=epochs, worker=worker, shuffle=True
    )
    worker.wait_at_barrier("joined")
    begin = time.monotonic()
    for epoch in queue.epochs():
        model.fit(
            epoch.dataset(
                read,
                (
                    tf.TensorSpec([None, 2], tf.int64),
                    tf.TensorSpec([None, 1], tf.float32),
                ),
            ),
            initial_epoch=epoch.number,
            epochs=epoch.number + 1,
            callbacks=[tsw.keras.SyncEpochs()],
            verbose=2,
        )
    result: dict[str, Any] = {
        "seconds": time.monotonic() - begin,
        "samples": worker.stats()["workers"]["samples"],
    }
    if worker.is_chief:
        scores = model.predict(valid.ids, batch_size=8192, verbose=0)
        auc = keras.metrics.AUC()
        auc.update_state(valid.labels, scores)
        result["auc"] = float(auc.result())
    return result


def report(result: dict[str, Any]) -> None:
    print(
        f"AUC {result['auc']:.4f} on ratings that were held out; "
        f"{result['samples']:.0f} samples of all workers in "
        f"{result['seconds']:.1f} s"
    )


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    arguments = _EPOCHS.value, _MAX_RATINGS.value
    if _WITHOUT_RAY.value:
        result = train(*arguments)
        if "auc" in result:
            report(result)
        return

    if _RAY.value != "local" and not (_DATA_DIR.value and _SECRETS.value):
        raise app.UsageError(
            "--ray of several machines needs --data_dir and --secrets"
        )

    import ray

    # The workers find the modules of this folder there.
    folder = str(pathlib.Path(__file__).resolve().parent)
    ray.init(
        _RAY.value,
        # The processes may be more than the cores of the machine.
        num_cpus=_SERVERS.value + _WORKERS.value
        if _RAY.value == "local"
        else None,
        include_dashboard=False,
        runtime_env={"working_dir": folder},
    )
    security: dict[str, Any] = {"host": "127.0.0.1"}
    if _SECRETS.value:
        secrets = pathlib.Path(_SECRETS.value)
        security = {
            "tls": tsw.Tls(
                cert=secrets / "server.pem", key=secrets / "server.key"
            ),
            "token_file": secrets / "tokens",
        }
    with tempfile.TemporaryDirectory(prefix="movielens-") as temporary:
        with tsw.ray.start_servers(
            _SERVERS.value,
            name="movielens",
            data_dir=_DATA_DIR.value or temporary,
            resources_per_server={_SERVER_RESOURCE.value: 1},
            **security,
        ) as servers:
            print(f"{servers.address} has {', '.join(servers.addresses())}")
            results = tsw.ray.run_workers(
                train, _WORKERS.value, servers=servers, args=arguments
            )
    report(results[0])


if __name__ == "__main__":
    app.run(main)
