"""Makes the chart's values.schema.json: `settings` from the settings tree, the rest from the models below.

    .venvs/cli/bin/python scripts/chart_schema.py [--check]

`--check` fails when what is committed is not current.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from forage_common.settings import Settings

SCHEMA = Path(__file__).resolve().parents[1] / "deploy/helm/forage/values.schema.json"
Quantity = str | int | float
Object = dict[str, Any]
"""Passed on to Kubernetes as it is."""


class Values(BaseModel):
    """A node of values.yaml: closed to unknown names. The defaults are in values.yaml, so nothing is required here."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class Image(Values):
    registry: str = Field("", description="instead of image.registry")
    repository: str = ""
    tag: str = Field("", description="instead of image.tag")
    digest: str = Field("", pattern="^(sha256:[0-9a-f]{64})?$", description="wins over a tag")


class SharedImage(Values):
    registry: str = ""
    tag: str = ""
    pullPolicy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    pullSecrets: list[str] = []


class Security(Values):
    runAsUser: int = Field(10001, ge=1)
    runAsGroup: int = Field(10001, ge=1)
    fsGroup: int = Field(10001, ge=1)


class Amounts(BaseModel):
    """Of CPU and memory at least; others, such as hugepages, may come along."""

    cpu: Quantity = ""
    memory: Quantity = ""


class Resources(Values):
    requests: Amounts = Amounts()
    limits: Amounts = Amounts()


class Gpu(Values):
    count: int = Field(0, ge=0)
    resource: str = "nvidia.com/gpu"


class Place(Values):
    nodeSelector: dict[str, str] = {}
    tolerations: list[Object] = []
    affinity: Object = {}


class Head(Place):
    resources: Resources = Resources()


class Part(Place):
    """What every component has."""

    image: Image = Image()
    resources: Resources = Resources()
    priorityClassName: str = ""
    runtimeClassName: str = ""
    podAnnotations: dict[str, str] = {}
    serviceAccountAnnotations: dict[str, str] = {}
    extraEnv: list[Object] = []


class Drained(Part):
    """With a time that the rollout's part reckons by itself."""

    terminationGracePeriodSeconds: int = Field(30, ge=0)


class Pdb(Values):
    enabled: bool = True
    maxUnavailable: int | str = 1


class Spread(Values):
    enabled: bool = True
    whenUnsatisfiable: Literal["ScheduleAnyway", "DoNotSchedule"] = "ScheduleAnyway"


class Autoscaling(Values):
    enabled: bool = False
    minReplicas: int = Field(1, ge=1)
    maxReplicas: int = Field(4, ge=1)
    targetCPUUtilization: int = Field(70, ge=1)


class Server(Drained):
    enabled: bool = True
    replicas: int = Field(1, ge=0)
    autoscaling: Autoscaling = Autoscaling()
    pdb: Pdb = Pdb()
    topologySpread: Spread = Spread()


class Data(Values):
    kind: Literal["emptyDir", "memory", "ephemeral", "claim", "shared"] = "emptyDir"
    size: Quantity = ""
    storageClassName: str = ""
    existingClaim: str = ""


class Retriever(Server):
    data: Data = Data()
    gpu: Gpu = Gpu()


class Secret(Values):
    existingSecret: str = ""


class Auth(Secret):
    enabled: bool = True


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


class Workers(Values):
    replicas: int = Field(1, ge=0)
    minReplicas: int = Field(1, ge=0)
    maxReplicas: int = Field(1, ge=1)


class Front(Values):
    enabled: bool = True
    resources: Resources = Resources()


class RayService(Values):
    upgradeStrategy: Literal["NewCluster", "None"] = "NewCluster"
    workers: Workers = Workers()
    idleTimeoutSeconds: int = Field(300, ge=0)
    head: Head = Head()
    front: Front = Front()


class Rollout(Part):
    mode: Literal["deployment", "rayservice", "none"] = "deployment"
    replicas: int = Field(1, ge=0)
    gpu: Gpu = Gpu()
    shmSize: Quantity = ""
    auth: Auth = Auth()
    pdb: Pdb = Pdb()
    topologySpread: Spread = Spread()
    strategy: Object = {}
    keda: Keda = Keda()
    rayservice: RayService = RayService()


class RayJob(Values):
    head: Head = Head()


class Trainer(Drained):
    mode: Literal["job", "rayjob", "none"] = "job"
    nodes: int = Field(1, ge=1)
    gpu: Gpu = Gpu()
    shmSize: Quantity = ""
    backoffLimit: int = Field(20, ge=0)
    rayjob: RayJob = RayJob()


class WithResources(Values):
    resources: Resources = Resources()


class Ray(Values):
    version: str = ""
    operatorNamespace: str = ""
    auth: Secret = Secret()
    submitter: WithResources = WithResources()
    autoscaler: WithResources = WithResources()


class External(Secret):
    url: str = Field("", pattern="^(rediss?://.+)?$")


class RedisStorage(Values):
    storageClassName: str = ""
    size: Quantity = ""


class Exporter(WithResources):
    enabled: bool = False
    image: Image = Image()


class Redis(Drained):
    enabled: bool = True
    external: External = External()
    auth: Secret = Secret()
    storage: RedisStorage = RedisStorage()
    maxmemory: str = Field(
        "", pattern="^[0-9]+(kb|mb|gb)?$", description="as Redis writes it, e.g. 1536mb; 0 = no limit"
    )
    exporter: Exporter = Exporter()


class Cli(WithResources):
    image: Image = Image()


class World(Values):
    enabled: bool = True


class Fetch(Values):
    url: str = Field(pattern="^[^:]+://.+")
    path: str = Field(pattern="^[^/.][^:=]*$", description="below /data")
    for_: list[Literal["retriever", "rollout", "trainer"]] = Field(alias="for", min_length=1)


class ObjectStore(Secret):
    env: list[Object] = []


class Shared(Values):
    existingClaim: str = ""
    storageClassName: str = ""
    accessModes: list[Literal["ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"]] = []
    size: Quantity = ""
    keep: bool = True


class Storage(Values):
    shared: Shared = Shared()


class Peers(Values):
    to: list[Object] = []
    ports: list[int] = []


class NetworkPolicy(Values):
    enabled: bool = True
    clients: dict[Literal["retriever", "reward", "rollout", "redis"], list[Object]] = {}
    metricsFrom: list[Object] = []
    objectStore: Peers = Peers()
    apiServer: Peers = Peers()
    collector: Peers = Peers()
    extraEgress: dict[Literal["retriever", "reward", "rollout", "trainer", "redis", "test"], list[Object]] = {}


class ServiceMonitor(Values):
    enabled: bool = False
    interval: str = ""


class Rules(Values):
    enabled: bool = False
    runbooks: str = Field("", description="put before docs/runbooks/<alert>.md, e.g. https://…/")


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


class Test(Values):
    question: str = Field("", min_length=1)


class Chart(Values):
    """Values of the Forage chart."""

    nameOverride: str = ""
    fullnameOverride: str = ""
    global_: Object = Field({}, alias="global", description="Helm's own")
    settings: Settings = Settings()
    image: SharedImage = SharedImage()
    security: Security = Security()
    cli: Cli = Cli()
    world: World = World()
    fetch: list[Fetch] = []
    fetcher: Cli = Cli()
    objectStore: ObjectStore = ObjectStore()
    storage: Storage = Storage()
    retriever: Retriever = Retriever()
    reward: Server = Server()
    rollout: Rollout = Rollout()
    trainer: Trainer = Trainer()
    ray: Ray = Ray()
    redis: Redis = Redis()
    networkPolicy: NetworkPolicy = NetworkPolicy()
    monitoring: Monitoring = Monitoring()
    test: Test = Test(question="?")


def schema() -> dict[str, Any]:
    """A JSON schema of draft 7, which every Helm reads."""
    made = Chart.model_json_schema(by_alias=True, ref_template="#/definitions/{model}")
    definitions: dict[str, Any] = made.pop("$defs")
    # Settings take a path for it, too: see TrainFile._bare, of which Pydantic's schema does not know.
    definitions["TrainFile"] = {"anyOf": [{"type": "string"}, definitions["TrainFile"]]}
    # Helm reads YAML 1.1, to which a bare `n:` is `false:`; the chart takes both (_settings.tpl).
    rollout = definitions["RolloutSettings"]["properties"]
    rollout["false"] = rollout["n"]
    made = {"$schema": "http://json-schema.org/draft-07/schema#", **made, "definitions": definitions}
    lean: dict[str, Any] = _lean(made)
    return lean


def _lean(node: Any, names: bool = False) -> Any:
    """Without titles, defaults and docstrings of models, which say nothing to who writes values.

    Args:
        names: the node's keys are names of properties, not of the schema language.
    """
    if isinstance(node, list):
        return [_lean(item) for item in node]
    if not isinstance(node, dict):
        return node
    model = "properties" in node
    drop = () if names else ("title", "default", *(("description",) if model else ()))
    return {
        key: value if key in ("const", "enum") and not names else _lean(value, key in ("properties", "definitions"))
        for key, value in node.items()
        if key not in drop
    }


def text() -> str:
    """The file's content."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] != ["--check"]:
        SCHEMA.write_text(text(), encoding="utf-8")
    elif SCHEMA.read_text(encoding="utf-8") != text():
        sys.exit(f"{SCHEMA.name} is not current: run 'make chart-schema' and commit")
