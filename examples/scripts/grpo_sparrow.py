"""
Train a model to solve maths problems with GRPO.

On one GPU:

    python examples/scripts/grpo_trl.py --model_name_or_path Qwen/Qwen3-1.7B --output_dir Qwen3-1.7B-GRPO \
        --max_completion_length 16384 --num_generations 8 --epsilon_high 0.28

On several:

    accelerate launch examples/scripts/grpo_trl.py --model_name_or_path Qwen/Qwen3-1.7B --output_dir Qwen3-1.7B-GRPO \
        --max_completion_length 16384 --num_generations 8 --epsilon_high 0.28

`grpo_sparrow.py` next to this file is the same script with sparse rollouts: one line, an import, is different. The reward
needs the package math-verify, and `--lora_r` the package peft.
"""

from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import HfArgumentParser
from trl.rewards import accuracy_reward
from sparrow_trl import SparrowGRPOConfig as GRPOConfig, SparrowGRPOTrainer as GRPOTrainer


@dataclass
class ScriptArguments:
    model_name_or_path: str = field(
        default="Qwen/Qwen3-1.7B", metadata={"help": "Model to train: a Hub repository or a folder."}
    )
    dataset_name: str = field(
        default="trl-lib/DeepMath-103K",
        metadata={
            "help": "Dataset with the columns `prompt` (messages) and `solution`: a Hub repository or a folder."
        },
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of the dataset to train on."})
    lora_r: int | None = field(default=None, metadata={"help": "Rank of a LoRA to train instead of all parameters."})


def main():
    script_args, training_args = HfArgumentParser((ScriptArguments, GRPOConfig)).parse_args_into_dataclasses()

    peft_config = None
    if script_args.lora_r:
        from peft import LoraConfig

        peft_config = LoraConfig(r=script_args.lora_r, task_type="CAUSAL_LM")

    trainer = GRPOTrainer(
        model=script_args.model_name_or_path,
        reward_funcs=accuracy_reward,
        args=training_args,
        train_dataset=load_dataset(script_args.dataset_name, split=script_args.dataset_split),
        peft_config=peft_config,
    )
    trainer.train()

    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


if __name__ == "__main__":
    main()
