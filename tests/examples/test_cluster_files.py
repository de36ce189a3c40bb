"""The cluster examples are what Ray's own validator and KubeRay's RayJob take, and what they run
exists here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import ray
import ray.runtime_env
import yaml

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((CLUSTER / name).read_text())


def test_ray_s_own_validator_takes_the_ray_up_file():
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(read("ray-up.yaml")))


def test_the_rayjob_is_valid_and_workers_share_the_results():
    job = read("rayjob.yaml")
    schema = yaml.safe_load((Path(__file__).parent / "rayjob.schema.yaml").read_text())
    jsonschema.validate(job, schema)
    assert yaml.safe_load(job["spec"]["runtimeEnvYAML"]).keys() <= set(
        ray.runtime_env.RuntimeEnv.known_fields
    )
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == ray.__version__
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts["runs"] == "/mnt/runs" and mounts.keys() == {
            volume["name"] for volume in pod["volumes"]
        }
        assert container["resources"]["limits"] == container["resources"]["requests"], (
            "Ray counts the limits"
        )
