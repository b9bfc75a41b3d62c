"""The fields of Kubernetes objects that our manifests may use, as JSON schemas without any others.

Listed by hand after KubeRay 1.7.0 (RayService, `ray.io/v1`) and the API of Kubernetes 1.36, as far
as a server on Ray may want them. `python -m tests.support.kubernetes_check` compares manifests with
the full definitions, which are too large to keep here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer"}
YES_OR_NO: Schema = {"type": "boolean"}
NUMBER_OR_TEXT: Schema = {"type": ["integer", "string"]}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def listed(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def fields(required: tuple[str, ...] = (), /, **known: Schema) -> Schema:
    """Return the schema of an object with these fields and no others."""
    return {
        "type": "object",
        "properties": known,
        "required": list(required),
        "additionalProperties": False,
    }


METADATA = fields(name=TEXT, labels=TEXTS, annotations=TEXTS)
LABELS = fields(
    matchLabels=TEXTS,
    matchExpressions=listed(
        fields(
            ("key", "operator"),
            key=TEXT,
            operator=one_of("In", "NotIn", "Exists", "DoesNotExist"),
            values=listed(TEXT),
        )
    ),
)

# Pods

KEY_OF_SECRET = fields(("key",), name=TEXT, key=TEXT, optional=YES_OR_NO)
VALUE_FROM = fields(secretKeyRef=KEY_OF_SECRET)
ENV = listed(fields(("name",), name=TEXT, value=TEXT, valueFrom=VALUE_FROM))
EXEC = fields(command=listed(TEXT))
PROBE = fields(
    exec=EXEC,
    httpGet=fields(("port",), path=TEXT, port=NUMBER_OR_TEXT, scheme=TEXT),
    tcpSocket=fields(("port",), port=NUMBER_OR_TEXT),
    initialDelaySeconds=NUMBER,
    periodSeconds=NUMBER,
    timeoutSeconds=NUMBER,
    failureThreshold=NUMBER,
    successThreshold=NUMBER,
)
SECCOMP = fields(("type",), type=one_of("RuntimeDefault", "Localhost", "Unconfined"))
CONTAINER_SECURITY = fields(
    allowPrivilegeEscalation=YES_OR_NO,
    capabilities=fields(add=listed(TEXT), drop=listed(TEXT)),
    privileged=YES_OR_NO,
    readOnlyRootFilesystem=YES_OR_NO,
    runAsNonRoot=YES_OR_NO,
    seccompProfile=SECCOMP,
)
POD_SECURITY = fields(
    fsGroup=NUMBER,
    fsGroupChangePolicy=one_of("OnRootMismatch", "Always"),
    runAsGroup=NUMBER,
    runAsNonRoot=YES_OR_NO,
    runAsUser=NUMBER,
    seccompProfile=SECCOMP,
    supplementalGroups=listed(NUMBER),
)
AMOUNTS: Schema = {"type": "object", "additionalProperties": NUMBER_OR_TEXT}
RESOURCES = fields(limits=AMOUNTS, requests=AMOUNTS)
MOUNTS = listed(
    fields(("name", "mountPath"), name=TEXT, mountPath=TEXT, readOnly=YES_OR_NO, subPath=TEXT)
)
CONTAINER = fields(
    ("name",),
    name=TEXT,
    image=TEXT,
    imagePullPolicy=one_of("Always", "IfNotPresent", "Never"),
    command=listed(TEXT),
    args=listed(TEXT),
    env=ENV,
    lifecycle=fields(preStop=fields(exec=EXEC), postStart=fields(exec=EXEC)),
    livenessProbe=PROBE,
    readinessProbe=PROBE,
    startupProbe=PROBE,
    ports=listed(fields(("containerPort",), name=TEXT, containerPort=NUMBER, protocol=TEXT)),
    resources=RESOURCES,
    securityContext=CONTAINER_SECURITY,
    volumeMounts=MOUNTS,
)
KEY_TO_PATH = listed(fields(("key", "path"), key=TEXT, path=TEXT, mode=NUMBER))
VOLUME = fields(
    ("name",),
    name=TEXT,
    emptyDir=fields(medium=one_of("", "Memory"), sizeLimit=NUMBER_OR_TEXT),
    persistentVolumeClaim=fields(("claimName",), claimName=TEXT, readOnly=YES_OR_NO),
    projected=fields(
        defaultMode=NUMBER,
        sources=listed(fields(secret=fields(name=TEXT, items=KEY_TO_PATH, optional=YES_OR_NO))),
    ),
    secret=fields(secretName=TEXT, defaultMode=NUMBER, items=KEY_TO_PATH, optional=YES_OR_NO),
)
POD = fields(
    ("containers",),
    affinity={"type": "object"},
    automountServiceAccountToken=YES_OR_NO,
    containers=listed(CONTAINER),
    imagePullSecrets=listed(fields(name=TEXT)),
    initContainers=listed(CONTAINER),
    nodeSelector=TEXTS,
    priorityClassName=TEXT,
    securityContext=POD_SECURITY,
    serviceAccountName=TEXT,
    terminationGracePeriodSeconds=NUMBER,
    tolerations=listed(
        fields(
            key=TEXT,
            operator=one_of("Exists", "Equal"),
            value=TEXT,
            effect=one_of("NoSchedule", "PreferNoSchedule", "NoExecute"),
        )
    ),
    topologySpreadConstraints=listed(
        fields(
            ("maxSkew", "topologyKey", "whenUnsatisfiable"),
            labelSelector=LABELS,
            maxSkew=NUMBER,
            topologyKey=TEXT,
            whenUnsatisfiable=one_of("DoNotSchedule", "ScheduleAnyway"),
        )
    ),
    volumes=listed(VOLUME),
)
POD_TEMPLATE = fields(metadata=METADATA, spec=POD)

# Other objects of Kubernetes

CLAIM = fields(
    accessModes=listed(one_of("ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany")),
    resources=RESOURCES,
    storageClassName=TEXT,
)
SERVICE = fields(
    clusterIP=TEXT,
    ports=listed(
        fields(("port",), name=TEXT, port=NUMBER, protocol=TEXT, targetPort=NUMBER_OR_TEXT)
    ),
    selector=TEXTS,
    type=one_of("ClusterIP", "NodePort", "LoadBalancer"),
)
STATEFUL_SET = fields(
    ("selector", "template"),
    replicas=NUMBER,
    selector=LABELS,
    serviceName=TEXT,
    template=POD_TEMPLATE,
    volumeClaimTemplates=listed(fields(metadata=METADATA, spec=CLAIM)),
)
DISRUPTION_BUDGET = fields(
    maxUnavailable=NUMBER_OR_TEXT,
    minAvailable=NUMBER_OR_TEXT,
    selector=LABELS,
    unhealthyPodEvictionPolicy=one_of("IfHealthyBudget", "AlwaysAllow"),
)
PEERS = listed(
    fields(
        ipBlock=fields(("cidr",), cidr=TEXT, **{"except": listed(TEXT)}),
        namespaceSelector=LABELS,
        podSelector=LABELS,
    )
)
NETWORK_PORTS = listed(fields(endPort=NUMBER, port=NUMBER_OR_TEXT, protocol=TEXT))
NETWORK_POLICY = fields(
    podSelector=LABELS,
    policyTypes=listed(one_of("Ingress", "Egress")),
    ingress=listed(fields(ports=NETWORK_PORTS, **{"from": PEERS})),
    egress=listed(fields(ports=NETWORK_PORTS, to=PEERS)),
)

# KubeRay

CREDENTIAL = fields(value=TEXT, valueFrom=VALUE_FROM)
HEAD_GROUP = fields(
    ("rayStartParams", "template"),
    labels=TEXTS,
    rayStartParams=TEXTS,
    resources=TEXTS,
    serviceType=TEXT,
    template=POD_TEMPLATE,
)
WORKER_GROUP = fields(
    ("groupName", "maxReplicas", "minReplicas", "rayStartParams", "template"),
    groupName=TEXT,
    idleTimeoutSeconds=NUMBER,
    labels=TEXTS,
    maxReplicas=NUMBER,
    minReplicas=NUMBER,
    numOfHosts=NUMBER,
    rayStartParams=TEXTS,
    replicas=NUMBER,
    resources=TEXTS,
    suspend=YES_OR_NO,
    template=POD_TEMPLATE,
)
RAY_CLUSTER = fields(
    ("headGroupSpec",),
    authOptions=fields(
        enableK8sTokenAuth=YES_OR_NO, mode=one_of("disabled", "token"), secretName=TEXT
    ),
    autoscalerOptions=fields(
        env=ENV,
        idleTimeoutSeconds=NUMBER,
        image=TEXT,
        resources=RESOURCES,
        securityContext=CONTAINER_SECURITY,
        upscalingMode=one_of("Default", "Aggressive", "Conservative"),
        version=one_of("v1", "v2"),
        volumeMounts=MOUNTS,
    ),
    enableInTreeAutoscaling=YES_OR_NO,
    gcsFaultToleranceOptions=fields(
        backend=one_of("redis", "rocksdb"),
        externalStorageNamespace=TEXT,
        redisAddress=TEXT,
        redisPassword=CREDENTIAL,
        redisUsername=CREDENTIAL,
    ),
    headGroupSpec=HEAD_GROUP,
    rayVersion=TEXT,
    suspend=YES_OR_NO,
    workerGroupSpecs=listed(WORKER_GROUP),
)
RAY_SERVICE = fields(
    ("rayClusterConfig",),
    excludeHeadPodFromServeSvc=YES_OR_NO,
    rayClusterConfig=RAY_CLUSTER,
    rayClusterDeletionDelaySeconds=NUMBER,
    serveConfigV2=TEXT,
    serveService=fields(metadata=METADATA, spec=SERVICE),
    suspend=YES_OR_NO,
    upgradeStrategy=fields(
        clusterUpgradeOptions=fields(
            ("gatewayClassName", "intervalSeconds", "stepSizePercent"),
            gatewayClassName=TEXT,
            intervalSeconds=NUMBER,
            maxSurgePercent=NUMBER,
            stepSizePercent=NUMBER,
        ),
        type=one_of("NewCluster", "NewClusterWithIncrementalUpgrade", "None"),
    ),
)

SPECS = {
    ("v1", "PersistentVolumeClaim"): CLAIM,
    ("v1", "Service"): SERVICE,
    ("apps/v1", "StatefulSet"): STATEFUL_SET,
    ("networking.k8s.io/v1", "NetworkPolicy"): NETWORK_POLICY,
    ("policy/v1", "PodDisruptionBudget"): DISRUPTION_BUDGET,
    ("ray.io/v1", "RayService"): RAY_SERVICE,
}
"""Schema of the `spec`, by version and kind."""


def schema_of(version: str, kind: str) -> Schema:
    """Return the schema of a whole object; KeyError for a kind that is not listed."""
    spec = SPECS[version, kind]
    return fields(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion=TEXT,
        kind=TEXT,
        metadata=METADATA,
        spec=spec,
    )
