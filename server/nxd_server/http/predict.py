"""``POST /v1/predict``: any traced model, named tensors in and out."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from .errors import bad_request, clip, encode, missing_field
from .oneshot import wait_all
from .requests import check_model, context_of, whole_of
from .schemas import PredictBody

if TYPE_CHECKING:
    import torch


async def predict(request: Request, body: PredictBody) -> Response:
    """Run the model once on the tensors of ``body``.

    The dtypes and shapes are the traced ones (``/v1/buckets`` lists them); a batch smaller than a bucket's is padded,
    and may share a step with other requests'.
    """
    context = context_of(request)
    service, settings = context.service, context.settings
    check_model(service, body.model)
    if (body.inputs is None) == (body.safetensors is None):
        raise bad_request("send either `inputs` or `safetensors`", "inputs", "missing_parameter")
    service.require_ready()
    if service.task == "generate":
        raise bad_request(
            f"{service.model_name!r} was traced for generation, and its graphs keep a cache: use /v1/completions",
            code="task_not_supported",
        )
    from .tensors import tensors_from_safetensors  # torch, which a server that generates never loads

    specs = service.input_specs()
    if body.safetensors is not None:
        tensors = await asyncio.to_thread(tensors_from_safetensors, body.safetensors, "safetensors")
        field = "safetensors"
    else:
        tensors = await asyncio.to_thread(_read, body.inputs or {}, specs)
        field = "inputs"
    _check_names(tensors, specs, field)
    with whole_of(request) as whole:
        submit = functools.partial(service.submit_tensors, tensors, timeout=settings.request_timeout, whole=whole)
        (outputs,) = await wait_all(request, [submit], timeout=settings.request_timeout)
    if body.outputs is not None:
        missing = [name for name in body.outputs if name not in outputs]
        if missing:
            raise bad_request(
                f"`outputs`: there is no output {clip(missing[0])!r}; this model has {', '.join(outputs)}", "outputs"
            )
        outputs = {name: outputs[name] for name in body.outputs}
    as_file = (body.output_format or ("safetensors" if body.safetensors is not None else "json")) == "safetensors"
    answer = await asyncio.to_thread(_answer, service.model_name, outputs, as_file)
    return Response(answer, media_type="application/json")


def _read(inputs: dict[str, Any], specs: dict[str, Any]) -> dict[str, torch.Tensor]:
    from .tensors import tensor_from_json

    tensors = {}
    for name, value in inputs.items():
        if value is None:
            continue
        default = specs[name].torch_dtype if name in specs else None
        tensors[name] = tensor_from_json(value, default, f"inputs.{clip(name)}")
    return tensors


def _check_names(tensors: dict[str, torch.Tensor], specs: dict[str, Any], field: str) -> None:
    for name in tensors:
        if name not in specs:
            shown = f"{field}.{clip(name)}"
            raise bad_request(f"`{shown}`: there is no such input; this model takes {', '.join(specs)}", shown)
    for name, spec in specs.items():
        if name not in tensors and spec.default is None:
            raise missing_field(f"{field}.{name}")


def _answer(model: str, outputs: dict[str, torch.Tensor], as_file: bool) -> bytes:
    from .tensors import tensor_to_json, tensors_to_safetensors

    if as_file:
        return encode({"model": model, "safetensors": tensors_to_safetensors(outputs)})
    return encode({"model": model, "outputs": {name: tensor_to_json(value) for name, value in outputs.items()}})
