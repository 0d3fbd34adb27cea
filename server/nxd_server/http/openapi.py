"""The OpenAPI document: FastAPI's, with what our routes read and answer, who may ask, and how they refuse.

Answers are written where they are made; the tables here describe them, and a test holds them to what a server answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from nxd_server.http.error_responses import STATUSES
from nxd_server.http.keys import OPEN_PATHS
from nxd_server.http.request_body import Body
from nxd_server.http.request_context import ANTHROPIC_PATH, TGI_PATHS

SHAPES = """
Error error=ErrorDetails
ErrorDetails message=str type=str param?=str code?=str
MessagesError type=str error=MessagesErrorDetails request_id=str
MessagesErrorDetails type=str message=str
Usage prompt_tokens=int completion_tokens=int total_tokens=int
 prompt_tokens_details?=object completion_tokens_details?=object
Completion id=str object=str created=int model=str choices=[TextChoice] usage?=Usage weight_version?=int
 obfuscation?=str
TextChoice index=int text=str logprobs?=TextLogprobs finish_reason?=str token_ids?=[int] prompt_token_ids?=[int]
 prompt_logprobs?=[any]
TextLogprobs tokens=[str] token_logprobs=[any] top_logprobs=[any] text_offset=[int]
ChatCompletion id=str object=str created=int model=str choices=[ChatChoice] usage?=Usage weight_version?=int
 prompt_token_ids?=[int] prompt_logprobs?=[any]
ChatChoice index=int message=ChatMessage logprobs?=ChatLogprobs finish_reason=str token_ids?=[int]
ChatChunk id=str object=str created=int model=str choices=[ChatChunkChoice] usage?=Usage weight_version?=int
 obfuscation?=str
ChatChunkChoice index=int delta=ChatMessage logprobs?=ChatLogprobs finish_reason?=str token_ids?=[int]
 prompt_token_ids?=[int]
ChatMessage role?=str content?=str refusal?=str reasoning?=str reasoning_content?=str tool_calls?=[ToolCall]
ChatLogprobs content?=[TokenLogprob] refusal?=[TokenLogprob]
TokenLogprob token=str logprob=float bytes?=[int] top_logprobs?=[TokenLogprob]
ToolCall index?=int id?=str type?=str function=FunctionCall
FunctionCall name?=str arguments=str
ResponseObject id=str object=str created_at=int status=str completed_at?=int background=bool error?=object
 incomplete_details?=object instructions?=str max_output_tokens?=int max_tool_calls?=int model=str
 output=[ResponseItem] parallel_tool_calls=bool previous_response_id?=str reasoning=object service_tier=str store=bool
 temperature=float text=object tool_choice=any tools=[object] top_logprobs=int top_p=float truncation=str
 usage?=ResponseUsage metadata=object
ResponseItem id=str type=str status?=str role?=str content?=[ContentPart] summary?=[object] encrypted_content?=str
 call_id?=str name?=str arguments?=str output?=any
ContentPart type=str text?=str annotations?=[object] logprobs?=[TokenLogprob]
ResponseUsage input_tokens=int input_tokens_details=object output_tokens=int output_tokens_details=object
 total_tokens=int
ResponseEvent type=str sequence_number=int response?=ResponseObject item_id?=str output_index?=int content_index?=int
 item?=ResponseItem part?=ContentPart delta?=str text?=str arguments?=str name?=str logprobs?=[TokenLogprob]
 obfuscation?=str
ResponseItems object=str data=[ResponseItem] first_id?=str last_id?=str has_more=bool
Deleted id=str object=str deleted=bool
Message id=str type=str role=str model=str content=[ContentBlock] stop_reason?=str stop_sequence?=str
 usage=MessageUsage
ContentBlock type=str text?=str thinking?=str signature?=str id?=str name?=str input?=object
MessageUsage input_tokens=int cache_creation_input_tokens=int cache_read_input_tokens=int output_tokens=int
MessageEvent type=str message?=Message index?=int content_block?=ContentBlock delta?=object usage?=MessageUsage
MessageTokens input_tokens=int
TextUsage prompt_tokens=int total_tokens=int
Embeddings object=str model=str usage=TextUsage data=[Embedding]
Embedding object=str index=int embedding=[float]|str
Classes id?=str object=str created?=int model=str usage=TextUsage data=[TextClass]
TextClass index=int label?=str probs?=[float] scores?=[float] num_classes?=int entities?=[object]
Pooled id=str object=str created=int model=str usage=TextUsage data=[PooledText]
PooledText object=str index=int data=[any]|str
Ranking id=str model=str usage=TextUsage results=[Rank]
Rank index=int relevance_score=float document?=object
RankedText index=int score=float text?=str
Generated generated_text=str details?=object
GeneratedToken index=int token=object top_tokens?=[object] generated_text?=str details?=object
Info model_id=str model_dtype?=str model_device_type=str model_pipeline_tag=str max_concurrent_requests?=int
 max_best_of=int max_stop_sequences=int max_input_tokens=int max_total_tokens=int max_client_batch_size=int router=str
 version=str model_sha?=str sha?=str docker_label?=str
GenerateError error=str error_type=str
Scores id=str object=str created=int model=str usage=TextUsage data=[Score]
Score object=str index=int score=float
Prediction model=str outputs?=object safetensors?=str
TokenIds count=int max_model_len=int tokens=[int] token_strs?=[str]
Detokenized prompt=str
Restarted object=str copies=int seconds=float
SwappedWeights object=str version=int path=str tag?=str seconds=float
Adapter id=str object=str created=int slot=int running=int deleted?=bool
Adapters object=str data=[Adapter]
Model id=str object=str created=int owned_by=str max_model_len?=int task?=str backend=str tp_degree=int pp_degree=int
 weight_version=int generation_defaults?=object parent?=str chat?=bool tool_calls?=bool top_logprobs?=int labels?=int
Models object=str data=[Model]
Bucket name=str object=str model?=str executions?=int seconds?=float useful_tokens?=int padding_tokens?=int
 step_seconds?=float inputs=[object] outputs=[object]
Buckets object=str data=[Bucket]
Status status=str error?=ErrorDetails uptime?=float restarts?=int ranks?=[object] last_step_age?=float
 step_running?=float recovery?=object running?=int waiting?=int slots_free?=int weight_version?=int models?=object
 draft?=object
Versions version=str torch=str python=str
"""
"""Answers and their parts: the fields, of which those with ``?`` may be null or left out."""
EXTRA = "nxd"
QUERIES = {"/v1/responses/{response_id}/input_items": {"limit": "int", "order": "str", "after": "str"}}
KEYS = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of the server, or the administrator's."},
    "x_api_key": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "The same key."},
}
TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "object": "object", "null": "null"}
REF = "#/components/schemas/{model}"


def _schema(kind: str) -> dict[str, Any]:
    """Return the schema of ``[int]|Usage``: one of them, each a plain kind, a list in brackets, or a shape's name."""
    if "|" in kind:
        return {"anyOf": [_schema(one) for one in kind.split("|")]}
    if kind.startswith("["):
        return {"type": "array", "items": _schema(kind[1:-1])}
    if kind in TYPES:
        return {"type": TYPES[kind]}
    return {} if kind == "any" else {"$ref": REF.format(model=kind)}


def about(answer: str, events: str = "", body: str = "", only_admin: bool = False) -> dict[str, Any]:
    """Return what :func:`document` reads of a route, for its ``openapi_extra``: the kinds of its answer (or the content
    type, of a text), of the events of its streams and of its body, and whether it needs the administrator's key."""
    return {EXTRA: [answer, events, body, only_admin]}


def document(app: FastAPI, bodies: Sequence[type[Body]], keyless: bool, root: str | None) -> dict[str, Any]:
    """Return the document of all routes; ``keyless``: the server has no keys; ``root``: what its paths begin with."""
    servers: list[dict[str, Any]] | None = [{"url": root}] if root else None
    found = get_openapi(title=app.title, version=app.version, routes=app.routes, servers=servers)
    schemas: dict[str, Any] = {}
    for line in SHAPES.strip().replace("\n ", " ").splitlines():
        name, *fields = line.split()
        kinds = {field: kind for field, _, kind in (one.partition("=") for one in fields)}
        properties = {field.rstrip("?"): _schema(kind + "|null" * ("?" in field)) for field, kind in kinds.items()}
        needed = [field for field in kinds if "?" not in field]
        schemas[name] = {"type": "object", "properties": properties, "required": needed}
    for kind in bodies:
        schema = kind.model_json_schema(ref_template=REF)
        schemas |= {**schema.pop("$defs", {}), kind.__name__: schema}
    for path, operations in found["paths"].items():
        for operation in operations.values():
            answer, events, body, only_admin = operation.pop(EXTRA)
            if body:
                operation["requestBody"] = {
                    "required": True,
                    "content": {"application/json": {"schema": _schema(body)}},
                }
            for name, kind in QUERIES.get(path, {}).items():
                operation["parameters"].append({"name": name, "in": "query", "schema": _schema(kind)})
            is_open = path in OPEN_PATHS
            keys: list[dict[str, Any]] = [] if is_open else [{name: []} for name in KEYS]
            operation["security"] = [*keys, {}] if keyless and keys and not only_admin else keys
            forms = {answer: "str"} if "/" in answer else {"application/json": answer}
            forms |= {"text/event-stream": events} if events else {}
            content = {form: {"schema": _schema(kind)} for form, kind in forms.items()}
            refusals = (403, 500, 503) if is_open else (STATUSES if body else (400, 401, 403, 404, 500, 503))
            operation["responses"] = {
                "200": {"description": "The answer.", "content": content},
                **{str(status): _refusal(path, answer, status) for status in refusals if status != 405},
            }
    found["components"] = {"schemas": dict(sorted(schemas.items())), "securitySchemes": KEYS}
    return found


def _refusal(path: str, answer: str, status: int) -> dict[str, Any]:
    error = "MessagesError" if path.startswith(ANTHROPIC_PATH) else "GenerateError" if path in TGI_PATHS else "Error"
    shape = "Status" if answer == "Status" and status == 503 else error
    meaning = STATUSES[status][1].replace("_", " ").capitalize() + "."
    found = {"description": meaning, "content": {"application/json": {"schema": _schema(shape)}}}
    if status in (429, 503):
        found["headers"] = {"Retry-After": {"description": "Seconds.", "schema": _schema("int")}}
    return found
