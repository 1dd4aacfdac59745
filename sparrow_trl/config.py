"""The configuration of [`SparrowGRPOTrainer`]: TRL's, and what the sparse rollouts need on top."""

import json
import os
from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig
from trl import GRPOConfig

from .distill.loss import KL_DIRECTIONS, KL_ESTIMATORS, SAMPLED_ESTIMATORS
from .monitor import ACTIONS, STATISTICS
from .processes import warn
from .rollout.backend import BACKENDS
from .rollout.sampler import NUMBERS, Sampler
from .sparsity import DEFAULT_TARGET, SparsitySchedule, is_hub_repo
from .validation import boolean, fraction, integer, is_number, number


_BATCH_SIZES = (
    "num_generations",
    "num_generations_eval",
    "generation_batch_size",
    "steps_per_generation",
    "num_iterations",
)
_IMPORTANCE_SAMPLING_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass
class SparrowGRPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`SparrowGRPOTrainer`].

    Every parameter of [`~trl.GRPOConfig`] is taken, with the same meaning. This class includes only the parameters
    that are specific to sparse rollouts. Two of TRL's defaults differ, see the note below.

    Using [`~transformers.HfArgumentParser`] we can turn this class into
    [argparse](https://docs.python.org/3/library/argparse#module-argparse) arguments that can be specified on the
    command line.

    Parameters:
        > Parameters that control the sparsity of the rollouts

        sparse_schedule (`str`, `dict[str, Any]` or [`SparsitySchedule`], *optional*, defaults to `"auto"`):
            How many pages of the KV cache a query reads during rollouts, by its position. Possible values are:

            - `"auto"`: the published schedule if the model is one that has one. Else it is calibrated, once, on the first
              training prompts, and kept in `output_dir/sparrow_calibration`; where sequences are too short to gain from
              sparsity, it is dense, with a warning.
            - `"dense"`: this package's rollout engine with exact attention.
            - `"fixed:64"`: the same number of scored pages at every position.
            - `"qwen3-1.7b"` or `"qwen3-1.7b@0.86"`: a published schedule, by default the one for `sparse_target`.
            - the path of a JSON file, or of a folder that holds `sparrow_schedule.json`.
            - `"user/name"`: a Hub repository that holds `sparrow_schedule.json`.
            - a [`SparsitySchedule`], or a dictionary of its fields. An object is stored as the dictionary.
            - `None` (on the command line: `none`): sparsity off. TRL's own generation runs, and the training is
              exactly that of [`~trl.GRPOTrainer`].
        sparse_target (`float`, *optional*, defaults to `0.86`):
            Tail of the acceptance rate (its 5th percentile in each bin of positions) that the schedule must keep. It
            selects among published schedules, is what `"auto"` calibrates for, and the default of `tail_threshold`. The
            [paper](https://huggingface.co/papers/2606.08446) found training stable at `0.86` and above.

        > Parameters that control the rollout engine

        rollout_memory_fraction (`float`, *optional*, defaults to `0.5`):
            Part of the free memory that the KV cache of a rollout may take, in `(0, 1]`. It is freed before the
            backward pass. Lower it if the rollout runs out of memory; when pages run out, sequences wait or are
            recomputed, which is slower.
        rollout_max_num_seqs (`int`, *optional*, defaults to `256`):
            Sequences that are decoded at the same time on one device.
        rollout_prefill_chunk_size (`int`, *optional*, defaults to `1024`):
            Prompt tokens that one forward pass of the prefill takes. Lower it if the prefill runs out of memory.
        rollout_progress_bar (`bool`, *optional*):
            Whether to show a progress bar of the completions of a rollout. If `None`, it appears on the main process
            once a rollout takes long, unless `disable_tqdm=True`.
        rollout_check_support (`bool`, *optional*, defaults to `True`):
            Whether to decode a short random prompt when the trainer is built and compare with the model's plain
            forward pass, so that an architecture on which the engine would be wrong is refused.
        rollout_decode_backend (`str`, *optional*, defaults to `"auto"`):
            What decodes: `"triton"` (kernels) or `"torch"` (PyTorch operations), both in bursts of steps that stay on the
            device, or `"host"` (PyTorch operations, each step planned on the host). `"auto"` takes the first that works
            on a CUDA device, and `"host"` on a CPU.

        > Parameters that control DistillSparse

        distill_sparse (`bool`, *optional*, defaults to `False`):
            Whether to train a LoRA that is on in rollouts alone, so that the sparse actor comes closer to the dense
            policy. The policy is trained, evaluated and saved without it. It is stored in the folder `sparrow/adapter`
            of checkpoints and of the saved model.
        distill_rank (`int`, *optional*, defaults to `16`):
            Rank of this LoRA.
        distill_alpha (`float`, *optional*):
            Its update is scaled by `distill_alpha / distill_rank`. If `None`, twice the rank.
        distill_target_modules (`list[str]`, *optional*):
            Last parts of the names of the layers it adapts, or `["all-linear"]` for all linear layers but the head. If
            `None`, the linear layers inside the attention.
        distill_learning_rate (`float`, *optional*, defaults to `0.0005`):
            Learning rate of its own optimizer, an AdamW.
        distill_warmup_steps (`int`, *optional*, defaults to `5`):
            Steps of this optimizer over which the learning rate rises; constant afterwards.
        distill_max_grad_norm (`float`, *optional*, defaults to `1.0`):
            Norm to which the LoRA's gradient is clipped; `0` turns clipping off.
        distill_kl (`str`, *optional*, defaults to `"full"`):
            How the divergence from the dense policy is measured: `"full"` over the whole vocabulary, `"top_k"` over the
            `distill_top_k` tokens that the policy finds most likely, with all others as one, or estimated from the
            sampled token alone, `"k1"`, `"k2"` or `"k3"`.
        distill_kl_direction (`str`, *optional*, defaults to `"forward"`):
            `"forward"`, the divergence of the actor from the policy, KL(policy || actor), or `"reverse"`.
        distill_kl_coef (`float`, *optional*, defaults to `1.0`):
            Weight of the divergence in the LoRA's loss.
        distill_ppo_coef (`float`, *optional*, defaults to `1.0`):
            Weight of the policy-gradient term in the LoRA's loss.
        distill_top_k (`int`, *optional*, defaults to `64`):
            See `distill_kl`.
        distill_reuse_teacher (`bool`, *optional*, defaults to `False`):
            Whether to take the policy's log-probabilities of the sampled tokens from before its update, which are known
            already, instead of from a forward of the updated policy. Only with `"k1"`, `"k2"` or `"k3"`.
        distill_every (`int`, *optional*, defaults to `1`):
            Update the LoRA after every so many generation batches.
        distill_tokens (`int`, *optional*):
            Tokens, prompts included, of one update on each process, at most; which sequences, is drawn at random. If
            `None`, all of the generation batch.
        distill_steps (`int`, *optional*, defaults to `1`):
            Optimizer steps of one update, each on its part of the sequences.
        distill_micro_tokens (`int`, *optional*, defaults to `4096`):
            Tokens of one forward of the update, at most, but for a longer sequence. Lower it if the update runs out of
            memory.

        > Parameters that control the tail monitor

        tail_monitor (`bool`, *optional*, defaults to `True`):
            Whether to measure the acceptance rate of some completions, log its tail, and act when it is too low. It is
            the overlap of what the sparse actor and the dense policy would sample. Off with a dense schedule.
        tail_threshold (`float`, *optional*):
            What the tail (5th percentile) should be at or above in each bin of positions, in `(0, 1)`. If `None`, it is
            `sparse_target`.
        tail_action (`str`, *optional*, defaults to `"warn"`):
            What to do when the tail of a bin is below the threshold, by a confidence interval. Possible values are:

            - `"warn"`: say so, once for each bin.
            - `"adapt"`: raise the bin's budget at once, and lower it slowly when there is room.
            - `"densify"`: sample with dense attention until the tail that the schedule has on those completions is back.
            - `"stop"`: end the training after this step.
        tail_share (`float`, *optional*, defaults to `0.0625`):
            Part of the completions that are measured, in `(0, 1]`. Where that is less than one of a batch, one of every
            few batches is.
        tail_every (`int`, *optional*, defaults to `1`):
            Measure every so many generation batches.
        tail_statistic (`str`, *optional*, defaults to `"auto"`):
            What is compared with the threshold. `"lower"` is the lower bound from the most likely tokens of both sides,
            with which the paper's `0.86` was measured; it costs no pass over the model. `"exact"` is the rate over the
            full vocabulary, which takes one more pass over the measured completions. `"auto"` is `"lower"`, unless the
            first batch shows that the distributions are too flat for it.
        tail_top_k (`int`, *optional*, defaults to `20`):
            How many of the most likely tokens the bounds know of each side.
        tail_min_tokens (`int`, *optional*, defaults to `400`):
            New tokens in a bin before it is judged again.
        tail_confidence (`float`, *optional*, defaults to `0.98`):
            Confidence of the interval that is compared with the threshold, in `(0, 1)`.
        tail_floor_every (`int`, *optional*, defaults to `100`):
            Measured batches from one measurement of the noise floor (the policy against itself, computed another way)
            to the next.
        tail_min_budget (`int`, *optional*, defaults to `8`):
            Scored pages below which `tail_action="adapt"` lowers no budget.
        tail_max_budget (`int`, *optional*):
            Scored pages above which `tail_action="adapt"` raises no budget. If `None`, up to all pages.

    > [!NOTE]
    > These parameters have default values different from [`~trl.GRPOConfig`]:
    > - `vllm_importance_sampling_mode`: Defaults to `"token_truncate"` instead of `"sequence_mask"`.
    > - `vllm_importance_sampling_clip_max`: Defaults to `2.0` instead of `3.0`.
    >
    > The parameters `vllm_importance_sampling_*` apply to sparse rollouts as they do to vLLM's: the sparse actor that
    > samples is not the dense policy that is trained, so each token is weighted by
    > `min(p_policy / p_actor, vllm_importance_sampling_clip_max)`. A ratio over a whole sequence multiplies up the
    > differences of all its tokens, so the sequence-level modes are unusable for long completions. The two defaults hold
    > with `sparse_schedule=None` and `use_vllm=True` too.
    """

    _VALID_DICT_FIELDS = GRPOConfig._VALID_DICT_FIELDS + ["sparse_schedule"]

    # Parameters whose default values are overridden from GRPOConfig
    vllm_importance_sampling_mode: str = field(
        default="token_truncate",
        metadata={
            "help": "Specifies how the importance sampling ratios between the policy and the sparse (or vLLM) actor "
            "that sampled are constrained, when vllm_importance_sampling_correction=True. Supported options are: "
            "'token_truncate' (each token's ratio is clipped to [C_min, C_max]), 'token_mask' (ratios outside are set "
            "to zero), and 'sequence_truncate' and 'sequence_mask' (the same with one ratio for a whole sequence, "
            "which is unusable for long completions)."
        },
    )
    vllm_importance_sampling_clip_max: float | None = field(
        default=2.0,
        metadata={
            "help": "Importance sampling upper bound C_max used by `vllm_importance_sampling_mode`. For '*_truncate' "
            "modes, ratios are clipped from above at C_max. For '*_mask' modes, ratios larger than C_max are set to "
            "zero."
        },
    )

    # Parameters that control the sparsity of the rollouts
    sparse_schedule: dict[str, Any] | str | None = field(
        default="auto",
        metadata={
            "help": "How many pages of the KV cache a query reads during rollouts, by its position: 'auto' (the "
            "published schedule of the model, else calibrated on the first training prompts), 'dense', 'fixed:64', a published schedule such as "
            "'qwen3-1.7b@0.86', the path of a JSON file or folder, a Hub repository 'user/name', or a JSON "
            "dictionary. 'none' turns sparsity off: TRL's own generation runs."
        },
    )
    sparse_target: float = field(
        default=DEFAULT_TARGET,
        metadata={
            "help": "Tail of the acceptance rate (its 5th percentile in each bin of positions) that the schedule must "
            "keep. It selects among published schedules, is what 'auto' calibrates for, and the default of "
            "tail_threshold."
        },
    )

    # Parameters that control the rollout engine
    rollout_memory_fraction: float = field(
        default=0.5,
        metadata={
            "help": "Part of the free memory that the KV cache of a rollout may take, in (0, 1]. It is freed before "
            "the backward pass."
        },
    )
    rollout_max_num_seqs: int = field(
        default=256,
        metadata={"help": "Sequences that are decoded at the same time on one device."},
    )
    rollout_prefill_chunk_size: int = field(
        default=1024,
        metadata={"help": "Prompt tokens that one forward pass of the prefill takes."},
    )
    rollout_progress_bar: bool | None = field(
        default=None,
        metadata={
            "help": "Whether to show a progress bar of the completions of a rollout. If `None`, it appears on the "
            "main process once a rollout takes long, unless `disable_tqdm=True`."
        },
    )
    rollout_check_support: bool = field(
        default=True,
        metadata={
            "help": "Whether to decode a short random prompt when the trainer is built and compare with the model's "
            "plain forward pass, so that an architecture on which the engine would be wrong is refused."
        },
    )
    rollout_decode_backend: str = field(
        default="auto",
        metadata={
            "help": "What decodes: 'triton' (kernels) or 'torch' (PyTorch operations), both in bursts of steps that stay on "
            "the device, or 'host' (PyTorch operations, each step planned on the host). 'auto' takes the first that works."
        },
    )

    # Parameters that control DistillSparse
    distill_sparse: bool = field(
        default=False,
        metadata={
            "help": "Whether to train a LoRA that is on in rollouts alone, so that the sparse actor comes closer to the "
            "dense policy. The policy is trained, evaluated and saved without it."
        },
    )
    distill_rank: int = field(default=16, metadata={"help": "Rank of the LoRA of `distill_sparse`."})
    distill_alpha: float | None = field(
        default=None,
        metadata={"help": "The LoRA is scaled by `distill_alpha / distill_rank`. If `None`, twice the rank."},
    )
    distill_target_modules: list[str] | None = field(
        default=None,
        metadata={
            "help": "Last parts of the names of the layers that the LoRA adapts, or `all-linear` for all linear layers "
            "but the head. If `None`, the linear layers inside the attention."
        },
    )
    distill_learning_rate: float = field(
        default=5e-4, metadata={"help": "Learning rate of the LoRA's own optimizer, an AdamW."}
    )
    distill_warmup_steps: int = field(
        default=5,
        metadata={"help": "Steps of the LoRA's optimizer over which its learning rate rises; constant afterwards."},
    )
    distill_max_grad_norm: float = field(
        default=1.0, metadata={"help": "Norm to which the LoRA's gradient is clipped; 0 turns clipping off."}
    )
    distill_kl: str = field(
        default="full",
        metadata={
            "help": "How the divergence of the sparse actor from the dense policy is measured: 'full' over the whole "
            "vocabulary, 'top_k' over the policy's most likely tokens, or from the sampled token alone: 'k1', 'k2', "
            "'k3'.",
            "choices": list(KL_ESTIMATORS),
        },
    )
    distill_kl_direction: str = field(
        default="forward",
        metadata={
            "help": "'forward', KL(policy || actor), or 'reverse', KL(actor || policy).",
            "choices": list(KL_DIRECTIONS),
        },
    )
    distill_kl_coef: float = field(default=1.0, metadata={"help": "Weight of the divergence in the LoRA's loss."})
    distill_ppo_coef: float = field(
        default=1.0, metadata={"help": "Weight of the policy-gradient term in the LoRA's loss."}
    )
    distill_top_k: int = field(default=64, metadata={"help": "How many tokens `distill_kl='top_k'` looks at."})
    distill_reuse_teacher: bool = field(
        default=False,
        metadata={
            "help": "Whether to take the policy's log-probabilities of the sampled tokens from before its update, "
            "which are known already, instead of from another forward. Only with `distill_kl` 'k1', 'k2' or 'k3'."
        },
    )
    distill_every: int = field(default=1, metadata={"help": "Update the LoRA after every so many generation batches."})
    distill_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Tokens, prompts included, of one update of the LoRA on each process, at most. If `None`, all of "
            "the generation batch."
        },
    )
    distill_steps: int = field(
        default=1,
        metadata={"help": "Optimizer steps of one update of the LoRA, each on its part of the sequences."},
    )
    distill_micro_tokens: int = field(
        default=4096,
        metadata={
            "help": "Tokens of one forward of the LoRA's update, at most, but for a longer sequence. Lower it if the "
            "update runs out of memory."
        },
    )

    # Parameters that control the tail monitor
    tail_monitor: bool = field(
        default=True,
        metadata={
            "help": "Whether to measure the acceptance rate of some completions, log its tail, and act when it is too "
            "low. Off with a dense schedule."
        },
    )
    tail_threshold: float | None = field(
        default=None,
        metadata={
            "help": "What the tail (5th percentile of the acceptance rate) should be at or above in each bin of "
            "positions, in (0, 1). If `None`, it is `sparse_target`."
        },
    )
    tail_action: str = field(
        default="warn",
        metadata={
            "help": "What to do when the tail of a bin is below the threshold, by a confidence interval: 'warn', "
            "'adapt' (raise the bin's budget, and lower it slowly when there is room), 'densify' (sample with dense "
            "attention until it recovers) or 'stop'.",
            "choices": list(ACTIONS),
        },
    )
    tail_share: float = field(
        default=0.0625,
        metadata={
            "help": "Part of the completions that are measured, in (0, 1]. Where that is less than one of a batch, one "
            "of every few batches is."
        },
    )
    tail_every: int = field(default=1, metadata={"help": "Measure every so many generation batches."})
    tail_statistic: str = field(
        default="auto",
        metadata={
            "help": "What is compared with the threshold: 'lower' (the lower bound from the most likely tokens of both "
            "sides, with which the paper's 0.86 was measured), 'exact' (over the full vocabulary, by one more pass "
            "over the measured completions) or 'auto' ('lower', unless the distributions are too flat for it).",
            "choices": list(STATISTICS),
        },
    )
    tail_top_k: int = field(
        default=20, metadata={"help": "How many of the most likely tokens the bounds know of each side."}
    )
    tail_min_tokens: int = field(default=400, metadata={"help": "New tokens in a bin before it is judged again."})
    tail_confidence: float = field(
        default=0.98,
        metadata={"help": "Confidence of the interval that is compared with the threshold, in (0, 1)."},
    )
    tail_floor_every: int = field(
        default=100,
        metadata={
            "help": "Measured batches from one measurement of the noise floor (the policy against itself, computed "
            "another way) to the next."
        },
    )
    tail_min_budget: int = field(
        default=8, metadata={"help": "Scored pages below which tail_action='adapt' lowers no budget."}
    )
    tail_max_budget: int | None = field(
        default=None,
        metadata={
            "help": "Scored pages above which tail_action='adapt' raises no budget. If `None`, up to all pages."
        },
    )

    def __post_init__(self):
        if isinstance(self.sparse_schedule, SparsitySchedule):
            # A dictionary, so that the configuration can be written as JSON
            self.sparse_schedule = self.sparse_schedule.to_dict()
        elif isinstance(self.sparse_schedule, os.PathLike):
            self.sparse_schedule = os.fspath(self.sparse_schedule)
        # The command line passes the value as a string
        elif isinstance(self.sparse_schedule, str) and self.sparse_schedule.lower() in ("none", "null"):
            self.sparse_schedule = None
        elif isinstance(self.sparse_schedule, str) and self.sparse_schedule.startswith("{"):
            _check_json(self.sparse_schedule)

        for name in _BATCH_SIZES:
            if (value := getattr(self, name)) is not None:
                setattr(self, name, integer(name, value))
        if self.num_generations is not None and self.num_generations < 2:
            raise ValueError(
                f"num_generations={self.num_generations} is below 2: the advantage of a completion is its reward "
                "relative to the other completions of the same prompt."
            )
        try:
            super().__post_init__()
        except ValueError as error:
            # TRL names neither the option to change nor the values it could have
            if "divisible" in str(error) and (hint := self._divisibility_hint()):
                raise ValueError(f"{error} {hint}") from error
            raise

        self._check_rollout_options()
        for name in ("distill_sparse", "distill_reuse_teacher"):
            boolean(name, getattr(self, name))
        if self.distill_sparse:
            self._check_distill_options()
        self._check_tail_options()
        if self.sparse_schedule is not None:
            self._check_schedule(self.sparse_schedule)
            self._check_conflicts(self.sparse_schedule)
            self._check_generation_options()
            self._check_importance_sampling()

    def _divisibility_hint(self) -> str | None:
        """The valid values of the option because of which a batch cannot be split into full groups of completions."""
        batch_size = self.per_device_train_batch_size * self.world_size
        if self.generation_batch_size % batch_size:
            return f"Set generation_batch_size to a multiple of {batch_size}."
        if self.do_eval and self.eval_strategy != "no":
            eval_batch_size = self.per_device_eval_batch_size * self.world_size
            if eval_batch_size % (self.num_generations_eval or self.num_generations):
                return (
                    f"Set num_generations_eval to one of {_divisors(eval_batch_size)}, or change "
                    "per_device_eval_batch_size."
                )
        if self.generation_batch_size % self.num_generations:
            valid = [value for value in _divisors(self.generation_batch_size) if value > 1]
            return (
                f"Set num_generations to one of {valid}, or change per_device_train_batch_size, "
                "gradient_accumulation_steps, steps_per_generation or generation_batch_size."
            )
        return None

    def _check_rollout_options(self):
        for name in ("sparse_target", "rollout_memory_fraction"):
            setattr(self, name, fraction(name, getattr(self, name)))
        for name in ("rollout_max_num_seqs", "rollout_prefill_chunk_size"):
            setattr(self, name, integer(name, getattr(self, name), low=1))
        boolean("rollout_progress_bar", self.rollout_progress_bar, or_none=True)
        boolean("rollout_check_support", self.rollout_check_support)
        if self.rollout_decode_backend not in BACKENDS:
            raise ValueError(
                f"rollout_decode_backend={self.rollout_decode_backend!r} is not one of {', '.join(map(repr, BACKENDS))}."
            )

    def _check_distill_options(self):
        if self.sparse_schedule is None:
            raise ValueError(
                "distill_sparse=True trains the sparse actor, but sparsity is off (sparse_schedule=None). Set a "
                "schedule, or distill_sparse=False."
            )
        for name in ("distill_rank", "distill_every", "distill_steps", "distill_micro_tokens", "distill_top_k"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} is not a positive integer.")
        if self.distill_tokens is not None:
            self.distill_tokens = integer("distill_tokens", self.distill_tokens, low=1)
        alpha = self.distill_alpha
        if alpha is not None and (not is_number(alpha) or not 0 < alpha < float("inf")):
            raise ValueError(f"distill_alpha={alpha!r} is not a finite number above 0; None is twice the rank.")
        for name in (
            "distill_learning_rate",
            "distill_warmup_steps",
            "distill_max_grad_norm",
            "distill_kl_coef",
            "distill_ppo_coef",
        ):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value!r} is not a finite number of at least 0.")
        for name, choices in (("distill_kl", KL_ESTIMATORS), ("distill_kl_direction", KL_DIRECTIONS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(choices)}.")
        if self.distill_reuse_teacher and self.distill_kl not in SAMPLED_ESTIMATORS:
            raise ValueError(
                f"distill_reuse_teacher=True needs distill_kl to be one of {', '.join(SAMPLED_ESTIMATORS)}, not "
                f"{self.distill_kl!r}: only the log-probabilities of the sampled tokens are known already."
            )
        if self.distill_target_modules == []:
            raise ValueError("distill_target_modules=[] names no layer; None takes those of the attention.")

    def _check_tail_options(self):
        boolean("tail_monitor", self.tail_monitor)
        for name, known in (("tail_action", ACTIONS), ("tail_statistic", STATISTICS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(map(repr, known))}.")
        self.tail_share = fraction("tail_share", self.tail_share)
        for name in ("tail_threshold", "tail_confidence"):
            value = getattr(self, name)
            if value is not None and (not is_number(value) or not 0 < value < 1):
                raise ValueError(f"{name}={value!r} is not a number in (0, 1).")
        for name, low in (
            ("tail_every", 1),
            ("tail_top_k", 1),
            ("tail_min_tokens", 20),
            ("tail_floor_every", 1),
            ("tail_min_budget", 1),
        ):
            setattr(self, name, integer(name, getattr(self, name), low=low))
        if self.tail_max_budget is not None:
            self.tail_max_budget = integer("tail_max_budget", self.tail_max_budget, low=self.tail_min_budget)
        if self.tail_monitor and self.tail_threshold is None and self.sparse_target == 1:
            raise ValueError("sparse_target=1 is no threshold that a tail can meet. Set tail_threshold, in (0, 1).")

    def _check_schedule(self, schedule: dict[str, Any] | str):
        # "auto" needs the model, and a repository the network: the trainer resolves those
        if isinstance(schedule, str) and (schedule == "auto" or is_hub_repo(schedule)):
            return
        try:
            SparsitySchedule.resolve(schedule, target=self.sparse_target)
        except (ValueError, TypeError, FileNotFoundError) as error:
            if "sparse_schedule" in str(error):
                raise
            raise type(error)(f"sparse_schedule={schedule!r}: {error}") from error

    def _check_conflicts(self, schedule: dict[str, Any] | str):
        shown = repr(schedule) if isinstance(schedule, str) else "a schedule"
        described = f"sparse rollouts (sparse_schedule={shown})"
        for name in ("use_vllm", "use_transformers_continuous_batching"):
            if getattr(self, name):
                raise ValueError(
                    f"{name}=True cannot be combined with {described}: one engine generates the completions. Set "
                    f"{name}=False, or sparse_schedule=None to train without sparsity, as TRL does."
                )
        if self.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation={self.cache_implementation!r} has no meaning with {described}, which keep "
                "their own paged cache. Set cache_implementation=None, or sparse_schedule=None."
            )

    def _check_generation_options(self):
        length = self.max_completion_length
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(
                f"max_completion_length={self.max_completion_length} is not a positive integer, which sparse rollouts "
                "need: the KV cache is planned with it."
            )
        number("temperature", self.temperature)
        own = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
        options = self.generation_kwargs or {}
        for name in NUMBERS:
            number(name, own.get(name), or_none=True)
            number(f"generation_kwargs[{name!r}]", options.get(name), or_none=True)
        boolean("generation_kwargs['do_sample']", options.get("do_sample", True))
        # The training computes its log-probabilities with these two, so a rollout must not have others
        if "temperature" in options and options["temperature"] != self.temperature:
            raise ValueError(
                f"generation_kwargs sets temperature={options['temperature']}, but the training uses the option "
                f"temperature={self.temperature}. Set temperature={options['temperature']} instead."
            )
        if not options.get("do_sample", True):
            raise ValueError(
                "generation_kwargs sets do_sample=False, but all greedy completions of a prompt are equal."
            )
        if "max_new_tokens" in options and options["max_new_tokens"] is None:
            raise ValueError(
                "generation_kwargs sets max_new_tokens=None, which would undo "
                f"max_completion_length={self.max_completion_length}. Leave it out."
            )
        Sampler(GenerationConfig(**{"do_sample": True, **own, **options}), stop_token_ids=[])

    def _check_importance_sampling(self):
        boolean("vllm_importance_sampling_correction", self.vllm_importance_sampling_correction)
        if not self.vllm_importance_sampling_correction:
            if self.sparse_schedule != "dense":
                warn(
                    "vllm_importance_sampling_correction=False trains on the tokens of the sparse actor as if the "
                    "policy had sampled them, which is known to end in collapse. Leave it at True, or set "
                    "sparse_schedule='dense'.",
                    stacklevel=4,
                )
            return
        for name in ("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"):
            number(name, getattr(self, name), or_none=True)
        mode = self.vllm_importance_sampling_mode
        if mode not in _IMPORTANCE_SAMPLING_MODES:
            raise ValueError(
                f"vllm_importance_sampling_mode={mode!r} is not one of {', '.join(_IMPORTANCE_SAMPLING_MODES)}."
            )
        if mode.startswith("sequence_"):
            if self.loss_type == "vespo":
                raise ValueError(
                    f"loss_type='vespo' needs vllm_importance_sampling_mode='token_truncate' or 'token_mask', not "
                    f"{mode!r}."
                )
            warn(
                f"vllm_importance_sampling_mode={mode!r} takes one ratio for a whole completion. The differences "
                "between the sparse actor and the policy multiply up along it, so for long completions nearly every "
                "ratio is out of bounds. Use 'token_truncate'.",
                stacklevel=4,
            )


def _divisors(number: int) -> list[int]:
    return [value for value in range(1, number + 1) if number % value == 0]


def _check_json(text: str) -> None:
    """What is parsed as JSON later on, without the name of the option in the error."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"sparse_schedule={text!r} is not valid JSON: {error}.") from error
