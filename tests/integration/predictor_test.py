"""tfswitch-serving, and the program of examples/serving_cc."""

import contextlib
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from pathlib import Path

import grpc
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_log_pb2,
    prediction_service_pb2_grpc,
)

import tfswitch as tsw
from tests.programs import ROOT, run_python
from tests.support import free_ports

# The command `tfswitch-serving`, whichever checkout it was installed from.
COMMAND = [
    sys.executable,
    "-c",
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
    "import tfswitch_command; tfswitch_command.serving()",
]
SOURCES = ROOT / "examples/serving_cc"
MODEL = "ranking"
MAX_MESSAGE_BYTES = 1 << 20
HANG_SECS = 60

ModelVersionStatus = get_model_status_pb2.ModelVersionStatus


def built(name: str) -> Path:
    """The path of a program of the build folder."""
    build = Path(os.environ.get("TFSWITCH_BUILD_DIR") or ROOT / "build")
    path = build / name
    assert path.exists(), f"run `ninja -C {build}` first"
    return path


def wait_until(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + HANG_SECS
    while not condition():
        assert time.monotonic() < give_up, f"it never came true that {what}"
        time.sleep(0.01)


# --- Models -------------------------------------------------------------------


class Ranking(tf.Module):
    """Scores pairs of ids; a version's scores begin at 100 times its number."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.weights = tf.Variable(np.linspace(0, 1, 97), dtype=tf.float32)

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 2], tf.int64, name="ids"),
            tf.TensorSpec([None, 3], tf.float32, name="dense"),
        ]
    )
    def __call__(self, ids, dense):
        known = tf.gather(self.weights, tf.math.floormod(ids, 97))
        score = tf.reduce_sum(known, 1) + tf.reduce_sum(dense, 1)
        return {
            "score": score + 100.0 * self.version,
            "pair": 2 * ids,
            "version": tf.zeros_like(ids[:, 0]) + self.version,
        }


def save(version: int, folder: Path, module: tf.Module | None = None) -> Path:
    """Saves a model under another name, then renames it to its version."""
    partial = folder / f"{version}.partial"
    module = module or Ranking(version)
    signatures = {"serving_default": module.__call__}
    tf.saved_model.save(module, str(partial), signatures)
    return partial.rename(folder / str(version))


def edit_graph(
    saved_model: Path, edit: Callable[[saved_model_pb2.SavedModel], None]
) -> None:
    path = saved_model / "saved_model.pb"
    model = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    edit(model)
    path.write_bytes(model.SerializeToString())


def use_an_unknown_op(model: saved_model_pb2.SavedModel) -> None:
    """As if later versions of the packages had exported the model."""
    model.meta_graphs[0].meta_info_def.tensorflow_version = "2.99.0"
    for function in model.meta_graphs[0].graph_def.library.function:
        for node in function.node_def:
            if node.op == "FloorMod":
                node.op = "Tfswitch>LookupOfTomorrow"


class ServedRows:
    """A table, and models of it that answer with the sums of rows.

    Attributes:
        table: Rows of one float.
        models: Folder of versions.
    """

    def __init__(self, folder: Path) -> None:
        self.table = tsw.EmbeddingTable("user", 1)
        self.models = folder / "models"
        self.models.mkdir()

    def save(self, version: int) -> Path:
        """Saves a version under another name, then renames it."""
        partial = self.models / f"{version}.partial"
        tsw.saved_model.save(
            lambda ids: {"score": tf.reduce_sum(self.table.lookup(ids), -1)},
            partial,
            inputs={"ids": tf.TensorSpec([None], tf.int64)},
        )
        return partial.rename(self.models / str(version))

    def set_all(self, value: float, num_rows: int = 64) -> None:
        self.table.assign(
            np.arange(num_rows), np.full((num_rows, 1), value, np.float32)
        )

    def export(self, version: int = 1) -> tsw.export.ExportReport:
        return tsw.export.delta(self.models / str(version))

    def exports(self, version: int = 1) -> Path:
        return self.models / str(version) / tsw.export._MODEL_ROWS


@pytest.fixture
def rows(embedded: tsw.Cluster, tmp_path: Path) -> ServedRows:
    """Rows in this process."""
    return ServedRows(tmp_path)


def damage(export: Path) -> None:
    """Changes a bit in the middle of the rows of an export."""
    (rows,) = export.glob("*.safetensors")
    content = bytearray(rows.read_bytes())
    content[len(content) // 2] ^= 1
    rows.write_bytes(content)


IDS = np.array([[1, -7], [2**62, 5], [40, 41]])
DENSE = np.array([[0.5, 0, 1], [0.25, 0.125, 3], [1, 2, 3]], np.float32)


@functools.cache
def scores(version: int) -> np.ndarray:
    return Ranking(version)(IDS, DENSE)["score"].numpy()


@pytest.fixture(scope="module")
def two_versions(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save(1, folder)
    save(2, folder)
    return folder


# --- predict_file -------------------------------------------------------------


PredictFile = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def predict_file() -> PredictFile:
    """Runs the program with a model, a file and flags."""

    def run(model: Path, input_file: Path, *flags: str):
        return subprocess.run(
            [
                str(built("examples/serving_cc/predict_file")),
                f"--model={model}",
                f"--input={input_file}",
                *flags,
            ],
            capture_output=True,
            text=True,
            timeout=HANG_SECS,
        )

    return run


def write_csv(path: Path, ids=IDS, dense=DENSE) -> Path:
    rows = [
        f'"{i}",{"|".join(map(str, a))},{"|".join(map(repr, map(float, b)))}'
        for i, (a, b) in enumerate(zip(ids, dense, strict=True))
    ]
    path.write_text("\r\n".join(["label,ids,dense", *rows]) + "\r\n")
    return path


def example(**features: tf.train.Feature) -> bytes:
    feature = tf.train.Features(feature=features)
    return tf.train.Example(features=feature).SerializeToString()


def integers(values) -> tf.train.Feature:
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def floats(values) -> tf.train.Feature:
    return tf.train.Feature(float_list=tf.train.FloatList(value=values))


def write_records(path: Path, *records: bytes) -> Path:
    compression = "GZIP" if path.suffix == ".gz" else ""
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for record in records:
            writer.write(record)
    return path


def good_record(ids=IDS[0], dense=DENSE[0], **more) -> bytes:
    return example(ids=integers(ids), dense=floats(dense), **more)


def column(text: str, name: str) -> list[str]:
    header, *lines = (line.split(",") for line in text.splitlines())
    return [line[header.index(name)] for line in lines]


@pytest.mark.parametrize(
    ("kind", "batch_size"), [("csv", 2), ("tfrecord", 1), ("tfrecord.gz", 256)]
)
def test_predict_file_gives_what_the_model_gives(
    kind: str,
    batch_size: int,
    predict_file: PredictFile,
    two_versions: Path,
    tmp_path,
) -> None:
    path = tmp_path / f"in.{kind}"
    if kind == "csv":
        write_csv(path)
    else:
        rows = zip(IDS, DENSE, strict=True)
        write_records(path, *(good_record(*row) for row in rows))

    result = predict_file(two_versions, path, f"--batch_size={batch_size}")

    assert result.returncode == 0, result.stderr
    score = np.array(column(result.stdout, "score"), np.float32)
    np.testing.assert_allclose(score, scores(2), rtol=1e-6)
    pairs = [cell.split("|") for cell in column(result.stdout, "pair")]
    np.testing.assert_array_equal(np.array(pairs, int), 2 * IDS)


def test_predict_file_writes_chosen_outputs_of_a_version_to_a_file(
    predict_file: PredictFile, two_versions: Path, tmp_path: Path
) -> None:
    result = predict_file(
        two_versions,
        write_csv(tmp_path / "in.csv"),
        f"--output={tmp_path / 'out.csv'}",
        "--output_name=version",
        "--version=1",
    )

    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out.csv").read_text() == "version\n1\n1\n1\n"
    assert sorted(os.listdir(tmp_path)) == ["in.csv", "out.csv"]


def test_predict_file_takes_rows_of_any_length_and_strings(
    predict_file: PredictFile, tmp_path: Path
) -> None:
    class Bag(tf.Module):
        @tf.function(
            input_signature=[
                tf.TensorSpec([None, None], tf.int32, name="ids"),
                tf.TensorSpec([None], tf.string, name="name"),
            ]
        )
        def __call__(self, ids, name):
            return {"sum": tf.reduce_sum(ids, 1), "name": name + "!"}

    save(1, tmp_path, Bag())
    path = tmp_path / "in.csv"
    path.write_text('ids,name\n1|2,a\n3|4,"b,""c"""\n5,d|e\n,f\n')

    result = predict_file(tmp_path, path)

    assert result.returncode == 0, result.stderr
    assert result.stdout == 'name,sum\na!,3\n"b,""c""!",7\nd|e!,5\nf!,0\n'


# By name: the bytes of a map's entries come in any order.
BAD_FILES = {
    "no column": (
        "ids;dense\n",
        "no column 'dense' for an input of that name, float [?,3]; it has: "
        "ids;dense",
    ),
    "no header": ("", "it has no header"),
    "no number": (
        "ids,dense\n1|2,1|2|3\n1|x,1|2|3\n",
        "record 2: input 'ids': 'x' is not a value of int64 [?,2]",
    ),
    "short cell": (
        "ids,dense\n1|2,1|2\n",
        "record 1: column 'dense': 2 values are not a row of float [?,3]",
    ),
    "short line": (
        "ids,dense\n1|2\n",
        "record 1: it has 1 cells, and the header 2",
    ),
    "open quote": ('ids,dense\n"1|2,1\n', "a quote is not closed"),
    "not an example": (
        [good_record(), b"\xff\xff"],
        "record 2: it is not a tf.train.Example",
    ),
    "missing feature": (
        [good_record(), example(ids=integers([1, 2]))],
        "record 2: no feature 'dense'; it has: ids",
    ),
    "short row": (
        [good_record(dense=[1.0])],
        "record 1: feature 'dense': 1 values are not a row of float [?,3]",
    ),
    "list of another type": (
        [example(ids=floats([1, 2]), dense=floats([1, 2, 3]))],
        "record 1: feature 'ids': the input takes int64 [?,2], and this is "
        "another list",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file_is_refused_with_its_record_and_leaves_no_other(
    name: str, predict_file: PredictFile, two_versions: Path, tmp_path: Path
) -> None:
    content, reason = BAD_FILES[name]
    if isinstance(content, str):
        path = tmp_path / "in.csv"
        path.write_text(content)
    else:
        path = write_records(tmp_path / "in.tfrecord", *content)

    result = predict_file(
        two_versions, path, f"--output={tmp_path / 'out.csv'}"
    )

    assert result.returncode == 1
    assert f"'{path}'" in result.stderr
    assert reason in result.stderr
    assert os.listdir(tmp_path) == [path.name]


def test_model_of_another_version_is_refused_with_the_remedy(
    predict_file: PredictFile, tmp_path: Path
) -> None:
    folder = save(1, tmp_path)
    edit_graph(folder, use_an_unknown_op)

    result = predict_file(tmp_path, write_csv(tmp_path / "in.csv"))

    assert result.returncode == 1
    for text in (
        f"the model in '{folder}': this process does not have its ops "
        "Tfswitch>LookupOfTomorrow",
        "Load the op library of the package that exported it",
        f"exported with TensorFlow 2.99.0, and this is {tf.__version__}",
    ):
        assert text in result.stderr


def test_a_signature_that_names_what_the_graph_lacks_is_refused(
    predict_file: PredictFile, tmp_path: Path
) -> None:
    def edit(model: saved_model_pb2.SavedModel) -> None:
        signature = model.meta_graphs[0].signature_def["serving_default"]
        signature.outputs["score"].name = "nowhere:0"

    edit_graph(save(1, tmp_path), edit)

    result = predict_file(tmp_path, write_csv(tmp_path / "in.csv"))

    assert result.returncode == 1
    assert "'score' is 'nowhere:0', which the graph does not" in result.stderr


@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_one_of_several_parts_is_no_dense_tensor(
    kind: str, predict_file: PredictFile, tmp_path: Path
) -> None:
    def edit(model: saved_model_pb2.SavedModel) -> None:
        signature = model.meta_graphs[0].signature_def["serving_default"]
        getattr(signature, kind)["x"].coo_sparse.values_tensor_name = "x:0"
        signature.defaults["x"].CopyFrom(tf.make_tensor_proto(1.0))

    edit_graph(save(1, tmp_path), edit)

    result = predict_file(tmp_path, write_csv(tmp_path / "in.csv"))

    assert result.returncode == 1
    assert f"{kind[:-1]} 'x' is not one dense tensor" in result.stderr


def test_a_model_as_text_that_cannot_be_loaded_names_the_versions(
    predict_file: PredictFile, tmp_path: Path
) -> None:
    folder = save(1, tmp_path)
    model = saved_model_pb2.SavedModel.FromString(
        (folder / "saved_model.pb").read_bytes()
    )
    (folder / "saved_model.pb").unlink()
    path = folder / "saved_model.pbtxt"
    path.write_text(text_format.MessageToString(model))
    csv = write_csv(tmp_path / "in.csv")
    assert predict_file(tmp_path, csv).returncode == 0

    path.write_text("from_another_version: 1")
    result = predict_file(tmp_path, csv)

    assert result.returncode == 1
    assert f"This is TensorFlow {tf.__version__}" in result.stderr


def test_op_library_of_another_build_is_refused_with_the_remedy(
    predict_file: PredictFile, two_versions: Path, tmp_path: Path
) -> None:
    library = tmp_path / "libtfswitch_ops.so"
    library.write_bytes(b"not a library")

    result = predict_file(
        two_versions,
        write_csv(tmp_path / "in.csv"),
        f"--op_library={library}",
    )

    assert result.returncode == 1
    assert f"cannot load the op library '{library}'" in result.stderr
    assert f"built for TensorFlow {tf.__version__}" in result.stderr


def symbols(file: Path, which: str) -> dict[str, str]:
    """Dynamic symbols and their versions, "" for none."""
    command = ["nm", "-D", f"--{which}-only", str(file)]
    listed = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    names = (line.split()[-1] for line in listed.decode().splitlines())
    return {
        name: version for name, _, version in (n.partition("@") for n in names)
    }


def test_one_binary_for_all_tensorflows_takes_only_the_c_api_from_one() -> None:
    of_tensorflow: set[str] = set()
    for name in ("libtensorflow_cc.so.2", "libtensorflow_framework.so.2"):
        path = Path(tf.sysconfig.get_lib()) / name
        of_tensorflow |= symbols(path, "defined").keys()
    package = Path(tsw.__file__).parent
    library = package / "libtfswitch_predictor.so"

    for file in (library, package / "bin/tfswitch-serving"):
        needed = symbols(file, "undefined")
        # A function of the C++ library, of which TensorFlow has copies, has the
        # version of that library.
        taken = {
            name
            for name, version in needed.items()
            if name in of_tensorflow
            and not version.startswith(("GLIBC", "CXXABI", "GCC"))
        }
        assert {name for name in taken if not name.startswith("TF_")} == set()
        assert not [n for n in needed if "protobuf" in n or "tensorflow" in n]
        assert ("TF_SessionRun" in taken) == (file == library)
    exported = symbols(library, "defined")
    # A program that was built with another minor version does not load it.
    node = "TFSWITCH_" + ".".join(tsw.__version__.split(".")[:2])
    exported.pop(node, None)
    assert "_ZN8tfswitch9Predictor4LoadERKNS_16PredictorOptionsE" in exported
    assert all(re.match("_ZNK?8tfswitch", name) for name in exported)
    assert set(exported.values()) == {f"@{node}"}


def test_cmake_finds_the_c_api_without_tensorflow(tmp_path: Path) -> None:
    found = run_python("-m", "tfswitch", "cmake-dir").stdout.strip()
    package = shutil.copytree(
        found, tmp_path / "tfswitch", ignore=shutil.ignore_patterns("*.so")
    )
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.22)\n"
        "project(p LANGUAGES CXX)\n"
        "find_package(tfswitch CONFIG ${OPTIONS})\n"
        "if(NOT TARGET tfswitch::capi OR TARGET tfswitch::predictor)\n"
        '  message(FATAL_ERROR "targets")\n'
        "endif()\n"
        'message("found=${tfswitch_FOUND} core=${tfswitch_CORE_LIBRARY}")\n'
    )

    def configure(options: str) -> str:
        result = subprocess.run(
            [
                *("cmake", "-S", ".", "-B", "build"),
                f"-DCMAKE_PREFIX_PATH={package}",
                f"-DPython_EXECUTABLE={python}",
                f"-DOPTIONS={options}",
            ],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=4 * HANG_SECS,
        )
        assert result.returncode == 0, result.stdout
        return result.stdout

    core = f"core={package}/libtfswitch_core.so"
    assert f"found=1 {core}" in configure("REQUIRED;COMPONENTS;capi")
    without = configure("")
    assert f"found=0 {core}" in without
    assert "there is no libtensorflow_cc.so.2 in" in without


def test_cpp_tests_of_the_predictor_pass(
    two_versions: Path, rows: ServedRows
) -> None:
    rows.table.assign([3, 5], [[3.0], [5.0]])
    rows.save(1)
    rows.table.assign([3, 5], [[6.0], [10.0]])
    assert rows.export().number == 2

    result = subprocess.run(
        [str(built("tests/cc/predictor/predictor_test"))],
        env={
            **os.environ,
            "TFSWITCH_TEST_MODELS": str(two_versions),
            "TFSWITCH_TEST_ROWS": str(rows.models),
            "TFSWITCH_TEST_OP_LIBRARY": str(tsw.ops.library_path()),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=5 * HANG_SECS,
    )

    assert result.returncode == 0, result.stdout


def test_the_example_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [ROOT / "docs/tfswitch_serving.md", SOURCES / "README.md"]
    blocks = {}
    for page in pages:
        text = page.read_text(encoding="utf-8")
        blocks |= dict(re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S))
    commands = blocks["bash"].replace(
        "build/serving_cc", str(built("examples/serving_cc"))
    )
    monkeypatch.chdir(tmp_path)
    exec(blocks["python"], {"__name__": "example"})

    result = subprocess.run(
        ["bash", "-e", "-c", commands.split("\n\n")[0]],
        capture_output=True,
        text=True,
        timeout=HANG_SECS,
    )

    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"score\n[\d.]+\n[\d.]+\n", result.stdout)


# --- The server ---------------------------------------------------------------


class PredictionServer:
    """A running tfswitch-serving, and a client of it.

    Args:
        folder: For what the server writes to stderr.
        model_dir: Folder of versions.
        flags: More of them.
        wait: Whether to wait until a model serves.
        credentials: The client's credentials. None means plaintext.
        variables: Further variables of the server's environment.
    """

    def __init__(
        self,
        folder: Path,
        model_dir: Path,
        *flags: str,
        wait: bool = True,
        credentials: grpc.ChannelCredentials | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._log_path = folder / f"server-{time.monotonic_ns()}.log"
        with self._log_path.open("w") as log:
            self.process = subprocess.Popen(
                [
                    *COMMAND,
                    f"--model_dir={model_dir}",
                    f"--model_name={MODEL}",
                    "--address=127.0.0.1:0",
                    "--poll_secs=0.05",
                    *flags,
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                env={
                    **os.environ,
                    "TF_CPP_MIN_LOG_LEVEL": "3",  # It is for TensorFlow.
                    **(variables or {}),
                },
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("listening on "), line + self.log()
        self.address = line.split()[-1]
        self.channel = (
            grpc.insecure_channel(self.address)
            if credentials is None
            else grpc.secure_channel(self.address, credentials)
        )
        self.stub = prediction_service_pb2_grpc.PredictionServiceStub(
            self.channel
        )
        if wait:
            wait_until(self.is_serving, f"the server serves: {self.log()}")

    def log(self) -> str:
        return self._log_path.read_text()

    def health(self) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        request = health_pb2.HealthCheckRequest()
        return stub.Check(request, timeout=HANG_SECS).status

    def is_serving(self) -> bool:
        assert self.process.poll() is None, self.log()
        return self.health() == health_pb2.HealthCheckResponse.SERVING

    def states(self) -> dict[int, tuple[int, str]]:
        """State and error of each version."""
        request = get_model_status_pb2.GetModelStatusRequest()
        request.model_spec.name = MODEL
        stub = model_service_pb2_grpc.ModelServiceStub(self.channel)
        answer = stub.GetModelStatus(request, timeout=HANG_SECS)
        return {
            status.version: (status.state, status.status.error_message)
            for status in answer.model_version_status
        }

    def wait_for(self, version: int, state: int) -> str:
        """Waits for a version's state and returns its error."""
        wait_until(
            lambda: self.states().get(version, (0, ""))[0] == state,
            f"version {version} is in state {state}: {self.log()[-2000:]}",
        )
        return self.states()[version][1]

    def predict(
        self, request: predict_pb2.PredictRequest
    ) -> predict_pb2.PredictResponse:
        return self.stub.Predict(request, timeout=HANG_SECS)

    def check(self) -> int:
        """Predicts, checks the answer and returns its version."""
        response = self.predict(request())
        version = response.model_spec.version.value
        np.testing.assert_allclose(
            tf.make_ndarray(response.outputs["score"]),
            scores(version),
            rtol=1e-6,
        )
        return version

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(HANG_SECS)

    def __enter__(self) -> "PredictionServer":
        return self

    def __exit__(self, *exception) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait(HANG_SECS)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def server(two_versions: Path, tmp_path_factory) -> Iterator[PredictionServer]:
    """A server of version 2, for tests that leave it as it is."""
    with PredictionServer(
        tmp_path_factory.mktemp("server"),
        two_versions,
        f"--max_message_bytes={MAX_MESSAGE_BYTES}",
    ) as server:
        yield server


StartServer = Callable[..., PredictionServer]


@pytest.fixture
def start(tmp_path: Path) -> StartServer:
    """Starts a server of the models of a folder, with flags."""
    return functools.partial(PredictionServer, tmp_path)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder for versions."""
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def request(**inputs) -> predict_pb2.PredictRequest:
    """A good request, with other inputs if there are any."""
    message = predict_pb2.PredictRequest()
    message.model_spec.name = MODEL
    for name, value in (inputs or {"ids": IDS, "dense": DENSE}).items():
        message.inputs[name].CopyFrom(tf.make_tensor_proto(value))
    return message


def test_a_client_of_tensorflow_serving_gets_scores(server) -> None:
    response = server.predict(request())

    assert response.model_spec.name == MODEL
    assert response.model_spec.version.value == 2
    assert response.model_spec.signature_name == "serving_default"
    assert set(response.outputs) == {"score", "pair", "version"}
    # Some clients read the field of the type and not tensor_content.
    np.testing.assert_allclose(
        response.outputs["score"].float_val, scores(2), rtol=1e-6
    )
    np.testing.assert_array_equal(
        tf.make_ndarray(response.outputs["pair"]), 2 * IDS
    )


def test_version_signature_and_outputs_can_be_chosen(server) -> None:
    chosen = request()
    chosen.model_spec.version.value = 2
    chosen.model_spec.signature_name = "serving_default"
    chosen.output_filter.append("version")

    response = server.predict(chosen)

    assert list(response.outputs) == ["version"]


def test_an_input_with_a_default_may_be_left_out(
    start: StartServer, models: Path
) -> None:
    def edit(model: saved_model_pb2.SavedModel) -> None:
        signature = model.meta_graphs[0].signature_def["serving_default"]
        signature.defaults["dense"].CopyFrom(tf.make_tensor_proto(DENSE))

    edit_graph(save(1, models), edit)
    with start(models) as server:
        response = server.predict(request(ids=IDS))

    np.testing.assert_allclose(
        tf.make_ndarray(response.outputs["score"]), scores(1), rtol=1e-6
    )


def test_metadata_has_the_signature(server) -> None:
    asked = get_model_metadata_pb2.GetModelMetadataRequest()
    asked.model_spec.name = MODEL
    asked.metadata_field.append("signature_def")

    answer = server.stub.GetModelMetadata(asked, timeout=HANG_SECS)

    signatures = get_model_metadata_pb2.SignatureDefMap()
    assert answer.metadata["signature_def"].Unpack(signatures)
    inputs = signatures.signature_def["serving_default"].inputs
    assert inputs["ids"].dtype == tf.int64.as_datatype_enum
    assert answer.model_spec.version.value == 2
    asked.metadata_field[:] = ["graph"]
    with pytest.raises(grpc.RpcError, match="metadata_field 'graph'"):
        server.stub.GetModelMetadata(asked, timeout=HANG_SECS)


def test_the_client_in_python_prints_signature_and_scores(server) -> None:
    client = (SOURCES / "client.py", server.address, MODEL)

    assert "DT_INT64" in run_python(*client).stdout
    asked = run_python(*client, "ids=[[1, 2]]", "dense=[[0, 0, 0]]")
    assert asked.stdout.startswith("version 2\npair: [[2, 4]]\nscore: [200.0")
    refused = run_python(*client, "user=[1]", check=False)
    assert "INVALID_ARGUMENT: no input 'user'" in refused.stderr


# Fields of a good request that are made bad, the code and a part of the text.
def _change(**fields) -> Callable[[predict_pb2.PredictRequest], None]:
    """Sets fields of the tensor "ids"."""

    def change(request) -> None:
        tensor = request.inputs["ids"]
        for name, value in fields.items():
            if name == "dims":
                tensor.tensor_shape.ClearField("dim")
                for size in value:
                    tensor.tensor_shape.dim.add(size=size)
            elif name == "unknown_rank":
                tensor.tensor_shape.unknown_rank = value
            elif name == "int64_val":
                tensor.ClearField("tensor_content")
                tensor.int64_val[:] = value
            else:
                setattr(tensor, name, value)

    return change


def _spec(**fields) -> Callable[[predict_pb2.PredictRequest], None]:
    def change(request) -> None:
        for name, value in fields.items():
            if name == "version":
                request.model_spec.version.value = value
            else:
                setattr(request.model_spec, name, value)

    return change


def _input(name: str, value) -> Callable[[predict_pb2.PredictRequest], None]:
    return lambda request: request.inputs[name].CopyFrom(
        tf.make_tensor_proto(value)
    )


SIGNATURE = "'dense': float [?,3], 'ids': int64 [?,2]"
NOT_FOUND = {
    "model": (
        _spec(name="rank"),
        f"no model 'rank'; it has: '{MODEL}'",
    ),
    "version": (_spec(version=1), "version 1 is not served; version 2 is"),
    "label": (_spec(version_label="stable"), "no version is labelled 'stable'"),
    "signature": (
        _spec(signature_name="classify"),
        "no signature 'classify'; the signatures are ",
    ),
}
INVALID = {
    "output": (
        lambda request: request.output_filter.append("rank"),
        "no output 'rank'; the outputs are 'pair': int64 [?,2], ",
    ),
    "unknown input": (
        _input("user", [1]),
        f"no input 'user'; the inputs are {SIGNATURE}",
    ),
    "missing input": (
        lambda request: request.inputs.pop("ids"),
        f"input 'ids' is missing; the inputs are {SIGNATURE}",
    ),
    "dtype": (
        _input("ids", np.float32(IDS)),
        "input 'ids': expected int64 [?,2], got float [3,2]",
    ),
    "shape": (
        _input("ids", IDS[0]),
        "input 'ids': expected int64 [?,2], got int64 [2]",
    ),
    "batch": (
        _input("ids", IDS[:2]),
        "",  # An op of the graph refuses it.
    ),
    "truncated content": (
        _change(tensor_content=IDS.tobytes()[:-1]),
        "input 'ids': tensor_content has 47 bytes, and DT_INT64 of shape "
        "[3,2] takes 48",
    ),
    "too many values": (
        _change(int64_val=range(7)),
        "input 'ids': it has 7 values, and DT_INT64 of shape [3,2] holds 6",
    ),
    "no rank": (
        _change(unknown_rank=True),
        "input 'ids': its shape has no rank",
    ),
    "larger than the limit": (
        _change(dims=[2**40, 2], int64_val=[1]),
        f"is larger than the {MAX_MESSAGE_BYTES} bytes",
    ),
    "no type": (
        _change(dtype=0),
        "tensor 'ids': this server sends and takes numbers, booleans and "
        "strings, and not DT_INVALID",
    ),
    "unknown type": (_change(dtype=777), "and not type 777"),
    "strings that are none": (
        _change(dtype=7, tensor_content=b"\xff\xff\xff\xff\xff\xff"),
        "input 'ids': tensor_content is not DT_STRING of shape [3,2]",
    ),
    "a string that is repeated": (
        lambda request: request.inputs["ids"].CopyFrom(
            tf.make_tensor_proto("x" * 100_000, shape=[1000])
        ),
        "input 'ids': its strings are longer than the ",
    ),
}


@pytest.mark.parametrize("case", NOT_FOUND | INVALID)
def test_bad_request_is_refused_by_name(case: str, server) -> None:
    make_bad, text = (NOT_FOUND | INVALID)[case]
    code = "NOT_FOUND" if case in NOT_FOUND else "INVALID_ARGUMENT"
    bad = request()
    make_bad(bad)

    with pytest.raises(grpc.RpcError) as refused:
        server.predict(bad)

    assert refused.value.code().name == code, refused.value.details()
    assert text in refused.value.details()
    assert server.check() == 2


@pytest.mark.parametrize(
    ("message", "code", "text"),
    [
        (
            b"\xff\xff\xff",
            grpc.StatusCode.INVALID_ARGUMENT,
            "not a tensorflow.serving.PredictRequest",
        ),
        (
            b"\0" * (MAX_MESSAGE_BYTES + 1),
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"larger than max ({MAX_MESSAGE_BYTES + 1} vs. {MAX_MESSAGE_BYTES}",
        ),
    ],
    ids=["garbage", "too large"],
)
def test_bytes_that_are_no_request_are_refused(
    message: bytes, code: grpc.StatusCode, text: str, server
) -> None:
    method = "/tensorflow.serving.PredictionService/Predict"
    call = server.channel.unary_unary(method)

    with pytest.raises(grpc.RpcError) as refused:
        call(message, timeout=HANG_SECS)

    assert refused.value.code() == code
    assert text in refused.value.details()
    assert server.check() == 2


TYPES = [
    *(tf.bfloat16, tf.bool, tf.complex64, tf.complex128, tf.float16),
    *(tf.float32, tf.float64, tf.int8, tf.int16, tf.int32, tf.int64),
    *(tf.string, tf.uint8, tf.uint16, tf.uint32, tf.uint64),
]


@pytest.fixture(scope="module")
def echo(tmp_path_factory) -> Iterator[PredictionServer]:
    """A server that answers each input, named for its type, with itself."""

    class Echo(tf.Module):
        @tf.function(
            input_signature=[
                tf.TensorSpec([None, 2], dtype, name=dtype.name)
                for dtype in TYPES
            ]
        )
        def __call__(self, *inputs):
            return {
                f"{dtype.name}_out": tf.identity(value)
                for dtype, value in zip(TYPES, inputs, strict=True)
            }

    folder = tmp_path_factory.mktemp("echo")
    save(1, folder, Echo())
    with PredictionServer(folder, folder) as server:
        yield server


def _in_field(dtype: tf.DType, values: list) -> object:
    """A tensor whose values are in the field of its type."""
    full = tf.make_tensor_proto(values[:1], dtype, [1])  # One goes there.
    for value in values[1:]:
        full.MergeFrom(tf.make_tensor_proto([value], dtype, [1]))
    return full


@pytest.mark.parametrize("how", ["content", "field", "one repeated", "none"])
def test_all_types_travel(how: str, echo) -> None:
    message = predict_pb2.PredictRequest()
    message.model_spec.name = MODEL
    expected = {}
    for dtype in TYPES:
        if dtype == tf.string:
            values = [b"", b"a\0b", b"c", b"d"]
        elif dtype == tf.bool:
            values = [True, False, False, True]
        else:
            values = [3, 0, 1, 2]
        if how == "one repeated":
            values = values[1:2] * 4
        elif how == "none":
            zero = {tf.string: b"", tf.bool: False}.get(dtype, 0)
            values = [zero] * 4
        expected[dtype] = np.array(values, dtype.as_numpy_dtype).reshape(2, 2)
        if how == "content":
            tensor = tf.make_tensor_proto(expected[dtype], dtype)
        else:
            given = {"field": 4, "one repeated": 1, "none": 1}[how]
            tensor = _in_field(dtype, values[:given])
            if how == "none":
                tensor = type(tensor)(dtype=tensor.dtype)
            tensor.tensor_shape.ClearField("dim")
            for size in (2, 2):
                tensor.tensor_shape.dim.add(size=size)
        message.inputs[dtype.name].CopyFrom(tensor)

    response = echo.predict(message)

    for dtype in TYPES:
        answered = tf.make_ndarray(response.outputs[f"{dtype.name}_out"])
        np.testing.assert_array_equal(answered, expected[dtype], dtype.name)


def test_empty_batch_gives_empty_scores(server) -> None:
    response = server.predict(request(ids=IDS[:0], dense=DENSE[:0]))

    assert tf.make_ndarray(response.outputs["score"]).shape == (0,)


# --- Starting, swapping, stopping ---------------------------------------------


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--model_dir="], "give --model_dir"),
        (["--token=secret"], "unknown argument '--token';"),
        (["--max_requests=0"], "must be positive"),
        (["--watch_rows_secs=-1"], "must not be negative"),
        (
            ["--address=256.0.0.1:1", "--insecure"],
            "cannot listen on 256.0.0.1:1",
        ),
        (["--model_dir=/nowhere"], "cannot look for versions in '/nowhere'"),
        (["--version=7"], "version 7 is not in"),
    ],
)
def test_server_that_cannot_serve_says_why_and_exits(
    flags: list[str], text: str, two_versions: Path
) -> None:
    result = subprocess.run(
        [
            *COMMAND,
            f"--model_dir={two_versions}",
            "--address=127.0.0.1:0",
            *flags,
        ],
        capture_output=True,
        text=True,
        timeout=HANG_SECS,
    )

    assert result.returncode in (1, 2)
    assert text in result.stderr


class Gated(tf.Module):
    """Says in a file that it runs, then waits for another file."""

    def __init__(self, version: int, started: str = "", gate: str = "") -> None:
        self.version = version
        self.files = [started, gate]

    @tf.function(
        input_signature=[
            tf.TensorSpec([], tf.string, name="started"),
            tf.TensorSpec([], tf.string, name="gate"),
        ]
    )
    def __call__(self, started, gate):
        if self.files[0]:  # The inputs do not count.
            started, gate = (tf.constant(path) for path in self.files)

        def is_closed(round_number):
            # With the round in it, or it would be looked for only once.
            name = tf.strings.join(
                [gate, tf.strings.substr(tf.as_string(round_number), 0, 0)]
            )
            return tf.equal(tf.size(tf.io.matching_files(name)), 0)

        def run():
            with tf.control_dependencies([tf.io.write_file(started, "")]):
                return tf.while_loop(
                    is_closed, lambda i: i + 1, [tf.constant(0)]
                )[0]

        rounds = tf.cond(tf.strings.length(started) > 0, run, lambda: 0)
        with tf.control_dependencies([rounds]):
            return {"version": tf.constant([self.version], tf.int64)}


@contextlib.contextmanager
def under_way(
    server: PredictionServer, folder: Path
) -> Iterator["futures.Future[predict_pb2.PredictResponse]"]:
    """A request of a gated model, which runs until the end of the block."""
    started, gate = folder / "started", folder / "gate"
    with futures.ThreadPoolExecutor(1) as pool:
        message = request(started=str(started), gate=str(gate))
        future = pool.submit(server.predict, message)
        try:
            wait_until(started.exists, "the request runs")
            yield future
        finally:
            gate.touch()


def test_versions_are_swapped_under_load(
    start: StartServer, models: Path, tmp_path: Path
) -> None:
    save(1, models)
    stop = threading.Event()
    with (
        start(models) as server,
        futures.ThreadPoolExecutor(2) as pool,
    ):

        def predict_all_the_time() -> list[int]:
            versions = [server.check()]
            while not stop.is_set():
                versions.append(server.check())
            return versions

        clients = [pool.submit(predict_all_the_time) for _ in range(2)]
        try:
            save(2, models)
            server.wait_for(2, ModelVersionStatus.AVAILABLE)

            broken = models / "3.partial"
            save(3, tmp_path).rename(broken)
            edit_graph(broken, use_an_unknown_op)
            broken.rename(models / "3")
            error = server.wait_for(3, ModelVersionStatus.END)
            assert "Tfswitch>LookupOfTomorrow" in error
            assert set(server.states()) == {2, 3}

            # Neither is a version: one is not complete, one is named so.
            save(5, tmp_path).rename(models / "5.copy")
            (save(6, tmp_path) / "saved_model.pb").unlink()
            (tmp_path / "6").rename(models / "6")
            save(4, models)
            server.wait_for(4, ModelVersionStatus.AVAILABLE)
            assert set(server.states()) == {3, 4}

            # Roll back: the newest that is there and can be loaded.
            (models / "4").rename(models / "4.bad")
            server.wait_for(2, ModelVersionStatus.AVAILABLE)

            # A refused version is tried again when it changes.
            repaired = save(3, tmp_path) / "saved_model.pb"
            repaired.replace(models / "3/saved_model.pb")
            server.wait_for(3, ModelVersionStatus.AVAILABLE)
            assert set(server.states()) == {3}
        finally:
            stop.set()

        for client in clients:
            changes = [
                v for v, _ in itertools.groupby(client.result(HANG_SECS))
            ]
            # A slow client may miss one.
            served = iter([1, 2, 4, 2, 3])
            assert all(version in served for version in changes), changes
        assert server.stop() == 0


def test_a_version_whose_file_is_a_folder_is_refused(
    start: StartServer, models: Path
) -> None:
    save(1, models)
    with start(models) as server:
        (models / "2/saved_model.pb").mkdir(parents=True)

        error = server.wait_for(2, ModelVersionStatus.END)

        assert str(models / "2") in error
        assert server.check() == 1
        assert server.stop() == 0
        events = re.findall(r"Z (\w+ \w+) ", server.log())
        assert (events[0], events[-1]) == ("info started", "info stopped")
        assert set(events[1:-1]) == {
            "info version_served",
            "error version_refused",
        }


def test_a_request_under_way_ends_on_the_version_it_began_on(
    start: StartServer, tmp_path: Path
) -> None:
    save(1, tmp_path, Gated(1))
    with start(tmp_path) as server:
        with under_way(server, tmp_path) as old:
            save(2, tmp_path, Gated(2))
            server.wait_for(2, ModelVersionStatus.AVAILABLE)
            new = server.predict(request(started="", gate=""))
            assert not old.done()

        assert new.outputs["version"].int64_val == [2]
        assert old.result(HANG_SECS).outputs["version"].int64_val == [1]
        assert old.result().model_spec.version.value == 1


def test_a_signal_lets_requests_under_way_end(
    start: StartServer, tmp_path: Path
) -> None:
    save(1, tmp_path, Gated(1))
    with start(tmp_path, f"--grace_secs={HANG_SECS}") as server:
        with under_way(server, tmp_path) as running:
            server.process.send_signal(signal.SIGINT)

            def refuses() -> bool:
                with grpc.insecure_channel(server.address) as channel:
                    stub = prediction_service_pb2_grpc.PredictionServiceStub(
                        channel
                    )
                    try:
                        stub.Predict(
                            request(started="", gate=""), timeout=HANG_SECS
                        )
                    except grpc.RpcError as error:
                        return error.code() == grpc.StatusCode.UNAVAILABLE
                return False

            wait_until(refuses, "new requests are refused")
            assert not running.done()

        assert running.result(HANG_SECS).outputs["version"].int64_val == [1]
        assert server.process.wait(HANG_SECS) == 0


def test_requests_longer_than_the_grace_are_cancelled(
    start: StartServer, tmp_path: Path
) -> None:
    save(1, tmp_path, Gated(1))
    with start(tmp_path, "--grace_secs=0") as server:
        with under_way(server, tmp_path) as running:
            server.process.send_signal(signal.SIGTERM)

            with pytest.raises(grpc.RpcError):
                running.result(HANG_SECS)

        assert server.process.wait(HANG_SECS) == 0


def test_a_server_killed_in_the_middle_of_a_swap_serves_after_a_restart(
    start: StartServer, models: Path, tmp_path: Path
) -> None:
    started, gate = tmp_path / "started", tmp_path / "gate"
    save(1, models, Gated(1))
    idle = request(started="", gate="")
    with start(models) as server:
        # Its warm-up does not end.
        save(2, models, Gated(2, str(started), str(gate)))
        server.wait_for(2, ModelVersionStatus.LOADING)
        wait_until(started.exists, "version 2 is warmed up")
        assert server.predict(idle).outputs["version"].int64_val == [1]
        server.process.kill()
        server.process.wait(HANG_SECS)

    with start(models, wait=False) as server:
        assert server.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as loading:
            server.predict(idle)
        assert loading.value.code() == grpc.StatusCode.UNAVAILABLE
        assert f"'{MODEL}' is being loaded" in loading.value.details()
        gate.touch()
        wait_until(server.is_serving, "the server serves")

        assert server.predict(idle).outputs["version"].int64_val == [2]


def test_a_signal_ends_a_server_that_is_loading(
    start: StartServer, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    save(1, tmp_path, Gated(1, str(started), str(tmp_path / "gate")))
    with start(tmp_path, wait=False) as server:
        wait_until(started.exists, "version 1 is warmed up")

        assert server.stop() == 0


def test_more_requests_than_allowed_are_refused_and_health_is_not(
    start: StartServer, tmp_path: Path
) -> None:
    save(1, tmp_path, Gated(1))
    with start(tmp_path, "--max_requests=1") as server:
        idle = request(started="", gate="")
        with under_way(server, tmp_path) as running:
            with pytest.raises(grpc.RpcError) as refused:
                server.predict(idle)

            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert server.is_serving()

        assert running.result(HANG_SECS).outputs["version"].int64_val == [1]

        def is_answered() -> bool:
            try:
                return bool(server.predict(idle))
            except grpc.RpcError:  # The other's answer overtook its end.
                return False

        wait_until(is_answered, "the next request is answered")
        assert server.predict(idle).outputs["version"].int64_val == [1]


def test_a_deadline_ends_a_request(start: StartServer, tmp_path: Path) -> None:
    save(1, tmp_path, Gated(1))
    with start(tmp_path) as server:
        message = request(
            started=str(tmp_path / "started"), gate=str(tmp_path / "gate")
        )

        with pytest.raises(grpc.RpcError) as ended:
            server.stub.Predict(message, timeout=0.5)

        assert ended.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        # It does not run on: nothing is under way that would have to end.
        assert server.stop() == 0


def write_warm_up(saved_model: Path, message) -> None:
    log = prediction_log_pb2.PredictionLog()
    log.predict_log.request.CopyFrom(message)
    (saved_model / "assets.extra").mkdir()
    write_records(
        saved_model / "assets.extra/tf_serving_warmup_requests",
        log.SerializeToString(),
    )


def test_recorded_warm_up_requests_are_run(
    start: StartServer, models: Path, tmp_path: Path
) -> None:
    started, gate = tmp_path / "started", tmp_path / "gate"
    gate.touch()
    first = save(1, tmp_path, Gated(1))
    write_warm_up(first, request(started=str(started), gate=str(gate)))
    first.rename(models / "1")
    with start(models) as server:
        assert started.exists()

        second = save(2, tmp_path)
        write_warm_up(second, request(ids=IDS))
        second.rename(models / "2")

        error = server.wait_for(2, ModelVersionStatus.END)
        assert "a warm-up request: input 'dense' is missing" in error
        assert server.predict(request(started="", gate=""))


# --- Rows that change while they are served -----------------------------------


class ScoreClient:
    """Asks for the scores of some ids all the time, while rows change.

    All rows are set to one value before each export, so an answer with two
    would be of two exports.

    Attributes:
        values: The distinct answers.
    """

    def __init__(self, server: PredictionServer, num_rows: int = 64) -> None:
        self._server = server
        self._request = request(ids=np.linspace(0, num_rows - 1, 64, dtype=int))
        self._stop = threading.Event()
        self._pool = futures.ThreadPoolExecutor(2)
        self._runs = [self._pool.submit(self._run) for _ in range(2)]
        self.values: list[float] = []

    def ask(self) -> float:
        answer = self._server.predict(self._request)
        (value,) = set(tf.make_ndarray(answer.outputs["score"]).tolist())
        return value

    def wait_for(self, value: float) -> None:
        wait_until(
            lambda: self.ask() == value or self._has_failed(),
            f"{value} is served: {self._server.log()[-2000:]}",
        )

    def __enter__(self) -> "ScoreClient":
        return self

    def __exit__(self, *exception) -> None:
        self._stop.set()
        self._pool.shutdown()
        for run in self._runs:
            changes = [v for v, _ in itertools.groupby(run.result())]
            # One that was left does not come again.
            assert len(set(changes)) == len(changes), changes
            self.values = sorted({*self.values, *changes})

    def _run(self) -> list[float]:
        values = [self.ask()]
        while not self._stop.is_set():
            values.append(self.ask())
        return values

    def _has_failed(self) -> bool:
        return any(run.done() and run.result() for run in self._runs)


def test_exports_change_the_answers_of_a_running_server(
    start: StartServer, rows: ServedRows, tmp_path: Path
) -> None:
    rows.set_all(1)
    rows.save(1)
    (port,) = free_ports(1)
    with start(
        rows.models,
        "--watch_rows_secs=0.02",
        f"--http_address=127.0.0.1:{port}",
    ) as server:

        def state() -> str:
            return server.states()[1][1]

        def data_time() -> float:
            page = f"http://127.0.0.1:{port}/metrics"
            with urllib.request.urlopen(page) as answer:
                time_of = re.search(
                    r"tfswitch_model_data_timestamp_seconds\S+ (\S+)",
                    answer.read().decode(),
                )
            assert time_of is not None
            return float(time_of[1])

        with ScoreClient(server) as client:
            assert client.ask() == 1
            assert state() == "rows as of export 1, base 1"

            rows.set_all(2)
            begin = time.time()
            assert data_time() <= begin
            assert rows.export().number == 2
            client.wait_for(2)
            wait_until(lambda: data_time() > begin - 1e-3, "the time follows")

            # A delta that is damaged before the server can see it.
            rows.set_all(3)
            elsewhere = tmp_path / "exports"
            shutil.copytree(rows.exports(), elsewhere)
            assert tsw.export.delta(elsewhere).number == 3
            damage(elsewhere / "delta-00000003")
            (elsewhere / "delta-00000003").rename(
                rows.exports() / "delta-00000003"
            )
            wait_until(lambda: "is damaged" in state(), "it is refused")
            assert "rows as of export 2, base 1; newer" in state()
            assert " info rows_served version=1 rows=" in server.log()
            refused = ' error rows_refused message="newer rows'
            wait_until(lambda: refused in server.log(), "it is logged")
            assert server.is_serving()
            assert client.ask() == 2

            # Later exports are refused too, up to a newer base.
            rows.set_all(4)
            rows.export()
            rows.set_all(5)
            assert tsw.export.base(rows.models / "1").number == 5
            client.wait_for(5)
            rows.set_all(6)
            rows.export()
            client.wait_for(6)
            wait_until(
                lambda: state() == "rows as of export 6, base 5",
                "the state has no error any more",
            )
            assert server.is_serving()

        assert client.values == [1, 2, 5, 6]
        assert server.stop() == 0


def test_rows_that_are_checked_first_refuse_a_version_until_they_are_whole(
    start: StartServer, rows: ServedRows, tmp_path: Path
) -> None:
    rows.set_all(1, 50_000)
    rows.save(1)
    with start(rows.models, "--verify_rows_first") as server:
        damage(
            rows.save(2).rename(tmp_path / "2")
            / tsw.export._MODEL_ROWS
            / "base-00000001"
        )
        (tmp_path / "2").rename(rows.models / "2")
        error = server.wait_for(2, ModelVersionStatus.END)
        assert "is damaged" in error
        assert str(rows.exports(2)) in error
        assert server.states()[1][0] == ModelVersionStatus.AVAILABLE

        tsw.export.base(rows.models / "2")

        server.wait_for(2, ModelVersionStatus.AVAILABLE)

    # Otherwise a block is checked when it is first used.
    damage(rows.exports(2) / "base-00000002")
    with start(rows.models) as server:
        assert server.states()[2][0] == ModelVersionStatus.AVAILABLE


def test_a_version_is_taken_while_rows_are_exported_to_it(
    start: StartServer, rows: ServedRows
) -> None:
    rows.set_all(1)
    rows.save(1)
    with start(rows.models, "--watch_rows_secs=0.01") as server:
        rows.save(2)
        values = itertools.count(2)

        def is_taken() -> bool:
            rows.set_all(next(values))
            rows.export(2)
            states = server.states()
            assert states.get(2, (0,))[0] != ModelVersionStatus.END, states
            return states.get(2, (0,))[0] == ModelVersionStatus.AVAILABLE

        wait_until(is_taken, "version 2 serves")
        last = next(values)
        rows.set_all(last)
        rows.export(2)
        with ScoreClient(server) as client:
            client.wait_for(last)
