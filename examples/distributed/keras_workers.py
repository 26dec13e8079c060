"""Trains in several processes with plain `fit`, all variables on the servers.

    tfswitch launch --servers=2 --workers=2 keras_workers.py --consistency=bsp

Every worker runs this program, and TF_CONFIG tells it which worker it is. The
"ps" entries of TF_CONFIG are tfswitch servers, to which tfswitch connects. They
hold the embeddings, the dense variables and the optimizer state of both.
"""

from collections.abc import Sequence

import keras
import movielens
import numpy as np
from absl import app, flags

import tfswitch as tsw

_CONSISTENCY = flags.DEFINE_enum(
    "consistency",
    "bsp",
    ["asp", "ssp", "bsp"],
    "How much workers wait for each other: not at all, if they are --staleness "
    "steps ahead of the slowest, or after each step.",
)
_STALENESS = flags.DEFINE_integer(
    "staleness", 4, "For ssp: steps ahead of the slowest.", lower_bound=0
)
_EPOCHS = flags.DEFINE_integer("epochs", 3, "How often to see all ratings.")
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 256, "Ratings per step and worker."
)
_MAX_RATINGS = flags.DEFINE_integer(
    "max_ratings", None, "Take only so many ratings."
)


def consistency() -> tsw.train.Consistency:
    """Returns the consistency that the flags name."""
    if _CONSISTENCY.value == "ssp":
        return tsw.train.Consistency.ssp(_STALENESS.value)
    return tsw.train.Consistency(_CONSISTENCY.value)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    train, valid = movielens.read(_MAX_RATINGS.value)
    worker = tsw.train.Worker(consistency=consistency())
    keras.utils.set_random_seed(movielens.SEED + worker.worker_id)
    mine = movielens.my_share(train, worker)

    model = movielens.build_model(consistency())
    optimizer = tsw.keras.ParameterServerOptimizer(
        tsw.optimizers.Adam(movielens.LEARNING_RATE),
        consistency=consistency(),
        worker=worker,
    )
    model.compile(optimizer, "binary_crossentropy")
    # Workers have different numbers of steps. The callback ends each epoch when
    # it has ended for all workers, so that all validate the same, complete
    # model.
    model.fit(
        *mine,
        batch_size=_BATCH_SIZE.value,
        epochs=_EPOCHS.value,
        validation_data=tuple(valid),
        callbacks=[tsw.keras.SyncEpochs()],
        verbose=2,
    )
    stats = worker.stats()
    print(f"clock {stats['clock']}; waits for others: {stats['waits']}")

    if worker.is_chief:
        group = worker.stats()["workers"]
        ahead = np.trim_zeros(group["staleness"], "b")
        print(f"{sum(ahead)} steps of all workers in {group['rounds']} rounds")
        print(f"steps that were 0, 1, 2, ... ahead of the slowest: {ahead}")
        scores = model.predict(valid.ids, batch_size=8192, verbose=0)
        movielens.report_auc(valid, scores)


if __name__ == "__main__":
    app.run(main)
