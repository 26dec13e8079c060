"""Looks ids up in a loaded model for a test, as a Python server would.

Reads "load PATH" and "ask ID,ID,..." from its standard input, a line each, and
answers each with a line of JSON: `{"values": [...]}` or `{"error": "..."}`.
"""

import json
import sys

import tensorflow as tf

import tfswitch as tsw  # noqa: F401


def main() -> None:
    loaded = None
    for line in sys.stdin:
        command, argument = line.split(maxsplit=1)
        answer: dict[str, object] = {"values": []}
        try:
            if command == "load":
                loaded = tf.saved_model.load(argument.strip())
            else:
                assert loaded is not None
                ids = [int(text) for text in argument.split(",")]
                score = loaded.signatures["serving_default"](
                    ids=tf.constant(ids, tf.int64)
                )["score"]
                answer["values"] = score.numpy().tolist()
        except tf.errors.OpError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


main()
