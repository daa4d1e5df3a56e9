"""The manifests of ``docker/k8s``: what Kubernetes takes, and what our own commands and settings take.

Schemas are those that Kubernetes publishes, as the package kubernetes-validate has them, in their strict
form: a field that does not exist is an error. JobSet's own fields are typed here, after its API v1alpha2:
https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/; what it makes Jobs of is checked as a Job. So are
those of a PodMonitor: https://prometheus-operator.dev/docs/api-reference/api/.
"""

from __future__ import annotations

import copy
import functools
import re
import shlex
import signal
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import kubernetes_validate
import msgspec
import pytest
import yaml
from msgspec import Meta

from tests.server.memory_limit import most_server_bytes
from zenps.cli.arguments import make_parser, split_command
from zenps.cli.exit_codes import FAILED, REFUSED
from zenps.config.settings import MAX_WORKERS, Config
from zenps.config.sources import load
from zenps.config.values import parse_address

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "docker" / "k8s"
FILES = ("jobset.yaml", "plain.yaml")
# The oldest that still has patches, and the newest that schemas are there for.
VERSIONS = ("1.34.0", "1.37.0")
ROLES = ("scheduler", "server", "worker")

Document = dict[str, Any]
DnsLabel = Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]


class _Struct(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    pass


class Network(_Struct):
    enable_dns_hostnames: bool = msgspec.field(name="enableDNSHostnames", default=True)
    subdomain: DnsLabel = ""
    publish_not_ready_addresses: bool = True


class SuccessPolicy(_Struct):
    operator: Literal["All", "Any"]
    target_replicated_jobs: list[str] = []


class FailurePolicyRule(_Struct):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    action: Literal["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]
    target_replicated_jobs: list[str] = []
    on_job_failure_reasons: list[
        Literal["BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "PodFailurePolicy"]
    ] = []


class FailurePolicy(_Struct):
    rules: Annotated[list[FailurePolicyRule], Meta(max_length=20)] = []
    max_restarts: int = 0
    restart_strategy: Literal["Recreate", "BlockingRecreate", "InPlaceRestart"] = "Recreate"


class DependsOn(_Struct):
    name: str
    status: Literal["Ready", "Complete"]


class Template(_Struct):
    spec: Document
    metadata: Document = {}


class ReplicatedJob(_Struct):
    name: DnsLabel
    template: Template
    replicas: Annotated[int, Meta(ge=0)] = 1
    depends_on: Annotated[list[DependsOn], Meta(max_length=1)] = []


class JobSetSpec(_Struct):
    replicated_jobs: list[ReplicatedJob]
    network: Network = msgspec.field(default_factory=Network)
    success_policy: SuccessPolicy | None = None
    failure_policy: FailurePolicy | None = None


class JobSet(_Struct):
    api_version: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: Document
    spec: JobSetSpec


class Selector(_Struct):
    match_labels: dict[str, str]


class Relabeling(_Struct):
    source_labels: list[str]
    target_label: str


class PodMetricsEndpoint(_Struct):
    port: str
    interval: str
    honor_labels: bool
    relabelings: list[Relabeling]


class PodMonitorSpec(_Struct):
    selector: Selector
    pod_metrics_endpoints: list[PodMetricsEndpoint]


class PodMonitor(_Struct):
    api_version: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PodMonitor"]
    metadata: Document
    spec: PodMonitorSpec


@functools.cache
def documents(file: str) -> list[Document]:
    return list(yaml.safe_load_all((MANIFESTS / file).read_text()))


def validate(document: Document, version: str) -> None:
    """Raises :class:`ValueError` or a ``kubernetes_validate.ValidationError``."""
    if document["kind"] != "JobSet":
        kubernetes_validate.validate(document, version, strict=True)
        return
    spec = msgspec.convert(document, JobSet).spec
    names = [job.name for job in spec.replicated_jobs]
    for number, job in enumerate(spec.replicated_jobs):
        if any(depends.name not in names[:number] for depends in job.depends_on):
            raise ValueError(f"{job.name} depends on one that does not come before it")
        made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job.name}}
        kubernetes_validate.validate(made | {"spec": job.template.spec}, version, strict=True)
    if spec.success_policy and not set(spec.success_policy.target_replicated_jobs) <= {*names}:
        raise ValueError("the successPolicy is of no replicated job")


# ── what Kubernetes takes ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", FILES)
def test_manifests_follow_the_schemas(file: str, version: str) -> None:
    for document in documents(file):
        validate(document, version)


def _rename(path: str, name: str) -> Callable[[Document], None]:
    def plant(document: Document) -> None:
        *parents, last = path.split(".")
        place = _at(document, parents)
        place[name] = place.pop(last)

    return plant


def _set(path: str, value: object) -> Callable[[Document], None]:
    def plant(document: Document) -> None:
        *parents, last = path.split(".")
        _at(document, parents)[last] = value

    return plant


def _at(place: Any, path: list[str]) -> Any:
    for step in path:
        place = place[int(step) if isinstance(place, list) else step]
    return place


POD = "spec.replicatedJobs.0.template.spec.template.spec"
MISTAKES: dict[str, tuple[str, str, Callable[[Document], None]]] = {
    "a JobSet's field": ("jobset.yaml", "JobSet", _rename("spec.network", "networks")),
    "a JobSet's type": ("jobset.yaml", "JobSet", _set("spec.failurePolicy.maxRestarts", "3")),
    "a JobSet's value": ("jobset.yaml", "JobSet", _set("spec.successPolicy.operator", "Every")),
    "a role that is none": ("jobset.yaml", "JobSet", _set("spec.successPolicy.targetReplicatedJobs", ["x"])),
    "a role too early": ("jobset.yaml", "JobSet", _set("spec.replicatedJobs.1.dependsOn.0.name", "worker")),
    "a pod's field": ("jobset.yaml", "JobSet", _rename(f"{POD}.enableServiceLinks", "enableServiceLink")),
    "a pod's type": ("jobset.yaml", "JobSet", _set(f"{POD}.terminationGracePeriodSeconds", "15")),
    "a probe's field": (
        "jobset.yaml",
        "JobSet",
        _rename(f"{POD}.containers.0.readinessProbe.exec", "execute"),
    ),
    "a variable that is no string": (
        "plain.yaml",
        "Job",
        _set("spec.template.spec.containers.0.env.0.value", 1),
    ),
    "a StatefulSet's field": ("plain.yaml", "StatefulSet", _rename("spec.serviceName", "service")),
    "a Service's type": ("plain.yaml", "Service", _set("spec.publishNotReadyAddresses", "yes")),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    file, kind, plant = MISTAKES[mistake]
    document = copy.deepcopy(next(found for found in documents(file) if found["kind"] == kind))
    plant(document)
    with pytest.raises((ValueError, kubernetes_validate.ValidationError)):
        validate(document, VERSIONS[-1])


# ── what our commands and settings take ─────────────────────────────────────────────────────────


def jobs(file: str) -> dict[str, Document]:
    """The Job or StatefulSet of each role."""
    found: dict[str, Document] = {}
    for document in documents(file):
        if document["kind"] == "JobSet":
            found |= {job["name"]: job["template"] for job in document["spec"]["replicatedJobs"]}
        elif document["kind"] in ("Job", "StatefulSet"):
            found[document["metadata"]["name"].removeprefix("zenps-")] = document
    assert tuple(sorted(found)) == ROLES
    return found


def pod(file: str, role: str) -> Document:
    found: Document = jobs(file)[role]["spec"]["template"]
    return found


def container(file: str, role: str) -> Document:
    (found,) = pod(file, role)["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def settings(file: str, role: str, tmp_path: Path) -> Config:
    """As the role finds them in its container."""
    text = documents(file)[0]["data"]["zenps.toml"]
    (tmp_path / "zenps.toml").write_text(text)
    variables = {
        # What the downward API fills in is a pod's address or index.
        item["name"]: item.get("value", "10.1.2.3" if item["name"].endswith("HOST") else "1")
        for item in container(file, role)["env"]
    }
    assert variables["ZENPS_CONFIG"] == "/etc/zenps/zenps.toml"
    return load(environ=variables, file=tmp_path / "zenps.toml").config


def commands(file: str, role: str) -> Iterator[list[str]]:
    own = container(file, role)
    yield own["args"]
    for probe in ("readinessProbe", "livenessProbe"):
        if probe in own:
            yield own[probe]["exec"]["command"]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("file", FILES)
def test_commands_are_ours(file: str, role: str) -> None:
    first, *probes = commands(file, role)
    program, *arguments = first
    assert program == "zenps"
    options, command = split_command(arguments)
    parsed = make_parser().parse_args(options)
    assert bool(command) == parsed.takes_command
    assert first[1] == role
    for probe in probes:
        assert probe == ["probe", role]
    assert 'zenps health --role "$1"' in (MANIFESTS.parent / "probe").read_text("utf-8")


@pytest.mark.parametrize("file", FILES)
def test_scheduler_of_a_failed_job_is_not_tried_again(file: str) -> None:
    """Each try waits for nodes that do not come, and holds its pod as long."""
    spec = jobs(file)["scheduler"]["spec"]
    assert pod(file, "scheduler")["spec"]["restartPolicy"] == "Never"  # or Kubernetes knows no such policy
    fails, ignored = spec["podFailurePolicy"]["rules"]
    assert fails["action"] == "FailJob"
    assert fails["onExitCodes"] == {
        "containerName": container(file, "scheduler")["name"],
        "operator": "In",
        "values": [FAILED, REFUSED],
    }
    assert ignored["action"] == "Ignore"
    assert spec["backoffLimit"] == 10  # killed, it is replaced


def test_a_worker_that_is_evicted_is_no_failure() -> None:
    (jobset,) = (document for document in documents("jobset.yaml") if document["kind"] == "JobSet")
    policy = msgspec.convert(jobset, JobSet).spec.failure_policy
    assert policy is not None
    (rule,) = policy.rules
    assert rule.action == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule.target_replicated_jobs == ["worker"]
    assert rule.on_job_failure_reasons == ["PodFailurePolicy"]
    (fails,) = jobs("jobset.yaml")["worker"]["spec"]["podFailurePolicy"]["rules"]
    assert fails == {
        "action": "FailJob",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    assert pod("jobset.yaml", "worker")["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize("file", FILES)
def test_a_scheduler_that_is_evicted_is_killed_so_that_the_next_one_recovers_its_job(file: str) -> None:
    hook = container(file, "scheduler")["lifecycle"]["preStop"]["exec"]["command"]
    script = "trap 'exit 7' TERM; sleep 60 & wait"
    namespace = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")
    # As in its container, process 1 passes signals on, and ends as its child does.
    run = f"sh -c {shlex.quote(script)} & child=$!; sleep 0.2; {shlex.join(hook)} & wait $child"
    done = subprocess.run([*namespace, "sh", "-c", run], timeout=30, check=False)
    assert done.returncode == 128 + signal.SIGKILL


def test_servers_that_stay_are_replaced_only_by_the_command_of_the_page() -> None:
    """A rollout waits for servers to be ready, so it would go on when the next job trains."""
    assert jobs("plain.yaml")["server"]["spec"]["updateStrategy"] == {"type": "OnDelete"}
    page = (ROOT / "docs" / "deploy.md").read_text("utf-8")
    (selector,) = re.findall(r"`kubectl delete pods --selector ([^`]+)`", page)
    labels = {role: pod("plain.yaml", role)["metadata"]["labels"].items() for role in ROLES}
    wanted = dict(label.split("=") for label in selector.split(",")).items()
    assert [role for role in ROLES if wanted <= labels[role]] == ["server"]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("file", FILES)
def test_settings_are_ours(file: str, role: str, tmp_path: Path) -> None:
    config = settings(file, role, tmp_path)
    spec = {name: jobs(file)[name]["spec"] for name in ROLES}
    counts = {name: spec[name].get("replicas", spec[name].get("completions")) for name in ROLES}
    assert counts == {"scheduler": 1, "server": config.cluster.servers, "worker": config.cluster.workers}
    assert config.kernels.threads == 1  # or as many as the node has cores, whatever the pod requests
    own = container(file, role)
    ports = {port["name"]: port["containerPort"] for port in own["ports"]}
    expected = {"metrics": config.metrics.port}
    if role == "scheduler":
        expected["scheduler"] = parse_address(config.cluster.scheduler)[1]
    if role == "server":
        expected["data"] = config.cluster.server_port
        limit_bytes = int(own["resources"]["limits"]["memory"].removesuffix("Mi")) << 20
        assert own["resources"]["requests"]["memory"] == own["resources"]["limits"]["memory"]
        for workers in (1, 2, 64, MAX_WORKERS):
            many = msgspec.structs.replace(config.cluster, workers=workers)
            assert most_server_bytes(msgspec.structs.replace(config, cluster=many)) <= limit_bytes
    assert ports == expected
    annotations = pod(file, role)["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(config.metrics.port)
    # Servers that stay between jobs must not hold their nodes.
    stays = jobs(file)[role].get("kind") == "StatefulSet"
    assert (annotations.get("cluster-autoscaler.kubernetes.io/safe-to-evict") == "false") != stays
    if stays:
        evicted = annotations["cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"].split(",")
        volumes = pod(file, role)["spec"]["volumes"]
        assert {*evicted} == {volume["name"] for volume in volumes if "emptyDir" in volume}


@pytest.mark.parametrize("file", FILES)
def test_pods_reach_one_another_at_all_ports_and_prometheus_their_metrics_alone(file: str) -> None:
    policy = next(document for document in documents(file) if document["kind"] == "NetworkPolicy")
    selector = policy["spec"]["podSelector"]
    for role in ("scheduler", "server", "worker"):
        assert selector["matchLabels"].items() <= pod(file, role)["metadata"]["labels"].items()
    among_them, metrics = policy["spec"]["ingress"]
    assert among_them == {"from": [{"podSelector": selector}]}
    assert metrics["ports"] == [{"port": 9101}]
    (prometheus,) = metrics["from"]  # one entry: of that namespace, and of these pods
    assert all(prometheus[which]["matchLabels"] for which in ("namespaceSelector", "podSelector"))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("file", FILES)
def test_the_monitor_gives_each_pod_what_the_rules_need(file: str, role: str) -> None:
    """As ``docker/prometheus/prometheus.yml`` does."""
    (document,) = documents("podmonitor.yaml")
    spec = msgspec.convert(document, PodMonitor).spec
    (endpoint,) = spec.pod_metrics_endpoints
    labels = pod(file, role)["metadata"]["labels"]
    assert spec.selector.match_labels.items() <= labels.items()
    assert endpoint.port in {port["name"] for port in container(file, role)["ports"]}
    (relabeling,) = endpoint.relabelings
    found = {f"__meta_kubernetes_pod_label_{re.sub('[^a-z]', '_', name)}": labels[name] for name in labels}
    assert [found[source] for source in relabeling.source_labels] == [role]
    assert relabeling.target_label == "role"
    ours = yaml.safe_load((MANIFESTS.parent / "prometheus" / "prometheus.yml").read_text())
    assert endpoint.interval == ours["global"]["scrape_interval"]
    assert endpoint.honor_labels == ours["scrape_configs"][0]["honor_labels"] is True


def test_the_scheduler_s_name() -> None:
    jobset = next(document for document in documents("jobset.yaml") if document["kind"] == "JobSet")
    # https://jobset.sigs.k8s.io/docs/concepts/: <jobSet.name>-<replicatedJob.name>-<job>-<pod>.<subdomain>
    name = f"{jobset['metadata']['name']}-scheduler-0-0.{jobset['spec']['network']['subdomain']}"
    assert address_of_scheduler("jobset.yaml") == name
    service = next(
        document
        for document in documents("plain.yaml")
        if document["kind"] == "Service"
        and document["metadata"]["name"] == address_of_scheduler("plain.yaml")
    )
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= pod("plain.yaml", "scheduler")["metadata"]["labels"].items()


def address_of_scheduler(file: str) -> str:
    tree = tomllib.loads(documents(file)[0]["data"]["zenps.toml"])
    host, port = parse_address(tree["cluster"]["scheduler"])
    environment = {item["name"]: item.get("value", "") for item in container(file, "scheduler")["env"]}
    assert port == parse_address(environment["ZENPS_CLUSTER_SCHEDULER"])[1]
    return host


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("file", FILES)
def test_pods_may_do_little(file: str, role: str) -> None:
    spec = pod(file, role)["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    # Else a Service whose name begins with zenps gives them variables that are refused as unknown settings.
    assert spec["enableServiceLinks"] is False
    assert spec["automountServiceAccountToken"] is False
    for own in (*spec["initContainers"], *spec["containers"]):
        assert own["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"memory"} <= own["resources"]["limits"].keys()
    mounted = {mount["mountPath"] for mount in container(file, role)["volumeMounts"]}
    assert {"/tmp", "/etc/zenps", "/keys"} <= mounted
    secrets = next(volume["secret"] for volume in spec["volumes"] if volume["name"] == "secrets")
    assert secrets == {"secretName": f"zenps-{role}-keys", "optional": True}
