"""`Cluster.table`: a table that exists, with its own settings."""

import numpy as np
import pytest

import tfswitch as tsw
from tests.support import make_table, running_servers

SETTINGS = {
    "defaults": {},
    "initializer": {"initializer": tsw.initializers.GlorotUniform()},
    "normal": {"initializer": tsw.initializers.TruncatedNormal(0.1, 0.3)},
    "options": {
        "optimizer": tsw.optimizers.Adam(
            beta_1=0.8,
            l2=0.1,
            clipnorm=2.0,
            cowclip=tsw.optimizers.CowClip(0.5),
        ),
        "seed": 2**64 - 1,
    },
    "dense": {"optimizer": "adagrad", "update": "dense"},
    "segments": {
        "optimizer": tsw.optimizers.Segments(
            [(1, tsw.optimizers.Ftrl(0.1)), (None, tsw.optimizers.SGD(0.3))]
        ),
        "admission": tsw.admission.MinCount(3, not_admitted="weight"),
    },
    "bloom": {
        "admission": tsw.admission.BloomMinCount(
            3, capacity=1000, not_admitted=0.5
        ),
        "eviction": tsw.eviction.MaxRows(2**40, order="lfu", every_secs=3600),
    },
    "probability": {"admission": tsw.admission.Probability(0.1)},
    "show_click": {
        "admission": tsw.admission.ShowClick(3.0, not_admitted="shared"),
        "statistics": tsw.statistics.ShowClick(0.2, 2.0, 0.9),
        "eviction": tsw.eviction.AnyOf(
            [tsw.eviction.Ttl(3), tsw.eviction.ShowClickScore(0.7)],
            every_secs=60,
        ),
    },
    "norm": {"eviction": tsw.eviction.L2Norm(0.01)},
    "storage": {
        "storage_dtype": tsw.StorageDtype("float16", "bfloat16", "nearest"),
        "consistency": tsw.train.Consistency.ssp(3),
    },
    "usage": {"statistics": tsw.statistics.Usage(), "consistency": "bsp"},
}


@pytest.fixture(params=[0, 2], ids=["local", "servers"])
def cluster(request):
    with running_servers(request.param) as address:
        with tsw.connect(address) as cluster:
            yield cluster


def test_a_table_is_opened_with_the_settings_that_it_has(cluster):
    for name, settings in SETTINGS.items():
        made = tsw.EmbeddingTable(name, 4, **settings)

        opened = cluster.table(name)

        assert isinstance(opened, tsw.EmbeddingTable)
        assert opened.dim == 4
        assert opened.seed == made.seed
        for setting in (
            "initializer",
            "admission",
            "eviction",
            "statistics",
            "update",
            "storage_dtype",
            "consistency",
        ):
            assert getattr(opened, setting) == getattr(made, setting), setting
        assert (
            opened.optimizer.to_table_config()
            == made.optimizer.to_table_config()
        )


def test_an_opened_table_reads_and_steps_the_same_rows(cluster):
    made = make_table("user")
    made.push([7], [[1.0, 2.0]])
    opened = cluster.table("user")
    opened.learning_rate = 0.5

    opened.push([7], [[1.0, 1.0]])

    np.testing.assert_array_equal(made.lookup([7]), [[-1.5, -2.5]])


def test_a_dense_table_is_opened_as_one(cluster):
    shapes = {"a:;": (2, 3), "b": (), "none": (0, 2)}
    made = tsw.DenseTable("mlp", shapes, optimizer="sgd", consistency="bsp")
    made.initialize([np.ones((2, 3)), np.array(5.0), np.zeros((0, 2))])

    opened = cluster.table("mlp")

    assert isinstance(opened, tsw.DenseTable)
    assert opened.shapes == shapes
    assert opened.consistency == made.consistency
    np.testing.assert_array_equal(opened.pull()[1], 5.0)


def test_the_optimizer_of_an_open_table_stays_open(cluster):
    layer = tsw.keras.DynamicEmbedding(2, name="rows", table="rows")
    layer.build()
    layer.table  # noqa: B018  The layer makes its table when it is read.

    opened = cluster.table("rows")

    assert opened._spec.is_open
    opened.push([1], [[1.0, 1.0]])
    assert not cluster.table("rows")._spec.is_open


def test_the_error_for_another_name_has_the_tables(cluster):
    made = make_table("user")

    with pytest.raises(KeyError, match=f"'movie'.*{made.name}"):
        cluster.table("movie")
    with pytest.raises(ValueError, match="name"):
        cluster.table("")
