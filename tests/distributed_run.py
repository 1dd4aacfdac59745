"""What each process of `tests/test_distributed.py` runs, started by `accelerate launch`."""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate.utils import gather_object

from sparrow_trl.monitor import AcceptanceHistogram
from tiny import tiny_model
from training import RecordingTrainer, make_trainer, prompts


class UnevenTrainer(RecordingTrainer):
    """The completions of the second process are much longer, and it asks for more rollouts."""

    def rollout(self, prompt_ids, num_generations=1):
        late = self.accelerator.process_index == 1
        self.generation_config.max_new_tokens = 40 if late else 3
        if late:
            super().rollout(prompt_ids[:1], num_generations)
        return super().rollout(prompt_ids, num_generations)


def main(output_dir: str) -> None:
    model = tiny_model()
    trainer = make_trainer(
        output_dir,
        UnevenTrainer,
        arguments={"model": model, "eval_dataset": prompts(4)},
        max_completion_length=40,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        num_generations=8,  # a group is spread over both processes
        num_generations_eval=2,
        eval_strategy="steps",
        eval_steps=2,
        max_steps=3,
        num_iterations=1,
        save_strategy="steps",
        save_steps=2,
        tail_share=1.0,
        tail_statistic="lower",
        tail_min_tokens=40,
        distill_sparse=True,
        distill_steps=2,
    )
    assert trainer.accelerator.num_processes == 2
    assert torch.distributed.get_backend() == "gloo"
    mine, counts, reduce = [], [], AcceptanceHistogram.reduce

    def recorded(histogram, *args):
        counts.append(histogram.tokens())
        reduce(histogram, *args)
        counts.append(histogram.tokens())

    AcceptanceHistogram.reduce = recorded
    after = trainer.after_rollout_scored
    trainer.after_rollout_scored = lambda scored: (mine.append(ratios_of(scored)), after(scored))
    trainer.train()

    monitors = gather_object([trainer.tail_monitor.state_dict()])
    counts = gather_object([counts[:2]])
    first_step = gather_object([mine[0].tolist()])
    digests = gather_object([{name: p.double().sum().item() for name, p in model.named_parameters()}])
    bytes_of = gather_object([torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()])
    lora = torch.cat([p.detach().flatten() for p in trainer.distill.adapter.parameters()])
    loras = gather_object([lora.numpy().tobytes()])
    completion_ids = gather_object([trainer.rollouts[0 if trainer.accelerator.process_index == 0 else 1][1]])
    if trainer.accelerator.is_main_process:
        initial = torch.cat([p.detach().flatten() for p in tiny_model().parameters()]).numpy().tobytes()
        report = {
            "ratios": first_step,
            "equal": bytes_of[0] == bytes_of[1],
            "trained": bytes_of[0] != initial,
            "equal_loras": loras[0] == loras[1],
            "trained_lora": any(update.B.any().item() for update in trainer.distill.adapter.updates),
            "digests": digests,
            "completion_ids": completion_ids,
            "monitors": monitors,
            "counts": counts,
            "log_history": trainer.state.log_history,
        }
        (Path(output_dir) / "report.json").write_text(json.dumps(report))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    # All is done and written. On a busy machine the interpreter's own end now and then aborts ("terminate called without
    # an active exception": a thread of gloo is still there), which says nothing about training.
    sys.stdout.flush()
    os._exit(0)


def ratios_of(scored) -> torch.Tensor:
    return (scored.policy_logprobs - scored.actor_logprobs)[scored.mask].exp()


if __name__ == "__main__":
    main(sys.argv[1])
