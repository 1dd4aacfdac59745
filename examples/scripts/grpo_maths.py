"""
Train a model to solve maths problems with sparse rollouts, with rewards and data put together in the script.

All parameters, on one GPU and on four:

    accelerate launch --config_file examples/accelerate_configs/single_gpu.yaml examples/scripts/grpo_maths.py \
        --output_dir Qwen3-1.7B-maths

    accelerate launch --config_file examples/accelerate_configs/multi_gpu.yaml --num_processes 4 \
        examples/scripts/grpo_maths.py --output_dir Qwen3-1.7B-maths

A LoRA, with an evaluation on 64 problems that are held out:

    accelerate launch --config_file examples/accelerate_configs/single_gpu.yaml examples/scripts/grpo_maths.py \
        --output_dir Qwen3-1.7B-maths --use_peft --lora_r 32 --learning_rate 1e-5 \
        --eval_strategy steps --eval_steps 50 --eval_problems 64

Problems of your own, from a folder or a Hub repository, and a tenth of the reward for the form of an answer:

    accelerate launch --config_file examples/accelerate_configs/single_gpu.yaml examples/scripts/grpo_maths.py \
        --output_dir Qwen3-1.7B-maths --dataset_name my_problems --problem_column question --answer_column final_answer \
        --reward_weights 1 0.1 0

Three rewards are logged: the right answer, the form of the reasoning, and a penalty for length. Training goes by the
first alone unless `--reward_weights` says otherwise. It needs `pip install ".[eval]"`, and with a LoRA ".[eval,peft]".
"""

from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import AutoTokenizer
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from sparrow_trl import SparrowGRPOConfig, SparrowGRPOTrainer
from sparrow_trl.rewards import MathsReward, ThinkFormatReward, get_recipe, overlong_reward, prefills_thinking


# Groups of 8, temperature 1, no KL term, token-level correction and a tail of 0.86 are defaults already. The paper's
# learning rate and batch are not known to us: 1e-6 is TRL's default, and each process has 4 prompts in a batch.
DEFAULTS = {
    "model_name_or_path": "Qwen/Qwen3-1.7B",
    "max_completion_length": 37_000,
    "epsilon_high": 0.28,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 32,
    "reward_weights": [1.0, 0.0, 0.0],
    "lora_target_modules": ["all-linear"],
    "lora_dropout": 0.0,  # rollouts have none
}


@dataclass
class MathsArguments:
    dataset_name: str = field(
        default="POLARIS-Project/Polaris-Dataset-53K",
        metadata={"help": "Dataset of problems and answers: a Hub repository or a folder."},
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of the dataset to train on."})
    problem_column: str = field(default="problem", metadata={"help": "Column of the dataset with the problems."})
    answer_column: str = field(default="answer", metadata={"help": "Column of the dataset with the right answers."})
    eval_problems: int = field(
        default=64, metadata={"help": "Problems that are held out for the evaluations of `eval_strategy`."}
    )


def main():
    parser = TrlParser((MathsArguments, SparrowGRPOConfig, ModelConfig))
    parser.set_defaults(**DEFAULTS)
    script_args, training_args, model_args = parser.parse_args_and_config()

    problems = load_dataset(script_args.dataset_name, split=script_args.dataset_split)
    recipe = get_recipe("polaris").with_columns(problem=script_args.problem_column, answer=script_args.answer_column)
    train_dataset, eval_dataset = recipe.prepare(problems), None
    if training_args.eval_strategy != "no":
        if not 0 < script_args.eval_problems < len(train_dataset):
            raise ValueError(f"eval_problems={script_args.eval_problems} is no part of {len(train_dataset)} problems.")
        splits = train_dataset.train_test_split(script_args.eval_problems, seed=training_args.seed)
        train_dataset, eval_dataset = splits["train"], splits["test"]

    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
    opened = prefills_thinking(tokenizer)
    length = training_args.max_completion_length
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    trainer = SparrowGRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[
            MathsReward(thinking_opened=opened),
            ThinkFormatReward(thinking_opened=opened),
            overlong_reward(length, max(1, length // 8)),
        ],
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)

    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.end()


if __name__ == "__main__":
    main()
