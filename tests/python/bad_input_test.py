"""Mistakes of users: the type and text of the error, and no change."""

import math
import socket

import numpy as np
import pytest
import tensorflow as tf
from mypy import api as mypy

import tfswitch as tsw
from tests.conftest import running_cluster
from tests.support import PACKAGE

START = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


@pytest.fixture
def table(request):
    """In this process, where a test does not ask for servers."""
    with running_cluster(getattr(request, "param", 0)):
        table = tsw.EmbeddingTable(
            "user", 2, optimizer=tsw.optimizers.SGD(0.5), seed=0
        )
        table.assign([1, 2], START)
        yield table
        # Whatever went wrong, nothing changed.
        assert table.size() == 2
        np.testing.assert_array_equal(table.lookup([1, 2]), START)


# For what servers refuse, and not Python.
on_servers_too = pytest.mark.parametrize(
    "table", [0, 3], ids=["embedded", "three_servers"], indirect=True
)


@pytest.mark.parametrize(
    ("method", "ids", "message"),
    [
        ("lookup", [1.0], "got float64.*Cast them"),
        ("push", tf.constant([1.0]), "got float32.*Cast them"),
        ("lookup", np.array(["a", None]), "objects with None"),
        ("lookup_or_create", [True], "got bool"),
        ("lookup", tf.constant([True]), "got bool"),
        ("push", tf.ragged.constant([[1], []]), "RaggedTensor.*flat_values"),
        ("lookup", tf.sparse.from_dense([1]), "SparseTensor.*values"),
        ("assign", [1.0], "table 'user'"),
        ("remove", [True], "table 'user'"),
    ],
)
def test_ids_that_are_neither_integers_nor_strings_are_named(
    table, method, ids, message
):
    arguments = [ids]
    if method in ("push", "assign"):
        arguments.append(np.zeros((1, 2), np.float32))

    with pytest.raises((ValueError, TypeError), match=f"(?s){message}"):
        getattr(table, method)(*arguments)


@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (2,), (1, 2, 2), ()])
def test_gradients_and_values_of_a_wrong_shape_are_named(table, shape):
    with pytest.raises(ValueError, match="user") as error:
        table.push([1, 2], np.zeros(shape, np.float32))
    assert f"[{','.join(map(str, shape))}]" in str(error.value)
    with pytest.raises(ValueError, match=r"'user'.*\(2, 2\)") as error:
        table.assign([1, 2], np.zeros(shape, np.float32))
    assert str(shape) in str(error.value)


@on_servers_too
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_gradients_that_are_not_finite_name_the_id(table, bad):
    gradients = np.ones((3, 2), np.float32)
    gradients[1, 1] = bad

    with pytest.raises(ValueError, match=r"'user'.* -77 ") as error:
        table.push([1, -77, 2], gradients)

    assert "nothing was applied" in str(error.value)


@on_servers_too
def test_gradients_that_overflow_when_summed_name_the_id(table):
    gradients = np.full((2, 2), 3e38, np.float32)

    with pytest.raises(ValueError, match=r"'user'.* 2 "):
        table.push([2, 2], gradients)


@on_servers_too
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_name_the_id(table, bad):
    with pytest.raises(ValueError, match=r"'user'.* 2 "):
        table.assign([1, 2], [[0.0, 0.0], [bad, 0.0]])


@pytest.mark.parametrize("rate", [-1.0, math.nan, math.inf])
def test_a_bad_learning_rate_is_named(table, rate):
    with pytest.raises(ValueError, match=r"'user'.*learning.rate"):
        table.push([1], [[1.0, 1.0]], learning_rate=rate)
    with pytest.raises(ValueError, match="learning_rate"):
        table.learning_rate = rate


@on_servers_too
def test_errors_in_a_graph_are_those_of_tensorflow(table):
    push = tf.function(lambda g: table.push([1, 2], g))

    with pytest.raises(tf.errors.InvalidArgumentError, match="'user'"):
        push(tf.constant([[math.nan, 0.0], [0.0, 0.0]]))


@pytest.mark.parametrize("method", ["assign", "remove"])
def test_python_methods_refuse_symbolic_tensors(table, method):
    arguments = [tf.ones([2, 2])] if method == "assign" else []

    with pytest.raises(ValueError, match=r"'user'.*outside tf\.function"):
        tf.function(
            lambda ids: getattr(table, method)(ids, *arguments),
            autograph=False,
        )(tf.constant([1, 2]))


@on_servers_too
@pytest.mark.parametrize(
    ("arguments", "difference"),
    [
        ({"dim": 3}, r"dim \(2 here, 3 asked\)"),
        ({"seed": 9}, r"seed \(0 here, 9 asked\)"),
        ({"initializer": "ones"}, "initializer"),
        ({"optimizer": "adam"}, "optimizer"),
        ({"optimizer": tsw.optimizers.SGD(0.5, momentum=0.5)}, "momentum"),
    ],
)
def test_a_table_with_another_config_names_the_difference(
    table, arguments, difference
):
    options = {"dim": 2, "optimizer": tsw.optimizers.SGD(0.5), "seed": 0}
    options |= arguments

    with pytest.raises(ValueError, match=f"'user'.*{difference}"):
        tsw.EmbeddingTable("user", **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "Received: name=''"),
        ({"name": None}, "Received: name=None"),
        ({"name": "a" * 257}, "256 characters"),
        ({"name": "a" * 221}, "220 bytes"),
        ({"name": "a\nb"}, "control characters"),
        ({"dim": 0}, "Received: dim=0"),
        ({"dim": 4097}, "1 to 4096. Received: dim=4097"),
        ({"dim": 2.0}, r"Received: dim=2.0 \(of type float\)"),
        ({"dim": True}, "Received: dim=True"),
        ({"dtype": "float16"}, "Received: dtype='float16'"),
        ({"seed": -1}, "Received: seed=-1"),
        ({"seed": 2**64}, "Received: seed=18446744073709551616"),
        ({"capacity": 0}, "1 to 2.*48, or None. Received: capacity=0"),
        (
            {"capacity": 2**48},
            r"'t': capacity: .* GB, and there are .* GB of memory; lower it",
        ),
        ({"push_depth": 65}, "0 to 64, or None. Received: push_depth=65"),
        ({"cluster": "local://"}, "tfswitch.connect"),
        ({"initializer": "he_normal"}, "he_normal"),
        ({"optimizer": "nadam"}, "nadam"),
    ],
)
def test_bad_arguments_are_named(embedded, arguments, message):
    with pytest.raises(ValueError, match=message):
        tsw.EmbeddingTable(**({"name": "t", "dim": 2} | arguments))
    assert embedded.tables() == []


def test_type_checkers_refuse_bad_arguments(tmp_path, monkeypatch):
    arguments = {
        "admission=None, optimizer=tsw.optimizers.Adam()": None,
        "admission=3.5": '"float"; expected "Always | MinCount | Bloom',
        "admission=tsw.admission.MinCont(3)": 'maybe "MinCount"',
        "eviction=tsw.admission.MinCount(3)": 'expected "Ttl | ShowClick',
        "optimizer=tsw.statistics.Usage()": 'expected "Optimizer | str',
        'consistency="bps"': "Literal['bps']",
    }
    program = tmp_path / "program.py"
    program.write_text(
        "import tfswitch as tsw\n"
        + "".join(f"tsw.keras.DynamicEmbedding(8, {a})\n" for a in arguments)
        + "".join(f'tsw.EmbeddingTable("a", 8, {a})\n' for a in arguments)
    )
    monkeypatch.chdir(PACKAGE.parent)
    monkeypatch.setenv("MYPYPATH", str(PACKAGE.parent))

    output, _, _ = mypy.run([str(program)])

    found = {int(line.split(":")[1]): line for line in output.splitlines()[:-1]}
    messages = dict(enumerate([*arguments.values()] * 2, start=2))
    expected = {line: text for line, text in messages.items() if text}
    assert found.keys() == expected.keys(), output
    assert all(text in found[line] for line, text in expected.items()), output


def test_an_unknown_table_is_named_with_those_there_are(cluster):
    table = tsw.EmbeddingTable("user", 2)
    tsw.EmbeddingTable("item", 2)
    cluster.drop("user")

    for call in (
        table.drop,
        table.stats,
        lambda: cluster.drop("user"),
        lambda: table.lookup([1]),
        lambda: table.push([1], [[1.0, 1.0]]),
    ):
        with pytest.raises(KeyError, match="'user'"):
            call()


def test_a_server_that_is_not_there_is_named(unused_address):
    with pytest.raises((ConnectionError, TimeoutError), match=unused_address):
        tsw.connect(f"grpc://{unused_address}", timeout_secs=0.5)


def test_a_port_that_speaks_no_grpc_is_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        with pytest.raises((ConnectionError, TimeoutError), match=address):
            tsw.connect(f"grpc://{address}", timeout_secs=0.5)


@pytest.fixture
def unused_address():
    # Bound but not listening: nobody else gets the port meanwhile.
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"
