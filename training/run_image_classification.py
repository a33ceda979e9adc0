"""Trains an image classifier, from scratch or from pretrained weights, with any position encoding.

    python training/run_image_classification.py --scheme rope_nd --scheme_options '{"assignment": "mixed"}' \
        --eval_resolutions 24 32 48 --output_dir outputs/rope_nd --num_train_epochs 30 --learning_rate 1e-3
    accelerate launch --config_file training/accelerate/ddp_gpu.yaml training/run_image_classification.py \
        --model_name_or_path google/vit-base-patch16-224 --dataset_name my_photos --output_dir outputs/photos

Without further options a small ViT learns the handwritten digits that install with scikit-learn. All options can stand
in one YAML or JSON file; flags after it override it. The same command again resumes.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.images.classification import run_image_classification


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    return run_image_classification("run_image_classification", arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
