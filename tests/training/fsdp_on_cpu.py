"""run_clm sharded by FSDP2 on the CPU, for a machine without GPUs.

accelerate shards on accelerators only, so here it is told that these processes have some. All the rest (torch's
`fully_shard`, accelerate's preparation, Trainer's checkpoints) runs as on GPUs, over gloo.
"""

from __future__ import annotations

import sys

from accelerate.state import PartialState
from accelerate.utils import DistributedType

from training.run_clm import main
from training.trainer import SchemeTrainer

if __name__ == "__main__":
    original = SchemeTrainer.create_accelerator_and_postprocess

    def create(trainer: SchemeTrainer) -> None:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        original(trainer)
        assert trainer.is_fsdp_enabled
        print("sharded")

    SchemeTrainer.create_accelerator_and_postprocess = create  # type: ignore[method-assign]
    sys.exit(main())
