"""Server: a parameter server in this process."""

import pytest

import tfswitch as tsw


def test_port_zero_is_reported_back():
    with tsw.Server() as one, tsw.Server() as two:
        assert one.address.startswith("127.0.0.1:")
        assert not one.address.endswith(":0")
        assert one.address != two.address


def test_start_returns_the_server_and_may_be_called_again():
    server = tsw.Server()

    assert server.start() is server
    address = server.address
    assert server.start().address == address
    server.stop()
    server.stop()


def test_a_server_that_does_not_run_has_no_address():
    server = tsw.Server("127.0.0.1:0")
    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        _ = server.address
    server.start().stop(grace=0.0)
    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        _ = server.address


def test_a_stopped_server_can_start_again_and_is_empty():
    server = tsw.Server().start()
    with tsw.connect(f"grpc://{server.address}"):
        tsw.EmbeddingTable("t", 2).lookup_or_create([1])
    server.stop()

    server.start()

    with tsw.connect(f"grpc://{server.address}") as cluster:
        assert cluster.tables() == []
    server.stop()


def test_an_address_in_use_is_named():
    with tsw.Server() as server:
        with pytest.raises(ConnectionError, match=server.address):
            tsw.Server(server.address).start()


@pytest.mark.parametrize("address", ["", "nowhere", "127.0.0.1:x", "a:70000"])
def test_a_bad_address_is_named(address):
    with pytest.raises(ValueError, match=f"'{address}'"):
        tsw.Server(address).start()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shard_index": -1}, "Received: shard_index=-1"),
        ({"num_shards": 0}, "Received: num_shards=0"),
        ({"num_shards": 2.0}, "Received: num_shards=2.0"),
        ({"shard_index": 2, "num_shards": 2}, "shard_index=2, num_shards=2"),
        ({"num_threads": -1}, "Received: num_threads=-1"),
        ({"max_message_bytes": True}, "Received: max_message_bytes=True"),
        ({"limits": {"max_x": "1"}}, "Received: max_x='1'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        tsw.Server(**arguments)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_rows": 1}, "no limit 'max_rows'; there are: max_buffer_bytes"),
        ({"max_buffer_bytes": 5}, "max_buffer_bytes must be .*, got 5"),
    ],
)
def test_limits_reach_the_server(limits, message):
    with pytest.raises(ValueError, match=message):
        tsw.Server(limits=limits).start()


def test_repr_says_where_and_which_shard():
    server = tsw.Server(shard_index=1, num_shards=2)
    assert "not running, shard 1 of 2" in repr(server)
    with server:
        assert server.address in repr(server)
