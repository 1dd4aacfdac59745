"""The rewards in a training run, together, as the trainer calls them."""

import json

import pytest
from datasets import Dataset

from sparrow_trl.rewards import boxed_format_reward, code_reward, maths_reward, overlong_reward, think_format_reward
from training import logged, make_trainer


FUNCTIONS = [maths_reward, code_reward, think_format_reward, boxed_format_reward, overlong_reward(10, 5)]


@pytest.mark.parametrize("conversational", [False, True])
def test_a_run_with_all_rewards(tmp_path, conversational):
    text = "Please answer at some length, or not."
    prompt = [{"role": "user", "content": text}] if conversational else text
    tests = json.dumps({"inputs": ["1"], "outputs": ["2"]})
    data = Dataset.from_list([{"prompt": prompt, "solution": "4", "tests": tests}] * 8)
    trainer = make_trainer(tmp_path, arguments={"reward_funcs": FUNCTIONS, "train_dataset": data})
    trainer.train()
    for name in ("maths_reward", "code_reward", "think_format_reward", "boxed_format_reward"):
        assert logged(trainer, f"rewards/{name}/mean") == [0.0, 0.0]  # a random model has no answer
    penalties = logged(trainer, "rewards/soft_overlong_punishment_reward/mean")
    assert len(penalties) == 2 and all(-1.0 <= penalty <= 0.0 for penalty in penalties)
    assert logged(trainer, "maths_timeouts") == [0.0, 0.0]
    assert logged(trainer, "code_timeouts") == [0.0, 0.0]


def test_what_cannot_be_judged_is_left_out(tmp_path):
    """Two prompts, of which one has neither a reference nor tests: TRL averages over the others."""
    rows = [
        {"prompt": "Say something.", "solution": "4", "tests": ""},
        {"prompt": "Say more.", "solution": "", "tests": ""},
    ]
    trainer = make_trainer(
        tmp_path, arguments={"reward_funcs": [maths_reward, code_reward, lambda completions, **kw: [1.0] * len(completions)],
                             "train_dataset": Dataset.from_list(rows * 4)}, max_steps=1,
    )  # fmt: skip
    trainer.train()
    assert logged(trainer, "rewards/maths_reward/mean") == [0.0]
    (reward,) = logged(trainer, "reward")
    assert reward == pytest.approx(1.0)
