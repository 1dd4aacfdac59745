"""GRPO with sparse rollouts: TRL's trainer with this package's rollout engine in the place of `generate`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast_object_list, parse_flag_from_env
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
)

from .config import SparrowGRPOConfig
from .distilling_trainer import DistillingTrainer
from .processes import warn
from .rollout import (
    RolloutEngine,
    RolloutStats,
    check_model_config,
    check_peft_config,
    stop_ids,
)
from .rollout.support import WITHOUT_SPARSITY
from .rollout_metrics import RolloutMetrics
from .sparsity import SparsitySchedule
from .sparsity.calibration.auto import calibrate_for_training
from .sparsity.calibration.options import CalibrationOptions
from .sparsity.calibration.provenance import check_made_for
from .sparsity.presets import preset_name
from .trl_seams import ScoredRollout


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from trl.trainer.grpo_trainer import EnvironmentFactory, RewardFunc, RolloutFunc


_UNSHARDED = f"Use DDP, or DeepSpeed ZeRO-1 or ZeRO-2. {WITHOUT_SPARSITY}"


class SparrowGRPOTrainer(DistillingTrainer):
    """
    Trainer for Group Relative Policy Optimization with sparse rollouts.

    A drop-in for [`~trl.GRPOTrainer`]: the arguments are the same, in the same order, with the same meaning. What
    differs is who generates the completions. The method is that of the paper [Sparrow: Sparse Rollout for Stable and
    Efficient Long-context RL of Large Language Models](https://huggingface.co/papers/2606.08446): the actor that
    samples reads a part of its KV cache, the policy that is trained reads all of it, and the importance ratio between
    the two weights each token of the loss.

    Example:

    ```python
    >>> from sparrow_trl import SparrowGRPOConfig as GRPOConfig, SparrowGRPOTrainer as GRPOTrainer
    >>> from trl.rewards import accuracy_reward
    >>> from datasets import load_dataset

    >>> trainer = GRPOTrainer(
    ...     model="Qwen/Qwen3-1.7B",
    ...     reward_funcs=accuracy_reward,
    ...     args=GRPOConfig(output_dir="Qwen3-1.7B-Sparrow", max_completion_length=16384),
    ...     train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    ... )
    >>> trainer.train()
    ```

    With `args.sparse_schedule=None` the training is exactly that of [`~trl.GRPOTrainer`].

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model to be trained, as in [`~trl.GRPOTrainer`]. The architecture has to be one that the rollout engine
            supports.
        reward_funcs (`RewardFunc | list[RewardFunc]`, *optional*):
            Reward functions, as in [`~trl.GRPOTrainer`].
        args ([`SparrowGRPOConfig`], *optional*):
            Configuration for this trainer. If `None`, a default configuration is used.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`], *optional*):
            Dataset to use for training, as in [`~trl.GRPOTrainer`].
        eval_dataset ([`~datasets.Dataset`], [`~datasets.IterableDataset`], [`~datasets.DatasetDict`], [`~datasets.IterableDatasetDict`] or `dict[str, Dataset | IterableDataset]`):
            Dataset to use for evaluation, as in [`~trl.GRPOTrainer`].
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Tokenizer, as in [`~trl.GRPOTrainer`]. Sparse rollouts support text alone.
        reward_processing_classes ([`~transformers.PreTrainedTokenizerBase`] or `list[PreTrainedTokenizerBase]`, *optional*):
            Tokenizers of the reward functions that are models, as in [`~trl.GRPOTrainer`].
        callbacks (list of [`~transformers.TrainerCallback`], *optional*):
            Callbacks to customize the training loop, as in [`~trl.GRPOTrainer`].
        optimizers (`tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None]`, *optional*, defaults to `(None, None)`):
            Optimizer and scheduler to use, as in [`~trl.GRPOTrainer`].
        quantization_config ([`~transformers.BitsAndBytesConfig`], *optional*):
            Quantization of a model that is given as a string, as in [`~trl.GRPOTrainer`].
        peft_config ([`~peft.PeftConfig`], *optional*):
            PEFT configuration used to wrap the model, as in [`~trl.GRPOTrainer`]. Prompt learning is not supported.
        tools (list of `Callable`, *optional*):
            Functions that the model can call, as in [`~trl.GRPOTrainer`].
        rollout_func (`RolloutFunc`, *optional*):
            Function that generates the completions, as in [`~trl.GRPOTrainer`]. It owns generation: rollouts are
            sparse where it calls `trainer.rollout(prompt_ids)`, and batches for which it did are corrected with the
            `"logprobs"` it returns, so it has to pass on those that `rollout` gave. `trainer.rollout_engine` gives it
            the engine itself, whose samples are *not* corrected.
        environment_factory (`EnvironmentFactory` or `dict[str, EnvironmentFactory]`, *optional*):
            Factory of environments, as in [`~trl.GRPOTrainer`].

    Raises:
        [`UnsupportedModelError`]: the rollout engine cannot run the model.
        `ValueError`: an argument cannot be combined with sparse rollouts (sharded parameters, images, prompt learning).
        `TypeError`: `args` is not a [`SparrowGRPOConfig`].
    """

    _rollout_engine: RolloutEngine | None = None

    def __init__(
        self,
        model: "str | PreTrainedModel | PeftModel",
        reward_funcs: "RewardFunc | list[RewardFunc] | None" = None,
        args: SparrowGRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset
        | IterableDataset
        | DatasetDict
        | IterableDatasetDict
        | dict[str, Dataset | IterableDataset]
        | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: "PeftConfig | None" = None,
        tools: list[Callable] | None = None,
        rollout_func: "RolloutFunc | None" = None,
        environment_factory: "EnvironmentFactory | dict[str, EnvironmentFactory] | None" = None,
    ):
        model_name = model if isinstance(model, str) else model.config.name_or_path
        if args is None:
            args = SparrowGRPOConfig(f"{model_name.split('/')[-1]}-GRPO")
        elif not isinstance(args, SparrowGRPOConfig):
            raise TypeError(
                f"`args` is a {type(args).__name__}, but SparrowGRPOTrainer needs a SparrowGRPOConfig, which has the "
                "options of sparse rollouts on top. Change the import: "
                "`from sparrow_trl import SparrowGRPOConfig as GRPOConfig, SparrowGRPOTrainer as GRPOTrainer`."
            )
        if args.sparse_schedule is not None:
            _refuse_sharding(args)
            _refuse_images(processing_class)
            if peft_config is not None:
                check_peft_config(peft_config)
            _refuse_architecture(model, args)
            # Resolved before the model is loaded, for it may read a file or ask the Hub
            known = args.sparse_schedule != "auto" or preset_name(model_name) in SparsitySchedule.presets()
            schedule = None
            if known:
                schedule = SparsitySchedule.resolve(args.sparse_schedule, model_name, args.sparse_target)
            if rollout_func is not None:
                warn(
                    "`rollout_func` generates the completions, so the rollouts are not sparse, except where it calls "
                    "`trainer.rollout(prompt_ids)`."
                )

        super().__init__(
            model=model,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        if args.sparse_schedule is None:
            return

        _refuse_images(self.processing_class)
        _refuse_spread_parameters(self.model)
        self._schedule = self._calibrate(model_name) if schedule is None else schedule
        check_made_for(self._schedule, self.model.config)
        self._rollout_stats: list[RolloutStats] = []
        self._sampled_schedule = self._schedule
        self._rollout_metrics = {
            mode: RolloutMetrics(
                clip_min=args.vllm_importance_sampling_clip_min,
                clip_max=args.vllm_importance_sampling_clip_max,
                by_sequence=args.vllm_importance_sampling_mode.startswith("sequence_"),
            )
            for mode in ("train", "eval")
        }
        self._warned_of_clipping = False
        _warn_of_dropout(self.model)
        self.take_over_generation(
            stop_ids(
                self.eos_token_ids,
                self.processing_class.eos_token_id,
                self.model.config.get_text_config().eos_token_id,
                self.model.generation_config.eos_token_id,
                self.generation_config.eos_token_id,
            )
        )
        if rollout_func is None:
            # Built here, not at the first rollout: what the engine cannot run is refused before any time is spent
            _ = self.rollout_engine
        self.start_distill(self._schedule)
        self.start_tail_monitor(self._schedule)

    def _calibrate(self, model_name: str) -> SparsitySchedule:
        """
        The schedule that `sparse_schedule="auto"` finds, on the main process alone. The others wait for it, and fail
        with it.
        """
        args = self.args
        found: list[Any] = [None, None]  # the schedule, or what kept it from being found
        failure: Exception | None = None
        if self.accelerator.is_main_process:
            options = CalibrationOptions(
                target=args.sparse_target,
                temperature=args.temperature,
                seed=args.seed,
                memory_fraction=args.rollout_memory_fraction,
            )
            try:
                with torch.no_grad(), self.accelerator.autocast():
                    schedule = calibrate_for_training(
                        self.accelerator.unwrap_model(self.model, keep_torch_compile=False),
                        self.processing_class,
                        self.train_dataset,
                        args.output_dir,
                        name=model_name,
                        max_completion_length=args.max_completion_length,
                        options=options,
                        progress_bar=not args.disable_tqdm,
                    )
                found[0] = schedule.to_dict()
            except Exception as error:
                failure, found[1] = error, f"{type(error).__name__}: {error}"
        found = broadcast_object_list(found)
        if failure is not None:
            raise failure
        if found[1] is not None:
            raise RuntimeError(f"sparse_schedule='auto': the calibration on the main process failed: {found[1]}")
        return SparsitySchedule.from_dict(found[0])

    @property
    def rollout_engine(self) -> RolloutEngine:
        """
        The engine that samples the completions.

        Raises:
            `ValueError`: sparsity is off.
        """
        if not self.samples_rollouts:
            raise ValueError("There is no rollout engine, because sparsity is off (sparse_schedule=None).")
        if self._rollout_engine is None:
            self._rollout_engine = RolloutEngine(
                self.accelerator.unwrap_model(self.model, keep_torch_compile=False),
                self._schedule,
                stop_token_ids=self.eos_token_ids,
                memory_fraction=self.args.rollout_memory_fraction,
                max_num_seqs=self.args.rollout_max_num_seqs,
                prefill_chunk_size=self.args.rollout_prefill_chunk_size,
                progress_bar=self._shows_progress(),
                check_support=self.args.rollout_check_support,
                decode_backend=self.args.rollout_decode_backend,
            )
        return self._rollout_engine

    @property
    def rollout_schedule(self) -> SparsitySchedule:
        """The schedule of the next rollout."""
        return self._schedule if self._rollout_engine is None else self._rollout_engine.schedule

    @rollout_schedule.setter
    def rollout_schedule(self, schedule: SparsitySchedule) -> None:
        self.rollout_engine.schedule = schedule

    def _shows_progress(self) -> bool | None:
        if not self.accelerator.is_main_process:
            return False
        if self.args.rollout_progress_bar is None and self.args.disable_tqdm:
            return False
        return self.args.rollout_progress_bar

    def rollout(
        self, prompt_ids: list[list[int]], num_generations: int = 1
    ) -> tuple[list[list[int]], list[list[float]]]:
        """
        Sample one completion for each entry of `prompt_ids` with the rollout engine.

        This is also what a `rollout_func` calls to sample with sparse attention.

        Args:
            prompt_ids (`list[list[int]]`):
                Token ids. A prompt comes as often as completions of it are wanted; the engine computes it once.
            num_generations (`int`, *optional*, defaults to `1`):
                Not used: the engine sees which prompts are equal.

        Returns:
            `tuple[list[list[int]], list[list[float]]]`: the token ids of each completion, its stop token included, and
            the log-probability of each of these tokens under the sparse actor, at the sampling temperature and over
            the full vocabulary.
        """
        # From the generator whose state is in every checkpoint, so that a resumed run samples the same tokens. TRL
        # seeds it differently on each process.
        seed = int(torch.randint(2**63 - 1, ()))
        monitored = self.choose_monitored(len(prompt_ids))
        # One autocast context around the whole rollout: the cast of each weight is cached until it ends
        with self.sampling_mode(), torch.no_grad(), self.accelerator.autocast():
            self._sampled_schedule = self.rollout_schedule
            output = self.rollout_engine.generate(
                prompt_ids,
                self.generation_config,
                seed=seed,
                top_logprobs=self.args.tail_top_k if monitored else 0,
                top_logprobs_for=monitored,
            )
        self.record_monitored(prompt_ids, output, monitored)
        if self.accelerator.device.type == "cuda":
            # The engine has dropped its KV cache. Give the memory back too: split up by what the backward allocates,
            # its blocks could not hold the next cache.
            torch.cuda.empty_cache()
        self._rollout_stats.append(output.stats)
        return output.completion_ids, output.logprobs

    def sampled_since_last_batch(self) -> bool:
        return bool(self._rollout_stats)

    def before_batch(self) -> None:
        super().before_batch()
        self._rollout_stats.clear()  # of a batch that an exception kept from being scored

    def after_rollout_scored(self, scored: ScoredRollout) -> None:
        clipped = self._rollout_metrics[self.metrics_mode].update(
            self._rollout_stats, scored, self._sampled_schedule, self.accelerator.gather
        )
        self._rollout_stats.clear()
        if clipped is not None and clipped > 0.5 and not self._warned_of_clipping:
            self._warned_of_clipping = True
            warn(
                f"The importance ratio of {clipped:.0%} of the tokens is out of its bounds "
                f"(vllm_importance_sampling_clip_max={self.args.vllm_importance_sampling_clip_max}), so the correction "
                "changes most of the loss: the sparse actor is far from the policy. Use a schedule with larger budgets. "
                "This warning is not repeated; see the metric sparrow/clipped_fraction."
            )
        super().after_rollout_scored(scored)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.samples_rollouts:
            for name, value in self._rollout_metrics[self.metrics_mode].pop().items():
                self.log_sparrow_metric(name, value)
        super().log(logs, start_time)


def _refuse_sharding(args: SparrowGRPOConfig) -> None:
    parallelism = args.parallelism_config
    if args.fsdp or parse_flag_from_env("ACCELERATE_USE_FSDP"):
        found = "FSDP (the option fsdp, or an FSDP configuration of accelerate)"
    elif args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3:
        found = "DeepSpeed ZeRO-3 (zero_optimization.stage=3)"
    elif parallelism is not None and (parallelism.tp_enabled or parallelism.dp_shard_enabled):
        found = "parallelism_config with tp_size > 1 or dp_shard_size > 1"
    else:
        return
    raise ValueError(f"Sparse rollouts need whole parameters on every process, but the run uses {found}. {_UNSHARDED}")


def _refuse_spread_parameters(model: torch.nn.Module) -> None:
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(
            f"Sparse rollouts need whole parameters on every process, but the model's are sharded. {_UNSHARDED}"
        )
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise ValueError(
            f"Sparse rollouts need the model on one device, but it is on {', '.join(devices)}. Set "
            f'model_init_kwargs={{"device_map": None}}. {WITHOUT_SPARSITY}'
        )


def _warn_of_dropout(model: "PreTrainedModel | PeftModel") -> None:
    found = {
        name: value
        for name, value in vars(model.config.get_text_config()).items()
        if name in ("attention_dropout", "attn_pdrop") and value
    }
    modules = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout) and module.p}
    if modules:
        found["torch.nn.Dropout"] = max(modules)
    if found:
        listed = ", ".join(f"{name}={value}" for name, value in found.items())
        warn(
            f"The model has dropout ({listed}). Rollouts run without it and training with it, so its noise shows in the "
            "importance ratios. Set disable_dropout=True, and dropout of attention to 0 in the model's config, with "
            "model_init_kwargs.",
            stacklevel=3,
        )


def _refuse_images(processing_class: Any) -> None:
    if isinstance(processing_class, ProcessorMixin):
        raise ValueError(
            f"Sparse rollouts support text alone, but the processing class is a {type(processing_class).__name__}, "
            f"which handles images too. Pass the tokenizer of a text model. {WITHOUT_SPARSITY}"
        )


def _refuse_architecture(model: "str | PreTrainedModel | PeftModel", args: SparrowGRPOConfig) -> None:
    if isinstance(model, str):
        # The configuration alone, so that a model that would be refused is not loaded first
        options = args.model_init_kwargs or {}
        names = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "code_revision", "gguf_file")
        check_model_config(
            options.get("config")
            or AutoConfig.from_pretrained(
                model,
                trust_remote_code=options.get("trust_remote_code", args.trust_remote_code),
                **{name: options[name] for name in names if name in options},
            )
        )
    else:
        check_model_config(model)
