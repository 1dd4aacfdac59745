"""The arguments of `sparrow train` beside those of the trainer, the model and the mixture of datasets."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl import ScriptArguments, TrlParser


_FILE_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}

# Reward functions by name: where they are.
REWARDS = {
    "accuracy_reward": "trl.rewards",
    "reasoning_accuracy_reward": "trl.rewards",
    "think_format_reward": "sparrow_trl.rewards",
    "boxed_format_reward": "sparrow_trl.rewards",
    "maths_reward": "sparrow_trl.rewards",
    "code_reward": "sparrow_trl.rewards",
}
OVERLONG = "overlong_reward"
OVERLONG_PART = 8  # the penalty grows over the last eighth of `max_completion_length`


@dataclass
class TrainArguments(ScriptArguments):
    """
    Arguments of `sparrow train`.

    Args:
        recipe (`str`, *optional*):
            A prepared dataset with its reward: `"polaris"`, `"taco"`, `"tiny-maths"` or `"tiny-code"`. Together with
            `dataset_name`, the columns of that dataset are prepared as the recipe says.
        reward_funcs (`list[str]`, *optional*):
            Reward functions: `"maths_reward"`, `"code_reward"`, `"boxed_format_reward"`, `"think_format_reward"`,
            `"overlong_reward"`, `"accuracy_reward"`, `"reasoning_accuracy_reward"`, or a dotted import path such as
            `"my_lib.rewards.custom_reward"`. By default those of the recipe.
        dry_run (`bool`, *optional*, defaults to `False`):
            Whether to print the plan of the run, its memory and the expected speed-up, and not to train. No weights are
            loaded.
        chip (`str`, *optional*):
            Chip that the dry run plans for, as in `sparrow cost`; by default this machine's, measured.
    """

    recipe: str | None = field(
        default=None,
        metadata={
            "help": "A prepared dataset with its reward: 'polaris', 'taco', 'tiny-maths' or 'tiny-code'. Together with "
            "`dataset_name`, the columns of that dataset are prepared as the recipe says."
        },
    )
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "Reward functions: 'maths_reward', 'code_reward', 'boxed_format_reward', 'think_format_reward', "
            "'overlong_reward', 'accuracy_reward', 'reasoning_accuracy_reward', or a dotted import path. By default those "
            "of the recipe."
        },
    )
    dry_run: bool = field(
        default=False,
        metadata={"help": "Print the plan, its memory and the expected speed-up, and do not train."},
    )
    chip: str | None = field(
        default=None,
        metadata={
            "help": "Chip that the dry run plans for, as in `sparrow cost`; by default this machine's, measured."
        },
    )


def make_parser(prog: str = "sparrow train") -> TrlParser:
    """
    A parser of [`TrainArguments`], `SparrowGRPOConfig`, `ModelConfig` and `DatasetMixtureConfig`. A LoRA has no dropout
    unless it is asked for (TRL's default is 0.05): rollouts have none, and would sample from another policy.
    """
    from trl import DatasetMixtureConfig, ModelConfig

    from ..config import SparrowGRPOConfig

    parser = TrlParser((TrainArguments, SparrowGRPOConfig, ModelConfig, DatasetMixtureConfig), prog=prog)
    parser.set_defaults(lora_dropout=0.0)
    return parser


def get_reward_funcs(names: list[str] | None, recipe: Any, max_completion_length: int) -> list[Callable[..., Any]]:
    """
    The reward functions by name, or those of the recipe.

    Raises:
        ValueError: there are none, or one of them is unknown.
    """
    if not names:
        if recipe is None:
            raise ValueError(
                f"Nothing rewards the completions: give --reward_funcs ({', '.join([*REWARDS, OVERLONG])}, or a dotted "
                "import path), or a --recipe, which brings its own."
            )
        return recipe.reward_funcs()
    return [_reward_func(name, max_completion_length) for name in names]


def _reward_func(name: str, max_completion_length: int) -> Callable[..., Any]:
    if name == OVERLONG:
        from ..rewards import overlong_reward

        return overlong_reward(max_completion_length, max(1, max_completion_length // OVERLONG_PART))
    module_name, _, function = name.rpartition(".")
    if not module_name:
        if name not in REWARDS:
            raise ValueError(
                f"reward_funcs: {name!r} is none of {', '.join([*REWARDS, OVERLONG])}, and no dotted import path."
            )
        module_name, function = REWARDS[name], name
    elif os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"reward_funcs: {name!r} cannot be imported: {error}") from error


def check_sandboxes(reward_funcs: list[Callable[..., Any]]) -> None:
    """
    Find out before a run whether rewards that run programs can isolate them.

    Raises:
        SandboxUnavailableError: this machine cannot; says what would help.
    """
    from ..rewards import CodeReward, code_reward
    from ..rewards.code import shared_sandbox

    for reward in reward_funcs:
        if reward is code_reward:
            shared_sandbox().isolation  # noqa: B018 - refuses
        elif isinstance(reward, CodeReward):
            reward.sandbox.isolation  # noqa: B018


def load_datasets(script: TrainArguments, mixture: Any, recipe: Any, evaluates: bool) -> tuple[Any, Any]:
    """
    The datasets for training and, where the run evaluates, for evaluation.

    Raises:
        ValueError: no dataset is named, or a split is missing.
    """
    if mixture.datasets:
        from trl import get_dataset

        if script.dataset_name:
            raise ValueError("Give dataset_name or datasets, not both.")
        splits = get_dataset(mixture)
    elif script.dataset_name:
        splits = _load(script)
    elif recipe is not None:
        if evaluates:
            raise ValueError(f"The recipe {recipe.name!r} has no split for evaluation; set eval_strategy='no'.")
        return recipe.load(**({"streaming": True} if script.dataset_streaming else {})), None
    else:
        raise ValueError("No dataset: give --dataset_name, --recipe, or `datasets` in a YAML file.")
    names = {"train": script.dataset_train_split, "eval": script.dataset_test_split if evaluates else None}
    for role, name in names.items():
        if name is not None and name not in splits:
            option = "dataset_train_split" if role == "train" else "dataset_test_split"
            raise ValueError(f"{option}={name!r} is no split of the dataset; it has {', '.join(splits)}.")
    chosen = [None if name is None else splits[name] for name in names.values()]
    if recipe is not None:
        chosen = [None if dataset is None else recipe.prepare(dataset) for dataset in chosen]
    return chosen[0], chosen[1]


def _load(script: TrainArguments) -> Any:
    from datasets import DatasetDict, load_dataset, load_from_disk

    name = script.dataset_name
    assert name is not None
    builder = _FILE_BUILDERS.get(Path(name).suffix)
    if builder is not None and Path(name).is_file():
        return load_dataset(builder, data_files=name, streaming=script.dataset_streaming)
    if (Path(name) / "state.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
        loaded = load_from_disk(name)
        return loaded if isinstance(loaded, dict) else DatasetDict({script.dataset_train_split: loaded})
    return load_dataset(name, name=script.dataset_config, streaming=script.dataset_streaming)
