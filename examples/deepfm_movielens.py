"""Trains DeepFM on MovieLens latest-small: will the user rate it 4 or more?

The tables of the embeddings live in this process, or on parameter servers:

    python examples/deepfm_movielens.py                  # in this process
    python examples/deepfm_movielens.py --servers=2      # starts two servers
    python examples/deepfm_movielens.py --address=grpc://ps0:7077,ps1:7077
    python examples/deepfm_movielens.py --demo           # all there is to see

The newest fifth of each user's ratings is held out for validation.
"""

import contextlib
import csv
import datetime
import gzip
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
from absl import app, flags

import tfswitch as tsw

_ADDRESS = flags.DEFINE_string(
    "address",
    None,
    "Servers that are running, as tfswitch.connect takes them. Rows that they "
    "have already are trained further.",
)
_SERVERS = flags.DEFINE_integer(
    "servers",
    0,
    "How many servers to start on this machine. 0: tables in this process.",
    lower_bound=0,
)
_EPOCHS = flags.DEFINE_integer("epochs", 5, "How often to see all ratings.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 256, "Ratings per step.")
_EMBEDDING = flags.DEFINE_enum(
    "embedding",
    "dynamic",
    ["dynamic", "keras"],
    "tfswitch.keras.DynamicEmbedding or keras.layers.Embedding.",
)
_COMPARE = flags.DEFINE_bool(
    "compare", False, "Train the same model on keras.layers.Embedding too."
)
_SAVE_DIR = flags.DEFINE_string(
    "save_dir",
    None,
    "Save model and tables there, load them again, and check predictions.",
)
_DEMO = flags.DEFINE_bool(
    "demo", False, "Two servers, compare, save and load; then what to do next."
)
_DATA = flags.DEFINE_string(
    "data",
    str(pathlib.Path(__file__).parent / "data" / "ml_latest_small"),
    "Folder with ratings.csv.gz and movies.csv.gz.",
)
_MAX_RATINGS = flags.DEFINE_integer(
    "max_ratings", None, "Take only so many lines of the ratings."
)

SEED = 1
DIM = 8  # Floats of a vector; each row has one more, its linear weight.
LEARNING_RATE = 0.1
MAX_GENRES = 10

# The number of ids that identify each feature, by name of the field.
FIELDS = {
    "user": 1,
    "movie": 1,
    "genres": MAX_GENRES,  # The rest is 0, which is padding.
    "year": 1,
    "hour_of_week": 1,
}

Features = dict[str, np.ndarray]


def read_movielens(folder: str, max_ratings: int | None) -> tuple:
    """Reads and splits the data.

    Returns:
        Features and labels for training, then for validation. Features are
        int64 of shape `(ratings, FIELDS[field])`, labels float32 `(ratings,)`.
    """
    genres: dict[str, np.ndarray] = {}
    year: dict[str, int] = {}
    for movie in _read_csv(folder, "movies.csv.gz"):
        # There is no vocabulary: any number may represent the name.
        ids = [zlib.crc32(name.encode()) for name in movie["genres"].split("|")]
        genres[movie["movieId"]] = np.array(
            (ids + [0] * MAX_GENRES)[:MAX_GENRES], np.int64
        )
        found = re.search(r"\((\d{4})\)\s*$", movie["title"])
        # 0 is padding, and a missing year would be 0, too.
        year[movie["movieId"]] = int(found[1]) if found else 1
    ratings = []
    for rating in _read_csv(folder, "ratings.csv.gz"):
        ratings.append(rating)
        if len(ratings) == max_ratings:
            break

    movies = [rating["movieId"] for rating in ratings]
    seconds = np.array([int(rating["timestamp"]) for rating in ratings])
    features = {
        "user": np.array([[int(rating["userId"])] for rating in ratings]),
        "movie": np.array([[int(movie)] for movie in movies]),
        "genres": np.stack([genres[movie] for movie in movies]),
        "year": np.array([[year[movie]] for movie in movies]),
        "hour_of_week": np.array([[_hour_of_week(s)] for s in seconds]),
    }
    labels = np.array(
        [float(rating["rating"]) >= 4.0 for rating in ratings], np.float32
    )
    held_out = _newest_of_each(features["user"][:, 0], seconds, share=0.2)
    return (
        {name: ids[~held_out] for name, ids in features.items()},
        labels[~held_out],
        {name: ids[held_out] for name, ids in features.items()},
        labels[held_out],
    )


def _read_csv(folder: str, name: str) -> Iterator[dict[str, str]]:
    path = pathlib.Path(folder) / name
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def _hour_of_week(seconds: int) -> int:
    moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return 1 + moment.weekday() * 24 + moment.hour


def _newest_of_each(
    users: np.ndarray, seconds: np.ndarray, share: float
) -> np.ndarray:
    """Marks the newest `share` of each user's ratings."""
    order = np.lexsort((np.arange(len(users)), seconds, users))
    _, first, counts = np.unique(
        users[order], return_index=True, return_counts=True
    )
    rank = np.arange(len(users)) - np.repeat(first, counts)
    marked = np.zeros(len(users), bool)
    marked[order] = rank >= np.repeat(np.ceil(counts * (1 - share)), counts)
    return marked


def deepfm(embed: Callable) -> keras.Model:
    """Builds and compiles DeepFM.

    Args:
        embed: Maps a field's name and its ids `(batch, ids)` to one embedding
            `(batch, 1 + DIM)`.
    """
    inputs = {
        name: keras.Input((size,), dtype="int64", name=name)
        for name, size in FIELDS.items()
    }
    rows = keras.ops.stack(
        [embed(name, ids) for name, ids in inputs.items()], axis=1
    )
    linear, vectors = rows[:, :, 0], rows[:, :, 1:]
    # Sum of the products of all pairs.
    pairs = (
        keras.ops.square(keras.ops.sum(vectors, axis=1))
        - keras.ops.sum(keras.ops.square(vectors), axis=1)
    ) / 2.0
    deep = keras.layers.Flatten()(vectors)
    for i, units in enumerate((64, 32)):
        deep = keras.layers.Dense(
            units,
            "relu",
            kernel_initializer=keras.initializers.GlorotUniform(SEED + i),
        )(deep)
    parts = [
        keras.ops.sum(linear, axis=1, keepdims=True),
        keras.ops.sum(pairs, axis=1, keepdims=True),
        keras.layers.Dense(
            1, kernel_initializer=keras.initializers.GlorotUniform(SEED)
        )(deep),
    ]
    outputs = keras.layers.Activation("sigmoid")(keras.layers.add(parts))
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.Adagrad(LEARNING_RATE),
        "binary_crossentropy",
        metrics=[keras.metrics.AUC(name="auc", num_thresholds=1000)],
    )
    return model


def dynamic_model() -> keras.Model:
    """DeepFM on tfswitch: the ids of the data are used as they are."""

    def embed(name: str, ids: keras.KerasTensor) -> keras.KerasTensor:
        return tsw.keras.DynamicEmbedding(
            1 + DIM,
            name=f"{name}_embedding",
            optimizer=tsw.optimizers.Adagrad(LEARNING_RATE),
            combiner="mean",
            mask_zero=True,
            seed=SEED,
        )(ids)

    return deepfm(embed)


def keras_model(train: Features) -> keras.Model:
    """The same on keras.layers.Embedding, which needs a vocabulary.

    Every row starts with the value that tfswitch gives it, so that the two
    trainings can be compared. Ids that training has not seen read as zeros in
    both. Adagrad differs for ids that occur twice in a batch: Keras 3 adds up
    the squares of their gradients, tfswitch squares the sum.
    """

    def embed(name: str, ids: keras.KerasTensor) -> keras.KerasTensor:
        vocabulary = np.unique(train[name])
        vocabulary = vocabulary[vocabulary != 0]
        # Index 0 is padding and 1 is any other id.
        indices = keras.layers.IntegerLookup(
            vocabulary=vocabulary, mask_token=0, name=f"{name}_index"
        )(ids)
        with tsw.connect("local://initial-rows"):
            table = tsw.EmbeddingTable(name, 1 + DIM, seed=SEED)
            rows = table.lookup_or_create(vocabulary).numpy()
        embedding = keras.layers.Embedding(
            2 + len(vocabulary),
            1 + DIM,
            mask_zero=True,
            name=f"{name}_embedding",
        )
        outputs = embedding(indices)
        embedding.set_weights([np.pad(rows, ((2, 0), (0, 0)))])
        return keras.layers.GlobalAveragePooling1D()(outputs)

    return deepfm(embed)


def train(model: keras.Model, data: tuple) -> float:
    """Trains, and returns the AUC of the last epoch on held-out ratings."""
    train_x, train_y, valid_x, valid_y = data
    keras.utils.set_random_seed(SEED)  # Before the ratings are shuffled.
    start = time.monotonic()
    history = model.fit(
        train_x,
        train_y,
        batch_size=_BATCH_SIZE.value,
        epochs=_EPOCHS.value,
        validation_data=(valid_x, valid_y),
        validation_batch_size=8192,
        verbose=1 if sys.stdout.isatty() else 2,
    )
    print(f"{time.monotonic() - start:.1f} s")
    return history.history["val_auc"][-1]


@contextlib.contextmanager
def running_servers(count: int) -> Iterator[str]:
    """Runs server programs on free ports; yields the address for `connect`."""
    program = pathlib.Path(tsw.__file__).parent / "bin" / "tfswitch-server"
    # Each server needs a folder for its saves.
    root = pathlib.Path(_SAVE_DIR.value or ".").resolve()
    root.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        addresses = []
        for i in range(count):
            server = subprocess.Popen(
                [
                    program,
                    "--address=127.0.0.1:0",
                    f"--shard_index={i}",
                    f"--num_shards={count}",
                    f"--checkpoint_root={root}",
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(server)  # Waits for its end,
            stack.callback(server.terminate)  # which comes first.
            line = server.stdout.readline().strip()
            if " serving on " not in line:
                raise RuntimeError(f"server {i} did not start: {line}")
            addresses.append(line.rsplit(" ", 1)[1])
            print(line)
        yield "grpc://" + ",".join(addresses)


@contextlib.contextmanager
def connected(servers: int) -> Iterator[tsw.Cluster]:
    """Connects as the flags say; if that starts servers, `servers` of them."""
    with contextlib.ExitStack() as stack:
        address = _ADDRESS.value or "local://"
        if servers:
            address = stack.enter_context(running_servers(servers))
        yield stack.enter_context(tsw.connect(address))


def report_tables(cluster: tsw.Cluster) -> None:
    for name, stats in cluster.stats().items():
        print(f"  table {name!r}: {stats['num_rows']} rows")


def predict(model: keras.Model, data: tuple) -> np.ndarray:
    return model.predict(data[2], batch_size=8192, verbose=0)


def save(model: keras.Model, cluster: tsw.Cluster, folder: str) -> None:
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    model.save(f"{folder}/model.keras")
    if cluster.is_remote:  # Rows of this process are in the model's file.
        cluster.save(f"{folder}/tables")


def check_saved(folder: str, data: tuple, expected: np.ndarray) -> None:
    """Loads the files of `save`, on one more server, and predicts again."""
    servers = _SERVERS.value + 1 if _SERVERS.value else 0
    with connected(servers) as cluster:
        if cluster.is_remote:  # Rows first: a model without them is refused.
            cluster.restore(f"{folder}/tables")
        model = keras.models.load_model(f"{folder}/model.keras")
        difference = np.abs(predict(model, data) - expected).max()
    print(
        f"{len(expected)} predictions of the loaded model differ by at most "
        f"{difference:.1e}"
    )
    if difference > 1e-6:
        raise RuntimeError("the loaded model predicts something else")


def run() -> None:
    data = read_movielens(_DATA.value, _MAX_RATINGS.value)
    train_y, valid_y = data[1], data[3]
    print(
        f"MovieLens latest-small: {len(train_y)} ratings to train with, "
        f"{len(valid_y)} held out; {valid_y.mean():.0%} of these are 4 or more"
    )
    if _EMBEDDING.value == "keras":
        auc = train(keras_model(data[0]), data)
        print(f"AUC with keras.layers.Embedding: {auc:.4f}")
        return

    with connected(_SERVERS.value) as cluster:
        print(f"\nTraining on tfswitch tables at {cluster.address}")
        model = dynamic_model()
        auc = train(model, data)
        report_tables(cluster)
        print(f"AUC with tfswitch: {auc:.4f}")
        if _SAVE_DIR.value:
            expected = predict(model, data)
            folder = str(pathlib.Path(_SAVE_DIR.value).resolve())
            save(model, cluster, folder)
    if _SAVE_DIR.value:
        print(f"\nLoading from {folder} again")
        check_saved(folder, data, expected)

    if _COMPARE.value:
        print("\nTraining the same model on keras.layers.Embedding")
        keras_auc = train(keras_model(data[0]), data)
        print(
            "\nAUC on held-out ratings: "
            f"tfswitch {auc:.4f}, keras.layers.Embedding {keras_auc:.4f}, "
            f"difference {auc - keras_auc:+.4f}"
        )


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    if _ADDRESS.value and _SERVERS.value:
        raise app.UsageError("--address and --servers exclude each other")
    with contextlib.ExitStack() as stack:
        if _DEMO.value:
            flags.FLAGS.servers = 0 if _ADDRESS.value else _SERVERS.value or 2
            flags.FLAGS.compare = True
            if not _SAVE_DIR.value:
                flags.FLAGS.save_dir = stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="tfswitch-demo-")
                )
        run()
    if _DEMO.value:
        print(NEXT_STEPS)


NEXT_STEPS = """
What to do next, from the folder of the repository:
  . .venv/bin/activate
      a Python with tfswitch, and its commands
  python examples/quickstart.py
      the smallest program, with tables in the process
  python examples/deepfm_movielens.py --helpshort
      other settings of this demo
  tfswitch-server --address 127.0.0.1:7077
      a server; then, from another terminal:
  python examples/deepfm_movielens.py --address grpc://127.0.0.1:7077
  ./scripts/test
      all linters and tests
README.md says how it works, and docs/ has the details."""


if __name__ == "__main__":
    app.run(main)
