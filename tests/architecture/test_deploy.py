"""The manifests in deploy/ are valid, agree with each other, and name options and routes that exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from instgenie.server.config import MODEL, OPTIONS
from instgenie.server.routes.operators import router

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
FILES = ("kubernetes.yaml", "kuberay.yaml")
VERSIONS = ("1.31", "1.35")
APP = "app.kubernetes.io/component"

# fields that KubeRay documents for ray.io/v1; a field that is not among them is dropped by the API server
CLUSTER_FIELDS = {"rayVersion", "enableInTreeAutoscaling", "autoscalerOptions", "headGroupSpec", "workerGroupSpecs",
                  "headServiceAnnotations", "suspend", "gcsFaultToleranceOptions"}  # fmt: skip
AUTOSCALER_FIELDS = {"idleTimeoutSeconds", "upscalingMode", "resources", "image", "imagePullPolicy", "env", "envFrom",
                     "version"}  # fmt: skip
HEAD_FIELDS = {"rayStartParams", "template", "serviceType", "headService", "enableIngress"}
GROUP_FIELDS = {"groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams", "template",
                "scaleStrategy", "idleTimeoutSeconds", "suspend"}  # fmt: skip


def resources(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def one(name: str, kind: str, called: str | None = None) -> dict[str, Any]:
    [found] = [r for r in resources(name) if r["kind"] == kind and called in (None, r["metadata"]["name"])]
    return found


def pods(name: str) -> dict[str, dict[str, Any]]:
    """The pod templates of a file, by component."""
    found = [r["spec"]["template"] for r in resources(name) if r["kind"] in ("Deployment", "StatefulSet")]
    for cluster in (r["spec"] for r in resources(name) if r["kind"] == "RayCluster"):
        found += [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]
    return {pod["metadata"]["labels"][APP]: pod for pod in found}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_follow_the_schema_of_kubernetes(name: str, version: str) -> None:
    """Strictly: a field that does not exist is an error. Pods within a RayCluster are checked as pod templates."""
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for resource in resources(name):
        if resource["kind"] != "RayCluster":
            validator.validate(resource, version, strict=True)
    for component, pod in pods(name).items():
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": component}, "template": pod}
        validator.validate(template, version, strict=True)
    with pytest.raises(validator.ValidationError):
        validator.validate(one(name, "Service", "instgenie") | {"surprise": 1}, version, strict=True)


def test_the_ray_cluster_has_documented_fields_only() -> None:
    cluster = one("kuberay.yaml", "RayCluster")
    assert cluster["apiVersion"] == "ray.io/v1"
    spec = cluster["spec"]
    assert set(spec) <= CLUSTER_FIELDS
    assert set(spec["autoscalerOptions"]) <= AUTOSCALER_FIELDS
    assert set(spec["headGroupSpec"]) <= HEAD_FIELDS
    for group in spec["workerGroupSpecs"]:
        assert set(group) <= GROUP_FIELDS
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


@pytest.mark.parametrize("name", FILES)
def test_options_of_the_fronts_exist(name: str) -> None:
    options = {option.variable: option for option in (MODEL, *OPTIONS)}
    data = one(name, "ConfigMap")["data"]
    for variable, value in data.items():
        options[variable].parse(value)
    head = data["INSTGENIE_CLUSTER"].split(":")[0]
    if name == "kubernetes.yaml":
        assert one(name, "Service", head)["spec"]["ports"][0]["port"] == 6379
    else:
        assert head == f"{one(name, 'RayCluster')['metadata']['name']}-head-svc"  # as KubeRay names it
        [group] = one(name, "RayCluster")["spec"]["workerGroupSpecs"]
        limits = (int(data["INSTGENIE_MIN_WORKERS"]), int(data["INSTGENIE_MAX_WORKERS"]))
        assert (group["minReplicas"], group["maxReplicas"]) == limits  # a node has one worker


@pytest.mark.parametrize("name", FILES)
def test_fronts_are_probed_drained_and_behind_a_service(name: str) -> None:
    found = pods(name)
    assert set(found) == {"front", "head", "node"}
    spec = found["front"]["spec"]
    [container] = spec["containers"]
    paths = {route.path for route in router.routes}  # type: ignore[attr-defined]
    probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "startup": "/health", "liveness": "/health", "readiness": "/ready",
    }  # fmt: skip
    assert {probe["path"] for probe in probes.values()} | {"/metrics"} <= paths
    port = {one["name"]: one["containerPort"] for one in container["ports"]}["http"]
    data = one(name, "ConfigMap")["data"]
    assert data["INSTGENIE_PORT"] == str(port) == found["front"]["metadata"]["annotations"]["prometheus.io/port"]
    assert spec["terminationGracePeriodSeconds"] > float(data["INSTGENIE_SHUTDOWN_TIMEOUT"])
    [keys] = [volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume]
    [file] = one(name, "Secret", keys)["stringData"]
    [mount] = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "keys"]
    assert data["INSTGENIE_API_KEY_FILE"] == f"{mount}/{file}"


@pytest.mark.parametrize("name", FILES)
def test_selectors_find_pods(name: str) -> None:
    labels = {component: pod["metadata"]["labels"] for component, pod in pods(name).items()}
    selectors = [r["spec"].get("selector") for r in resources(name) if r["kind"] == "Service"]
    kinds = ("Deployment", "StatefulSet", "PodDisruptionBudget")
    selectors += [r["spec"]["selector"]["matchLabels"] for r in resources(name) if r["kind"] in kinds]
    for selector in selectors:
        assert [one for one in labels.values() if selector.items() <= one.items()], selector
    images = {pod["spec"]["containers"][0]["image"] for pod in pods(name).values()}
    assert len(images) == 1
    for pod in pods(name).values():
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        assert pod["spec"]["containers"][0]["resources"]["requests"]
    gpu = pods(name)["node"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert gpu == "1"


def test_the_readme_names_the_files() -> None:
    named = set(re.findall(r"\]\(([\w.-]+)\)", (DEPLOY / "README.md").read_text()))
    assert named == {path.name for path in DEPLOY.iterdir() if path.name != "README.md"}
