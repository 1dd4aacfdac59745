"""What each process of the ZeRO-2 test in `tests/test_distributed.py` runs, with DeepSpeed and without."""

import os
import sys
from pathlib import Path

import torch
from accelerate.utils import parse_flag_from_env

from tiny import tiny_model
from training import RecordingTrainer, make_trainer


def main(output_dir: str) -> None:
    model = tiny_model()
    options = {}
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        # `use_cpu=True` would keep accelerate from DeepSpeed; without GPUs its processes talk over gloo
        options = {"use_cpu": False, "ddp_backend": "gloo"}
    trainer = make_trainer(
        output_dir,
        RecordingTrainer,
        arguments={"model": model},
        per_device_train_batch_size=4,
        num_generations=8,
        max_steps=3,
        max_completion_length=24,
        distill_sparse=True,
        **options,
    )
    assert trainer.accelerator.num_processes == 2

    def state() -> dict[str, torch.Tensor]:
        parts = {"policy": model, "lora": trainer.distill.adapter}
        return {name: torch.cat([p.detach().flatten() for p in part.parameters()]) for name, part in parts.items()}

    initial = {f"initial_{name}": tensor.clone() for name, tensor in state().items()}
    trainer.train()
    if trainer.accelerator.is_main_process:
        end = {**initial, **state(), "type": trainer.accelerator.distributed_type.value}
        end["completion_ids"] = [completion_ids for _, completion_ids, _ in trainer.rollouts]
        torch.save(end, Path(output_dir) / "end.pt")
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    os._exit(0)  # see `distributed_run.py`


if __name__ == "__main__":
    main(sys.argv[1])
