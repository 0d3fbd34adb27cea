"""What is looked at before a job starts: the files that its recipe names, and what this machine lacks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from nxd_infer.errors import RecipeError
from nxd_infer.recipes.data.megatron import blend_of
from nxd_infer.recipes.data.sources import files_of
from nxd_infer.recipes.experiment import copied_files
from nxd_infer.recipes.job import begin_of
from nxd_infer.recipes.models import dtypes, is_fast_at_bfloat16, obstacles
from nxd_infer.recipes.prepare import tokenizer_source
from nxd_infer.recipes.recipe import Loaded
from nxd_infer.recipes.tokenizers import require_tokenizer


def require_trainable(loaded: Loaded) -> None:
    """Raise RecipeError, with a key's line, if a job of this recipe would fail here whatever its data hold."""
    for obstacle in obstacles(loaded):
        raise RecipeError(obstacle)
    for missing in missing_files(loaded):
        raise missing


def missing_files(loaded: Loaded) -> list[RecipeError]:
    """Return the errors of what the recipe names and this machine lacks, each with the line of its key."""
    data, tokenizer = loaded.recipe.data, tokenizer_source(loaded)
    looks: list[Callable[[], object]] = [partial(_look_for_data, loaded, key) for key in ("train_dir", "val_dir")]
    looks += [partial(_look_for_indexed, loaded, data.data_prefix)]
    if tokenizer is not None:
        looks += [partial(require_tokenizer, tokenizer, loaded.tree.where("data.tokenizer"))]
    found = []
    for look in (*looks, partial(begin_of, loaded), partial(copied_files, loaded)):
        try:
            look()
        except RecipeError as error:
            found.append(error)
    return found


def _look_for_data(loaded: Loaded, key: str) -> None:
    try:
        if (given := getattr(loaded.recipe.data, key)) is not None:
            files_of(loaded.path(given))
    except RecipeError as error:
        raise loaded.tree.error(f"data.{key}", f"= {str(error).removeprefix('data: ')}") from None


def _look_for_indexed(loaded: Loaded, prefixes: Sequence[object]) -> None:
    key = "data.data_prefix"
    for _, prefix in blend_of(prefixes, loaded.tree.where(key)):
        for name in (f"{prefix}.idx", f"{prefix}.bin"):
            if not loaded.path(name).is_file():
                raise loaded.tree.error(key, f"names {prefix}, but {name} is not there")


def slow_products(loaded: Loaded) -> list[str]:
    """Return a sentence if this machine lacks instructions for the matrix products that the recipe has, or would."""
    kind = loaded.recipe.precision.type
    if is_fast_at_bfloat16() or (kind is not None and dtypes(loaded.recipe).products != torch.bfloat16):
        return []
    what = f"= {kind}: fp32 is many times as fast here, because" if kind else "is fp32 by default, because"
    return [str(loaded.tree.error("precision.type", f"{what} this processor has no bfloat16 instructions"))]
