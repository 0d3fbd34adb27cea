"""LoRA's options, and their form in PEFT's ``adapter_config.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Any

from nxd_infer.errors import CheckpointError, ParallelConfigError
from nxd_infer.util.options import KINDS, Kind, check_each, defaults, option
from nxd_infer.util.suggest import did_you_mean

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
    enable_lora: bool = option(
        True,
        "False: `initialize_parallel_model` does not adapt the model.",
        Kind("True or False (the rank is lora_rank=)", KINDS[bool].fits),
    )
    lora_rank: int = option(16, "Columns of B and rows of A.", int, minimum=1)
    lora_alpha: float = option(
        8, "The update is scaled by `alpha / rank`; with `use_rslora` by `alpha / sqrt(rank)`.", float, above=0
    )
    lora_dropout: float = option(
        0.0,
        "Dropout on the adapter's input, in training; drops the same elements at every degree.",
        float,
        minimum=0,
        below=1,
    )
    bias: str = option(
        "none", 'Train no biases, `"all"`, or those of adapted layers (`"lora_only"`).', str, choices=BIASES
    )
    target_modules: Sequence[str] | str | None = option(
        None,
        "Adapt layers whose full name contains one of these words, or matches one regular expression. None: the query "
        "and value projections of known model types.",
        Kind("a list of names", lambda value: isinstance(value, str) or _names(value)),
    )
    use_rslora: bool = option(False, "Scale by `alpha / sqrt(rank)` instead of `alpha / rank`.", bool)
    init_lora_weights: str = option(
        "default",
        'Initialise A like `nn.Linear`, or `"gaussian"` with standard deviation 1/rank, and B with zeros; of '
        "embeddings A with zeros and B normal, as in PEFT. Equal values at every degree.",
        str,
        choices=INITS,
    )
    _: KW_ONLY
    modules_to_save: Sequence[str] | None = option(
        None,
        "Modules to train and save in full, by name or by its last components.",
        Kind("a list of names", lambda value: _names(value)),
    )
    lora_verbose: bool = option(False, "Print what is adapted.", bool)
    load_lora_from_ckpt: bool = option(
        False,
        "Start from the adapter in `lora_save_dir`, and from the base weights that were saved with it "
        "(`save_lora_base`), and use its configuration; of the options given here only non-default `save_lora_base`, "
        "`merge_lora` and `save_lora_config_adapter` still apply.",
        bool,
    )
    lora_load_tag: str | None = option(
        None,
        "Folder under `lora_save_dir`. None: an adapter in the folder itself, else that of its newest checkpoint.",
        check=lambda _, tag: str(tag),  # of save_checkpoint(), which takes a number too
    )
    lora_save_dir: str = option("lora_adapter", "The folder of the adapter, or of its checkpoints.")
    merge_lora: bool = option(False, "State dicts hold the merged weights; needs `save_lora_base=True`.", bool)
    save_lora_base: bool = option(False, "State dicts hold the base weights in addition to the adapter.", bool)
    save_lora_config_adapter: bool = option(
        False,
        "Where the options are stored. True: in the state dict, under `lora_config`, and in a checkpoint in the "
        "adapter's own file. False: in no state dict, and in `lora_adapter/adapter_config.json`.",
        bool,
    )
    merge_sharded_lora: bool = option(
        True, "Accepted: state dicts are this rank's, adapter files are always unsharded.", bool
    )

    def __post_init__(self) -> None:
        check_each(self, ParallelConfigError, "LoraConfig: ")
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
    def of(config: LoraConfig | Mapping[str, Any]) -> LoraConfig:
        """Return a copy of a configuration, or create one from a mapping of its options."""
        if isinstance(config, LoraConfig):
            return replace(config)
        if not isinstance(config, Mapping):
            raise ParallelConfigError(f"lora_config must be a LoraConfig, a dict or None, got {type(config).__name__}")
        known = defaults(LoraConfig)
        for name in config:
            if name not in known:
                hint = did_you_mean(name, known) or f"; known are {', '.join(known)}"
                raise ParallelConfigError(f"lora_config has no key {name!r}{hint}")
        return LoraConfig(**config)

    def to_dict(self) -> dict[str, Any]:
        """Return every option as a plain value."""
        plain = asdict(self)
        return {name: list(v) if isinstance(v, set | frozenset | tuple) else v for name, v in plain.items()}

    def to_peft(self, target_modules: Sequence[str]) -> dict[str, Any]:
        """Return the content of ``adapter_config.json``; ``target_modules`` by PEFT's rule (names or last components).

        Options unknown to PEFT are included only if they are not the default, because PEFT warns about each.
        """
        known = defaults(LoraConfig)
        own = {name: getattr(self, name) for name in SAVING if getattr(self, name) != known[name]}
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
        known = defaults(LoraConfig)
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
            **{name: stored[name] for name in SAVING if name in stored and getattr(self, name) == known[name]},
        )


def _names(value: Any) -> bool:
    return isinstance(value, list | tuple | set | frozenset) and all(isinstance(one, str) for one in value)
