"""`deploy/sagemaker/endpoint.py` against SageMaker's control plane as moto and botocore have it."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from types import ModuleType

import boto3
import pytest
from botocore.response import StreamingBody
from botocore.stub import ANY, Stubber
from moto import mock_aws

FILE = Path(__file__).parents[3] / "deploy/sagemaker/endpoint.py"
GIVEN = {
    "image": "123456789012.dkr.ecr.us-east-1.amazonaws.com/nxd-infer:cpu",
    "model": "s3://bucket/artifact",
    "role": "arn:aws:iam::123456789012:role/SageMaker",
}


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name, value in {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    spec = importlib.util.spec_from_file_location("sagemaker_endpoint", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_endpoint_is_created_described_and_deleted(endpoint, capsys):
    words = [f"--{name}={value}" for name, value in GIVEN.items()]
    with mock_aws():
        options = ["--instance=ml.c5.4xlarge", "--trace-options=--tp 2"]
        assert endpoint.main(["create", "llama", *words, *options]) == 0
        assert capsys.readouterr().out.startswith("arn:aws:sagemaker:us-east-1:123456789012:endpoint/llama")
        client = boto3.client("sagemaker")
        model = client.describe_model(ModelName="llama")
        container = model["PrimaryContainer"]
        assert container["ModelDataSource"]["S3DataSource"]["S3Uri"] == "s3://bucket/artifact/"
        assert container["Environment"] == {"NXD_INFER_TRACE_OPTIONS": "--tp 2"}
        (variant,) = client.describe_endpoint_config(EndpointConfigName="llama")["ProductionVariants"]
        assert variant["InstanceType"] == "ml.c5.4xlarge" and "InferenceAmiVersion" not in variant
        assert endpoint.main(["create", "other", *words, "--instance=ml.none"]) == 1
        told = capsys.readouterr().err
        assert told.startswith("error: ") and "ml.none" in told
        assert endpoint.main(["delete", "other"]) == 0
        assert capsys.readouterr().out == "deleted: model\n"
        assert endpoint.main(["delete", "llama"]) == 0
        assert capsys.readouterr().out == "deleted: endpoint, configuration, model\n"
        assert not client.list_models()["Models"] and not client.list_endpoints()["Endpoints"]
        assert endpoint.main(["delete", "llama"]) == 0
        assert "there was none" in capsys.readouterr().out


def test_instances_with_neuron_devices_get_their_image(endpoint):
    """moto does not know these instances: botocore checks the call's form, and its lists the values."""
    client = boto3.client("sagemaker")
    shapes = client.meta.service_model
    assert endpoint.NEURON_AMI in shapes.shape_for("ProductionVariantInferenceAmiVersion").enum
    assert {"ml.inf2.xlarge", "ml.trn1.2xlarge"} <= set(shapes.shape_for("ProductionVariantInstanceType").enum)
    variant = {
        "VariantName": "main", "ModelName": "llama", "InstanceType": "ml.inf2.xlarge", "InitialInstanceCount": 1,
        "ModelDataDownloadTimeoutInSeconds": 3600, "ContainerStartupHealthCheckTimeoutInSeconds": 3600,
        "InferenceAmiVersion": endpoint.NEURON_AMI,
    }  # fmt: skip
    with Stubber(client) as calls:
        calls.add_response("create_model", {"ModelArn": "arn:aws:sagemaker:us-east-1:1:model/llama"})
        calls.add_response(
            "create_endpoint_config",
            {"EndpointConfigArn": "arn:aws:sagemaker:us-east-1:1:endpoint-config/llama"},
            {"EndpointConfigName": "llama", "ProductionVariants": [variant]},
        )
        calls.add_response("create_endpoint", {"EndpointArn": "arn:aws:sagemaker:us-east-1:1:endpoint/llama"})
        failed = {
            "EndpointName": "llama", "EndpointArn": "arn:aws:sagemaker:us-east-1:1:endpoint/llama",
            "EndpointStatus": "Failed", "FailureReason": "no capacity", "CreationTime": 0, "LastModifiedTime": 0,
        }  # fmt: skip
        calls.add_response("describe_endpoint", failed, {"EndpointName": ANY})
        calls.add_response("describe_endpoint", failed, {"EndpointName": "llama"})
        with pytest.raises(endpoint.EndpointError, match=r"llama is Failed: no capacity; .*`delete llama` removes"):
            endpoint.create(client, "llama", **GIVEN, instance="ml.inf2.xlarge")
        calls.assert_no_pending_responses()


def test_an_endpoint_is_asked_in_json(endpoint):
    client, asked, said = boto3.client("sagemaker-runtime"), b'{"prompt": "ab"}', b'{"choices": []}'
    form = {"EndpointName": "llama", "ContentType": "application/json", "Accept": "application/json", "Body": asked}
    with Stubber(client) as calls:
        calls.add_response("invoke_endpoint", {"Body": StreamingBody(io.BytesIO(said), len(said))}, form)
        assert endpoint.invoke(client, "llama", asked.decode()) == said.decode()
