"""An endpoint of SageMaker: create it, ask it, delete it. Needs `pip install boto3`, and an account's credentials.

    python deploy/sagemaker/endpoint.py create llama --image ACCOUNT.dkr.ecr.REGION.amazonaws.com/nxd-infer:cpu \\
        --model s3://bucket/artifact/ --role arn:aws:iam::ACCOUNT:role/SageMaker --instance ml.c7i.4xlarge
    python deploy/sagemaker/endpoint.py invoke llama '{"prompt": "A generator", "max_tokens": 16}'
    python deploy/sagemaker/endpoint.py delete llama

SageMaker copies the folder of `--model` to /opt/ml/model and runs the image with the argument `serve`; a folder of a
Hugging Face model is traced on the instance, which must be done within an hour.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError, WaiterError

STARTUP_SECONDS = 3600
"""The most that SageMaker allows, for the download of the model and for the start of the server."""
NEURON_AMI = "al2-ami-sagemaker-inference-neuron-2"
"""The image of Inf2 and Trn1 instances. UNVERIFIED: its driver, 2.19, is older than the one of the image's SDK."""
POLL_SECONDS = 15


class EndpointError(RuntimeError):
    """An endpoint that does not serve."""


def create(
    client: Any,
    name: str,
    *,
    image: str,
    model: str,
    role: str,
    instance: str,
    count: int = 1,
    trace_options: str | None = None,
) -> str:
    """Create the model, its configuration and the endpoint, all called ``name``; wait until it serves; its ARN.

    What was created stays if a later step fails: :func:`delete` removes it. Raises EndpointError if the endpoint does
    not come to serve, and botocore's errors.
    """
    source = {"S3Uri": model.rstrip("/") + "/", "S3DataType": "S3Prefix", "CompressionType": "None"}
    container: dict[str, Any] = {"Image": image, "ModelDataSource": {"S3DataSource": source}}
    if trace_options is not None:
        container["Environment"] = {"NXD_INFER_TRACE_OPTIONS": trace_options}
    variant: dict[str, Any] = {
        "VariantName": "main",
        "ModelName": name,
        "InstanceType": instance,
        "InitialInstanceCount": count,
        "ModelDataDownloadTimeoutInSeconds": STARTUP_SECONDS,
        "ContainerStartupHealthCheckTimeoutInSeconds": STARTUP_SECONDS,
    }
    if instance.startswith(("ml.inf2.", "ml.trn1.")):
        variant["InferenceAmiVersion"] = NEURON_AMI
    client.create_model(ModelName=name, PrimaryContainer=container, ExecutionRoleArn=role)
    client.create_endpoint_config(EndpointConfigName=name, ProductionVariants=[variant])
    arn = client.create_endpoint(EndpointName=name, EndpointConfigName=name)["EndpointArn"]
    limits = {"Delay": POLL_SECONDS, "MaxAttempts": 2 * STARTUP_SECONDS // POLL_SECONDS}
    try:
        client.get_waiter("endpoint_in_service").wait(EndpointName=name, WaiterConfig=limits)
    except WaiterError:
        found = client.describe_endpoint(EndpointName=name)
        reason = found.get("FailureReason", "no reason is given")
        raise EndpointError(
            f"the endpoint {name} is {found['EndpointStatus']}: {reason}; its log is in CloudWatch under "
            f"/aws/sagemaker/Endpoints/{name}; `delete {name}` removes what was created"
        ) from None
    return arn


def invoke(runtime: Any, name: str, body: str) -> str:
    """The answer to ``body``, JSON as /invocations takes it."""
    answer = runtime.invoke_endpoint(
        EndpointName=name, ContentType="application/json", Accept="application/json", Body=body.encode()
    )
    return answer["Body"].read().decode()


def delete(client: Any, name: str) -> list[str]:
    """Delete whatever :func:`create` has made; what there was."""
    deleted = []
    for what, call in (
        ("endpoint", lambda: client.delete_endpoint(EndpointName=name)),
        ("configuration", lambda: client.delete_endpoint_config(EndpointConfigName=name)),
        ("model", lambda: client.delete_model(ModelName=name)),
    ):
        try:
            call()
        except ClientError as error:
            if "Could not find" not in error.response["Error"]["Message"]:  # its code stands for other failures as well
                raise
        else:
            deleted.append(what)
    return deleted


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("create")
    asking = commands.add_parser("invoke")
    for command in (making, asking, commands.add_parser("delete")):
        command.add_argument("name", help="of the endpoint")
    making.add_argument("--image", required=True, help="the container's image, in ECR")
    making.add_argument("--model", required=True, help="s3:// folder of an artifact or a Hugging Face model")
    making.add_argument("--role", required=True, help="ARN of the role that may read both")
    making.add_argument("--instance", required=True, help="ml.c7i.4xlarge, ml.inf2.xlarge, ml.trn1.2xlarge, ...")
    making.add_argument("--count", type=int, default=1, help="instances")
    making.add_argument("--trace-options", help="how to trace a model: options of `nxd-infer trace`")
    asking.add_argument("body", help='JSON, such as {"prompt": "A generator"}')
    given = vars(parser.parse_args(arguments))
    command, name = given.pop("command"), given.pop("name")
    try:
        if command == "create":
            print(create(boto3.client("sagemaker"), name, **given))
        elif command == "invoke":
            print(invoke(boto3.client("sagemaker-runtime"), name, given["body"]))
        else:
            print(f"deleted: {', '.join(delete(boto3.client('sagemaker'), name)) or 'nothing, there was none'}")
    except (EndpointError, BotoCoreError, ClientError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
