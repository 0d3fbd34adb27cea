"""Tiny real models, traced on the eager backend once a session, and the reference that transformers gives for them."""

from __future__ import annotations

import torch

from tests.support.tiny_models import write_tiny

SLOTS, MAX_LEN, PROMPT_BUCKETS, BATCHES = 4, 64, (8, 16), (1, 4)


def trace_llama(directory, tp, backend="eager", compiler_args=None, **options):
    """Write a tiny Llama and its artifact for ``tp`` ranks; (model directory, artifact directory)."""
    import nxd_infer as nxd
    from nxd_models.serving import tasks

    model_dir = write_tiny("llama", directory / "llama")
    sizes = {"batch_sizes": BATCHES, "prompt_buckets": PROMPT_BUCKETS, "max_len": MAX_LEN, "slots": SLOTS}
    plan = tasks.plan(model_dir, "generate", **{"dtype": torch.float32} | sizes | options)
    return model_dir, _trace(nxd, plan, directory / f"llama_tp{tp}", tp, backend, compiler_args)


def costs_of(artifact):
    """Seconds by graph for an engine of ``artifact``, but for those that verify guesses: which steps it chooses must
    not hang on how busy the machine is."""
    from nxd_infer.runtime.load import load_artifact

    shapes = {bucket.name: bucket.inputs[0].shape for bucket in load_artifact(artifact).manifest.buckets}
    return {name: 1e-3 + 1e-5 * b * s for name, (b, s) in shapes.items() if not name.startswith("verify")}


def paying_costs(artifact):
    """A step that verifies costs what one without does: every guess pays."""
    costs = costs_of(artifact)
    return costs | {f"verify_b{count}": costs[f"decode_b{count}"] for count in (1, 4) if f"decode_b{count}" in costs}


def trace_encoder(directory, family, task, tp=1, **changes):
    """Write a tiny encoder, ``changes`` in its config.json, and its artifact; (model directory, artifact directory)."""
    import nxd_infer as nxd
    from nxd_models.serving import tasks

    model_dir = write_tiny(family, directory / family, **changes)
    plan = tasks.plan(model_dir, task, batch_sizes=(1, 4), prompt_buckets=(8, 32), dtype=torch.float32)
    return model_dir, _trace(nxd, plan, directory / f"{family}_tp{tp}", tp)


def _trace(nxd, plan, target, tp, backend="eager", compiler_args=None):
    options = {"tp_degree": tp, "backend": backend, "compiler_args": compiler_args}
    model = nxd.trace.parallel_model_trace(**plan.trace_arguments(), **options)
    try:
        nxd.trace.parallel_model_save(model, target)
    finally:
        model.close()
    return target


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
