"""Trains, saves and serves with an installed tfswitch, as a new user does.

    python installed_program.py EXAMPLES

EXAMPLES: the project's folder of that name; nothing else of the checkout is
used. Files go to the working directory. The last line is of versions.
"""

import atexit
import platform
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np

EXAMPLES = Path(sys.argv[1])
BIN = Path(sys.executable).parent


def start(*command: object, ready: str) -> tuple[subprocess.Popen, str]:
    """Returns a server and the address that its line about that has."""
    server = subprocess.Popen(
        [*map(str, command)], stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.kill)  # If a check fails.
    assert server.stdout is not None
    for line in server.stdout:
        found = re.search(rf"{ready} (127\.0\.0\.1:\d+)", line)
        if found:
            return server, found[1]
    raise AssertionError(f"{command} ended with {server.wait()}")


def train() -> tuple:
    """Runs the quick start; returns its model, ids and table."""
    names = runpy.run_path(str(EXAMPLES / "quickstart.py"))
    assert names["embedding"].table.size() == 500
    return names["model"], names["known"], names["embedding"].table


def main() -> None:
    # Without TensorFlow, which the server does not need.
    flags = ["--address=127.0.0.1:0", "--num_shards=2"]
    servers = [
        start(
            BIN / "tfswitch-server",
            *(*flags, f"--shard_index={index}"),
            ready="serving on",
        )
        for index in range(2)
    ]
    assert "tensorflow" not in sys.modules
    import keras
    import tensorflow as tf

    import tfswitch as tsw

    assert EXAMPLES.parent not in Path(tsw.__file__).parents
    address = "grpc://" + ",".join(server[1] for server in servers)
    with tsw.connect(address) as cluster:
        _, known, table = train()
        trained = table.lookup(known).numpy()
        cluster.save("checkpoint")
        table.assign(known, np.zeros_like(trained))
        cluster.restore("checkpoint")
        np.testing.assert_array_equal(table.lookup(known).numpy(), trained)
    for server, _ in servers:
        server.terminate()
        assert server.wait(60) == 0

    tsw.connect("local://")
    model, known, _ = train()
    ids = known[[[0, 1], [2, 3]]]
    scores = model.predict(ids, verbose=0)
    model.save("model.keras")
    again = keras.models.load_model("model.keras")
    np.testing.assert_array_equal(again.predict(ids, verbose=0), scores)

    np.savetxt("scores.txt", scores)
    tsw.saved_model.save(model, "models/1")
    signature = tf.saved_model.load("models/1").signatures["serving_default"]
    (name,) = signature.structured_input_signature[1]
    rows = "".join(f"{'|'.join(map(str, pair))}\n" for pair in ids)
    Path("in.csv").write_text(f"{name}\n{rows}")  # For a program in C++.
    (served,) = signature(**{name: tf.constant(ids)}).values()
    np.testing.assert_allclose(served.numpy(), scores, rtol=1e-6)

    serving, address = start(
        BIN / "tfswitch-serving",
        *("--model_dir=models", "--model_name=m", "--address=127.0.0.1:0"),
        ready="listening on",
    )
    answer = subprocess.check_output(
        [
            *(sys.executable, EXAMPLES / "serving_cc" / "client.py", address),
            *("m", f"{name}={ids.tolist()}"),
        ],
        text=True,
    )
    serving.terminate()
    assert serving.wait(60) == 0
    numbers = re.findall(r"\d\.\d+(?:e-\d+)?", answer)
    np.testing.assert_allclose(
        np.array(numbers, float), scores.ravel(), rtol=1e-6
    )
    print(
        f"TensorFlow {tf.__version__}, Python {platform.python_version()}, "
        f"Keras {keras.__version__}, tfswitch {tsw.__version__}"
    )


if __name__ == "__main__":
    main()
