"""Turn a configuration of NeMo's Megatron GPT, or of NeuronX-NeMo-Megatron, into a recipe.

Their ``model`` has what a recipe keeps in ``data``, ``distributed_strategy`` and ``precision`` too. Every key is moved,
kept, or listed as left out; nothing is lost in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nxd_infer.recipes.keys import spellings
from nxd_infer.recipes.schema import Recipe
from nxd_infer.recipes.yaml_text import KeyPath, Tree, dotted
from nxd_infer.util.options import is_section

SAME_NAME = {
    "data": "micro_batch_size global_batch_size",
    "distributed_strategy": (
        "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
        "context_parallel_size expert_model_parallel_size sequence_parallel kv_replicator"
    ),
    "exp_manager": "resume_from_checkpoint",
}
"""Keys of ``model`` that other sections have."""
MOVED = {
    **{f"model.{name}": f"{section}.{name}" for section, names in SAME_NAME.items() for name in names.split()},
    "model.wrap_with_zero": "distributed_strategy.zero1",
    "model.zero_use_master_weight": "precision.master_weights",
    "model.seed": "seed",
    "model.bias": "model.has_bias",
    "model.num_query_groups": "model.num_kv_heads",
    "model.rotary_base": "model.rope_theta",
    "model.window_size": "model.sliding_window_size",
    "model.restore_from_path": "exp_manager.resume_from_checkpoint",
    "restore_from_path": "exp_manager.resume_from_checkpoint",
    "trainer.resume_from_checkpoint": "exp_manager.resume_from_checkpoint",
    "model.num_moe_experts": "model.moe.num_experts",
    "model.moe_router_topk": "model.moe.top_k",
    "model.data.train_ds": "data.train_dir",
    "model.data.validation_ds": "data.val_dir",
}
"""Keys that have another place in a recipe."""
SECTIONS = {
    "model.data": "data",
    "model.tokenizer": "data.tokenizer",
    "model.peft.lora_tuning": "model_alignment_strategy.peft",
}
"""Sections that have another place."""
ADAMW = [
    "distributed_fused_adam",
    "fused_adam",
    "megatron_fused_adam",
    "mcore_distributed_optim",
    "adamw_no_trust_ratio",
]
PRECISIONS = {
    "32": "fp32",
    "32-true": "fp32",
    "bf16": "mixed_precision",
    "bf16-mixed": "mixed_precision",
    "bf16-true": "bf16",
    "16": "mixed_precision",
    "16-mixed": "mixed_precision",
}
ADAPTERS = {"adapter_dim": "lora_rank", "alpha": "lora_alpha", "adapter_dropout": "lora_dropout"}


def convert(tree: Tree) -> tuple[dict[str, Any], list[str]]:
    """Return a recipe's values, and the keys that have no place in one, each with its line."""
    recipe: dict[str, Any] = {"name": tree.values.get("name", "converted")}
    left_out = []
    for path, value in _leaves(tree.values, ()):
        old = dotted(path)
        new, value = _place(old, value)
        place, kind = _spelled(new)
        if is_section(kind) and not value:
            continue  # an empty section
        if not place or is_section(kind) or any("." in str(part) for part in path):  # the last would be another key
            left_out.append(f"{tree.where(path)}: {old} = {value!r}")
        elif value != "???":
            holder = recipe
            for part in place[:-1]:
                holder = holder.setdefault(part, {})
            holder[place[-1]] = _references(value)
    return recipe, left_out


def as_yaml(recipe: Mapping[str, Any], left_out: list[str]) -> str:
    """Return a recipe as a file's text; what was left out stands at its end."""
    import yaml

    text = yaml.safe_dump(dict(recipe), sort_keys=False, width=120)
    lines = ("".join(char if char.isprintable() else repr(char)[1:-1] for char in line) for line in left_out)
    return text + "".join(f"# left out, {line}\n" for line in lines)


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, (*path, name))
    else:
        yield path, value


def _place(old: str, value: Any) -> tuple[str, Any]:
    """Return where a key belongs, and its value there."""
    if old in ("trainer.precision", "model.precision"):
        return "precision.type", PRECISIONS.get(str(value), value)
    if old == "model.optim.name":
        return old, "adamw" if value in ADAMW else value
    new = MOVED.get(old, old)
    for section, target in SECTIONS.items():
        if new == old and old.startswith(f"{section}."):
            rest = old.removeprefix(f"{section}.")
            new = f"{target}.{ADAPTERS.get(rest, rest)}"
    return new, value


def _spelled(place: str) -> tuple[list[str], Any]:
    """Return a key's parts in their first spelling, and its kind; no parts if a recipe has no such key."""
    kind: Any = Recipe
    parts = []
    for part in place.split("."):
        if is_section(kind) and part in (keys := spellings(kind)):
            part, key = keys[part]
            kind = key.kind
        elif kind is not dict:  # which takes any key
            return [], None
        parts.append(part)
    return parts, kind


def _references(value: Any) -> Any:
    """Let references to moved keys follow them."""
    if isinstance(value, str) and "${" in value:
        for old, new in MOVED.items():
            for text in (old, f".{old.removeprefix('model.')}"):
                value = value.replace(f"${{{text}}}", f"${{{new}}}")
    return value
