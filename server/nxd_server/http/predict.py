"""``POST /v1/predict``: any traced model, named tensors in and out."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse

from nxd_server.http.error_responses import bad_request, clip, missing_field
from nxd_server.http.request_body import Listed, QueuedBody
from nxd_server.http.request_context import context_of, on_a_copy, seconds_left, unless_left, wait_all, whole_of

if TYPE_CHECKING:
    import torch

    from nxd_server.app.replica import Replica
    from nxd_server.engine import OneShotEngine


class PredictBody(QueuedBody):
    """``POST /v1/predict``."""

    inputs: dict[str, Any] | None = Field(
        None, description='Tensors by name: nested lists, or {"data": nested or flat list, "dtype", "shape"}.'
    )
    safetensors: str | None = Field(None, description="Alternative to `inputs`: one base64 safetensors file.")
    output_format: Literal["json", "safetensors"] | None = Field(
        None, description="Format of the outputs; by default that of the inputs."
    )
    outputs: Listed[str] | None = Field(None, description="Names of the outputs to return; by default all.")


async def predict(request: Request, body: PredictBody) -> JSONResponse:
    """Run the model once on the tensors of ``body``.

    The dtypes and shapes are the traced ones (``/v1/buckets`` lists them). If the model was traced with ``batch_dim=0``
    or declares as much, a batch smaller than a bucket's is padded, and may share a step with other requests.
    """
    context = context_of(request)
    service = context.service
    if (body.inputs is None) == (body.safetensors is None):
        raise bad_request("send either `inputs` or `safetensors`", "inputs", "missing_parameter")
    service.require_ready()
    if service.task == "generate":
        raise bad_request(
            f"{service.model_name!r} was traced for generation, and its graphs keep a cache: use /v1/completions",
            code="task_not_supported",
        )
    specs = service.input_specs()
    if body.safetensors is not None:
        read = functools.partial(unpack, body.safetensors, specs)
    else:
        read = functools.partial(read_tensors, body.inputs or {}, specs)
    tensors = await unless_left(request, context.tensors.run(read))

    async def run(replica: Replica) -> Any:
        worker, left = cast("OneShotEngine", replica.engine), seconds_left(request)
        with whole_of(request) as whole:
            submit = functools.partial(worker.submit, tensors, timeout=left, whole=whole)
            return await wait_all(request, [submit], timeout=left)

    (outputs,) = await on_a_copy(request, run)
    if body.outputs is not None:
        if missing := [name for name in body.outputs if name not in outputs]:
            raise bad_request(
                f"`outputs`: there is no output {clip(missing[0])!r}; this model has {', '.join(outputs)}", "outputs"
            )
        outputs = {name: outputs[name] for name in body.outputs}
    as_file = (body.output_format or ("safetensors" if body.safetensors is not None else "json")) == "safetensors"
    return await asyncio.to_thread(_answer, service.model_name, outputs, as_file)


def unpack(text: str, specs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the inputs in a base64 safetensors file. Raises ApiError 400 for names not in ``specs``."""
    from nxd_server.http.tensors import tensors_from_safetensors  # slow: torch, which servers that generate do without

    tensors = tensors_from_safetensors(text, "safetensors")
    _check_names(specs, "safetensors", tensors.keys())
    return tensors


def read_tensors(inputs: dict[str, Any], specs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the inputs from JSON. Raises ApiError 400 for names not in ``specs``."""
    from nxd_server.http.tensors import tensor_from_json

    given = {name: value for name, value in inputs.items() if value is not None}
    _check_names(specs, "inputs", given.keys())
    return {n: tensor_from_json(value, specs[n].torch_dtype, f"inputs.{n}") for n, value in given.items()}


def _check_names(specs: Mapping[str, Any], field: str, names: Set[str]) -> None:
    for name in sorted(names - specs.keys())[:1]:
        shown = f"{field}.{clip(name)}"
        raise bad_request(f"`{shown}`: there is no such input; this model takes {', '.join(specs)}", shown)
    for name, spec in specs.items():
        if name not in names and spec.default is None:
            raise missing_field(f"{field}.{name}")


def _answer(model: str, outputs: dict[str, torch.Tensor], as_file: bool) -> JSONResponse:
    from nxd_server.http.tensors import tensor_to_json, tensors_to_safetensors

    if as_file:
        return JSONResponse({"model": model, "safetensors": tensors_to_safetensors(outputs)})
    told = {name: tensor_to_json(value) for name, value in outputs.items()}
    return JSONResponse({"model": model, "outputs": told})
