"""The keys of a recipe: those of NxD Training's configuration files, and a few of ours (``trace``, marked "ours").

Source: NxD Training, "YAML Configuration Settings". The keys of ``model`` and ``data`` are in their own modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nxd_infer.pipeline.schedule import SCHEDULES
from nxd_infer.recipes.data.schema import Data
from nxd_infer.recipes.keys import key, section
from nxd_infer.recipes.model_schema import Model

COMPILER = "it speaks to Neuron's compiler or runtime, and nothing is compiled to train here"
LAUNCH = "it belongs to Lightning's trainer, and this loop has no use for it"
FILES = "checkpoints are safetensors, written rank by rank, in any case"


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


@dataclass(kw_only=True)
class Trainer:
    devices: int = key(1, "ranks per machine; each is a process", int, minimum=1, maximum=1 << 16)
    num_nodes: int = key(1, "machines", int, minimum=1, maximum=1 << 16)
    lnc: int | None = key(None, "physical cores per logical one", int, minimum=1, maximum=2, unused=COMPILER)
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
    limit_test_batches: float = key(
        1.0, "batches of a test", float, minimum=0, unused="recipes run no test; data.test_dir is not read"
    )
    gradient_clip_val: float = key(1.0, "largest 2-norm of the gradients; 0 does not clip", float, minimum=0)
    sequential_move_factor: int = key(11, "ranks that build their model at a time", int, minimum=1, maximum=32)
    accelerator: str | None = key(None, "kind of device", unused=LAUNCH)
    precision: Any = key(None, "see the section precision", object, unused=LAUNCH)
    logger: bool | None = key(None, "Lightning's own logger", bool, unused=LAUNCH)
    enable_checkpointing: bool | None = key(None, "Lightning's own checkpoints", bool, unused=LAUNCH)
    replace_sampler_ddp: bool | None = key(
        None, "Lightning's sampler", bool, unused=LAUNCH, also=("use_distributed_sampler",)
    )
    enable_model_summary: bool | None = key(None, "a table of the model", bool, unused=LAUNCH)
    enable_progress_bar: bool = key(True, "show the progress of the training", bool)
    benchmark: bool | None = key(None, "cuDNN's search", bool, unused=LAUNCH)
    accumulate_grad_batches: int = key(
        1, "follows from data.global_batch_size", int, unused="data.global_batch_size decides", only=(1,)
    )


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
    always_save_nemo: bool = key(
        False, "write NeMo's archives", bool, unused="NeMo's archives are not written", only=(False,)
    )
    model_parallel_size: int | None = key(None, "ranks per model", int, unused="it follows from distributed_strategy")
    use_master_weights_in_ckpt: bool = key(
        False, "the optimizer's state holds the float32 weights in any case", bool, unused=FILES
    )
    save_weights_only: bool | None = key(
        None, "leave the optimizer out", bool, unused="jobs resume exactly, so all is saved", only=(False,)
    )
    verbose: bool | None = key(None, "say what is saved", bool, unused=LAUNCH)
    save_nemo_on_train_end: bool = key(
        False, "write NeMo's archive at the end", bool, unused="NeMo's archives are not written", only=(False,)
    )
    enable_version_counter: bool | None = key(None, "number equal names", bool, unused=FILES)
    auto_insert_metric_name: bool = key(True, "write {step} as step=7, and not 7", bool)


@dataclass(kw_only=True)
class EarlyStopping:
    monitor: str = key("val_loss", "what must improve", choices=("val_loss", "reduced_train_loss", "train_loss"))
    mode: str = key("min", "whether more or less is better", choices=("max", "min"))
    patience: int = key(10, "validations without an improvement before the end", int, minimum=1)
    min_delta: float = key(0.001, "the least improvement", float, minimum=0)
    verbose: bool | None = key(None, "say so", bool, unused=LAUNCH)
    strict: bool | None = key(None, "refuse a metric that is missing", bool, unused=LAUNCH)
    check_finite: bool = key(True, "end when it is not a number", bool)


@dataclass(kw_only=True)
class ExpManager:
    explicit_log_dir: str | None = key(None, "the log's folder itself")
    exp_dir: str | None = key(None, "the folder of experiments; default: nxd_experiments")
    name: str = key("default", "the experiment's folder in exp_dir")
    version: str | None = key(None, "the folder of this job in the experiment's; default: the next version_N")
    use_datetime_version: bool = key(False, "name versions by the date, and not by number", bool)
    resume_if_exists: bool = key(False, "go on with the newest version and its newest checkpoint", bool)
    resume_past_end: bool = key(False, "accepted: a job whose steps are done ends at once", bool)
    resume_ignore_no_checkpoint: bool = key(True, "start from the beginning if there is no checkpoint", bool)
    resume_from_checkpoint: str | None = key(
        None, "checkpoints, or a Hugging Face directory, that the first start begins with"
    )
    create_checkpoint_callback: bool = key(True, "save checkpoints", bool)
    checkpoint_callback_params: CheckpointCallback = section(CheckpointCallback, "which checkpoints to save and keep")
    create_early_stopping_callback: bool = key(False, "end when a metric no longer improves", bool)
    early_stopping_callback_params: EarlyStopping = section(EarlyStopping, "when to end")
    create_tensorboard_logger: bool = key(True, "write TensorBoard's files into the log's folder", bool)
    summary_writer_kwargs: dict[str, Any] = key({}, "options of TensorBoard's writer", dict, unused=LAUNCH)
    create_wandb_logger: bool = key(False, "log to Weights and Biases, through Lightning", bool)
    wandb_logger_kwargs: dict[str, Any] = key({}, "arguments of Lightning's WandbLogger", dict)
    create_mlflow_logger: bool = key(False, "log to MLflow, through Lightning", bool)
    mlflow_logger_kwargs: dict[str, Any] = key({}, "arguments of Lightning's MLFlowLogger", dict)
    create_dllogger_logger: bool = key(False, "log to DLLogger", bool, unused="DLLogger is not written", only=(False,))
    create_clearml_logger: bool = key(False, "log to ClearML", bool, unused="ClearML is not written", only=(False,))
    create_neptune_logger: bool = key(False, "log to Neptune", bool, unused="Neptune is not written", only=(False,))
    log_local_rank_0_only: bool | None = key(None, "only rank 0 logs in any case", bool, unused=LAUNCH)
    log_global_rank_0_only: bool | None = key(None, "only rank 0 logs in any case", bool, unused=LAUNCH)
    log_step_timing: bool = key(True, "log the seconds per step", bool)
    step_timing_kwargs: dict[str, Any] = key({}, "options of NeMo's timer", dict, unused=LAUNCH)
    log_parameter_norm: bool = key(False, "log the 2-norm of all parameters", bool)
    log_gradient_norm: bool = key(True, "log the 2-norm of all gradients", bool)
    enable_recovery_time_instrumentation: bool = key(
        False, "log the seconds from the start of the process to the first step", bool
    )
    disable_validation_on_resume: bool = key(
        True, "no validation right after a resume", bool, unused="a resumed job goes on with its next step"
    )
    save_xser: bool = key(True, "all ranks write at a time", bool)
    load_xser: bool | None = key(None, "checkpoints of either kind are recognised", bool, unused=FILES)
    save_bf16: bool = key(
        False, "save weights in bfloat16", bool, unused="weights are saved in their own dtype", only=(False,)
    )
    async_checkpointing: bool = key(False, "write checkpoints while the training goes on", bool)
    ckpt_ptl_version: str | None = key(None, "Lightning's version in a checkpoint", unused=FILES)
    files_to_copy: list[str] = key([], "files to copy into the log's folder", list[str])
    max_time_per_run: Any = key(None, "as trainer.max_time, for this start of the job", object)
    ema: dict[str, Any] | None = key(None, "average of the weights", dict, unused="averages of weights are not kept")
    generate_samples: int = key(
        0, "ours: tokens to generate after each validation, from a text of the validation data", int, minimum=0
    )


@dataclass(kw_only=True)
class DistributedStrategy:
    tensor_model_parallel_size: int = key(1, "ranks that share each layer", int, minimum=1)
    pipeline_model_parallel_size: int = key(1, "ranks that share the layers in order", int, minimum=1)
    virtual_pipeline_model_parallel_size: int = key(1, "stages per rank", int, minimum=1)
    context_parallel_size: int = key(1, "ranks that share each sequence", int, minimum=1)
    expert_model_parallel_size: int = key(1, "ranks that share the experts", int, minimum=1)
    token_shuffle_group_size: int = key(
        1,
        "ranks among which tokens are shuffled for the experts",
        int,
        minimum=1,
        unused="experts are not trained here",
    )
    zero1: bool = key(True, "share the optimizer's state among the data-parallel ranks", bool)
    sequence_parallel: bool = key(False, "split activations between the parallel blocks along the sequence", bool)
    kv_replicator: Any = key(
        None,
        "copies of each key/value head",
        object,
        also=("kv_size_multiplier",),
        unused="heads are replicated as the degree needs",
    )
    pipeline_schedule: str | None = key(None, "ours: the schedule", choices=SCHEDULES)


@dataclass(kw_only=True)
class Precision:
    type: str = key(
        "mixed_precision",
        "mixed_precision: bfloat16 with float32 master weights and sums; autocast: float32 weights, bfloat16 products; "
        "fp32: float32; bf16SR: bfloat16 alone; manual: as the keys say",
        choices=PRECISIONS,
    )
    master_weights: bool | None = key(None, "step float32 copies of bfloat16 weights", bool)
    fp32_grad_acc: bool | None = key(None, "sum gradients in float32", bool)
    fp32_grads_cc: bool | None = key(
        None,
        "sum gradients over the ranks in float32, as always",
        bool,
        unused="gradients are always summed over ranks in float32",
    )
    xla_use_bf16: Any = key(None, "bfloat16 weights (manual)", object)
    xla_downcast_bf16: Any = key(None, "bfloat16 weights (manual)", object)
    neuron_rt_stochastic_rounding_en: Any = key(None, "round stochastically", object, unused=COMPILER)
    parallel_layers_reduce_dtype: str | None = key(
        None, "dtype of sums in parallel layers", choices=("bf16", "fp32"), unused="parallel layers sum in float32"
    )


@dataclass(kw_only=True)
class Sft:
    packing: bool = key(False, "put several documents into a row; attention and positions keep them apart", bool)


@dataclass(kw_only=True)
class Dpo:
    kl_beta: float = key(0.01, "weight of the distance from the reference", float, minimum=0, also=("beta",))
    loss_type: str = key("sigmoid", "the loss", choices=("sigmoid", "hinge", "ipo"))
    max_prompt_length: int | None = key(None, "longer prompts are cut", int, minimum=1)
    truncation_mode: str = key("keep_start", "which end of a text is kept", choices=("keep_start", "keep_end"))
    precompute_ref_log_probs: bool = key(
        True,
        "compute the reference's probabilities once, before the first step",
        bool,
        unused="the reference runs once, so that no second model is needed",
        only=(True,),
    )


@dataclass(kw_only=True)
class Orpo:
    beta: float = key(0.1, "weight of the odds ratio", float, minimum=0, also=("kl_beta",))
    max_prompt_length: int | None = key(None, "longer prompts are cut", int, minimum=1)
    truncation_mode: str = key("keep_start", "which end of a text is kept", choices=("keep_start", "keep_end"))


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
    save_lora_base: bool = key(
        False, "save the base weights, too", bool, unused="checkpoints hold the adapter; the traced model is merged"
    )
    merge_lora: bool = key(
        False, "save merged weights", bool, unused="checkpoints hold the adapter; the traced model is merged"
    )
    save_lora_config_adapter: bool = key(True, "save the options with the adapter", bool)
    merge_sharded_lora: bool | None = key(None, "adapters are saved whole", bool, unused=FILES)


@dataclass(kw_only=True)
class Alignment:
    sft: Sft | None = section(Sft, "supervised fine-tuning", optional=True)
    dpo: Dpo | None = section(Dpo, "direct preference optimisation", optional=True)
    orpo: Orpo | None = section(Orpo, "odds ratio preference optimisation", optional=True)
    peft: Peft | None = section(Peft, "train adapters (LoRA)", optional=True)


@dataclass(kw_only=True)
class Recipe:
    """A whole recipe, checked."""

    name: str = key("recipe", "what the job is called")
    model_source: str = key("hf", "whose names the model's keys have", choices=("hf", "megatron"))
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
    compiler_flags: str | None = key(None, "flags of neuronx-cc", unused=COMPILER)
    compiler_cache_url: str | None = key(None, "the compiler's cache", unused=COMPILER)
    async_exec_max_inflight_requests: int | None = key(
        None,
        "requests in flight",
        int,
        also=("aync_exec_max_inflight_requests", "neuron_rt_async_exec_max_inflight_requests"),
        unused=COMPILER,
    )
    bucket_size_collectives: float | None = key(
        None, "gradients are reduced in buckets of this size, in MB", float, minimum=0
    )
    neuron_rt_exec_timeout: int | None = key(None, "seconds a graph may run", int, unused=COMPILER)
    neuron_experimental_compress_rg: bool | None = key(None, "compress replica groups", bool, unused=COMPILER)
    restore_from_path: str | None = key(
        None, "NeMo's archive to begin with", unused="see exp_manager.resume_from_checkpoint", only=(None,)
    )
