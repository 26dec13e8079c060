"""`tfswitch info`, with servers and without."""

import json

import numpy as np
import pytest

import tfswitch as tsw
from tests.programs import run_python
from tests.support import free_ports, running_servers

COMMAND = ("-m", "tfswitch", "info")


@pytest.fixture(scope="module")
def servers():
    """The address of two servers with a table."""
    with running_servers(2) as address, tsw.connect(address) as cluster:
        table = tsw.EmbeddingTable(
            "user", 2, optimizer=tsw.optimizers.Adam(), cluster=cluster
        )
        table.lookup_or_create(range(1234))
        yield address


def test_tables_are_listed_in_readable_units(servers):
    output = run_python(*COMMAND, servers).stdout.splitlines()

    assert output[0] == f"2 server(s) at {servers}"
    assert output[1].split()[:4] == ["server", "shard", "version", "up"]
    assert output[5].split() == ["table", "dim", "rows", "bytes", "optimizer"]
    name, dim, rows, _, unit, optimizer = output[6].split()
    assert (name, dim, rows, optimizer) == ("user", "2", "1,234", "adam")
    assert unit in ("KiB", "MiB")


def test_json_has_what_programs_need(servers):
    found = json.loads(run_python(*COMMAND, servers, "--json").stdout)

    addresses = [server["address"] for server in found["servers"]]
    assert addresses == servers.removeprefix("grpc://").split(",")
    assert not any(server["is_insecure"] for server in found["servers"])
    (table,) = found["tables"]
    assert (table["table"], table["rows"]) == ("user", 1234)
    assert table["bytes"] > 1234 * 2 * 4


def test_zipf_ids_load_servers_alike_and_the_hottest_is_named():
    with running_servers(4) as address, tsw.connect(address) as cluster:
        table = tsw.EmbeddingTable("item", 4, cluster=cluster)
        random = np.random.default_rng(1)
        for _ in range(40):
            ids = random.zipf(1.2, 26 * 512)
            table.lookup_or_create(ids)
            table.push(ids, np.ones((len(ids), 4), np.float32))
        found = json.loads(run_python(*COMMAND, address, "--json").stdout)
        printed = run_python(*COMMAND, address).stdout.splitlines()

    keys = [server["keys"] for server in found["servers"]]
    assert max(keys) < 1.1 * sum(keys) / 4
    for name in ("received_bytes", "sent_bytes"):
        sizes = [server[name] for server in found["servers"]]
        assert max(sizes) < 1.1 * sum(sizes) / 4
    assert found["hot_ids"][0]["table"] == "item"
    assert printed[1].split()[6:8] == ["keys", "traffic"]
    assert printed[-4].split() == ["table", "hot", "id", "lookups"]


def test_nobody_there_is_one_line_and_an_exit_code():
    address = f"127.0.0.1:{free_ports(1)[0]}"

    result = run_python(*COMMAND, address, "--timeout=0.1", check=False)

    assert result.returncode == 1
    error = result.stderr.splitlines()[-1]
    assert error.startswith("tfswitch info: ") and address in error
    assert "Traceback" not in result.stderr
