"""LoRA's options, and their form in PEFT's ``adapter_config.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from typing import Any

from nxd_infer.errors import CheckpointError, ParallelConfigError

__all__ = ["LoraConfig"]

BIASES = ("none", "all", "lora_only")
INITS = ("default", "gaussian")
UNSUPPORTED = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "monteclora_config",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
)
"""PEFT options that change what an adapter computes and must be off here."""
KEEPING_THE_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of PEFT's ``init_lora_weights`` that do not change the base weights; the others (PiSSA, OLoRA, ...) do."""

SAVING = ("lora_verbose", "merge_lora", "merge_sharded_lora", "save_lora_base", "save_lora_config_adapter")
"""Options of ours that are stored with an adapter, in addition to PEFT's."""


@dataclass
class LoraConfig:
    """What to adapt, how, and what to save. Raises ParallelConfigError (a ValueError) for values out of range.

    Only ``LoRAModel(module, config)`` reads it; creating a configuration has no other effect.
    """

    # Positional options in the documented order; options that the documentation does not list are keyword-only.
    enable_lora: bool = True
    """False: ``initialize_parallel_model`` does not adapt the model."""
    lora_rank: int = 16
    """Columns of B and rows of A."""
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    """Dropout on the adapter's input, in training; 0 to below 1."""
    bias: str = "none"
    """Which biases to train: "none", "all", or those of adapted layers ("lora_only")."""
    target_modules: Sequence[str] | str | None = None
    """Adapt layers whose full name contains one of these words. A single string may also be a regular expression that
    matches the whole name. None: the query and value projections, by ``model.config.model_type``."""
    use_rslora: bool = False
    """Scale by ``alpha / sqrt(rank)`` instead of ``alpha / rank``."""
    init_lora_weights: str = "default"
    """Initialise A like ``nn.Linear`` ("default") or normal with standard deviation 1/rank ("gaussian"), and B with
    zeros. For embeddings A is zero and B normal, as in PEFT."""
    _: KW_ONLY
    modules_to_save: Sequence[str] | None = None
    """Modules to train and save in full, by name or by its last components."""
    lora_verbose: bool = False
    """Print what is adapted."""
    load_lora_from_ckpt: bool = False
    """Use the configuration and the weights of the adapter in ``lora_save_dir``. Saving options (:data:`SAVING`) that
    are set here to a non-default value override the checkpoint's."""
    lora_load_tag: str | None = None
    """Folder under ``lora_save_dir``; None: an adapter in the folder itself, else that of its newest checkpoint."""
    lora_save_dir: str = "lora_adapter"
    merge_lora: bool = False
    """State dicts hold the merged model; needs ``save_lora_base=True``."""
    save_lora_base: bool = False
    """State dicts hold the base weights in addition to the adapter."""
    save_lora_config_adapter: bool = False
    """Save this configuration in the adapter's own file, and in state dicts under the key ``lora_config``. False: in a
    checkpoint it is the file ``lora_adapter/adapter_config.json``."""
    merge_sharded_lora: bool = True
    """Accepted for ported code, no effect: state dicts are this rank's, adapter files are always unsharded."""

    def __post_init__(self) -> None:
        whole = isinstance(self.lora_rank, int) and not isinstance(self.lora_rank, bool)
        _check("lora_rank", self.lora_rank, whole and self.lora_rank >= 1, "a whole number of at least 1")
        _check("lora_alpha", self.lora_alpha, _number(self.lora_alpha) and self.lora_alpha > 0, "a number above 0")
        dropout = self.lora_dropout
        _check("lora_dropout", dropout, _number(dropout) and 0 <= dropout < 1, "a number from 0 to below 1")
        _check("bias", self.bias, self.bias in BIASES, '"none", "all" or "lora_only"')
        _check("init_lora_weights", self.init_lora_weights, self.init_lora_weights in INITS, '"default" or "gaussian"')
        for name in ("target_modules", "modules_to_save"):
            value = getattr(self, name)
            listed = isinstance(value, list | tuple | set | frozenset) and all(isinstance(one, str) for one in value)
            one = name == "target_modules" and isinstance(value, str)
            _check(name, value, value is None or listed or one, "a list of names or None")
        for option in fields(self):
            if option.type == "bool":
                value = getattr(self, option.name)
                fix = " (the rank is lora_rank=)" if option.name == "enable_lora" else ""
                _check(option.name, value, isinstance(value, bool), f"True or False{fix}")
        if self.merge_lora and not self.save_lora_base:
            raise ParallelConfigError(
                "merge_lora=True saves the base weights with the adapter merged in: also pass save_lora_base=True, "
                "or merge_lora=False to save only the adapter"
            )

    @property
    def scaling(self) -> float:
        """The factor of ``B A x``."""
        return self.lora_alpha / (math.sqrt(self.lora_rank) if self.use_rslora else self.lora_rank)

    @staticmethod
    def of(given: LoraConfig | Mapping[str, Any]) -> LoraConfig:
        """Return a copy of a configuration, or create one from a mapping of its options."""
        if isinstance(given, LoraConfig):
            return replace(given)
        if not isinstance(given, Mapping):
            raise ParallelConfigError(f"lora_config must be a LoraConfig, a dict or None, got {type(given).__name__}")
        known = [option.name for option in fields(LoraConfig)]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ParallelConfigError(f"lora_config has no key {unknown[0]!r}; known are {', '.join(known)}")
        return LoraConfig(**given)

    def to_dict(self) -> dict[str, Any]:
        """Return every option as a plain value."""
        plain = asdict(self)
        return {name: list(v) if isinstance(v, set | frozenset | tuple) else v for name, v in plain.items()}

    def to_peft(self, target_modules: Sequence[str]) -> dict[str, Any]:
        """Return the content of ``adapter_config.json``; ``target_modules`` by PEFT's rule (names or last components).

        Options unknown to PEFT are included only if they are not the default, because PEFT warns about each.
        """
        own = {name: getattr(self, name) for name in SAVING if getattr(self, name) != _default(name)}
        return own | {
            "peft_type": "LORA",
            "auto_mapping": None,
            "base_model_name_or_path": None,
            "task_type": None,
            "inference_mode": True,
            "r": self.lora_rank,
            "lora_alpha": self.lora_alpha,
            "lora_dropout": self.lora_dropout,
            "target_modules": sorted(target_modules),
            "bias": self.bias,
            "use_rslora": self.use_rslora,
            "init_lora_weights": True if self.init_lora_weights == "default" else self.init_lora_weights,
            "modules_to_save": sorted(self.modules_to_save) if self.modules_to_save else None,
            "fan_in_fan_out": False,
        }

    def with_peft(self, stored: Mapping[str, Any], where: object) -> LoraConfig:
        """Return this configuration updated with the content of ``adapter_config.json``.

        Raises CheckpointError for adapters of another kind, and for unsupported options.
        """
        if stored.get("peft_type") != "LORA":
            raise CheckpointError(f"{where}: peft_type is {stored.get('peft_type')!r}, but only LORA can be read")
        used = [name for name in UNSUPPORTED if stored.get(name)]
        if used:
            raise CheckpointError(f"{where}: the adapter uses {', '.join(used)}, which is not supported")
        init = stored.get("init_lora_weights", True)
        if init not in KEEPING_THE_BASE:
            raise CheckpointError(
                f"{where}: init_lora_weights={init!r} changed the base weights of the adapter, which is not supported; "
                "convert it with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"
            )
        return replace(
            self,
            lora_rank=stored.get("r", 8),
            lora_alpha=stored.get("lora_alpha", 8),
            lora_dropout=stored.get("lora_dropout", 0.0),
            target_modules=stored.get("target_modules"),
            bias=stored.get("bias", "none"),
            use_rslora=bool(stored.get("use_rslora", False)),
            init_lora_weights="gaussian" if init == "gaussian" else "default",
            modules_to_save=stored.get("modules_to_save"),
            **{name: stored[name] for name in SAVING if name in stored and getattr(self, name) == _default(name)},
        )


def _default(name: str) -> Any:
    """Return the default of an option."""
    return LoraConfig.__dataclass_fields__[name].default


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check(what: str, value: Any, fits: Any, wanted: str) -> None:
    if not fits:
        raise ParallelConfigError(f"LoraConfig: {what} must be {wanted}, got {value!r}")
