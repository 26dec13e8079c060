"""Ways to bring the libraries into a process, each in a process of its own.

TensorFlow, grpcio and the core library each carry gRPC, protobuf and Abseil,
and pyarrow has the last two. If their symbols met, a call over gRPC would break
first, so every way of loading makes some.
"""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.certificates import Authority
from tests.programs import ROOT, environment, run_python
from tests.support import PACKAGE

OPS = Path(tsw.ops.library_path())
CORE = PACKAGE / "libtfswitch_core.so"
(NATIVE,) = PACKAGE.glob("_native.*.so")
MINOR = ".".join(tf.__version__.split(".")[:2])

# Steps of the programs below. All but one load the libraries by their paths,
# because `import tfswitch` has an order of its own.
STEPS = {
    "import tensorflow": """
        import tensorflow as tf
    """,
    "load ops": """
        ops = tf.load_op_library(OPS)
    """,
    "load native": """
        import importlib.util
        spec = importlib.util.spec_from_file_location("_native", NATIVE)
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
    """,
    "import tfswitch": """
        import tensorflow as tf
        from tfswitch import _loader, _native as native
        ops = _loader.load_ops()
    """,
    "import grpcio": """
        import grpc
    """,
    # A round trip through grpcio's own server, and one to ours.
    "use grpcio": """
        from concurrent import futures
        def double(request, context):
            return request + request
        server = grpc.server(futures.ThreadPoolExecutor(1))
        server.add_generic_rpc_handlers([
            grpc.method_handlers_generic_handler(
                "Echo", {"Call": grpc.unary_unary_rpc_method_handler(double)})
        ])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            answer = channel.unary_unary("/Echo/Call")(b"ab", timeout=60)
        assert answer == b"abab", answer
        server.stop(None)
        for shard in shards:
            with grpc.insecure_channel(shard.address) as channel:
                health = channel.unary_unary("/grpc.health.v1.Health/Check")
                assert health(b"", timeout=60) == bytes([8, 1])
        with open(TLS[0], "rb") as ca, open(TLS[1], "rb") as cert:
            with open(TLS[2], "rb") as key:
                credentials = grpc.ssl_channel_credentials(
                    ca.read(), key.read(), cert.read())
        with grpc.secure_channel(secure.address, credentials) as channel:
            health = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert health(b"", timeout=60) == bytes([8, 1])
    """,
    "import pyarrow": """
        import pyarrow.parquet
    """,
    "use pyarrow": """
        sink = pyarrow.BufferOutputStream()
        rows = pyarrow.table({"id": [1, 2]})
        pyarrow.parquet.write_table(rows, sink, compression="zstd")
        assert pyarrow.parquet.read_table(sink.getvalue()).equals(rows)
    """,
    "start servers": """
        shards = [native.Server("127.0.0.1:0", i, 2) for i in range(2)]
        remote = "grpc://" + ",".join(shard.address for shard in shards)
        # OpenSSL comes to the core, and TensorFlow and grpcio have BoringSSL.
        secure = native.Server("127.0.0.1:0", 0, 1, tls=TLS)
        address_of_secure = "grpcs://" + secure.address
    """,
    # The ops read rows that the pybind11 module writes: both use one core.
    "use ops and native": """
        import json
        import numpy as np
        config = json.dumps({"name": "t", "dim": 4})
        ids = np.arange(-5, 5)
        for address in ("local://", remote, address_of_secure):
            tls = TLS if address == address_of_secure else None
            cluster = native.Cluster(address, 60.0, tls)
            table = cluster.open_table(config)
            rows = np.random.default_rng(0).random((10, 4), np.float32)
            table.assign(ids, rows)
            handle = ops.tfswitch_table_handle(
                cluster=address, config=config, shared_name=address)
            read = ops.tfswitch_lookup_many([handle], [ids], dims=[4])[0]
            np.testing.assert_array_equal(read, rows)
            ops.tfswitch_push_many(
                [handle], [ids], [tf.ones([10, 4])], [0.5], [[]], [[]], [0], [0]
            )
            np.testing.assert_allclose(
                table.pull(ids, False), rows - 0.5, atol=1e-6)
            assert table.size() == int(ops.tfswitch_size(handle)) == 10
    """,
    "stop servers": """
        for shard in [*shards, secure]:
            shard.stop(1.0)
        print("done")
    """,
}

# Each library comes before and after each other one.
ORDERS = {
    "tfswitch_after_grpcio_and_pyarrow": [
        "import grpcio",
        "import pyarrow",
        "import tfswitch",
        "start servers",
    ],
    "native_first_pyarrow_last": [
        "load native",
        "start servers",
        "import grpcio",
        "import tensorflow",
        "load ops",
        "import pyarrow",
    ],
    "tensorflow_first_grpcio_last": [
        "import tensorflow",
        "load ops",
        "load native",
        "start servers",
        "use ops and native",
        "import pyarrow",
        "import grpcio",
    ],
}


def run_new_interpreter(program: str, **variables: str) -> str:
    """Runs a program that nothing was imported for; returns what it printed."""
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(**variables),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


def steps_program(
    steps: list[str], native: Path = NATIVE, tls: tsw.Tls | None = None
) -> str:
    prelude = f"OPS = {str(OPS)!r}\nNATIVE = {str(native)!r}\n"
    if tls is not None:
        prelude += f"TLS = {(str(tls.ca), str(tls.cert), str(tls.key), '')!r}\n"
    return prelude + "".join(textwrap.dedent(STEPS[step]) for step in steps)


@pytest.mark.parametrize("order", ORDERS)
def test_libraries_work_in_any_order(order: str, tmp_path: Path) -> None:
    tls = Authority(tmp_path).sign("both", trusts=True)
    uses = ["use grpcio", "use pyarrow", "use ops and native", "use grpcio"]
    program = steps_program([*ORDERS[order], *uses, "stop servers"], tls=tls)

    assert run_new_interpreter(program).endswith("done\n")


def test_server_command_starts_without_tensorflow() -> None:
    program = """
import sys
import tfswitch_command

sys.modules["tensorflow"] = None  # Any import of it now fails.
sys.argv = ["tfswitch-server", "--version"]
tfswitch_command.server()
"""

    assert re.match(
        r"tfswitch-server \d+\.\d+\.\d+", run_new_interpreter(program)
    )


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["--help"], "usage: tfswitch COMMAND"),
        (["info", "--help"], "--json"),
        (["export", "--help"], "--base_every"),
        (["--version"], "tfswitch 0."),
    ],
)
def test_the_command_line_says_what_it_can_without_tensorflow(
    arguments: list[str], output: str
) -> None:
    program = f"""
import sys
import tfswitch_command

sys.modules["tensorflow"] = None  # Any import of it now fails.
sys.argv = ["tfswitch", *{arguments}]
tfswitch_command.main()
"""

    assert output in run_new_interpreter(program)


# --- What is said when a library is missing or does not fit ------------------


def build_library(path: Path, source: str) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)],
        input=source,
        text=True,
        check=True,
    )


def open_table_with(ops: Path, **variables: str) -> str:
    """The error of the table handle op of an op library."""
    program = f"""
import tensorflow as tf
ops = tf.load_op_library({str(ops)!r})
try:
    ops.tfswitch_table_handle(cluster="local://", config='{{"name":"t"}}')
except tf.errors.FailedPreconditionError as error:
    print(error.message)
"""
    return run_python("-c", program, env=environment(**variables)).stdout


def test_op_without_the_core_says_which_file_is_missing(tmp_path: Path) -> None:
    ops = shutil.copy(OPS, tmp_path)

    message = open_table_with(Path(ops))

    assert str(tmp_path / "libtfswitch_core.so") in message
    assert "Reinstall tfswitch" in message


def test_module_without_the_core_raises_import_error(tmp_path: Path) -> None:
    native = Path(shutil.copy(NATIVE, tmp_path))
    program = steps_program(["load native"], native).replace(
        "spec.loader.exec_module(native)",
        textwrap.dedent("""
            try:
                spec.loader.exec_module(native)
            except ImportError as error:
                print(error)
        """),
    )

    message = run_new_interpreter(program)

    assert str(tmp_path / "libtfswitch_core.so") in message
    assert "Reinstall tfswitch" in message


def test_core_path_can_be_set_in_the_environment(tmp_path: Path) -> None:
    native = Path(shutil.copy(NATIVE, tmp_path))
    program = steps_program(["load native"], native)

    version = run_new_interpreter(
        program + "print(native.version())", TFSWITCH_CORE_LIBRARY=str(CORE)
    )

    assert re.fullmatch(r"\d+\.\d+\.\d+\n", version)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            'extern "C" const void* Tfswitch_GetApi(unsigned)'
            " { return nullptr; }",
            "does not speak API version",
        ),
        ("int nothing;", "is not a tfswitch core library"),
        (
            f"""
            #include "{ROOT}/cc/capi/tfswitch.h"
            const char* Version() {{ return "9.8.7"; }}
            extern "C" const Tfswitch_Api* Tfswitch_GetApi(unsigned) {{
              static Tfswitch_Api api = {{}};
              api.version = Version;
              return &api;
            }}
            """,
            "is of version 9.8.7, and this part .*of version "
            f"{re.escape(tsw.__version__)}. Reinstall tfswitch",
        ),
    ],
    ids=["another API version", "no core", "another version"],
)
def test_a_core_that_does_not_fit_is_refused(
    source: str, message: str, tmp_path: Path
) -> None:
    core = tmp_path / "libtfswitch_core.so"
    build_library(core, source)

    told = open_table_with(OPS, TFSWITCH_CORE_LIBRARY=str(core))

    assert re.search(f"'{core}' {message}", told)


def error_of_import(folder: Path, before: str = "") -> str:
    """The ImportError where the package's libraries are those of `folder`."""
    (folder / "__init__.py").write_text("# As of a whole package.")
    program = f"""
import sys
from pathlib import Path
import tfswitch_command
tfswitch_command._put_package()
from tfswitch import _installation
_installation._FOLDER = Path({str(folder)!r})
{before}
try:
    from tfswitch import _loader
    _loader.load_ops()
except ImportError as error:
    print(error)
"""
    return run_python("-c", program).stdout


@pytest.fixture
def installation(tmp_path: Path) -> Path:
    """A package for TensorFlow 2.9 and 2.17, with a module for this Python."""
    for name in ("ops_tf29.so", "ops_tf217.so"):
        (tmp_path / f"libtfswitch_{name}").touch()
    (tmp_path / NATIVE.name).touch()
    return tmp_path


def test_unsupported_tensorflow_is_told_those_that_are(
    installation: Path,
) -> None:
    message = error_of_import(installation)

    assert (
        "this tfswitch works with TensorFlow 2.9 and 2.17, and this is "
        f"{tf.__version__}. Install one of these "
        "(`pip install 'tensorflow==2.17.*'`, or `tensorflow-cpu`)"
    ) in message


@pytest.mark.parametrize(
    ("program", "spoil", "told"),
    [
        (
            "from tfswitch import ops",
            # As if the other package had been installed after this one.
            lambda package: (package / "__init__.py").write_text(""),
            "overwr",
        ),
        (
            "from tfswitch.cli import main; main()",  # The other one's command.
            # As if both had been installed, and then the other one uninstalled.
            lambda package: (package / "__init__.py").unlink(),
            "or removed",
        ),
        (
            "import sys; sys.argv = ['tfswitch', 'version']\n"
            "import tfswitch_command; tfswitch_command.main()",
            # As if it had been installed before this one.
            lambda package: package.with_name(
                "tfswitch-1.1.1.dist-info"
            ).mkdir(),
            "tfswitch-1.1.1.dist-info is of another package",
        ),
    ],
    ids=["installed_later", "uninstalled", "installed_before"],
)
def test_files_of_the_other_tfswitch_are_told(
    program: str, spoil: Callable[[Path], object], told: str, tmp_path: Path
) -> None:
    package = tmp_path / "tfswitch"
    package.mkdir()
    for file in PACKAGE.iterdir():
        (package / file.name).symlink_to(file)
    (package / "__init__.py").unlink()
    shutil.copy(PACKAGE / "__init__.py", package)
    shutil.copy(ROOT / "tfswitch_command.py", tmp_path)
    spoil(package)
    # The installation under test stands beside other packages.
    without = f"import sys; sys.path.remove({str(PACKAGE.parent)!r})\n"

    result = subprocess.run(
        [sys.executable, "-c", without + program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )

    assert result.returncode == 1
    assert f"files of two packages are mixed in {package}:" in result.stderr
    assert told in result.stderr
    assert "pip uninstall tfswitch tfswitch-ps" in result.stderr


def test_import_without_tensorflow_names_the_one_to_install(
    installation: Path,
) -> None:
    message = error_of_import(
        installation, 'sys.modules["tensorflow"] = None  # Cannot be imported.'
    )

    assert "works with TensorFlow 2.9 and 2.17, and there is none" in message
    assert "pip install 'tensorflow==2.17.*'" in message


def test_python_without_a_module_is_told_those_that_have_one(
    installation: Path,
) -> None:
    (installation / NATIVE.name).unlink()
    for version in ("39", "310"):
        path = installation / f"_native.cpython-{version}-x86_64-linux-gnu.so"
        path.touch()

    message = error_of_import(
        installation, "sys.version_info = (3, 99, *sys.version_info[2:])"
    )

    assert "works with Python 3.9 and 3.10, and this is 3.99." in message


@pytest.mark.parametrize(
    ("name", "version", "remedy"),
    [
        ("keras", "3.4.1", "keras>=3.5"),
        ("tf_keras", "2.17.0", f"tf_keras=={MINOR}.*"),
    ],
)
def test_import_with_an_old_keras_names_the_version_to_install(
    name: str, version: str, remedy: str, tmp_path: Path
) -> None:
    (tmp_path / f"{name}.py").write_text(f"__version__ = {version!r}\n")
    program = f"""
import sys
import tensorflow  # It has a Keras of its own, which stays.
sys.modules.pop({name!r}, None)
sys.path.insert(0, {str(tmp_path)!r})
try:
    import tfswitch
except ImportError as error:
    print(error)
"""

    legacy = str(int(name == "tf_keras"))
    message = run_python(
        "-c", program, env=environment(TF_USE_LEGACY_KERAS=legacy)
    ).stdout

    assert f"this is {name} {version}." in message
    assert f"pip install '{remedy}'" in message


def test_layers_are_of_the_keras_that_tensorflow_has() -> None:
    """Ray Train sets the variable when `tf.keras` has been used already."""
    program = """
import os
import tensorflow as tf
tf.keras.layers.Layer
os.environ["TF_USE_LEGACY_KERAS"] = "1"
import tfswitch as tsw
print(issubclass(tsw.keras.DynamicEmbedding, tf.keras.layers.Layer))
"""
    assert run_python("-c", program).stdout.split()[-1] == "True"


def test_installation_without_a_module_says_how_to_get_it(
    tmp_path: Path,
) -> None:
    message = error_of_import(tmp_path)

    assert f"no module in {tmp_path}. Install tfswitch-ps again" in message


def test_command_without_its_program_ends_with_the_remedy(
    tmp_path: Path,
) -> None:
    program = f"""
from pathlib import Path
import tfswitch_command
tfswitch_command._put_package()
from tfswitch.cli import programs
programs._FOLDER = Path({str(tmp_path)!r})
tfswitch_command.server()
"""
    result = run_python("-c", program, check=False)

    assert result.returncode == 1
    assert result.stderr.startswith("tfswitch-server: there is no program")
    assert "Traceback" not in result.stderr


def test_missing_op_library_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / NATIVE.name).touch()

    message = error_of_import(tmp_path)

    assert f"no op library in {tmp_path}" in message
    assert "Install tfswitch-ps again" in message


def test_ops_that_do_not_fit_their_tensorflow_say_so(tmp_path: Path) -> None:
    (tmp_path / NATIVE.name).touch()
    ops = tmp_path / Path(OPS).name
    build_library(
        ops,
        "void symbol_that_went_away();void user() { symbol_that_went_away(); }",
    )

    message = error_of_import(tmp_path)

    assert f"{ops} does not fit this TensorFlow {tf.__version__}" in message
    assert "symbol_that_went_away" in message


def test_build_info_tells_what_this_installation_has() -> None:
    info = tsw.build_info()

    assert info["version"] == tsw.__version__
    assert ".".join(tf.__version__.split(".")[:2]) in info["tensorflow"]
    assert "{}.{}".format(*sys.version_info) in info["python"]
    assert info["libraries"]["grpc"].startswith("1.")
    assert "rich" not in info["libraries"]  # pip lists Python packages.


# --- A C++ server linked to TensorFlow ---------------------------------------


def serve_program() -> Path:
    """The C++ program; it is there whenever the tests in C++ were built."""
    build = os.environ.get("TFSWITCH_BUILD_DIR")
    program = Path(build or ROOT / "build") / "tests/cc/ops/serve_saved_model"
    if build is None and not program.exists():
        pytest.skip(f"{program} is not built; scripts/test builds it")
    return program


SAVE_AND_SERVE = """
import json
import subprocess
import sys
import numpy as np
import tensorflow as tf
from tfswitch import _loader, _native

program, library, path, where = sys.argv[1:]
ops = _loader.load_ops()
if where == "remote":
    servers = [_native.Server("127.0.0.1:0", i, 2) for i in range(2)]
    address = "grpc://" + ",".join(server.address for server in servers)
else:
    address = "local://"
config = json.dumps({
    "name": "t", "dim": 4, "seed": 7, "initializer": {"uniform": {}}})


class Model(tf.Module):
    # A row is made from (seed, id) alone, so that embedded tables of two
    # processes read the same.
    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, name="ids")])
    def __call__(self, ids):
        table = ops.tfswitch_table_handle(
            cluster=address, config=config, shared_name="t")
        if where == "strings":
            ids = ops.tfswitch_hash_strings(tf.strings.as_string(ids), salt=1)
        return {"embeddings": ops.tfswitch_lookup_many(
            [table], [ids], dims=[4], insert_missing=True)[0]}


model = Model()
ids = np.array([3, -1, 3, 2**62])
if where == "remote":
    # Values that only the servers know.
    table = _native.Cluster(address, 60.0).open_table(config)
    table.assign(ids[1:], np.random.default_rng(0).random((3, 4), np.float32))
expected = model(ids)["embeddings"].numpy()
assert np.all(expected[0] == expected[2]) and np.all(expected != 0)
tf.saved_model.save(model, path, signatures=model.__call__)
served = subprocess.run(
    [program, library, path, *map(str, ids)],
    capture_output=True, text=True, timeout=200)
assert served.returncode == 0, served.stderr
np.testing.assert_array_equal(
    np.array(served.stdout.split(), np.float32).reshape(4, 4), expected)
print("done")
"""


@pytest.mark.parametrize("where", ["strings", "remote"])
def test_cpp_server_linked_to_tensorflow_answers_as_python_does(
    where: str, tmp_path: Path
) -> None:
    printed = run_python(
        "-c", SAVE_AND_SERVE, serve_program(), OPS, tmp_path, where
    ).stdout

    assert printed == "done\n"
