"""``POST /pooling``, as vLLM has it: the numbers that an encoder gives for each text, without words around them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse

from nxd_server.http.error_responses import unsupported
from nxd_server.http.openai.embeddings import embed, encode_input, encoded, listed, usage_of
from nxd_server.http.openai.schemas import PoolingBody
from nxd_server.http.request_context import require_task

NAMES = {"embed": "embed", "classify": "classify", "token-classification": "token_classify"}
"""vLLM's names of our tasks."""


async def pooling(request: Request, body: PoolingBody) -> JSONResponse:
    """Return each text's embedding, a classifier's probabilities, or those of each token."""
    service = require_task(request, "/pooling", *NAMES)
    task = service.task
    if body.task not in (None, NAMES[task]):
        raise unsupported("task", f"{service.model_name!r} was traced for {NAMES[task]}")
    if task == "embed":
        if not body.use_activation and service.metadata.get("normalize"):
            raise unsupported("use_activation", "the model's vectors are normalised where it was traced")
        results, values = await embed(request, body)
    else:
        from nxd_server.engine.text_encoder import probabilities

        if body.dimensions is not None:
            raise unsupported("dimensions", "of a classifier")
        options = {"prompt_name": body.prompt_name, "truncate_prompt_tokens": body.truncate_prompt_tokens}
        results = await encode_input(request, body.input, **options)
        scores = service.require_encoder().scores if body.use_activation else "none"
        found = [probabilities(result.values, scores) for result in results]
        values = [result.values if one is None else one for one, result in zip(found, results, strict=True)]
    data = [
        {"index": index, "object": "pooling", "data": encoded(value, body.encoding_format)}
        for index, value in enumerate(values)
    ]
    return listed(service, data, usage_of(results), "pool")
