"""Learns who likes what, from ids without a vocabulary."""

import keras
import numpy as np

import tfswitch as tsw

rng = np.random.default_rng(0)
known = rng.integers(-(2**63), 2**63, 500)  # Any 64-bit number is an id.
taste = rng.normal(size=(500, 4))  # Hidden: the model has to learn this.
pairs = rng.integers(0, 500, (20_000, 2))
likes = (taste[pairs[:, 0]] * taste[pairs[:, 1]]).sum(axis=1) > 0

ids = keras.Input((2,), dtype="int64")  # Pairs of ids.
embedding = tsw.keras.DynamicEmbedding(8, name="item")  # Was Embedding(500, 8)
rows = embedding(ids)
score = keras.layers.Dot(axes=-1)([rows[:, 0], rows[:, 1]])
model = keras.Model(ids, keras.layers.Activation("sigmoid")(score))
model.compile(keras.optimizers.Adam(0.01), "bce", metrics=["AUC"])
model.fit(known[pairs], likes, validation_split=0.1, epochs=5, verbose=2)
print(f"{embedding.table.size()} ids have got a row. The first one's:")
print(known[0], embedding.table.lookup(known[0]).numpy().round(2))
