"""Consistency, as a value and as an argument of tables, layers and workers."""

import dataclasses

import numpy as np
import pytest

import tfswitch as tsw
from tfswitch import consistency as consistency_lib

Consistency = tsw.train.Consistency

ALL = [
    Consistency.asp(),
    Consistency.ssp(0),
    Consistency.ssp(3),
    Consistency.ssp(2**32 - 1),
    Consistency.bsp(),
    Consistency.bsp("sum"),
]


def test_the_three_kinds():
    assert Consistency.asp() == Consistency("asp")
    assert Consistency.ssp(3) == Consistency("ssp", staleness=3)
    assert Consistency.bsp() == Consistency("bsp", reduction="mean")
    assert Consistency.bsp("sum") == Consistency("bsp", reduction="sum")
    assert len(set(ALL)) == len(ALL)


@pytest.mark.parametrize("staleness", [-1, 2**32, 1.0, True, "3", None])
def test_a_staleness_that_is_no_number_of_steps_is_named(staleness):
    with pytest.raises(ValueError, match="Received: staleness=") as error:
        Consistency.ssp(staleness)

    assert repr(staleness) in str(error.value)


@pytest.mark.parametrize("reduction", ["max", "MEAN", None, 1])
def test_a_reduction_that_there_is_not_is_named(reduction):
    with pytest.raises(ValueError, match=r'"mean" or "sum"\. Received'):
        Consistency.bsp(reduction)


def test_a_kind_that_there_is_not_is_named():
    with pytest.raises(ValueError, match=r"ssp.*kind='hogwild'"):
        Consistency("hogwild")


def test_it_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Consistency.asp().kind = "bsp"


@pytest.mark.parametrize("consistency", ALL, ids=repr)
def test_config_round_trip_keeps_it(consistency):
    assert consistency_lib.get(consistency.get_config()) == consistency
    assert consistency_lib.get(consistency) is consistency


@pytest.mark.parametrize(
    ("identifier", "expected"),
    [
        (None, Consistency.asp()),
        ("asp", Consistency.asp()),
        ("bsp", Consistency.bsp()),
    ],
)
def test_names_stand_for_kinds(identifier, expected):
    assert consistency_lib.get(identifier) == expected


@pytest.mark.parametrize(
    "identifier",
    ["ssp", "ASP", 3, ["asp"], Consistency, {"bogus": 1}, np.array(["asp"])],
    ids=repr,
)
def test_what_stands_for_no_consistency_is_named(identifier):
    # "ssp" among them: it needs its number of steps.
    with pytest.raises(ValueError, match=r"\.ssp\(staleness\).*Received"):
        consistency_lib.get(identifier)


@pytest.mark.parametrize(
    ("consistency", "expected"),
    [
        (Consistency.asp(), ("ASP", 0, "MEAN")),
        (Consistency.ssp(4), ("SSP", 4, "MEAN")),
        (Consistency.bsp(), ("BSP", 0, "MEAN")),
        (Consistency.bsp("sum"), ("BSP", 0, "SUM")),
    ],
)
def test_the_field_of_a_table_config(consistency, expected):
    config = consistency.to_table_config()
    assert tuple(config.values()) == expected
    assert list(config) == ["kind", "staleness", "reduction"]


# --- Tables and layers ------------------------------------------------------


@pytest.mark.parametrize("consistency", ALL, ids=repr)
def test_a_table_has_what_it_was_given(embedded, consistency):
    table = tsw.EmbeddingTable("t", 2, consistency=consistency)
    again = tsw.EmbeddingTable("t", 2, consistency=consistency.get_config())

    assert table.consistency == again.consistency == consistency


def test_a_table_is_asynchronous_by_default(embedded):
    assert tsw.EmbeddingTable("t", 2).consistency == Consistency.asp()
    assert tsw.EmbeddingTable("t", 2, consistency="asp").name == "t"


def test_a_bad_consistency_of_a_table_makes_no_table(embedded):
    with pytest.raises(ValueError, match="Received: consistency='ssp'"):
        tsw.EmbeddingTable("t", 2, consistency="ssp")

    assert embedded.tables() == []


@pytest.mark.parametrize("consistency", ALL, ids=repr)
def test_a_layer_gives_its_table_its_consistency(embedded, consistency):
    layer = tsw.keras.DynamicEmbedding(2, consistency=consistency)
    copy = type(layer).from_config(layer.get_config())

    assert layer.table.consistency == consistency
    assert copy.table.consistency == consistency


def test_a_layer_takes_the_consistency_of_a_table_it_is_given(embedded):
    table = tsw.EmbeddingTable("t", 2, consistency="bsp")

    layer = tsw.keras.DynamicEmbedding(2, table=table)

    assert layer.get_config()["consistency"]["config"]["kind"] == "bsp"
    with pytest.raises(ValueError, match=r"`consistency` belongs to table 't'"):
        tsw.keras.DynamicEmbedding(2, table=table, consistency="asp")
