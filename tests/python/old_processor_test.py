"""Programs on a processor without AVX, which qemu-user emulates.

Nehalem is the newest one without it. An instruction that it does not have ends
a program with SIGILL.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tfswitch as tsw
from tests.programs import HANG_SECS, ROOT, environment
from tests.support import SERVER, ServerProcess

if shutil.which("qemu-x86_64") is None:
    pytest.skip(
        "needs qemu-x86_64; ./scripts/setup --dev installs it",
        allow_module_level=True,
    )

# Tables take what they may of the address space, and the emulator has memory
# for each page of it.
EMULATOR = ("prlimit", "--as=16000000000", "qemu-x86_64", "-cpu", "Nehalem")


def run(
    *command: object, emulated: bool = True
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*(EMULATOR if emulated else ()), *map(str, command)],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_SECS,
    )


def test_the_emulator_ends_programs_that_use_avx() -> None:
    program = """
import ctypes, mmap
memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | 4)
memory.write(b"\\xc5\\xf8\\x77\\xc3")  # vzeroupper, ret
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
ctypes.CFUNCTYPE(None)(address)()
"""

    result = run(sys.executable, "-c", program)

    assert result.returncode == -signal.SIGILL


EMBEDDED_TABLES = """
import json
import numpy as np
import tfswitch_command

tfswitch_command._put_package()  # TensorFlow does not run here.
from tfswitch import _native

random = np.random.default_rng(1)
cluster = _native.Cluster("local://", 60.0)
optimizers = ["sgd", "adagrad", "adam", "ftrl", "lion", "rmsprop"]
for i, optimizer in enumerate(optimizers):
    dim = (3, 16, 33)[i % 3]
    config = {
        "name": optimizer, "dim": dim, "seed": 7,
        "initializer": {"uniform": {}},
        "optimizer": {"segments": [{optimizer: {}}]},
        "storage_dtype": {
            "embeddings": ("FLOAT32", "FLOAT16", "BFLOAT16")[i // 2]}}
    table = cluster.open_table(json.dumps(config))
    ids = random.integers(-(2**63), 2**63, 50)
    for _ in range(3):
        gradients = random.normal(size=(50, dim)).astype(np.float32)
        table.push(ids, gradients, 0.1, True)
    print(optimizer, table.pull(ids, False).tobytes().hex())
"""


def test_embedded_tables_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As machines do that tell numpy's OpenBLAS what they have.
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")

    here = run(sys.executable, "-c", EMBEDDED_TABLES, emulated=False)
    there = run(sys.executable, "-c", EMBEDDED_TABLES)

    assert here.returncode == 0, here.stderr
    assert there.returncode == 0, there.stderr
    assert there.stdout == here.stdout


def test_a_server_trains_saves_and_comes_back(tmp_path: Path) -> None:
    ids = np.arange(-500, 500)
    gradients = np.random.default_rng(1).normal(size=(1000, 20))
    flags = (f"--data_dir={tmp_path}", "--push_log")
    config = {"optimizer": tsw.optimizers.Adam(0.1), "seed": 7}

    def run_server() -> ServerProcess:
        return ServerProcess(command=(*EMULATOR, str(SERVER)), flags=flags)

    expected = tsw.EmbeddingTable("old_processor", 20, **config)
    expected.push(ids, gradients)
    with (
        run_server() as server,
        tsw.Cluster(f"grpc://{server.address}") as cluster,
    ):
        table = tsw.EmbeddingTable("t", 20, cluster=cluster, **config)
        table.push(ids, gradients)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    with (
        run_server() as server,
        tsw.Cluster(f"grpc://{server.address}") as cluster,
    ):
        table = tsw.EmbeddingTable("t", 20, cluster=cluster, **config)
        rows = table.lookup(ids)

    np.testing.assert_array_equal(rows, expected.lookup(ids))


def build_folder() -> Path:
    """The build; it is there whenever the tests in C++ were built."""
    folder = os.environ.get("TFSWITCH_BUILD_DIR")
    if folder is None and not (ROOT / "build" / "tests").exists():
        pytest.skip("the C++ tests are not built; scripts/test builds them")
    return Path(folder or ROOT / "build")


@pytest.mark.parametrize(
    ("room", "tests"),
    [
        # The sums of long ago take a minute here, and no other instructions.
        ("optimizer", "*-*AreMadeAgain*:*AdamBetas99_999"),
        ("table", "Dims/EmbeddingTableModelTest.*"),
        ("serving", "RowFileTest.FormatsKeep*:RowFileTest.InstructionSets*"),
    ],
)
def test_kernels_in_cpp(room: str, tests: str) -> None:
    tests_of_room = build_folder() / "tests" / "cc" / room
    program = tests_of_room / f"tfswitch_{room}_tests"

    result = run(program, f"--gtest_filter={tests}")

    assert result.returncode == 0, result.stdout + result.stderr
    assert "[  PASSED  ]" in result.stdout


def test_other_files_get_no_function_that_is_compiled_for_avx2() -> None:
    # The linker keeps any one copy of an inline function.
    objects = list(build_folder().glob("cc/*/CMakeFiles/*/*_avx2.cc.o"))
    assert len(objects) == 4

    symbols = subprocess.run(
        ["nm", *objects], check=True, capture_output=True, text=True
    ).stdout

    assert " T " in symbols
    assert not re.findall(r"^\w+ [WVu] .*", symbols, re.M)


IMPORT = """
try:
    import tfswitch
except ImportError as error:
    print(error)
"""
SERVING = "import tfswitch_command; tfswitch_command.serving()"


@pytest.mark.parametrize(
    "program", [IMPORT, SERVING], ids=["import", "serving"]
)
def test_what_needs_tensorflow_says_that_the_processor_is_too_old(
    program: str,
) -> None:
    result = run(sys.executable, "-c", program)

    assert result.returncode == int(program == SERVING)
    message = result.stdout + result.stderr
    assert "this processor has no AVX" in message
    assert "Use another processor." in message
