"""Fixtures for all Python tests."""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator

import hypothesis
import pytest

import tfswitch as tsw
from tests.python.worker_threads import running_clients
from tests.support import examples, running_servers
from tfswitch import cluster as cluster_lib

# Each collection would look at all that TensorFlow has made, for 0.3 s.
gc.freeze()

# In CI the same examples each time; a failure prints how to replay it.
hypothesis.settings.register_profile(
    "ours",
    derandomize=bool(os.environ.get("CI")),
    max_examples=examples(40),
    print_blob=True,
    deadline=None,
)
hypothesis.settings.load_profile("ours")


@contextlib.contextmanager
def running_cluster(num_servers: int) -> Iterator[tsw.Cluster]:
    """Connects to new servers in this process; 0: to an embedded cluster."""
    with (
        running_servers(num_servers) as address,
        tsw.connect(address, timeout_secs=20.0) as cluster,
    ):
        yield cluster


@pytest.fixture(autouse=True)
def _no_default_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    """Resets the default cluster, so that no test sees another test's."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    cluster_lib._default = None
    yield
    cluster_lib._default = None


KINDS = pytest.fixture(params=[0, 2], ids=["embedded", "two_servers"])


@KINDS
def cluster(request: pytest.FixtureRequest) -> Iterator[tsw.Cluster]:
    """The default cluster, of each kind: tables behave the same on both.

    One server is a case of the tests in C++, which have all kinds of clients.
    """
    with running_cluster(request.param) as cluster:
        yield cluster


@KINDS
def client(
    request: pytest.FixtureRequest,
) -> Iterator[Callable[[int], tsw.Cluster]]:
    """`client(i)` is client number i of one cluster, of each kind."""
    with running_clients(request.param) as client:
        yield client


@pytest.fixture
def local() -> Iterator[Callable[[int], tsw.Cluster]]:
    """`local(i)` is client number i of one embedded cluster."""
    with running_clients(0) as client:
        yield client


@pytest.fixture
def embedded() -> Iterator[tsw.Cluster]:
    """An embedded default cluster of the test's own."""
    with running_cluster(0) as cluster:
        yield cluster


@pytest.fixture
def fresh_keras() -> Iterator[None]:
    """Seeds the Keras of the layers, and ends with its default policy."""
    # Not needed by other tests.
    from tfswitch.keras._backend import keras

    keras.utils.set_random_seed(3)
    yield
    keras.mixed_precision.set_global_policy("float32")


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[str]:
    """The URL of a bucket on an S3 server of this process.

    Environment variables name the server, also for programs that tests start.
    """
    # Not needed by other tests.
    import fsspec
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
    server.stop()


@pytest.fixture
def make_cluster() -> Iterator[Callable[[int], tsw.Cluster]]:
    """Makes default clusters of so many servers; 0: embedded."""
    with contextlib.ExitStack() as stack:
        yield lambda num_servers: stack.enter_context(
            running_cluster(num_servers)
        )
