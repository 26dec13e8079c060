"""The metrics of this process, as a dict and for Prometheus."""

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIServer

from tfswitch._connection import _metric_samples
from tfswitch._settings._ranges import Range
from tfswitch.cluster import Cluster, default_cluster

if TYPE_CHECKING:
    from prometheus_client import Metric

_PORT = Range("an integer from 0 to 65535", lambda v: 0 <= v <= 65535, int)


def read(cluster: Cluster | None = None) -> dict[str, float]:
    """Returns the present values of all metrics.

    ```python
    >>> tsw.metrics.read()['tfswitch_table_rows{shard="0",table="user"}']
    3.0
    ```

    Args:
        cluster: The cluster whose tables are read. For servers, each server
            is asked; the label `shard` tells their values apart. None means
            the default cluster if its tables are in this process, and
            otherwise no cluster.

    Returns:
        A dict from series to values. A series is a name with labels in
        Prometheus's notation, the labels sorted; docs/metrics_reference.md
        lists the names. Series whose names begin with `tfswitch_worker` measure
        the calls that this process makes.

    Raises:
        ConnectionError: If a server cannot be reached.
        PermissionError: If the token may not read all tables.
    """
    return {
        sample.series: sample.value
        for sample in _metric_samples.samples_of(_texts(cluster))
    }


class MetricsServer:
    """Answers Prometheus over HTTP until `close`, which may be repeated.

    Attributes:
        port: The port on which it listens.
    """

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self.port: int = server.server_port
        self._server = server
        self._thread = thread

    def close(self) -> None:
        """Closes the port, and waits until the thread has ended."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(
    port: int, *, address: str = "127.0.0.1", cluster: Cluster | None = None
) -> MetricsServer:
    """Answers `http://ADDRESS:PORT/metrics` with the metrics of this process.

    The answers also have the `process_` and `python_` metrics that Prometheus's
    client has for all Python programs. A daemon thread answers, so the program
    need not wait for it.

    ```python
    tsw.metrics.serve(9078)
    ```

    Args:
        port: The port; 0 means any free one, see `MetricsServer.port`.
        address: Where to listen. There is no TLS and no token: anyone who can
            reach this address can read the metrics.
        cluster: As in `read`.

    Raises:
        OSError: If the port is taken or may not be used.
        ValueError: If `port` is out of range.
    """
    import prometheus_client as client

    port = _PORT.check("port", port)

    process = client.ProcessCollector(registry=None)

    class OneOfEachName:
        def collect(self) -> Iterable["Metric"]:
            from prometheus_client import parser

            # Each server has families of the same names, and the process has
            # some of them. A name may occur once in an answer.
            families = {family.name: family for family in process.collect()}
            for text in _texts(cluster):
                for family in parser.text_string_to_metric_families(text):
                    known = families.setdefault(family.name, family)
                    if known is not family:
                        known.samples.extend(family.samples)
            return families.values()

    registry = client.CollectorRegistry()
    client.PlatformCollector(registry=registry)
    registry.register(OneOfEachName())
    try:
        return MetricsServer(*client.start_http_server(port, address, registry))
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot serve metrics on {address}:{port}: {error.strerror}. Give "
            "another `port`, or 0 for any free one",
        ) from error


def _texts(cluster: Cluster | None) -> list[str]:
    texts = _metric_samples.texts_of(None)
    if cluster is None and not default_cluster().is_remote:
        cluster = default_cluster()
    if cluster is not None:
        texts += _metric_samples.texts_of(cluster._native)
    return texts
