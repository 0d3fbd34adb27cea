"""Tiny real models of one layer, each distinct one traced once a run, and the reference that transformers gives."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from tests.support.shared import shared
from tests.support.tiny_models import write_tiny

MAX_LEN, PROMPT_BUCKETS, BATCHES, GUESSES = 256, (8, 16), (1, 4), 4
LORA = {"lora_slots": 2, "lora_rank": 4}


def trace_llama(tp=1, pp=1, backend="eager", compiler_args=None, only=None, **options):
    """A Llama that verifies ``GUESSES`` and, over several ranks, has slots for adapters; ``only``: so many graphs, by
    name. (model directory, artifact directory)."""
    sizes = {"batch_sizes": BATCHES, "prompt_buckets": PROMPT_BUCKETS, "max_len": MAX_LEN, "slots": 4}
    lora = LORA if tp > 1 else {}
    plan = {"dtype": torch.float32, "speculate": GUESSES, **sizes, **lora, **options}
    trace = {"tp_degree": tp, "pp_degree": pp, "backend": backend, "compiler_args": compiler_args}
    return _traced("llama", "generate", {"num_hidden_layers": pp}, plan, trace, only)


def trace_encoder(family, task, **changes):
    """An encoder, with ``changes`` in its config.json; (model directory, artifact directory)."""
    plan = {"batch_sizes": (1, 4), "prompt_buckets": (8, 32), "dtype": torch.float32}
    return _traced(family, task, changes, plan, {"backend": "eager"})


def _traced(family, task, changes, plan, trace, only=None):
    def make(folder: Path) -> None:
        import nxd_infer as nxd
        from nxd_models.serving import tasks

        model_dir = write_tiny(family, folder / "model", **{"num_hidden_layers": 1, **changes})
        made = tasks.plan(model_dir, task, **plan)
        if only:
            chosen = [(name, made.example_inputs[made.bucket_names.index(name)]) for name in only]
            made.bucket_names, made.example_inputs = (list(part) for part in zip(*chosen, strict=True))
        nxd.trace.parallel_model_trace(**made.trace_arguments(), **trace, artifact_dir=folder / "artifact").close()

    words = repr((sorted(changes.items()), sorted(plan.items()), sorted(trace.items()), only))
    folder = shared(f"{family}-{task}-{hashlib.sha256(words.encode()).hexdigest()[:16]}", make)
    return folder / "model", folder / "artifact"


def costs_of(artifact):
    """Seconds by graph for an engine of ``artifact``, but for those that verify guesses: which steps it chooses must
    not hang on how busy the machine is."""
    from nxd_infer.runtime.load import load_artifact

    shapes = {bucket.name: bucket.inputs[0].shape for bucket in load_artifact(artifact).manifest.buckets}
    return {name: 1e-3 + 1e-5 * b * s for name, (b, s) in shapes.items() if not name.startswith("verify")}


def paying_costs(artifact):
    """A step that verifies costs what one without does: every guess pays."""
    costs = costs_of(artifact)
    return costs | {f"verify_b{count}": costs[f"decode_b{count}"] for count in BATCHES}


def prompt_of(length, shift=0):
    return [5 + (7 * place + 3 * length + shift) % 280 for place in range(length)]


def reference_generate(model_dir, prompts, max_new_tokens):
    """Greedy tokens by transformers, one prompt at a time, and the smallest gap between the two best logits."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
            max_new_tokens=min(max_new_tokens, max(1, MAX_LEN - len(prompt))), pad_token_id=0,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        tops = [logits[0].topk(2).values for logits in out.logits]
        answers.append((out.sequences[0, len(prompt) :].tolist(), min(float(top[0] - top[1]) for top in tops)))
    return answers
