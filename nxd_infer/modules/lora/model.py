"""LoRAModel: a module with adapted layers, other weights frozen, and state dicts of the part to save."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.errors import LoraTargetError, ParallelConfigError, WeightMismatchError
from nxd_infer.layout import ParamLayout, WeightSource, check_weights, fill_tensor, weight_layout
from nxd_infer.layout.shard import stored_layout, weight_mismatch
from nxd_infer.modules.lora import peft
from nxd_infer.modules.lora.config import LoraConfig
from nxd_infer.modules.lora.find import find_together
from nxd_infer.modules.lora.layers import LoraLayer, adaptable, lora_layer
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_infer.modules.stand_in import named_modules_of_all
from nxd_infer.modules.wrapper import ModelWrapper
from nxd_infer.util.devices import transport_device

__all__ = ["LoRAModel", "get_lora_model"]

logger = logging.getLogger(__name__)


class LoRAModel(ModelWrapper):
    """``module`` with adapters beside the layers named in the configuration; used like the module.

    Args:
        module: any module; it is modified in place. Pad it (``pad_model``) before.
        config: a LoraConfig, or a dict of its options. With ``load_lora_from_ckpt`` the adapter in its
            ``lora_save_dir`` determines which layers are adapted, and is loaded; base weights in its checkpoint are
            not (a warning says so): ``load_checkpoint(lora_save_dir, lora_load_tag, model=...)`` loads both.
        layouts: of the whole model, where ``module`` is a pipeline stage of it.
        base_follows: the caller loads what ``base_checkpoint`` names, as ``initialize_parallel_model`` does.

    Linear, Embedding and Conv2d layers of PyTorch and ColumnParallelLinear, RowParallelLinear, ParallelEmbedding and
    GQAQKVColumnParallelLinear can be adapted. Afterwards only adapters, and what ``bias`` and ``modules_to_save`` name,
    require gradients: create the optimizer from ``parameters()`` then. All ranks must draw the same random numbers.

    A state dict holds the adapter; with ``save_lora_base`` also the base weights, as ``x.base_layer.weight``; with
    ``merge_lora`` in addition, the merged weights under the names of the module instead.
    """

    lora_config: LoraConfig
    lora_layers: dict[str, LoraLayer]
    base_layouts: dict[str, ParamLayout]
    """Layouts of the weights, under their names without adapters."""
    whole_layouts: dict[str, ParamLayout]
    """Those of all pipeline stages."""
    adapter_names: set[str]
    """Names of the factors' parameters in ``named_parameters``."""
    adapted_elsewhere: set[str]
    """The projections that other pipeline stages adapt."""
    base_checkpoint: Path | None
    """The checkpoint of the adapter that this model starts from, if the base weights are in it too."""
    _heads: set[str]
    """The adapted embeddings whose weight is the model's head, without a name of its own."""
    _every_path: dict[str, LoraLayer]
    """Also under the further names of a layer that has several."""

    def __init__(
        self,
        module: nn.Module,
        config: LoraConfig | Mapping[str, Any],
        *,
        layouts: Mapping[str, ParamLayout] | None = None,
        base_follows: bool = False,
    ):
        config = LoraConfig.of(config)
        if not config.enable_lora:
            raise ParallelConfigError("LoRAModel adapts a model, but its configuration has enable_lora=False")
        if any(isinstance(child, LoraLayer) for child in module.modules()):
            raise ParallelConfigError("the model already has LoRA layers: adapt the original module")
        super().__init__(module)
        self.base_layouts = weight_layout(module)
        self.whole_layouts = {**(layouts or {}), **self.base_layouts}
        stored = self.base_checkpoint = None
        if config.load_lora_from_ckpt:
            stored = find_together(config.lora_save_dir, config.lora_load_tag)
            self.base_checkpoint = peft.base_beside(stored)
            config = peft.read_config(stored, config)
            config.modules_to_save = self._present(config.modules_to_save) or None  # PEFT may name missing modules
        self.lora_config = config
        self.lora_layers, self._every_path, self._heads, self.adapted_elsewhere = {}, {}, set(), set()
        with undone_if_it_fails(module):
            self._adapt(None if stored is None else peft.adapted_paths(stored))
            part_from_others(module, self.lora_layers.values())
            self._freeze()
            if stored is not None:
                peft.load_found(self, stored)
        call_layers(module)
        if self.base_checkpoint is not None and not base_follows:
            warn_once(
                f"only the adapter of {self.base_checkpoint} is loaded, which holds the base weights too: "
                "load_checkpoint(FOLDER, TAG, model=model) loads both"
            )
        if config.lora_verbose and current_context().rank == 0:
            print(self.describe())

    def _get_name(self) -> str:
        return "LoraModel"  # as in the reference

    def get_base_model(self) -> nn.Module:
        """Return the adapted module with its adapters, without this wrapper."""
        return self.module

    # --- construction ---------------------------------------------------------------------------------

    def _adapt(self, exact: set[str] | None) -> None:
        """Insert LoRA layers. ``exact``: the logical paths to adapt, instead of the words of the configuration."""
        words = words_of(self.lora_config, self.module) if exact is None else ()
        made: dict[int, LoraLayer] = {}
        for path, child, elsewhere in list(named_modules_of_all(self.module)):
            if not path or not adaptable(child) or self.saved_whole(path):
                continue
            paths = self._logical_paths(path, child)
            if exact is not None:
                parts = tuple(part for part, logical in paths.items() if logical in exact)
            else:
                parts = tuple(part for part, logical in paths.items() if part and contains(logical, words))
                parts = parts or (tuple(paths) if contains(path, words) else ())
            if not parts:
                continue
            own = [self.whole_layouts[f"{path}.{name}"] for name in child._parameters if name.startswith("weight")]
            if current_context().pp.degree > 1 and id(child) not in made and any(layout.alias_of for layout in own):
                raise ParallelConfigError(
                    f"LoRA: {path!r} has the weight of another module, which another pipeline stage may hold: leave it "
                    "out of target_modules"
                )
            if getattr(child, "is_head", False):
                self._heads |= {paths[part] for part in parts}
            if id(child) not in made:
                extra = (parts,) if isinstance(child, GQAQKVColumnParallelLinear) else ()
                # Memory that nobody writes takes none.
                base = copy.deepcopy(child).to_empty(device=transport_device()) if elsewhere else child
                made[id(child)] = lora_layer(base, self.lora_config, *extra)
                made[id(child)].paths = {part: paths[part] for part in parts}
                if not elsewhere:
                    self.lora_layers[path] = made[id(child)]
            if elsewhere:  # made only to draw the random numbers that the whole model draws
                self.adapted_elsewhere |= {paths[part] for part in parts}
                continue
            parent, _, name = path.rpartition(".")
            setattr(self.module.get_submodule(parent), name, made[id(child)])
            self._every_path[path] = made[id(child)]
        if not made:
            every = named_modules_of_all(self.module)
            names = sorted({path.rpartition(".")[2] for path, child, _ in every if adaptable(child)})
            raise LoraTargetError(
                f"LoRA: no layer matches target_modules={sorted(exact or words)}; "
                f"the layers that can be adapted are {', '.join(names) or 'none'}"
            )

    def _logical_paths(self, path: str, child: nn.Module) -> dict[str, str]:
        """Return the name of each projection of a layer, by part; for most layers ``{"": path}``."""
        weights = [name for name in child._parameters if name.startswith("weight")]
        paths: dict[str, str] = {}
        for weight in weights:
            for part, logical in self.whole_layouts[f"{path}.{weight}"].sources:
                part = part or weight.removeprefix("weight").removeprefix("_")
                paths[part] = logical.removesuffix(".weight") if logical.endswith(".weight") else f"{path}.{part}"
        return paths

    def saved_whole(self, name: str) -> bool:
        """Return whether a module or parameter is one of ``modules_to_save``, or inside one."""
        parts = name.split(".")
        begins = [".".join(parts[: i + 1]) for i in range(len(parts))]
        words = self.lora_config.modules_to_save or ()
        return any(begin == word or begin.endswith(f".{word}") for begin in begins for word in words)

    def _freeze(self) -> None:
        self.module.requires_grad_(False)
        pairs = [pair for layer in self.lora_layers.values() for _, *pair in layer.factors()]
        factors = {id(factor.weight) for pair in pairs for factor in pair}
        self.adapter_names = {name for name, param in self._named() if id(param) in factors}
        adapted = {f"{path}.base_layer" for path in self.lora_layers}
        saved = {name for name in self.whole_layouts if self.saved_whole(name)}
        whole = saved | {self.whole_layouts[name].alias_of for name in saved}  # a tied one may be on another stage
        for name, param in self._named():
            path, _, leaf = name.rpartition(".")
            is_bias = leaf == "bias" or leaf.startswith("bias_")
            trained = name in self.adapter_names or self.base_name(name) in whole
            trained |= is_bias and self.lora_config.bias == "all"
            trained |= is_bias and self.lora_config.bias == "lora_only" and path in adapted
            if trained and param.is_floating_point():
                param.requires_grad_(True)
        words = self.lora_config.modules_to_save or ()
        missing = set(words) - set(self._present(words))
        if missing:
            raise ParallelConfigError(f"LoRA: modules_to_save matches no module: {', '.join(sorted(missing))}")

    def _present(self, words: Sequence[str] | None) -> list[str]:
        """Return the words that name a module."""
        paths = [path for path, _, _ in named_modules_of_all(self.module)]
        return [word for word in words or () if any(f".{path}".endswith(f".{word}") for path in paths)]

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.module.named_parameters(remove_duplicate=False))

    def base_name(self, name: str) -> str:
        """Return the name of a weight without adapters."""
        path, inside, leaf = name.rpartition(".base_layer.")
        return f"{path}.{leaf}" if inside and path in self._every_path else name

    # --- merging --------------------------------------------------------------------------------------

    def require_mergeable(self) -> None:
        """Raise LoraTargetError if merging would change another layer, which the adapter does not."""
        fix = "leave it out of target_modules"
        if self.lora_config.merge_lora:
            fix = f"pass merge_lora=False, or {fix}"
        if self._heads:
            raise LoraTargetError(
                f"the model's head is the weight of {min(self._heads)!r}, so an adapter of the embedding alone cannot "
                f"be merged into it: {fix}"
            )
        layouts, adapted = self.whole_layouts, peft.paths_of_all(self)
        for name, layout in layouts.items() if current_context().pp.degree > 1 else ():
            names = (*layout.logical_names, *layouts[layout.alias_of].logical_names) if layout.alias_of else ()
            changed = sorted({one.removesuffix(".weight") for one in names} & adapted)
            if changed:
                raise LoraTargetError(
                    f"{name!r} and {layout.alias_of!r} are one weight, which pipeline stages share, so an adapter of "
                    f"{changed[0]!r} cannot be merged into it: {fix}"
                )

    def merge(self) -> LoRAModel:
        """Merge the adapters into the weights and keep the base weights; see :meth:`LoraLayer.merge`."""
        self.require_mergeable()
        for layer in self.lora_layers.values():
            layer.merge()
        return self

    def unmerge(self) -> LoRAModel:
        """Restore the base weights exactly."""
        for layer in self.lora_layers.values():
            layer.unmerge()
        return self

    def merged_weights(self, state: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor, ParamLayout]]:
        """Yield name, tensor and layout of the weights without adapters, which are added to those they adapt.

        ``state``: the wrapped module's state dict. Raises as :meth:`require_mergeable`.
        """
        self.require_mergeable()
        added = {
            f"{path}.{name}": weight
            for path, layer in self._every_path.items()
            for name, weight in layer.merged_weights().items()
        }
        for name, tensor in (self.module.state_dict() if state is None else state).items():
            base = self.base_name(name)
            if base not in self.base_layouts:  # a factor, or what modules add with get_extra_state
                continue
            layout = self.base_layouts[base]
            if base in added or layout.alias_of in added:  # a tied weight differs under the name where it is merged
                layout = replace(layout, alias_of=None)
            yield base, added.get(base, tensor), layout

    def require_unmerged(self) -> None:
        """Raise ParallelConfigError while the adapters are merged."""
        if any(layer.merged for layer in self.lora_layers.values()):
            raise ParallelConfigError("the adapter is merged: call unmerge() before loading weights")

    # --- state ----------------------------------------------------------------------------------------

    def trained_names(self) -> set[str]:
        """Return the names saved with the adapter: parameters with gradients, and buffers of modules_to_save."""
        trained = {name for name, param in self._named() if param.requires_grad}
        return trained | {name for name, _ in self.module.named_buffers() if self.saved_whole(name)}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's tensors: the adapter, adapter and base, or merged; see the class."""
        config, state = self.lora_config, self.module.state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        names = [name for name in state if name.startswith(prefix)]
        if config.merge_lora:
            own = {name.removeprefix(prefix): state.pop(name) for name in names}
            others = {self.base_name(name): value for name, value in own.items() if name not in self.adapter_names}
            whole = others | {name: tensor for name, tensor, _ in self.merged_weights(own)}
            state.update({prefix + name: value for name, value in whole.items()})
            if hasattr(state, "_metadata"):
                state._metadata.setdefault(prefix[:-1], {})[MARK] = True
        else:
            for path, layer in self._every_path.items():
                base = layer.base_weights.items()
                state.update({f"{prefix}{path}.base_layer.{name}": weight.detach() for name, weight in base})
            trained = self.trained_names()
            for name in () if config.save_lora_base else names:
                if name.removeprefix(prefix) not in trained:
                    del state[name]
        if config.save_lora_config_adapter:
            state[f"{prefix}lora_config"] = config.to_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load an adapter, base weights (under the module's own names or ``x.base_layer.weight``), or both.

        Of merged weights, the adapter has no effect afterwards: they contain it. With ``strict``, raises
        WeightMismatchError for unknown names, and if a part of either is missing.
        """
        self.require_unmerged()
        state = {name: value for name, value in state_dict.items() if name != "lora_config"}
        known = list(self.module.state_dict())
        full = {self.base_name(name): name for name in known} | {name: name for name in known}
        taken = {full[name]: value for name, value in state.items() if name in full}
        unexpected = tuple(name for name in state if name not in full)
        if strict:
            self._require_complete(known, taken.keys(), unexpected)
        require_equal_ties(self.base_layouts, {self.base_name(name): value for name, value in taken.items()})
        contained = self._contained_in(state_dict, taken)
        result = self.module.load_state_dict(taken, strict=False, assign=assign)
        if contained:
            self.clear_adapter()
        return result

    def _contained_in(self, state_dict: Mapping[str, Any], taken: Collection[str]) -> bool:
        """Return whether base weights contain an adapter. Raises WeightMismatchError if that matters and is unknown."""
        names = set(taken)
        if self.adapter_names & names or names <= state_dict.keys():  # merged ones have the module's own names
            return False
        stored, metadata = state_dict.get("lora_config"), getattr(state_dict, "_metadata", None)
        if isinstance(stored, Mapping):
            return bool(stored.get("merge_lora"))
        if metadata is not None:
            return MARK in metadata.get("", {})
        if self._has_effect() and self.lora_config.merge_lora:
            raise WeightMismatchError(
                "these may be the merged weights that this model's state_dict() holds with merge_lora=True, and the "
                "adapter would count twice: first set lora_config.merge_lora = False for weights without an adapter, "
                "or call clear_adapter() for merged ones"
            )
        if self._has_effect():
            warn_once(
                "the state dict does not say whether its weights contain an adapter (merge_lora=True), and the model's "
                "own is added to them: call clear_adapter() if they do"
            )
        return False

    def _has_effect(self) -> bool:
        return any(bool(factor.any()) for layer in self.lora_layers.values() for factor in layer.zero_at_first())

    def clear_adapter(self) -> None:
        """Let the adapter have no effect, like a new one, because the weights contain it."""
        if self._has_effect():
            warn_once("the weights contain an adapter: the model's own has no effect now, and begins anew")
        for layer in self.lora_layers.values():
            for factor in layer.zero_at_first():
                nn.init.zeros_(factor)

    def _require_complete(self, known: Collection[str], taken: Collection[str], unexpected: Sequence[str]) -> None:
        """Raise unless ``taken`` has the whole adapter, all base weights, or both, and nothing is unexpected."""
        there, adapter, trained = set(taken), self.adapter_names, self.trained_names()
        frozen = set(known) - trained
        missing: set[str] = set()
        if adapter & there or not frozen & there:
            missing |= trained - there
        if frozen & there:
            missing |= (frozen | trained - adapter) - there
        if missing or unexpected:
            raise weight_mismatch("the weights do not fit the adapted model", sorted(missing), unexpected)

    def saved_weights(self) -> dict[str, tuple[Tensor, ParamLayout]]:
        """Return the tensors of :meth:`state_dict` with their layouts; base weights have the module's logical names."""
        if self.lora_config.merge_lora:
            return {name: (tensor, layout) for name, tensor, layout in self.merged_weights()}
        state, layouts = self.state_dict(), self._layouts()
        return {name: (tensor, layouts[name]) for name, tensor in state.items() if name in layouts}

    def load_weights(
        self, source: WeightSource, rank: int, degree: int, strict: bool = True, contain_adapter: bool = False
    ) -> None:
        """Load what :meth:`saved_weights` returned, by logical names, in any of the three forms, at any degree.

        ``contain_adapter``: these are merged weights; the adapter has no effect afterwards. Raises WeightMismatchError
        like :meth:`load_state_dict`, before anything changes.
        """
        tensors = self.module.state_dict()
        for name, layout in self.weights_of(source, strict).items():
            fill_tensor(tensors[name], source, layout.rank_layout(degree, rank))
        if contain_adapter:
            self.clear_adapter()

    def weights_of(self, source: WeightSource, strict: bool = True) -> dict[str, ParamLayout]:
        """Return the layouts that :meth:`load_weights` reads from ``source``, by tensor name; raises the same."""
        self.require_unmerged()
        names, layouts = set(source.keys()), self._layouts()
        by_base = {self.base_name(name): layout for name, layout in layouts.items()}
        firsts = [name for name, layout in layouts.items() if not layout.alias_of]
        readable = {name: stored_layout(self.base_name(name), by_base, names) for name in firsts}
        taken = {name: replace(layout, alias_of=None) for name, layout in readable.items() if layout}
        there = {self.base_name(name) for name in taken}
        present = taken.keys() | {name for name, layout in layouts.items() if layout.alias_of in there}
        if strict:
            used = {logical for name in present for logical in layouts[name].logical_names}
            self._require_complete(layouts, present, sorted(names - used))
        check_weights(taken, source, strict=False)
        return taken

    def _layouts(self) -> dict[str, ParamLayout]:
        """Return the layouts of the module's state dict: base weights as without adapters, and the factors."""
        return {
            name: layout if name in self.adapter_names else self.base_layouts[self.base_name(name)]
            for name, layout in weight_layout(self.module).items()
        }

    # --- adapters in PEFT's format --------------------------------------------------------------------

    def save_adapter(self, folder: Any = None) -> None:
        """:func:`nxd_infer.modules.lora.save_adapter`; the default folder is ``lora_save_dir``."""
        peft.save_adapter(self, self.lora_config.lora_save_dir if folder is None else folder)

    def load_adapter(self, folder: Any) -> None:
        """:func:`nxd_infer.modules.lora.load_adapter`."""
        peft.load_adapter(self, folder)

    def describe(self) -> str:
        """Return two lines: the adapted projections, and the number of trained parameters on this rank."""
        trained = sum(param.numel() for param in self.module.parameters() if param.requires_grad)
        total = sum(param.numel() for param in self.module.parameters())
        paths = [path for layer in self.lora_layers.values() for path in layer.paths.values()]
        return f"LoRA on {len(paths)} projections: {', '.join(paths)}\ntrained: {trained} of {total} parameters"


def get_lora_model(model: nn.Module, config: LoraConfig | Mapping[str, Any]) -> LoRAModel:
    """``LoRAModel(model, config)``, under the reference's name."""
    return LoRAModel(model, config)


@contextlib.contextmanager
def undone_if_it_fails(module: nn.Module) -> Iterator[None]:
    """Let ``module`` have the layers, and the parameters with gradients, that it had if the block raises."""
    children = [(parent, dict(parent._modules)) for parent in module.modules()]
    trained = [(param, param.requires_grad) for param in module.parameters()]
    try:
        yield
    except BaseException:
        for parent, before in children:
            parent._modules.update(before)
        for param, required in trained:
            param.requires_grad_(required)
        raise


def part_from_others(module: nn.Module, layers: Iterable[LoraLayer]) -> None:
    """Let adapted layers that are in ``module`` under another name without an adapter, too, stay there as they are.

    The adapted one is a copy then, with the same parameters: merging replaces its own.
    """
    parents = [parent for parent in module.modules() if not isinstance(parent, LoraLayer)]
    elsewhere = {id(child) for parent in parents for child in parent.children()}
    for layer in layers:
        if id(layer.base_layer) in elsewhere:
            base = copy.copy(layer.base_layer)
            base._parameters, base._buffers = dict(base._parameters), dict(base._buffers)
            layer.base_layer = base


def call_layers(module: nn.Module) -> None:
    """Let PyTorch's encoder layers call their adapted layers in evaluation, too: its fast path only reads the weights.

    Nested tensors are for that path alone.
    """
    for parent in module.modules():
        if isinstance(parent, nn.TransformerEncoder | nn.TransformerEncoderLayer) and any(
            isinstance(child, LoraLayer) for child in parent.modules()
        ):
            if isinstance(parent, nn.TransformerEncoder):
                parent.use_nested_tensor = False
            else:
                parent.activation_relu_or_gelu = 0


MARK = "nxd_merged_lora"
"""In the ``_metadata`` of a state dict whose weights contain the adapter; ``torch.save`` keeps it."""


def warn_once(text: str) -> None:
    """Log a warning on one rank of each pipeline stage."""
    context = current_context()
    if context.tp.rank == context.dp.rank == 0:
        logger.warning(text)


def require_equal_ties(layouts: Mapping[str, ParamLayout], state: Mapping[str, Any]) -> None:
    """Raise WeightMismatchError if one weight of the model is two different ones in ``state``, by base names."""
    for name, layout in layouts.items():
        first = state.get(layout.alias_of or "")
        if first is not None and name in state and not torch.equal(state[name], first):
            raise WeightMismatchError(
                f"{name!r} and {layout.alias_of!r} are one weight in this model, and two different ones in the state "
                "dict: build the model without tying them"
            )


DEFAULT_TARGETS = {
    "bert": ("query", "value"),
    "gpt_neox": ("query_key_value",),
    "llama": ("q_proj", "v_proj"),
    "mistral": ("q_proj", "v_proj"),
    "mixtral": ("q_proj", "v_proj"),
    "qwen2": ("q_proj", "v_proj"),
    "qwen3": ("q_proj", "v_proj"),
    "qwen3_moe": ("q_proj", "v_proj"),
    "roberta": ("query", "value"),
}
"""Default ``target_modules`` by ``model.config.model_type``: the projections that PEFT adapts."""


def words_of(config: LoraConfig, module: nn.Module) -> Sequence[str] | str:
    """Return ``target_modules``, or the default of a known model type. Raises LoraTargetError for another one."""
    if config.target_modules is not None:
        return config.target_modules
    kind = getattr(getattr(module, "config", None), "model_type", None)
    if kind not in DEFAULT_TARGETS:
        raise LoraTargetError(
            f"LoRA: there are no default target_modules for the model type {kind!r}; pass target_modules=[...]"
        )
    return DEFAULT_TARGETS[kind]


def contains(name: str, words: Sequence[str] | str) -> bool:
    """Return whether a name contains one of the words, or matches the regular expression."""
    if isinstance(words, str):
        return words in name or re.fullmatch(words, name) is not None
    return any(word in name for word in words)
