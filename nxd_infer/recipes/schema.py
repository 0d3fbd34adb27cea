"""The keys of a recipe: those of NxD Training's configuration files, and a few of ours (marked "ours").

Source: NxD Training, "YAML Configuration Settings". Keys in a section's ``UNUSED`` are accepted, and named once, by the
reason why they change nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nxd_infer.pipeline.schedule import SCHEDULES
from nxd_infer.recipes.keys import key, only, section

COMPILER = "it speaks to Neuron's compiler or runtime, and nothing is compiled to train here"
LAUNCH = "it belongs to Lightning's trainer, and this loop has no use for it"
FILES = "checkpoints are safetensors, written rank by rank, in any case"
KERNELS = "it chooses kernels of Trainium; the ones here compute the same"
OFF = "models are trained without it here"
EXPERTS = "it follows from the other keys, or changes nothing where experts take every token"
MEGATRON = "indexed files are read by their index alone"

PRECISIONS = (
    "mixed_precision",
    "mixed_precisionSR",
    "mixed_precision_SR",
    "bf16SR",
    "bf16",
    "fp32",
    "autocast",
    "manual",
)
RATES = (
    "LinearAnnealingWithWarmUp",
    "LinearAnnealing",
    "CosineAnnealing",
    "WarmupHoldPolicy",
    "WarmupAnnealing",
    "ConstantWithWarmUp",
)
OPTIMIZERS = ("adamw", "adamw_fp32OptState", "adam", "sgd", "adagrad", "rmsprop")


@dataclass(kw_only=True)
class Trainer:
    devices: int = key(1, "ranks per machine; each is a process", int, minimum=1, maximum=1 << 16)
    num_nodes: int = key(1, "machines", int, minimum=1, maximum=1 << 16)
    lnc: int | None = key(
        None, "physical cores per logical one, which tells a plan the device", int, minimum=1, maximum=2
    )
    max_epochs: int = key(-1, "passes over the data, -1 without a limit", int, minimum=-1)
    max_steps: int = key(-1, "steps to train, over all starts of the job; -1 without a limit", int, minimum=-1)
    max_time: Any = key(None, 'seconds to train, or a text "days:hours:minutes:seconds"', object)
    log_every_n_steps: int = key(1, "steps between two records in the log", int, minimum=1)
    val_check_interval: Any = key(
        None, "steps between two validations: a whole number, or a share of an epoch such as 0.25 or 1.0", object
    )
    check_val_every_n_epoch: int | None = key(None, "epochs between two validations", int, minimum=1)
    num_sanity_val_steps: int = key(0, "batches to validate before the first step", int, minimum=0)
    limit_val_batches: Any = key(1.0, "batches of a validation: a whole number, or a share of them such as 1.0", object)
    gradient_clip_val: float = key(1.0, "largest 2-norm of the gradients; 0 does not clip", float, minimum=0)
    sequential_move_factor: int = key(11, "ranks that build their model at a time", int, minimum=1, maximum=32)
    enable_progress_bar: bool = key(True, "show the progress of the training", bool)
    accumulate_grad_batches: int = only(1, "data.global_batch_size decides")
    UNUSED = {
        "recipes run no test; data.test_dir is not read": "limit_test_batches",
        LAUNCH: (
            "accelerator precision logger enable_checkpointing replace_sampler_ddp use_distributed_sampler "
            "enable_model_summary benchmark"
        ),
    }


@dataclass(kw_only=True)
class CheckpointCallback:
    monitor: str = key(
        "step",
        "what the best checkpoints are best at",
        choices=("step", "global_step", "consumed_samples", "reduced_train_loss", "train_loss", "val_loss"),
    )
    mode: str = key("max", "whether more or less of it is better", choices=("max", "min"))
    save_top_k: int = key(1, "checkpoints to keep: -1 all, 0 none", int, minimum=-1)
    save_last: bool = key(False, "keep the newest one, too", bool)
    every_n_train_steps: int | None = key(
        None, "steps between two checkpoints; default: at validations, and at the end", int, minimum=0
    )
    every_n_epochs: int | None = key(None, "epochs between two checkpoints", int, minimum=1)
    train_time_interval: float | None = key(None, "seconds between two checkpoints", float, minimum=0)
    filename: str = key(
        "{step}-{consumed_samples}",
        "a checkpoint's name; {step}, {epoch}, {consumed_samples} and metrics are replaced, {name:.2f} with a format",
    )
    dirpath: str | None = key(None, "the folder of the checkpoints; default: checkpoints in the log's folder")
    always_save_nemo: bool = only(False, "NeMo's archives are not written")
    save_weights_only: bool = only(False, "jobs resume exactly, so all is saved")
    save_nemo_on_train_end: bool = only(False, "NeMo's archives are not written")
    auto_insert_metric_name: bool = key(True, "write {step} as step=7, and not 7", bool)
    UNUSED = {
        "it follows from distributed_strategy": "model_parallel_size",
        FILES: "use_master_weights_in_ckpt enable_version_counter",
        LAUNCH: "verbose",
    }


@dataclass(kw_only=True)
class EarlyStopping:
    monitor: str = key("val_loss", "what must improve", choices=("val_loss", "reduced_train_loss", "train_loss"))
    mode: str = key("min", "whether more or less is better", choices=("max", "min"))
    patience: int = key(10, "validations without an improvement before the end", int, minimum=1)
    min_delta: float = key(0.001, "the least improvement", float, minimum=0)
    check_finite: bool = key(True, "end when it is not a number", bool)
    UNUSED = {LAUNCH: "verbose strict"}


@dataclass(kw_only=True)
class ExpManager:
    explicit_log_dir: str | None = key(None, "the log's folder itself")
    exp_dir: str | None = key(None, "the folder of experiments; default: nxd_experiments")
    name: str = key("default", "the experiment's folder in exp_dir")
    version: str | None = key(None, "the folder of this job in the experiment's; default: the next version_N")
    use_datetime_version: bool = key(False, "name versions by the date, and not by number", bool)
    resume_if_exists: bool = key(False, "go on with the newest version and its newest checkpoint", bool)
    resume_ignore_no_checkpoint: bool = key(True, "start from the beginning if there is no checkpoint", bool)
    resume_from_checkpoint: str | None = key(
        None, "checkpoints, or a Hugging Face directory, that the first start begins with"
    )
    create_checkpoint_callback: bool = key(True, "save checkpoints", bool)
    checkpoint_callback_params: CheckpointCallback = section(CheckpointCallback, "which checkpoints to save and keep")
    create_early_stopping_callback: bool = key(False, "end when a metric no longer improves", bool)
    early_stopping_callback_params: EarlyStopping = section(EarlyStopping, "when to end")
    create_tensorboard_logger: bool = key(True, "write TensorBoard's files into the log's folder", bool)
    create_wandb_logger: bool = key(False, "log to Weights and Biases, through Lightning", bool)
    wandb_logger_kwargs: dict[str, Any] = key({}, "arguments of Lightning's WandbLogger", dict)
    create_mlflow_logger: bool = key(False, "log to MLflow, through Lightning", bool)
    mlflow_logger_kwargs: dict[str, Any] = key({}, "arguments of Lightning's MLFlowLogger", dict)
    create_dllogger_logger: bool = only(False, "DLLogger is not written")
    create_clearml_logger: bool = only(False, "ClearML is not written")
    create_neptune_logger: bool = only(False, "Neptune is not written")
    log_step_timing: bool = key(True, "log the seconds per step", bool)
    log_parameter_norm: bool = key(False, "log the 2-norm of all parameters", bool)
    log_gradient_norm: bool = key(True, "log the 2-norm of all gradients", bool)
    enable_recovery_time_instrumentation: bool = key(
        False, "log the seconds from the start of the process to the first step", bool
    )
    save_xser: bool = key(True, "all ranks write at a time", bool)
    save_bf16: bool = only(False, "weights are saved in their own dtype")
    async_checkpointing: bool = key(False, "write checkpoints while the training goes on", bool)
    files_to_copy: list[str] = key([], "files to copy into the log's folder", list[str])
    max_time_per_run: Any = key(None, "as trainer.max_time, for this start of the job", object)
    generate_samples: int = key(
        0, "ours: tokens to generate after each validation, from a text of the validation data", int, minimum=0
    )
    UNUSED = {
        LAUNCH: "summary_writer_kwargs log_local_rank_0_only log_global_rank_0_only step_timing_kwargs",
        "a resumed job goes on with its next step": "disable_validation_on_resume",
        "a job whose steps are done ends at once": "resume_past_end",
        FILES: "load_xser ckpt_ptl_version",
        "averages of weights are not kept": "ema",
    }


@dataclass(kw_only=True)
class DistributedStrategy:
    tensor_model_parallel_size: int = key(1, "ranks that share each layer", int, minimum=1)
    pipeline_model_parallel_size: int = key(1, "ranks that share the layers in order", int, minimum=1)
    virtual_pipeline_model_parallel_size: int = key(1, "stages per rank", int, minimum=1)
    context_parallel_size: int = key(1, "ranks that share each sequence", int, minimum=1)
    expert_model_parallel_size: int = key(1, "ranks that share the experts", int, minimum=1)
    zero1: bool = key(True, "share the optimizer's state among the data-parallel ranks", bool)
    sequence_parallel: bool = key(False, "split activations between the parallel blocks along the sequence", bool)
    pipeline_schedule: str | None = key(None, "ours: the schedule", choices=SCHEDULES)
    UNUSED = {
        EXPERTS: "token_shuffle_group_size",
        "heads are replicated as the degree needs": "kv_replicator kv_size_multiplier",
    }


@dataclass(kw_only=True)
class Precision:
    type: str | None = key(
        None,
        "mixed_precision: bfloat16 with float32 master weights and sums; autocast: float32 weights, bfloat16 products; "
        "fp32: float32; bf16SR: bfloat16 alone; manual: as the keys say; default: mixed_precision, but fp32 on a "
        "processor without bfloat16 instructions",
        choices=PRECISIONS,
    )
    master_weights: bool | None = key(None, "step float32 copies of bfloat16 weights", bool)
    fp32_grad_acc: bool | None = key(None, "sum gradients in float32", bool)
    xla_use_bf16: Any = key(None, "bfloat16 weights (manual)", object)
    xla_downcast_bf16: Any = key(None, "bfloat16 weights (manual)", object)
    UNUSED = {
        "gradients are always summed over ranks in float32": "fp32_grads_cc",
        COMPILER: "neuron_rt_stochastic_rounding_en",
        "parallel layers sum in float32": "parallel_layers_reduce_dtype",
    }


@dataclass(kw_only=True)
class Sft:
    packing: bool = key(False, "put several documents into a row; attention and positions keep them apart", bool)


@dataclass(kw_only=True)
class Preference:
    max_prompt_length: int | None = key(None, "longer prompts are cut", int, minimum=1)
    truncation_mode: str = key("keep_start", "which end of a text is kept", choices=("keep_start", "keep_end"))


@dataclass(kw_only=True)
class Dpo(Preference):
    kl_beta: float = key(0.01, "weight of the distance from the reference", float, minimum=0, also=("beta",))
    loss_type: str = key("sigmoid", "the loss", choices=("sigmoid", "hinge", "ipo"))
    precompute_ref_log_probs: bool = only(True, "the reference runs once, so that no second model is needed")


@dataclass(kw_only=True)
class Orpo(Preference):
    beta: float = key(0.1, "weight of the odds ratio", float, minimum=0, also=("kl_beta",))


@dataclass(kw_only=True)
class Peft:
    lora_rank: int = key(16, "rank of the adapters", int, minimum=1)
    lora_alpha: float = key(32.0, "scale of the adapters, times the rank", float, minimum=0)
    lora_dropout: float = key(0.05, "dropout on the adapters' input", float, minimum=0, maximum=0.99)
    lora_bias: str = key("none", "which biases to train", choices=("none", "all", "lora_only"))
    lora_verbose: bool = key(False, "print what is adapted", bool)
    target_modules: list[str] = key(
        [],
        "layers to adapt, by a part of their names; qkv_proj and gate_up_proj, which are joined on Trainium, are their "
        "parts; default: queries and values",
        list[str],
    )
    load_lora_from_ckpt: bool = key(False, "begin with an adapter", bool)
    lora_save_dir: str | None = key(None, "the folder of that adapter")
    lora_load_tag: str | None = key(None, "its checkpoint")
    save_lora_config_adapter: bool = key(
        False, "save the options in the adapter's file, and not as adapter_config.json, which PEFT needs", bool
    )
    UNUSED = {
        "checkpoints hold the adapter; the traced model is merged": "save_lora_base merge_lora",
        FILES: "merge_sharded_lora",
    }


@dataclass(kw_only=True)
class Alignment:
    sft: Sft | None = section(Sft, "supervised fine-tuning", optional=True)
    dpo: Dpo | None = section(Dpo, "direct preference optimisation", optional=True)
    orpo: Orpo | None = section(Orpo, "odds ratio preference optimisation", optional=True)
    peft: Peft | None = section(Peft, "train adapters (LoRA)", optional=True)

    @property
    def pairs(self) -> Dpo | Orpo | None:
        """What is learnt from pairs of answers."""
        return self.dpo or self.orpo


@dataclass(kw_only=True)
class TokenizerKeys:
    type: str | None = key(None, 'a Hugging Face directory, or "trained": one is made from the data', also=("name",))
    model: str | None = key(None, "a tokenizer.json, or the directory that has it")
    vocab_file: str | None = key(None, "a vocabulary, with merges.txt beside it")
    vocab_size: int = key(4096, "ours: tokens of a trained tokenizer", int, minimum=260)
    UNUSED = {
        "tokenizers reads all that it can": "library",
        "merges.txt beside vocab_file is read": "merge_file",
        "tables are not read": "delimiter",
        "tokenizer.json says it all": "sentencepiece_legacy use_fast",
    }


@dataclass(kw_only=True)
class Data:
    micro_batch_size: int = key(1, "rows of one pass through the model, per data-parallel rank", int, minimum=1)
    global_batch_size: int = key(1, "rows of a step, over all ranks", int, minimum=1)
    train_dir: str | None = key(
        None, "a file, a folder, or a dataset's repository: JSON, CSV, Parquet, Arrow, texts; or saved by datasets"
    )
    val_dir: str | None = key(None, "the same to validate on")
    train_split: str | None = key(None, "ours: the split of train_dir; default: train, or its only one")
    val_split: str | None = key(None, "ours: the split of val_dir; default: validation, or its only one")
    dataset_config: str | None = key(None, "ours: of a folder whose README has several configurations, the one to read")
    ignore_columns: list[str] = key(
        [], "ours: columns that are not read, and fields of messages as messages.weight", list[str]
    )
    seq_length: int | None = key(None, "tokens per row", int, minimum=2)
    dev_choose_samples: int | None = key(None, "use only so many samples of train_dir", int, minimum=1)
    tokenizer: TokenizerKeys = section(TokenizerKeys, "from text to tokens")
    packing: bool | None = key(None, "as model_alignment_strategy.sft.packing", bool)
    shuffle: bool | None = key(None, "ours: a new order every epoch; default: in fine-tuning", bool)
    mask_prompt: bool = key(True, "ours: no loss on prompts", bool)
    data_prefix: list[object] = key([], "Megatron's indexed files without .bin, each after its weight", list[object])
    splits_string: str = key("980,10,10", "shares of train, validation and test in data_prefix", also=("split",))
    dataloader_type: str | None = key(None, "order of the rows", choices=("single", "cyclic"))
    reset_position_ids: bool = key(False, "positions restart at each document", bool)
    reset_attention_mask: bool = key(False, "documents of a row do not see each other", bool)
    eod_mask_loss: bool = key(False, "no loss on ends of documents", bool)
    UNUSED = {
        "recipes run no test": "test_dir",
        "model_alignment_strategy says it": "alignment_strategy",
        "the columns say it": "use_sft_style_data_module",
        MEGATRON: "index_mapping_dir data_impl skip_warmup exchange_dtype",
        "rows are read from mapped memory": "num_workers",
        "validations use whole batches": "validation_drop_last",
        "rows have seq_length tokens, and one target less": "no_seqlen_plus_one_input_tokens",
        "an incomplete last step is left out": "pad_samples_to_global_batch_size",
        "an epoch has every row once": "num_samples",
    }


@dataclass(kw_only=True)
class Sched:
    name: str = key("LinearAnnealingWithWarmUp", "how the learning rate moves", choices=RATES)
    warmup_steps: int = key(
        0,
        "steps up to the full rate: step n, from 0, has n/warmup_steps of it with LinearAnnealingWithWarmUp, else "
        "(n + 1)/(warmup_steps + 1)",
        int,
        minimum=0,
    )
    warmup_ratio: float | None = key(
        None, "the share of all steps, in place of warmup_steps", float, minimum=0, maximum=1
    )
    constant_steps: int = key(0, "last steps, at min_lr", int, minimum=0)
    max_steps: int | None = key(None, "steps until min_lr; default: trainer.max_steps", int, minimum=-1)
    min_lr: float = key(0.0, "the least rate", float, minimum=0)


@dataclass(kw_only=True)
class Optim:
    name: str = key("adamw", "the optimizer; its state is float32 in any case with master weights", choices=OPTIMIZERS)
    lr: float = key(1e-4, "learning rate", float, minimum=0)
    weight_decay: float = key(0.01, "weight decay", float, minimum=0)
    betas: list[float] = key([0.9, 0.999], "decay of the two moments", list[float])
    eps: float = key(1e-8, "added to the root of the second moment", float, minimum=0)
    momentum: float = key(0.0, "of sgd and rmsprop", float, minimum=0)
    sched: Sched | None = section(Sched, "the learning rate over the steps; without it: constant", optional=True)
    UNUSED = {KERNELS: "capturable"}


@dataclass(kw_only=True)
class Fusions:
    UNUSED = {KERNELS: "softmax flash_attention ring_attention mlp do_transpose"}


@dataclass(kw_only=True)
class Moe:
    num_experts: int = key(8, "experts per layer", int, minimum=1)
    top_k: int = key(2, "experts per token", int, minimum=1)
    capacity_factor: float = key(
        0.0, "tokens an expert takes, over an equal share; 0.0 with dropless", float, minimum=0
    )
    dropless: bool = key(True, "experts take every token", bool)
    output_router_logits: bool = key(True, "add the load balancing loss", bool, field="output_router_logits")
    router_aux_loss_coef: float = key(
        0.02, "factor of the load balancing loss", float, minimum=0, field="router_aux_loss_coef"
    )
    frequency: int = key(1, "layers from one with experts to the next", int, minimum=1)
    dropout: float = key(0.0, "share of the experts' outputs that is dropped", float, minimum=0, maximum=1)
    routing_algorithm: str = key("top_k", "how experts are chosen")
    router_activation: str = key("softmax", "what makes weights of the router's logits")
    normalize_top_k_affinities: bool = key(True, "the weights of a token's experts sum to 1", bool)
    UNUSED = {EXPERTS: "sinkhorn_iterations sinkhorn_tol token_shuffle_group_size"}


@dataclass(kw_only=True)
class Model:
    model_config: str | None = key(
        None, "config.json of Hugging Face, or the directory that has it; other keys replace its fields"
    )
    encoder_seq_length: int | None = key(None, "tokens per row", int, minimum=2)
    seq_length: int | None = key(None, "as encoder_seq_length", int, minimum=2)
    max_position_embeddings: int | None = key(None, "longest context", int, minimum=2, field="max_position_embeddings")
    num_layers: int | None = key(None, "layers", int, minimum=1, field="num_hidden_layers")
    hidden_size: int | None = key(None, "width", int, minimum=1, field="hidden_size")
    ffn_hidden_size: int | None = key(
        None, "inner width of the MLP", int, minimum=1, also=("intermediate_size",), field="intermediate_size"
    )
    num_attention_heads: int | None = key(None, "attention heads", int, minimum=1, field="num_attention_heads")
    num_kv_heads: int | None = key(
        None,
        "key/value heads",
        int,
        minimum=1,
        also=("num_key_value_heads", "num_query_groups"),
        field="num_key_value_heads",
    )
    kv_channels: int | None = key(None, "width of a head", int, minimum=1, also=("head_dim",), field="head_dim")
    vocab_size: int | None = key(None, "tokens; default: the tokenizer's, padded", int, minimum=1, field="vocab_size")
    make_vocab_size_divisible_by: int = key(
        8, "pad the vocabulary to a multiple of this and of the tensor-parallel degree", int, minimum=1
    )
    rope_theta: float | None = key(
        None, "base of the rotary positions", float, minimum=1, also=("rotary_base",), field="rope_theta"
    )
    rotary_percentage: float = only(1.0, OFF)
    position_embedding_type: str = key("rope", "kind of positions", choices=("rope", "learned_absolute", "none"))
    normalization: str | None = key(
        None, "kind of norm", choices=("rmsnorm", "layernorm", "layernorm1p", "low_precision_layernorm")
    )
    layernorm_epsilon: float | None = key(
        None, "added to the variance in norms", float, minimum=0, also=("rms_norm_eps",), field="rms_norm_eps"
    )
    activation: str | None = key(
        None,
        "activation of the MLP",
        choices=("swiglu", "fast-swiglu", "gelu", "geglu", "reglu", "squared-relu", "silu"),
    )
    has_bias: bool | None = key(None, "biases in linear layers", bool, also=("bias",))
    attention_bias: bool | None = key(None, "biases in attention", bool, field="attention_bias")
    share_embeddings_and_output_weights: bool | None = key(
        None, "tie the head to the embedding", bool, also=("tie_word_embeddings",), field="tie_word_embeddings"
    )
    transformer_block_type: str = key("pre_ln", "where the norms are", choices=("pre_ln", "post_ln", "normformer"))
    sliding_window_size: int | None = key(
        None, "positions that attention sees", int, minimum=1, also=("sliding_window",), field="sliding_window"
    )
    init_method_std: float | None = key(
        None,
        "standard deviation of new weights",
        float,
        minimum=0,
        also=("initializer_range",),
        field="initializer_range",
    )
    activations_checkpoint_granularity: str | None = key(
        None,
        "recompute layers in the backward pass: full, or their attention: selective",
        choices=("full", "selective"),
    )
    pipeline_cuts: list[str] = key([], "last layers of all stages but the last; default: balanced", list[str])
    weight_init_only: bool = key(
        False, "take the weights of exp_manager.resume_from_checkpoint, and not its optimizer", bool
    )
    do_layer_norm_weight_decay: bool = key(False, "decay norms and biases, too", bool)
    fusions: Fusions = section(Fusions, "kernels")
    moe: Moe | None = section(Moe, "mixture of experts", optional=True)
    optim: Optim = section(Optim, "the optimizer")
    extra: dict[str, Any] = key({}, "ours: further fields of config.json", dict)
    UNUSED = {
        "queries, keys and values are sharded exactly without it": "qkv_linear fuse_qkv",
        OFF: "use_scaled_init_method hidden_dropout hidden_dropout_prob attention_dropout ffn_dropout",
        KERNELS: "apply_query_key_layer_scaling persist_layer_norm transpose_nki_inputs flash_attention",
        "stages follow from distributed_strategy": "pre_process post_process",
        "weights are made rank by rank, the same at any degree": "use_cpu_initialization",
        "selective recomputes the attention": "activations_checkpoint_recompute",
        "full recomputes every layer": "activations_checkpoint_method activations_checkpoint_num_layers",
    }


@dataclass(kw_only=True)
class Recipe:
    """A whole recipe, checked."""

    name: str = key("recipe", "what the job is called")
    seed: int = key(1234, "of the weights and of the order of the data", int, minimum=0)
    trainer: Trainer = section(Trainer, "how long, on how many ranks")
    exp_manager: ExpManager = section(ExpManager, "folders, checkpoints, logs")
    distributed_strategy: DistributedStrategy = section(DistributedStrategy, "how the ranks share the work")
    data: Data = section(Data, "what to train on")
    model: Model = section(Model, "what to train")
    precision: Precision = section(Precision, "dtypes")
    model_alignment_strategy: Alignment = section(Alignment, "fine-tuning; without it: pre-training")
    trace: dict[str, Any] | None = key(
        None, "ours: trace the trained model; `out`, and arguments of `nxd-infer trace` by name", dict
    )
    bucket_size_collectives: float | None = key(
        None, "gradients are reduced in buckets of this size, in MB", float, minimum=0
    )
    restore_from_path: str | None = only(None, "see exp_manager.resume_from_checkpoint")
    UNUSED = {
        "the model's keys have both names": "model_source",
        COMPILER: (
            "compiler_flags compiler_cache_url async_exec_max_inflight_requests aync_exec_max_inflight_requests "
            "neuron_rt_async_exec_max_inflight_requests neuron_rt_exec_timeout neuron_experimental_compress_rg"
        ),
    }

    @property
    def seq_length(self) -> int:
        """Tokens per row: ``data.seq_length``, or else one of the model's keys, which must be equal."""
        given = (self.data.seq_length, self.model.encoder_seq_length, self.model.seq_length)
        return next((one for one in given if one is not None), 2048)

    @property
    def world_size(self) -> int:
        return self.trainer.devices * self.trainer.num_nodes

    @property
    def data_parallel_size(self) -> int:
        """Ranks that have data of their own."""
        strategy = self.distributed_strategy
        shared = strategy.tensor_model_parallel_size * strategy.pipeline_model_parallel_size
        return self.world_size // (shared * strategy.context_parallel_size)

    @property
    def microbatches(self) -> int:
        """Passes through the model that a step has, per data-parallel rank."""
        return self.data.global_batch_size // (self.data.micro_batch_size * self.data_parallel_size)

    @property
    def is_pretraining(self) -> bool:
        """Whether documents are one long text, and not one example each."""
        return self.model_alignment_strategy.sft is None and not (self.model_alignment_strategy.pairs or self.packing)

    @property
    def packing(self) -> bool:
        """Whether several documents share a row."""
        sft = self.model_alignment_strategy.sft
        return bool(self.data.packing) or (sft is not None and sft.packing)
