"""Generates the chart's values.schema.json: `settings` from the settings models, everything else from the models below.

    .venvs/cli/bin/python scripts/chart_schema.py [--check]

`--check` writes nothing and fails if the committed file is out of date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from forage_runtime.settings import Settings

SCHEMA = Path(__file__).resolve().parents[1] / "deploy/helm/forage/values.schema.json"
Quantity = str | int | float
Object = dict[str, Any]
"""Part of a Kubernetes object, which the chart copies unchanged."""


class Values(BaseModel):
    """A node of values.yaml that refuses unknown names. Nothing is required: values.yaml has the defaults."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class Image(Values):
    registry: str = Field("", description="overrides image.registry")
    repository: str = ""
    tag: str = Field("", description="overrides image.tag")
    digest: str = Field("", pattern="^(sha256:[0-9a-f]{64})?$", description="overrides the tag")


class SharedImage(Values):
    registry: str = ""
    tag: str = ""
    pullPolicy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    pullSecrets: list[str] = []


class Security(Values):
    runAsUser: int = Field(10001, ge=1)
    runAsGroup: int = Field(10001, ge=1)
    fsGroup: int = Field(10001, ge=1)


class Quantities(BaseModel):
    """CPU, memory and any other resource that Kubernetes knows, such as hugepages."""

    cpu: Quantity = ""
    memory: Quantity = ""


class Resources(Values):
    requests: Quantities = Quantities()
    limits: Quantities = Quantities()


class Gpu(Values):
    count: int = Field(0, ge=0)
    resource: str = "nvidia.com/gpu"


class Scheduling(Values):
    nodeSelector: dict[str, str] = {}
    tolerations: list[Object] = []
    affinity: Object = {}


class RayHead(Scheduling):
    resources: Resources = Resources()


class Component(Scheduling):
    """Values that every component has."""

    image: Image = Image()
    resources: Resources = Resources()
    priorityClassName: str = ""
    runtimeClassName: str = ""
    podAnnotations: dict[str, str] = {}
    serviceAccountAnnotations: dict[str, str] = {}
    extraEnv: list[Object] = []
    labels: dict[str, str] = {}
    podLabels: dict[str, str] = {}
    schedulerName: str = ""
    hostNetwork: bool = False
    securityContext: Object = {}
    resourceClaims: list[Object] = []
    extraVolumes: list[Object] = []
    extraVolumeMounts: list[Object] = []
    extraContainers: list[Object] = []


class StoppableComponent(Component):
    """A component whose termination grace period is a value; the chart computes that of the rollout."""

    terminationGracePeriodSeconds: int = Field(30, ge=0)


class Pdb(Values):
    enabled: bool = True
    maxUnavailable: int | str = 1


class TopologySpread(Values):
    enabled: bool = True
    whenUnsatisfiable: Literal["ScheduleAnyway", "DoNotSchedule"] = "ScheduleAnyway"


class Autoscaling(Values):
    enabled: bool = False
    minReplicas: int = Field(1, ge=1)
    maxReplicas: int = Field(4, ge=1)
    targetCPUUtilization: int = Field(70, ge=1)


class RetrieverAutoscaling(Autoscaling):
    prometheusAddress: str = Field("", pattern="^(https?://.+)?$")
    waitingPerReplica: int = Field(200, ge=1)


class Server(StoppableComponent):
    enabled: bool = True
    replicas: int = Field(1, ge=0)
    autoscaling: Autoscaling = Autoscaling()
    pdb: Pdb = Pdb()
    topologySpread: TopologySpread = TopologySpread()


class Secret(Values):
    existingSecret: str = ""


class Auth(Secret):
    enabled: bool = True


class TokenServer(Server):
    auth: Auth = Auth()


class RetrieverData(Values):
    kind: Literal["emptyDir", "memory", "ephemeral", "claim", "shared"] = "emptyDir"
    size: Quantity = ""
    storageClassName: str = ""
    existingClaim: str = ""


class Retriever(TokenServer):
    autoscaling: RetrieverAutoscaling = RetrieverAutoscaling()
    data: RetrieverData = RetrieverData()
    gpu: Gpu = Gpu()


class Keda(Values):
    enabled: bool = False
    minReplicas: int = Field(1, ge=0)
    maxReplicas: int = Field(4, ge=1)
    pollingInterval: int = Field(15, ge=1)
    cooldownPeriod: int = Field(300, ge=0)
    promptsPerReplica: int = Field(32, ge=1)
    prometheusAddress: str = Field("", pattern="^(https?://.+)?$")
    requestsWaitingPerReplica: int = Field(64, ge=1)
    trainerStarvation: float = Field(0.5, ge=0, le=1)
    operatorNamespace: str = "keda"


class RayWorkers(Values):
    replicas: int = Field(1, ge=0)
    minReplicas: int = Field(1, ge=0)
    maxReplicas: int = Field(1, ge=1)


class Frontend(Values):
    enabled: bool = True
    resources: Resources = Resources()


class RayService(Values):
    upgradeStrategy: Literal["NewCluster", "None"] = "NewCluster"
    workers: RayWorkers = RayWorkers()
    idleTimeoutSeconds: int = Field(300, ge=0)
    head: RayHead = RayHead()
    front: Frontend = Frontend()


class Rollout(Component):
    mode: Literal["deployment", "rayservice", "none"] = "deployment"
    replicas: int = Field(1, ge=0)
    gpu: Gpu = Gpu()
    shmSize: Quantity = ""
    auth: Auth = Auth()
    pdb: Pdb = Pdb()
    topologySpread: TopologySpread = TopologySpread()
    strategy: Object = {}
    keda: Keda = Keda()
    rayservice: RayService = RayService()


class RayJob(Values):
    head: RayHead = RayHead()


class Trainer(StoppableComponent):
    mode: Literal["job", "rayjob", "none"] = "job"
    nodes: int = Field(1, ge=1)
    gpu: Gpu = Gpu()
    shmSize: Quantity = ""
    backoffLimit: int = Field(20, ge=0)
    rayjob: RayJob = RayJob()


class WithResources(Values):
    resources: Resources = Resources()


class RayTls(Secret):
    enabled: bool = False


class Ray(Values):
    version: str = ""
    operatorNamespace: str = ""
    auth: Secret = Secret()
    tls: RayTls = RayTls()
    submitter: WithResources = WithResources()
    autoscaler: WithResources = WithResources()


class ExternalRedis(Secret):
    url: str = Field("", pattern="^(rediss?://.+)?$")


class Ingress(Values):
    enabled: bool = False
    className: str = ""
    host: str = Field("", description="name under which browsers reach the console")
    tlsSecret: str = ""
    annotations: dict[str, str] = {}


class Console(StoppableComponent):
    enabled: bool = False
    auth: Secret = Secret()
    ingress: Ingress = Ingress()


class RedisStorage(Values):
    storageClassName: str = ""
    size: Quantity = ""


class RedisExporter(WithResources):
    enabled: bool = False
    image: Image = Image()


class Redis(StoppableComponent):
    enabled: bool = True
    external: ExternalRedis = ExternalRedis()
    auth: Secret = Secret()
    storage: RedisStorage = RedisStorage()
    maxmemory: str = Field(
        "", pattern="^([0-9]+(kb|mb|gb)?)?$", description="in Redis' notation, 0 = no limit; empty = 75 % of the limit"
    )
    exporter: RedisExporter = RedisExporter()


class ToolContainer(WithResources):
    image: Image = Image()


class World(Values):
    enabled: bool = True


class Fetch(Values):
    url: str = Field(pattern="^[^:]+://.+")
    path: str = Field(pattern="^[^/.][^:=]*$", description="relative to /data")
    for_: list[Literal["retriever", "rollout", "trainer"]] = Field(alias="for", min_length=1)


class ObjectStore(Secret):
    env: list[Object] = []


class SharedVolume(Values):
    existingClaim: str = ""
    storageClassName: str = ""
    accessModes: list[Literal["ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"]] = []
    size: Quantity = ""
    keep: bool = True


class Storage(Values):
    shared: SharedVolume = SharedVolume()


class EgressPeers(Values):
    to: list[Object] = []
    ports: list[int] = []


class NetworkPolicy(Values):
    enabled: bool = True
    clients: dict[Literal["retriever", "reward", "rollout", "redis", "console"], list[Object]] = {}
    metricsFrom: list[Object] = []
    dns: EgressPeers = EgressPeers()
    objectStore: EgressPeers = EgressPeers()
    roles: EgressPeers = EgressPeers()
    apiServer: EgressPeers = EgressPeers()
    collector: EgressPeers = EgressPeers()
    extraEgress: dict[
        Literal["retriever", "reward", "rollout", "trainer", "redis", "console", "test"], list[Object]
    ] = {}


class ServiceMonitor(Values):
    enabled: bool = False
    interval: str = ""


class Rules(Values):
    enabled: bool = False
    runbooks: str = Field("", description="prefix of docs/runbooks/<alert>.md, for example https://…/")


class Dashboards(Values):
    enabled: bool = False
    label: str = ""
    labelValue: str = ""
    folder: str = ""


class Monitoring(Values):
    labels: dict[str, str] = {}
    serviceMonitor: ServiceMonitor = ServiceMonitor()
    rules: Rules = Rules()
    dashboards: Dashboards = Dashboards()


class IssuerRef(Values):
    name: str = ""
    kind: str = "Issuer"
    group: str = ""


class CertManager(Values):
    enabled: bool = False
    issuerRef: IssuerRef = IssuerRef()
    duration: str = Field("2160h", pattern="^([0-9]+h)?$")
    renewBefore: str = Field("720h", pattern="^([0-9]+h)?$")


class Tls(Secret):
    enabled: bool = False
    requireClientCert: bool = False
    certManager: CertManager = CertManager()


class HelmTest(Values):
    question: str = Field("", min_length=1)


class ChartValues(Values):
    """Values of the Forage chart."""

    nameOverride: str = ""
    fullnameOverride: str = ""
    listenHost: Literal["0.0.0.0", "::"] = "0.0.0.0"
    global_: Object = Field({}, alias="global", description="reserved by Helm")
    settings: Settings = Settings()
    image: SharedImage = SharedImage()
    security: Security = Security()
    tls: Tls = Tls()
    cli: ToolContainer = ToolContainer()
    world: World = World()
    fetch: list[Fetch] = []
    fetcher: ToolContainer = ToolContainer()
    objectStore: ObjectStore = ObjectStore()
    storage: Storage = Storage()
    retriever: Retriever = Retriever()
    reward: TokenServer = TokenServer()
    rollout: Rollout = Rollout()
    trainer: Trainer = Trainer()
    console: Console = Console()
    signing: Secret = Secret()
    ray: Ray = Ray()
    redis: Redis = Redis()
    networkPolicy: NetworkPolicy = NetworkPolicy()
    monitoring: Monitoring = Monitoring()
    test: HelmTest = HelmTest(question="?")


def generate_schema() -> dict[str, Any]:
    """Generate the JSON schema, in draft 7, which all supported versions of Helm read."""
    schema = ChartValues.model_json_schema(by_alias=True, ref_template="#/definitions/{model}")
    definitions: dict[str, Any] = schema.pop("$defs")
    # The settings also accept a plain path here: see TrainFile._bare, which Pydantic's schema does not show.
    definitions["TrainFile"] = {"anyOf": [{"type": "string"}, definitions["TrainFile"]]}
    # So does a route, see `RewardRoute`: one reward in place of a list.
    route = definitions["RewardSettings"]["properties"]["routes"]
    route["additionalProperties"]["minItems"] = route["additionalProperties"].pop("minLength")
    route["additionalProperties"] = {"anyOf": [{"$ref": "#/definitions/RewardPart"}, route["additionalProperties"]]}
    # Helm reads YAML 1.1, where the key `n:` means `false:`; the chart accepts both (_settings.tpl).
    rollout = definitions["RolloutSettings"]["properties"]
    rollout["false"] = rollout["n"]
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema, "definitions": definitions}
    stripped: dict[str, Any] = _strip(schema)
    return stripped


def _strip(node: Any, keys_are_names: bool = False) -> Any:
    """Remove titles, defaults and docstrings of models, which do not help authors of values.

    Args:
        keys_are_names: the keys of the node are names of properties, not keywords of the schema language.
    """
    if isinstance(node, list):
        return [_strip(item) for item in node]
    if not isinstance(node, dict):
        return node
    is_model = "properties" in node
    dropped = () if keys_are_names else ("title", "default", *(("description",) if is_model else ()))
    literals = () if keys_are_names else ("const", "enum")
    return {
        key: value if key in literals else _strip(value, keys_are_names=key in ("properties", "definitions"))
        for key, value in node.items()
        if key not in dropped
    }


def render_schema() -> str:
    """Render the content of values.schema.json."""
    return json.dumps(generate_schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] != ["--check"]:
        SCHEMA.write_text(render_schema(), encoding="utf-8")
    elif SCHEMA.read_text(encoding="utf-8") != render_schema():
        sys.exit(f"{SCHEMA.name} is out of date: run 'make chart-schema' and commit the result")
