"""Short training runs on tiny models, for the tests of the trainer."""

import torch
from datasets import Dataset

from sparrow_trl import SparrowGRPOConfig, SparrowGRPOTrainer
from tiny import tiny_model, tiny_tokenizer


# Sparse from the fifth page on: at 4 tokens a page, a prompt of 30 tokens and more keeps a part of its pages.
SPARSE = {"budgets": [2], "page_size": 4}

WORDS = ("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india")


def prompts(number: int = 8, conversational: bool = False) -> Dataset:
    """Prompts of different lengths, 30 to 45 tokens, with a column that reward functions can use."""
    texts = [" ".join(WORDS[(i + j) % len(WORDS)] for j in range(6)) + "!" * (i % 5) for i in range(number)]
    if conversational:
        texts = [[{"role": "user", "content": text}] for text in texts]
    return Dataset.from_dict({"prompt": texts, "wanted": list(range(number))})


def count_letters(completions, **kwargs) -> list[float]:
    """A reward that nearly all completions of a group differ in."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(character.isalpha() for character in text) + len(text) / 100 for text in texts]


class RecordingTrainer(SparrowGRPOTrainer):
    """Keeps what it sampled: in `rollouts`, one entry a call, prompts, completions and their log-probabilities."""

    def __init__(self, *args, **kwargs):
        self.rollouts = []
        super().__init__(*args, **kwargs)

    def rollout(self, prompt_ids, num_generations=1):
        completion_ids, logprobs = super().rollout(prompt_ids, num_generations)
        self.rollouts.append((prompt_ids, completion_ids, logprobs))
        return completion_ids, logprobs


@torch.no_grad()
def plain_logprobs(model, prompt: list[int], completion: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of each token of a completion, from one plain forward of the model."""
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def make_config(output_dir, cls=SparrowGRPOConfig, **options):
    defaults = {
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 10,
        "gradient_checkpointing": False,
    }
    if cls is SparrowGRPOConfig:
        defaults["sparse_schedule"] = SPARSE
    return cls(output_dir=str(output_dir), **{**defaults, **options})


def make_trainer(output_dir, cls=SparrowGRPOTrainer, config=None, *, arguments=None, **options):
    """A trainer of a tiny Llama. `options` go to the configuration, `arguments` to the trainer."""
    defaults = {
        "reward_funcs": count_letters,
        "train_dataset": prompts(),
        "processing_class": tiny_tokenizer(),
    }
    given = {**defaults, **(arguments or {})}
    if "model" not in given:
        given["model"] = tiny_model()
    return cls(args=config or make_config(output_dir, **options), **given)


def logged(trainer, name: str) -> list[float]:
    """The values of a metric in the order of the logs."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]
