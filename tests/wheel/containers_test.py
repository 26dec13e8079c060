"""The images of the Dockerfile: what it says, and in long runs what they do.

Images are built with buildah, from a base that debootstrap makes: Debian 12 and
its Python in place of python:3.12-slim-bookworm. Steps of the build have no
network, and take packages from a folder. TFSWITCH_WHEEL is the path of the
wheel; `scripts/wheel` prints it.
"""

import contextlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfswitch as tsw
from tests.certificates import Authority
from tests.programs import HANG_SECS, ROOT
from tests.support import SERVER
from tests.tokens import TokenFile

TARGETS = ("server", "serving", "train")


# --- The Dockerfile alone ----------------------------------------------------


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions that make each stage, with those of its base."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ")
    found: dict[str, list[tuple[str, str]]] = {"": []}
    name = ""
    for line in filter(None, text.splitlines()):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = list(found.get(base, []))
        found[name].append((instruction, rest.strip()))
    return found


def values(target: str, instruction: str) -> list[str]:
    return [rest for name, rest in stages()[target] if name == instruction]


@pytest.mark.parametrize("target", TARGETS)
def test_dockerfile_has_an_image_that_is_not_of_root(target: str) -> None:
    assert values("", "ARG") == ["BASE=python:3.12-slim-bookworm"]
    assert values(target, "FROM")[0] == "${BASE} AS tfswitch"
    assert values(target, "USER") == ["tfswitch"]
    assert values(target, "VOLUME")
    assert len(values(target, "ENTRYPOINT")) == 1
    assert len(values(target, "HEALTHCHECK")) == int(target != "train")


def test_dockerfile_copies_what_is_there_and_not_ignored() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[0] == "*"
    kept = [line.removeprefix("!") for line in lines[1:]]
    for rest in values("train", "COPY"):
        source = rest.split()[0]
        assert source.startswith(tuple(kept)), source
        assert source == "dist/*.whl" or (ROOT / source).is_file(), source


def test_dockerfile_takes_the_newest_tensorflow_of_the_project() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    end = re.search(r'"tensorflow-cpu>=\d+\.\d+,<(\d+)\.(\d+)"', project)
    assert end is not None

    (default,) = values("train", "ARG")

    newest = f"{end[1]}.{int(end[2]) - 1}"
    assert default == f"TENSORFLOW=tensorflow-cpu=={newest}.*"


def test_server_of_the_dockerfile_needs_secrets() -> None:
    (entrypoint,) = values("server", "ENTRYPOINT")
    flags = json.loads(entrypoint)[1:]

    result = subprocess.run(
        [SERVER, *flags, "--data_dir="], capture_output=True, text=True
    )

    assert result.returncode != 0
    assert "/run/secrets/" in result.stderr


@pytest.mark.parametrize("kind", ["plaintext", "tls", "client_certificates"])
def test_health_check_tells_whether_a_server_serves(
    kind: str, tmp_path: Path
) -> None:
    check = runpy.run_path(str(ROOT / "scripts" / "container_health.py"))[
        "main"
    ]
    authority = Authority(tmp_path)
    tls = None
    if kind != "plaintext":
        tls = authority.sign("server", trusts=kind == "client_certificates")
    with tsw.Server(tls=tls) as server:
        port = int(server.address.rpartition(":")[2])
        if kind == "client_certificates":
            with pytest.raises(SystemExit, match="does not serve"):
                check(port)
            client = authority.sign("client")
            certificate = tmp_path / "health.pem"
            certificate.write_text(
                f"{Path(client.cert).read_text()}{Path(client.key).read_text()}"
            )
            check.__globals__["CERTIFICATE"] = str(certificate)
        check(port)
    with pytest.raises(SystemExit, match=f"no server on port {port}"):
        check(port)


# --- What the images do ------------------------------------------------------


def run(*command: object) -> str:
    result = subprocess.run(
        [*map(str, command)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-10_000:]
    return result.stdout.strip()


class Builder:
    """buildah, with images and containers of its own.

    Args:
        folder: The folder of its images.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._buildah = [
            *("buildah", "--root", str(folder / "images")),
            *("--runroot", str(folder / "run")),
        ]

    def __call__(self, *arguments: object) -> str:
        return run(*self._buildah, *arguments)

    def make_base(self, wheels: Path) -> None:
        """Makes the image `base`, whose pip takes packages from `wheels`."""
        root = self._folder / "root"
        # Its mounts must not stay.
        run(
            *("unshare", "--mount", "debootstrap", "--variant=minbase"),
            *("--include=python3-pip", "bookworm", root),
        )
        archive = self._folder / "root.tar"
        run("tar", "-C", root, "--one-file-system", "-cf", archive, ".")
        container = self("from", "scratch")
        self("add", container, archive, "/")
        path = "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        for variable in (
            f"PATH={path}",
            f"PIP_FIND_LINKS={wheels}",
            *("PIP_NO_INDEX=1", "PIP_BREAK_SYSTEM_PACKAGES=1"),
        ):
            self("config", "--env", variable, container)
        self("commit", container, "base")
        self("rm", container)
        archive.unlink()
        shutil.rmtree(root)

    def build(self, context: Path, target: str, wheels: Path) -> None:
        run(
            *("unshare", "--net"),
            *(*self._buildah, "build", "--isolation=chroot"),
            *("--format=docker", "--layers", f"--volume={wheels}:{wheels}:ro"),
            *("--build-arg=BASE=localhost/base", f"--target={target}"),
            *(f"--tag={target}", context),
        )

    def config(self, target: str) -> dict:
        image = self("inspect", "--type=image", f"localhost/{target}")
        return json.loads(image)["Docker"]["config"]

    def command(
        self,
        target: str,
        *arguments: str,
        mounts: dict[str, Path] | None = None,
    ) -> list[str]:
        """The command that runs arguments in a new container of an image."""
        container = self("from", "--pull-never", f"localhost/{target}")
        volumes = [
            f"--volume={source}:{place}"
            for place, source in (mounts or {}).items()
        ]
        return [
            *(*self._buildah, "run", "--isolation=chroot", *volumes),
            *(container, "--", *arguments),
        ]

    def clear(self) -> None:
        self("rm", "--all")
        self("rmi", "--all", "--force")


def why_not() -> str:
    """Why images cannot be built here; empty if they can."""
    missing = [
        name
        for name in ("buildah", "debootstrap", "unshare", "nsenter", "ip")
        if shutil.which(name) is None
    ]
    if missing:
        return f"needs {', '.join(missing)}; ./scripts/setup --dev installs it"
    if os.geteuid() != 0:
        return "needs root, as debootstrap does"
    if sys.version_info[:2] != (3, 11):
        return "needs Python 3.11, which Debian 12 has"
    if not os.environ.get("TFSWITCH_WHEEL"):
        return "TFSWITCH_WHEEL is not set; scripts/test sets it"
    return ""


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """A builder that has built each image."""
    if reason := why_not():
        pytest.skip(f"the Dockerfile was only read: this test {reason}")
    folder = tmp_path_factory.mktemp("containers")
    context, wheels = folder / "context", folder / "wheels"
    for name in ("dist", "scripts"):
        (context / name).mkdir(parents=True)
    for name in (
        *("Dockerfile", ".dockerignore"),
        "scripts/container_health.py",
    ):
        shutil.copy(ROOT / name, context / name)
    wheel = shutil.copy(os.environ["TFSWITCH_WHEEL"], context / "dist")
    tensorflow = values("train", "ARG")[0].partition("=")[2]
    run(
        *(sys.executable, "-m", "pip", "download", "--only-binary=:all:"),
        *(f"--dest={wheels}", wheel, tensorflow),
    )
    builder = Builder(folder)
    try:
        builder.make_base(wheels)
        for target in TARGETS:
            builder.build(context, target, wheels)
        yield builder
    finally:
        builder.clear()
        shutil.rmtree(folder)


class Pod:
    """Containers that share a network, which has nothing but a loopback."""

    def __init__(self) -> None:
        self._servers: list[subprocess.Popen] = []
        self._init = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "ip link set lo up; echo; read x"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._init.stdout is not None
        self._init.stdout.readline()

    def enter(self, command: list[str]) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._init.pid}/ns/net", *command]

    def start(self, command: list[str], line: str) -> None:
        """Starts a server; returns when it has printed a line."""
        # With a namespace of processes, which end with it.
        new = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        server = subprocess.Popen(
            self.enter([*new, *command]), stdout=subprocess.PIPE, text=True
        )
        self._servers.append(server)
        assert server.stdout is not None
        while line not in (printed := server.stdout.readline()):
            assert printed, f"the server ended with {server.wait()}"

    def close(self) -> None:
        for process in (*self._servers, self._init):
            process.kill()
            process.wait()


TRAIN = """
import pathlib
import numpy as np
import keras
import tfswitch as tsw

tsw.connect(
    "grpcs://127.0.0.1:7077",
    tls=tsw.Tls(ca="/run/secrets/ca.pem", server_name="ps0"),
    token=pathlib.Path("/run/secrets/train.token"))
ids = keras.Input((2,), dtype="int64", name="ids")
embedding = tsw.keras.DynamicEmbedding(8, name="item")
score = keras.layers.Dense(1)(keras.layers.Flatten()(embedding(ids)))
model = keras.Model(ids, score)
model.compile("adam", "mse")
model.fit(np.arange(64).reshape(32, 2), np.ones(32), verbose=0)
tsw.saved_model.save(model, "/training/models/1")
print(embedding.table.size(), "rows")
"""


@pytest.mark.acceptance
@pytest.mark.timeout(1800)
def test_images_train_and_serve_without_root(
    builder: Builder, tmp_path: Path
) -> None:
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    authority = Authority(secrets)
    authority.sign("server", "DNS:ps0")
    token = TokenFile(secrets / "tokens").create("train")
    (secrets / "train.token").write_text(f"{token}\n")
    work = tmp_path / "work"
    work.mkdir()
    run("chown", "-R", "10001", secrets, work)
    for target in TARGETS:
        assert run(*builder.command(target, "id", "-u")) == "10001"

    pod = Pod()

    def serve(target: str, line: str, mounts: dict[str, Path]) -> None:
        """Starts a server as its image says; returns when it is healthy."""
        config = builder.config(target)
        check = config["Healthcheck"]["Test"][1:]
        health = pod.enter(builder.command(target, *check))
        assert subprocess.run(health).returncode == 1
        pod.start(
            builder.command(target, *config["Entrypoint"], mounts=mounts), line
        )
        deadline = time.monotonic() + HANG_SECS
        while subprocess.run(health).returncode != 0:
            assert time.monotonic() < deadline

    mounts = {"/run/secrets": secrets}
    with contextlib.closing(pod):
        serve("server", "serving on 0.0.0.0:7077 with TLS, tokens", mounts)
        (entrypoint,) = builder.config("train")["Entrypoint"]
        train = builder.command(
            *("train", entrypoint, "-c", TRAIN),
            mounts={**mounts, "/training": work},
        )
        assert "64 rows" in run(*pod.enter(train))
        mounts["/models"] = work / "models"
        serve("serving", "listening on 0.0.0.0:8500", mounts)
