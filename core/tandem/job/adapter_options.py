"""Support of each option of the adapters' libraries, as data. The page docs/reference/adapter-options.md is generated
from it, and a test reads the signatures of the installed versions.

*exact*: a run that was killed and resumed ends with the weights of an undisturbed one, and the option does what its
library says. *condition*: exact within the limits of the note. *warned*: the option does less than the library says,
and a warning says so. *refused*: the run ends at once with an error of one sentence.

This module imports none of the libraries: the adapters read it when training starts, and the check of a script before
that (tandem_coordinator.prerequisites.adapter).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Treatment = Literal["exact", "condition", "warned", "refused"]


@dataclass(frozen=True)
class Option:
    """An option of a library's call."""

    treatment: Treatment
    note: str = ""
    """Reason, and what to use instead."""
    values: tuple[Any, ...] = ()
    """Values that are refused or warned of; if empty, all except the default."""
    default: Any = None
    """The library's default of a refused option, unless it is empty. Only checks without the library need it."""

    def concerns(self, value: Any) -> bool:
        """Return whether a value other than the default is refused or warned of."""
        return not self.values or getattr(value, "value", value) in self.values


def is_same(value: Any, default: Any) -> bool:
    """Return whether a value is the default, also where the library has replaced an empty value by another one."""
    return bool(value == default or (not value and not default))


@dataclass(frozen=True)
class Table:
    """All options of one call."""

    call: str
    """The call as a script writes it: `transformers.TrainingArguments`."""
    options: Mapping[str, Option] = field(default_factory=dict)


def _table(call: str, exact: str = "", **options: Option) -> Table:
    return Table(call, {**{name: Option("exact") for name in exact.split()}, **options})


def _condition(note: str) -> Option:
    return Option("condition", note)


def _warned(note: str, *values: Any) -> Option:
    return Option("warned", note, values)


def _refused(note: str, *values: Any, default: Any = None) -> Option:
    return Option("refused", note, values, default)


REPLICATED_ONLY = "an adapter keeps a whole model on each process. Use a session with `fsdp` or `tensor_parallel`"
SAVES = "Tandem saves in the place of the library: set `spec.checkpoint` of the job, or `checkpoint=` of the adapter"
LAYERWISE = (
    "it steps inside the backward pass of each micro-batch, so the result would depend on the number of processes. "
    "Use one that steps once"
)
EVALUATION = "it counts for evaluation. Training data is read by `dataloader_num_workers` alone"
REFERENCE = "the reference model would change while it trains, and checkpoints do not have it. Leave it as it began"

TRAINING_ARGUMENTS = _table(
    "transformers.TrainingArguments",
    """output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
    lr_scheduler_kwargs warmup_steps optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon optim_target_modules
    gradient_accumulation_steps max_grad_norm label_smoothing_factor bf16 bf16_full_eval fp16 fp16_full_eval tf32
    activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs
    torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache
    torch_empty_cache_steps logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter
    log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id
    trackio_static_space_id eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only
    eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics
    hub_token hub_private_repo hub_model_id hub_revision metric_for_best_model greater_is_better
    restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu dataloader_drop_last
    dataloader_num_workers dataloader_pin_memory remove_unused_columns label_names length_column_name
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout debug
    skip_memory_metrics do_train do_eval do_predict local_rank""",
    optim=_refused(
        LAYERWISE,
        "lomo",
        "adalomo",
        "galore_adamw_layerwise",
        "galore_adamw_8bit_layerwise",
        "galore_adafactor_layerwise",
        "apollo_adamw_layerwise",
    ),
    neftune_noise_alpha=_condition("noise follows from seed, step and process, as dropout does"),
    include_num_input_tokens_seen=_condition("the count includes samples that stand in where a process has none"),
    eval_on_start=_condition("it evaluates at each start, so also after a restart"),
    save_steps=_condition("counts where there is no job. In a job `spec.checkpoint` counts"),
    average_tokens_across_devices=_refused(
        "without it processes weigh by their number and not by their tokens, so the loss would depend on how samples "
        "are divided. Leave it on",
        default=True,
    ),
    auto_find_batch_size=_refused(
        "it changes the global batch. Set per_device_train_batch_size to what fits; with fewer processes there are "
        "more micro-batches, not larger ones"
    ),
    save_strategy=_warned(SAVES, "epoch", "best"),
    save_only_model=_warned(SAVES),
    save_on_each_node=_warned(SAVES),
    save_total_limit=_warned(SAVES + " (`keepLast`, `keepBest`)"),
    enable_jit_checkpoint=_refused("Tandem saves and leaves on SIGTERM. Leave it out"),
    push_to_hub=_warned("nothing is pushed while it trains. Call trainer.push_to_hub() after train()"),
    hub_strategy=_warned("nothing is pushed while it trains. Call trainer.push_to_hub() after train()"),
    hub_always_push=_warned("nothing is pushed while it trains. Call trainer.push_to_hub() after train()"),
    load_best_model_at_end=_refused(
        "it needs the Trainer's own checkpoints. Evaluators name the best checkpoint of Tandem's, and tandem "
        "checkpoints export writes it"
    ),
    ignore_data_skip=_refused("training goes on where the data stood, and nothing is read again. Leave it out"),
    accelerator_config=_refused(
        "per_device_train_batch_size would be that of all processes. Leave it out", "split_batches"
    ),
    parallelism_config=_refused(REPLICATED_ONLY),
    dataloader_persistent_workers=_condition(EVALUATION),
    dataloader_prefetch_factor=_condition(EVALUATION),
    dataloader_multiprocessing_context=_condition(EVALUATION),
    dataloader_in_order=_condition(EVALUATION),
    train_sampling_strategy=_refused(
        "the order must not depend on the number of processes. Leave it at `random`", default="random"
    ),
    fsdp=_refused(REPLICATED_ONLY),
    fsdp_config=_condition("counts with `fsdp` alone, which is refused"),
    deepspeed=_refused(REPLICATED_ONLY),
    resume_from_checkpoint=_refused(
        "training goes on from the newest checkpoint of the run directory. Leave it out; to begin with other weights, "
        "load them into the model. (A path in output_dir, as `get_last_checkpoint` finds it, is not refused and not "
        "read)"
    ),
)
HF_TRAINER = _table(
    "transformers.Trainer",
    """model args train_dataset eval_dataset processing_class compute_metrics optimizer_cls_and_kwargs
    preprocess_logits_for_metrics""",
    data_collator=_condition("what it draws, such as masks, follows from seed, step and process, as dropout does"),
    model_init=_refused("it makes the model anew in train(). Make it before, and give it as model="),
    compute_loss_func=_condition("it divides by `num_items_in_batch`, which it is given"),
    callbacks=_condition(
        "the state of an `ExportableState` comes back. A callback that holds copies of the weights in another way is "
        "refused"
    ),
    optimizers=_condition("an optimizer that steps once; a schedule that has a state_dict"),
)
SFT = _table(
    "trl.SFTConfig",
    """model_init_kwargs trust_remote_code chat_template_path dataset_text_field dataset_kwargs dataset_num_proc
    eos_token max_length truncation_mode shuffle_dataset packing packing_strategy padding_free pad_to_multiple_of
    eval_packing completion_only_loss assistant_only_loss loss_type activation_offloading pad_token""",
    router_aux_loss_coef=_condition("the auxiliary loss is a mean over a micro-batch"),
)
DPO = _table(
    "trl.DPOConfig",
    """model_init_kwargs trust_remote_code disable_dropout dataset_num_proc max_length truncation_mode padding_free
    pad_to_multiple_of precompute_ref_log_probs precompute_ref_batch_size loss_weights ld_alpha f_divergence_type
    f_alpha_divergence_coef label_smoothing beta use_weighting discopop_tau activation_offloading pad_token""",
    router_aux_loss_coef=_condition("the auxiliary loss is a mean over a micro-batch"),
    loss_type=_condition("a mean over pairs; with `sft` tokens of a micro-batch weigh alike, not those of the step"),
    sync_ref_model=_refused(REFERENCE),
    ref_model_mixup_alpha=_condition("counts with `sync_ref_model` alone, which is refused"),
    ref_model_sync_steps=_condition("counts with `sync_ref_model` alone, which is refused"),
)
REWARD = _table(
    "trl.RewardConfig",
    """model_init_kwargs trust_remote_code chat_template_path disable_dropout dataset_num_proc eos_token max_length
    pad_to_multiple_of center_rewards_coefficient activation_offloading pad_token""",
)
KTO = _table(
    "trl.KTOConfig",
    """model_init_kwargs trust_remote_code disable_dropout dataset_num_proc max_length
    pad_to_multiple_of precompute_ref_log_probs precompute_ref_batch_size beta desirable_weight undesirable_weight
    activation_offloading""",
    router_aux_loss_coef=_condition("the auxiliary loss is a mean over a micro-batch"),
    loss_type=_condition(
        "the reference point of `kto` is estimated from a micro-batch, whose size depends on the number of processes"
    ),
    sync_ref_model=_refused(REFERENCE),
    ref_model_mixup_alpha=_condition("counts with `sync_ref_model` alone, which is refused"),
    ref_model_sync_steps=_condition("counts with `sync_ref_model` alone, which is refused"),
)
GENERATES = "it generates while it trains, from batches that span several steps. Run it without the adapter"
OWN_LOOPS = _table(
    "trl",
    GRPOTrainer=_refused(GENERATES),
    RLOOTrainer=_refused(GENERATES),
    DistillationTrainer=_refused(GENERATES),
)
CONFIGS_OF_TRL = {"SFTConfig": SFT, "DPOConfig": DPO, "RewardConfig": REWARD, "KTOConfig": KTO}

ACCELERATOR = _table(
    "accelerate.Accelerator",
    """device_placement split_batches mixed_precision gradient_accumulation_steps cpu dataloader_config log_with
    project_dir kwargs_handlers dynamo_backend dynamo_plugin gradient_accumulation_plugin""",
    rng_types=_condition("a step's random numbers follow from seed, step and process, whatever is named here"),
    project_config=_condition("`save_state` is not needed; Tandem saves"),
    step_scheduler_with_optimizer=_condition(
        "where it is off, the schedule steps when the script calls it: call it once for each optimizer step"
    ),
    deepspeed_plugin=_refused(REPLICATED_ONLY),
    deepspeed_plugins=_refused(REPLICATED_ONLY),
    fsdp_plugin=_refused(REPLICATED_ONLY),
    torch_tp_plugin=_refused(REPLICATED_ONLY),
    megatron_lm_plugin=_refused(REPLICATED_ONLY),
    parallelism_config=_refused(REPLICATED_ONLY),
)
DATA_LOADER_CONFIGURATION = _table(
    "accelerate.utils.DataLoaderConfiguration",
    "split_batches non_blocking",
    dispatch_batches=_refused("each process reads its own share of a step. Leave it out"),
    even_batches=_condition("shares may be uneven, and each sample weighs the same; no sample comes twice"),
    use_seedable_sampler=_condition("the order follows from `elastic(seed=…)`"),
    data_seed=_condition("the order follows from `elastic(seed=…)`"),
    use_stateful_dataloader=_condition("where the data stands is in Tandem's checkpoint"),
)
GRADIENT_ACCUMULATION_PLUGIN = _table(
    "accelerate.utils.GradientAccumulationPlugin",
    "num_steps sync_each_batch",
    adjust_scheduler=_condition(
        "a prepared schedule steps with the optimizer, as often as on the processes that the job asks for"
    ),
    sync_with_dataloader=_condition("the last step of an epoch is a whole one, with fewer samples"),
)

LIGHTNING_TRAINER = _table(
    "lightning.Trainer",
    """accelerator devices num_nodes precision logger max_epochs min_epochs max_steps min_steps limit_val_batches
    limit_test_batches limit_predict_batches check_val_every_n_epoch log_every_n_steps enable_progress_bar
    enable_model_summary accumulate_grad_batches gradient_clip_val gradient_clip_algorithm deterministic benchmark
    inference_mode profiler detect_anomaly barebones default_root_dir enable_autolog_hparams model_registry
    limit_train_batches""",
    val_check_interval=_refused(
        "a time would validate by the clock. Give a number of batches, or a part of an epoch", "a time"
    ),
    strategy=_refused(
        "Elastic keeps a whole model on each process: strategy `ddp`, or none. For a model that is "
        "split, use a session with `fsdp`"
    ),
    callbacks=_condition(
        "the state of a callback (`state_dict`) comes back, and the weights of `WeightAveraging`; which are refused "
        "stands below"
    ),
    fast_dev_run=_refused("it would complete the run directory after a few steps. Try the script without Elastic"),
    max_time=_refused(
        "it ends training by the clock, so a run that was killed would take another number of steps. Set "
        "`spec.runPolicy.activeDeadlineSeconds` of the job"
    ),
    overfit_batches=_refused(
        "it counts batches of one process. Give Elastic a loader of `torch.utils.data.Subset(dataset, range(n))`"
    ),
    num_sanity_val_steps=_condition("it validates at each start, so also after a restart"),
    enable_checkpointing=_condition("a `ModelCheckpoint` writes its own files beside Tandem's checkpoints"),
    use_distributed_sampler=_condition("it counts for validation and tests. Elastic divides the training data"),
    plugins=_condition("those of precision, environment and layers; checkpoints are Tandem's, not a `CheckpointIO`'s"),
    sync_batchnorm=_condition("statistics are those of a micro-batch on all processes"),
    reload_dataloaders_every_n_epochs=_condition("it counts for validation; the training data stays the same"),
)
LIGHTNING_FIT = _table(
    "lightning.Trainer.fit",
    "model val_dataloaders",
    train_dataloaders=_condition("`elastic.loader`"),
    datamodule=_condition("its `train_dataloader` returns `elastic.loader`; its `state_dict` is not kept"),
    ckpt_path=_refused(
        "training goes on from the newest checkpoint of the run directory. Leave it out; to begin with other weights, "
        "load them into the module before fit. (`last` is not refused: what it finds in the folder of the script's "
        "ModelCheckpoint is not read)"
    ),
    weights_only=_condition("counts with `ckpt_path` alone, which is refused"),
)
LIGHTNING_CALLBACKS = _table(
    "lightning.pytorch.callbacks",
    """Checkpoint DeviceStatsMonitor EarlyStopping EMAWeightAveraging LambdaCallback LearningRateMonitor
    ModelCheckpoint ModelSummary ProgressBar RichModelSummary RichProgressBar ThroughputMonitor TQDMProgressBar
    WeightAveraging BasePredictionWriter OnExceptionCheckpoint Callback""",
    BatchSizeFinder=_refused("it changes the global batch. Give the loader the batch size that it found"),
    LearningRateFinder=_refused("it trains before training. Run it without Elastic, and set the rate that it found"),
    GradientAccumulationScheduler=_refused("it changes the global batch while it trains. Use accumulate_grad_batches"),
    StochasticWeightAveraging=_refused(
        "it holds weights, and replaces the schedule while it trains. Use WeightAveraging, which checkpoints keep"
    ),
    BaseFinetuning=_refused("it adds parameters to the optimizer while it trains. Give each stage a run of its own"),
    BackboneFinetuning=_refused(
        "it adds parameters to the optimizer while it trains. Give each stage a run of its own"
    ),
    ModelPruning=_refused("it replaces parameters while it trains. Prune after training"),
    SpikeDetection=_refused("a session does so, and goes back. Use Elastic(…, rewind_on='Spikes')"),
    Timer=_refused(
        "`max_time` makes one, and it ends training by the clock. Set `spec.runPolicy.activeDeadlineSeconds` of the job"
    ),
)
TABLES = (
    TRAINING_ARGUMENTS,
    HF_TRAINER,
    *CONFIGS_OF_TRL.values(),
    OWN_LOOPS,
    ACCELERATOR,
    DATA_LOADER_CONFIGURATION,
    GRADIENT_ACCUMULATION_PLUGIN,
    LIGHTNING_TRAINER,
    LIGHTNING_FIT,
    LIGHTNING_CALLBACKS,
)
"""All tables, in the order of the page."""
