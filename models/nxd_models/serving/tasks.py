"""The arguments of ``parallel_model_trace`` for a model directory and a task: buckets, example inputs, files.

    plan = tasks.plan("model_dir", batch_sizes=[1, 4], prompt_buckets=[128, 512], max_len=1024)
    model = parallel_model_trace(**plan.trace_arguments(), tp_degree=2)

Buckets of a decoder: ``decode_b<B>`` (B rows of one token) for every batch size; if speculating also ``verify_b<B>``
(B rows of a token and ``speculate`` guesses); ``prefill_s<S>`` (one row of S tokens) for every prompt length; and
``mixed_b<B>`` (like ``decode``, with a row for every slot and PROMPT_ROWS for prompt tokens). Buckets of an encoder:
``b<B>_s<S>`` for every pair.
"""

from __future__ import annotations

from nxd_infer.errors import ModelConfigError
from nxd_infer.util.options import accepts_options
from nxd_models import registry
from nxd_models.hf import sentence_transformers as sentence
from nxd_models.serving.encode_task import plan_encode
from nxd_models.serving.generate_task import plan_generate
from nxd_models.serving.task_options import TaskOptions
from nxd_models.serving.task_plan import TaskPlan

SERVING_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
)
"""Files that a server needs besides the graphs; copied if present, with the files of sentence-transformers."""

FURTHER_TEMPLATES = "additional_chat_templates"
"""The folder of chat templates for other uses; it is copied too."""


@accepts_options(TaskOptions)
def plan(options: TaskOptions) -> TaskPlan:
    """Return what tracing a model directory for a task takes.

    Args:
        {arguments}

    Raises ModelConfigError naming the argument or the field of ``config.json``.
    """
    directory = registry.load_config(options.model_dir, options.model_impl)
    task = directory.task(options.task)
    if task != "generate" and options.speculate:
        raise ModelConfigError(f"speculate = {options.speculate}: the task {task!r} guesses no tokens, generate does")
    if task != "generate" and options.lora_slots:
        raise ModelConfigError(
            f"lora_slots = {options.lora_slots}: the task {task!r} has no slots for adapters, generate has"
        )
    if directory.spec.model_impl is not None and options.lora_slots:
        raise ModelConfigError(
            f"lora_slots = {options.lora_slots}: a module of {directory.spec.model_impl} has no slots for adapters; "
            "families of nxd_models have"
        )
    if directory.spec.encodes_prompts and options.lora_slots:
        raise ModelConfigError(
            f"lora_slots = {options.lora_slots}: a model with an encoder has no slots for adapters; merge the adapter "
            "into the model and trace that"
        )
    made = plan_generate(directory, options) if task == "generate" else plan_encode(directory, task, options)
    path = directory.path
    made.metadata["model_name"] = options.model_name or path.resolve().name
    if (library := directory.spec.model_impl) is not None:
        made.func_kwargs["model_impl"] = made.metadata["model_impl"] = library
    templates = sorted(f"{FURTHER_TEMPLATES}/{file.name}" for file in path.glob(f"{FURTHER_TEMPLATES}/*.jinja"))
    names = [*SERVING_FILES, *templates, *([] if task == "generate" else sentence.files(path))]
    made.files_to_copy = {name: path / name for name in names if (path / name).is_file()}
    return made
