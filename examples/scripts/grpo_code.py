"""
Train a model to write programs that pass tests, with sparse rollouts, and with a reward function of our own.

All parameters, on one GPU and on four:

    accelerate launch --config_file examples/accelerate_configs/single_gpu.yaml examples/scripts/grpo_code.py \
        --output_dir Qwen3-1.7B-code

    accelerate launch --config_file examples/accelerate_configs/multi_gpu.yaml --num_processes 4 \
        examples/scripts/grpo_code.py --output_dir Qwen3-1.7B-code

A LoRA on the easier problems, paid by the share of tests that pass, 20 of a problem at most:

    accelerate launch --config_file examples/accelerate_configs/single_gpu.yaml examples/scripts/grpo_code.py \
        --output_dir Qwen3-1.7B-code --use_peft --lora_r 32 --learning_rate 1e-5 \
        --difficulties EASY MEDIUM --partial --max_tests 20

Two rewards are logged: the tests, and whether there is a program. Training goes by the first alone unless
`--reward_weights` says otherwise. Programs run in a sandbox, on Linux alone. A LoRA needs `pip install ".[peft]"`.
"""

from dataclasses import dataclass, field, replace

from datasets import load_dataset
from transformers import AutoTokenizer
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from sparrow_trl import SparrowGRPOConfig, SparrowGRPOTrainer
from sparrow_trl.rewards import CodeReward, Limits, extract_code, get_recipe, prefills_thinking


# Groups of 8, temperature 1, no KL term, token-level correction and a tail of 0.86 are defaults already. The paper's
# learning rate and batch are not known to us: 1e-6 is TRL's default, and each process has 4 prompts in a batch.
DEFAULTS = {
    "model_name_or_path": "Qwen/Qwen3-1.7B",
    "max_completion_length": 24_576,
    "epsilon_high": 0.28,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 32,
    "reward_weights": [1.0, 0.0],
    "lora_target_modules": ["all-linear"],
    "lora_dropout": 0.0,  # rollouts have none
}


@dataclass
class CodeArguments:
    dataset_name: str | None = field(
        default=None,
        metadata={"help": "Dataset with the columns of TACO: a Hub repository or a folder. By default TACO itself."},
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of the dataset to train on."})
    difficulties: list[str] | None = field(
        default=None,
        metadata={"help": "Train on these alone, such as EASY and MEDIUM, by the column `difficulty` of the dataset."},
    )
    partial: bool = field(
        default=False, metadata={"help": "Whether to pay the share of tests that pass, instead of 1 for all of them."}
    )
    max_tests: int | None = field(default=None, metadata={"help": "Run the first so many tests of a problem only."})
    cpu_seconds: int = field(
        default=4, metadata={"help": "Seconds of CPU time that a test may take; twice that on the clock."}
    )


def of_difficulty(dataset, wanted: list[str]):
    """The problems of a dataset that have one of the difficulties in `wanted`."""
    known = set(map(str, dataset["difficulty"])) if "difficulty" in dataset.column_names else set()
    if missing := sorted(set(wanted) - known):
        has = f"it has {', '.join(sorted(known))}" if known else "it has no column 'difficulty'"
        raise ValueError(f"difficulties: the dataset has no problem that is {', '.join(missing)}; {has}.")
    return dataset.filter(lambda row: row["difficulty"] in wanted)


def main():
    parser = TrlParser((CodeArguments, SparrowGRPOConfig, ModelConfig))
    parser.set_defaults(**DEFAULTS)
    script_args, training_args, model_args = parser.parse_args_and_config()

    recipe = replace(get_recipe("taco"), keep=("difficulty",))
    if script_args.dataset_name is None:
        train_dataset = recipe.load(split=script_args.dataset_split)
    else:
        train_dataset = recipe.prepare(load_dataset(script_args.dataset_name, split=script_args.dataset_split))
    if script_args.difficulties:
        train_dataset = of_difficulty(train_dataset, script_args.difficulties)

    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
    opened = prefills_thinking(tokenizer)
    limits = Limits(cpu_seconds=script_args.cpu_seconds, wall_seconds=2 * script_args.cpu_seconds)
    tests_reward = CodeReward(
        limits=limits, partial=script_args.partial, max_tests=script_args.max_tests, thinking_opened=opened
    )
    tests_reward.sandbox.isolation  # noqa: B018 - where nothing isolates programs, refuse now and not after a rollout

    def program_reward(completions, **kwargs) -> list[float]:
        """1 where there is a program, whether or not it works."""
        return [float(extract_code(completion, opened) is not None) for completion in completions]

    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    trainer = SparrowGRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[tests_reward, program_reward],
        args=training_args,
        train_dataset=train_dataset,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)

    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name or recipe.dataset_id)
    trainer.end()


if __name__ == "__main__":
    main()
