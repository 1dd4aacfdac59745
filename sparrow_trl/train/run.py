"""`sparrow train`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import yaml
from rich.console import Console
from transformers import AutoTokenizer
from trl import ModelConfig

from ..rewards import SandboxUnavailableError
from .arguments import TrainArguments, check_sandboxes, get_reward_funcs, load_datasets, make_parser


if TYPE_CHECKING:
    from ..trainer import SparrowGRPOTrainer


PROMPTS_LOOKED_AT = 64  # of the dataset, for the length of a typical prompt


def main(argv: Sequence[str]) -> int:
    """
    Train, or print the plan of the run.

    Args:
        argv (`list[str]`): flags; `--config FILE` reads a YAML file, which flags override.

    Returns:
        `int`: 0; 2 for a mistake in the arguments, which is then printed.
    """
    try:
        argv = list(argv)
        if {"--dry_run", "--dry-run"} & set(argv) and not torch.cuda.is_available():
            argv += ["--use_cpu", "true"]  # or bf16, TRL's default, is refused: the plan may be for another machine
        script, args, model, mixture = make_parser().parse_args_and_config(argv)
        if not model.model_name_or_path:
            raise ValueError("No model: give --model_name_or_path.")
        trainer = _prepare(script, args, model, mixture)
    except (ValueError, TypeError, ImportError, OSError, yaml.YAMLError, SandboxUnavailableError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    if trainer is not None:
        _train(trainer)
    return 0


def _prepare(script: TrainArguments, args: Any, model: ModelConfig, mixture: Any) -> SparrowGRPOTrainer | None:
    """The trainer, or `None` where the plan of the run was all that was asked for."""
    recipe = None
    if script.recipe is not None:
        from ..rewards import get_recipe

        recipe = get_recipe(script.recipe)
    reward_funcs = get_reward_funcs(script.reward_funcs, recipe, args.max_completion_length)
    if not script.dry_run:
        check_sandboxes(reward_funcs)
    train_dataset, eval_dataset = load_datasets(script, mixture, recipe, evaluates=args.eval_strategy != "no")
    for dataset in (train_dataset, eval_dataset):
        names = getattr(dataset, "column_names", None)  # unknown of some streams
        if names is not None and "prompt" not in names:
            raise ValueError(
                f"The dataset has no column 'prompt'; it has {', '.join(names)}. Rename one, or give a --recipe."
            )
    if script.dry_run:
        from .plan import make_plan, print_plan

        rows = len(train_dataset) if hasattr(train_dataset, "__len__") else None
        length = _typical_prompt_length(train_dataset, model)
        print_plan(make_plan(args, model, script.chip, length, rows), Console())
        return None

    from trl import get_peft_config, get_quantization_config

    from ..trainer import SparrowGRPOTrainer

    args.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(args.model_init_kwargs or {}),
    }
    trainer = SparrowGRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=reward_funcs,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )
    trainer.dataset_name = script.dataset_name or (recipe.dataset_id if recipe else None)
    return trainer


def _train(trainer: SparrowGRPOTrainer) -> None:
    args = trainer.args
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model(args.output_dir)
    trainer.accelerator.print(f"The model is in {args.output_dir}.")
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=trainer.dataset_name)
    trainer.end()


def _typical_prompt_length(dataset: Any, model: ModelConfig) -> int:
    """Median length of the first prompts, in tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path, revision=model.model_revision)
    lengths = []
    for row in islice(dataset, PROMPTS_LOOKED_AT):
        prompt = row["prompt"]
        if not isinstance(prompt, str):
            prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        lengths.append(len(tokenizer(prompt, add_special_tokens=False)["input_ids"]))
    return sorted(lengths)[len(lengths) // 2] if lengths else 1
