"""Files of earlier versions are read.

`tests/data/recorded` was written by version 0.1.0 before its messages and
configs were described once: a checkpoint of three tables. They stay as they
are; what a later version writes goes beside them.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest

import tfswitch as tsw

RECORDED = Path(__file__).parents[1] / "data" / "recorded"

ADAM = tsw.optimizers.Adam(0.1, l2=0.5)
TABLES = {
    "adam": {
        "optimizer": ADAM,
        "seed": 2**63 + 5,
        "eviction": tsw.eviction.MaxRows(100, order="lfu"),
        "statistics": tsw.statistics.ShowClick(),
    },
    "dense": {
        "optimizer": tsw.optimizers.SGD(0.1, momentum=0.9),
        "update": "dense",
        "seed": 1,
    },
    "segments": {
        "optimizer": tsw.optimizers.Segments(
            [(1, tsw.optimizers.SGD(0.1)), (None, tsw.optimizers.Adagrad(0.1))]
        ),
        "admission": tsw.admission.MinCount(2),
        "storage_dtype": "float16",
        "seed": 4,
    },
}


def test_a_checkpoint_restores_and_its_configs_are_those_of_today(
    cluster: tsw.Cluster, tmp_path: Path
) -> None:
    shutil.copytree(RECORDED / "checkpoint", tmp_path / "checkpoint")
    report = cluster.restore(tmp_path / "checkpoint")

    assert report == {"tables": sorted(TABLES), "num_rows": 17, "save": 1}
    expected = np.load(RECORDED / "expected.npz")
    for name, settings in TABLES.items():
        ids, values = expected[f"{name}_ids"], expected[f"{name}_values"]
        if name == "adam":  # It was pushed to once more before `expected`.
            is_saved = ~np.isin(ids, [1, 77])
            ids, values = ids[is_saved], values[is_saved]
        # Its config is equal, or this would raise.
        table = tsw.EmbeddingTable(
            name, values.shape[1], cluster=cluster, **settings
        )
        np.testing.assert_array_equal(table.lookup(ids).numpy(), values)
        table.push(ids, np.ones_like(values))


@pytest.fixture
def cluster(tmp_path: Path):
    with tsw.connect(f"local://{tmp_path.name}") as connected:
        yield connected
