"""PEFT's LoRA on parallel layers: the factors follow the layer that they adapt.

Of a layer whose outputs are split, the second factor is split like it; of one whose inputs are split, the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nxd_infer import comm
from nxd_infer.context import ParallelContext, current_context
from nxd_infer.distributed.apply import fill, place_of, refuse_save_pretrained
from nxd_infer.distributed.regions import SUMMED, sum_gradients
from nxd_infer.distributed.replace import META, ColumnParallelConv1D, RowParallelConv1D
from nxd_infer.errors import AdapterError, MissingPackageError
from nxd_infer.modules.lora.config import KEEPING_THE_BASE
from nxd_infer.parallel_layers.base import ParallelLayer
from nxd_infer.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear


def get_peft_model(model: Any, peft_config: Any, adapter_name: str = "default") -> Any:
    """``peft.get_peft_model`` for a parallelized model. Every rank calls it.

    ``peft_config`` is a ``LoraConfig`` whose target modules are linear layers. The initial factors are those of the
    first rank. Raises AdapterError for adapters that cannot follow a split layer, MissingPackageError without PEFT.
    """
    try:
        import peft  # optional: peft
        from peft.tuners.lora.layer import Linear  # optional: peft
    except ImportError as error:
        raise MissingPackageError(f"this needs PEFT ({error}): pip install peft") from error
    if not isinstance(peft_config, peft.LoraConfig):
        raise AdapterError(f"a parallelized model takes a LoraConfig, got {type(peft_config).__name__}")
    if (how := peft_config.init_lora_weights) not in KEEPING_THE_BASE:
        raise AdapterError(
            f"init_lora_weights={how!r} needs the whole weights: call peft.get_peft_model() before parallelize()"
        )
    for layer in model.modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):  # what PEFT asks of a linear layer
            layer.__dict__.update(in_features=layer.input_size, out_features=layer.output_size)
    kinds = (ColumnParallelConv1D, RowParallelConv1D, ColumnParallelLinear, RowParallelLinear)
    peft_config._register_custom_module(dict.fromkeys(kinds, Linear))
    wrapped = peft.get_peft_model(model, peft_config, adapter_name)
    own = dict(wrapped.state_dict(keep_vars=True))
    partial = [*split_adapters(wrapped), *_copies_of_summed(wrapped, adapter_name)]
    fill(wrapped, own, device=place_of(own, None))
    sum_gradients(wrapped, partial, current_context())
    refuse_save_pretrained(wrapped)
    return wrapped


def _copies_of_summed(model: nn.Module, adapter: str) -> list[str]:
    """Return the names of the weights of modules to save that are copies of those whose gradients are summed."""
    inner, copied = ".original_module.", f".modules_to_save.{adapter}."
    summed = [name for name, weight in model.named_parameters() if getattr(weight, SUMMED, False)]
    return [name.replace(inner, copied) for name in summed if inner in name]


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers that PEFT has wrapped, by name. Raises AdapterError for other adapters than LoRA."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "base_layer", None), nn.Module):
            if not hasattr(module, "lora_A"):
                raise AdapterError(f"{name}: {type(module).__name__} cannot be parallelized; only LoRA can")
            yield name, module


def split_adapters(model: nn.Module) -> list[str]:
    """Split the factors of adapted parallel layers; the new ones are on the meta device.

    Returns the names of the factors that stay whole and whose gradients are partial sums. A collective: the factors
    become those of the first rank, also where the layer is whole.
    """
    partial: list[str] = []
    for name, layer in list(adapted_layers(model)):
        base = layer.base_layer
        _equalise(layer, current_context())
        if not isinstance(base, ParallelLayer) or base.degree == 1:
            continue
        if not isinstance(base, ColumnParallelLinear | RowParallelLinear):
            raise AdapterError(
                f"{name}: adapters of an embedding cannot be split; parallelize with parallelize_embeddings=False, or "
                "leave the module out of target_modules"
            )
        if len(layer.lora_magnitude_vector):
            raise AdapterError(f"{name}: DoRA norms span all ranks and cannot be split; pass use_dora=False")
        for variant in getattr(layer, "lora_variant", {}).values():  # of releases that have some
            raise AdapterError(f"{name}: {type(variant).__name__} cannot be split; use plain LoRA")
        if isinstance(base, ColumnParallelConv1D | RowParallelConv1D):
            layer.fan_in_fan_out = True  # as PEFT corrects it for Conv1D; merging reads it
        for adapter in list(layer.lora_A):
            if isinstance(base, RowParallelLinear):
                layer.lora_A[adapter] = _first_of_row(layer.lora_A[adapter], base)
                if base.sequence_parallel_enabled:
                    factor = layer.lora_B[adapter]
                    partial += [f"{name}.lora_B.{adapter}.{own}" for own, _ in factor.named_parameters()]
            else:
                layer.lora_B[adapter] = _second_of_column(layer.lora_B[adapter], base)
                if base.input_is_shared or base.sequence_parallel_enabled:
                    partial.append(f"{name}.lora_A.{adapter}.weight")
    return partial


def _equalise(layer: nn.Module, context: ParallelContext) -> None:
    """Give all ranks the first one's values of what PEFT has added to a layer."""
    for name, weight in layer.named_parameters():
        if name.startswith("base_layer.") or weight.is_meta:
            continue
        with torch.no_grad():
            for axis in ("tp", "dp", "cp"):
                weight.copy_(comm.broadcast(weight, context, axis))


def _first_of_row(factor: nn.Linear, base: RowParallelLinear) -> nn.Module:
    return _split(factor, base, RowParallelLinear, input_is_parallel=True, input_plan=base.input_plan)


def _second_of_column(factor: nn.Linear, base: ColumnParallelLinear) -> nn.Module:
    plan = {"output_plan": base.output_plan, "input_is_shared": base.input_is_shared}
    return _split(factor, base, ColumnParallelLinear, gather_output=base.gather_output, **plan)


def _split(factor: nn.Linear, base: Any, kind: Any, **how: Any) -> nn.Module:
    """Return a layer of ``kind`` for the factor, split like ``base``."""
    made = kind(
        factor.in_features,
        factor.out_features,
        bias=factor.bias is not None,
        sequence_parallel_enabled=base.sequence_parallel_enabled,
        sequence_dimension=base.sequence_dimension,
        dtype=factor.weight.dtype,
        device=META,
        **how,
    )
    for weight in made.parameters():
        weight.requires_grad_(factor.weight.requires_grad)
    return made
