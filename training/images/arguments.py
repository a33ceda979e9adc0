"""The options of `run_image_classification.py`, in addition to those that all training scripts have."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers.hf_argparser import HfArg

from training.arguments import WeightsArguments
from training.errors import SettingsError

#: The model that is trained if none is named: small enough for a CPU. ViT draws weights with a standard deviation of
#: 0.02, which is meant for 768 dimensions; at 64 it leaves attention uniform for too long.
SMALL_VIT = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128, "patch_size": 4,
    "initializer_range": 0.05,
}  # fmt: skip


@dataclass
class ImageModelArguments(WeightsArguments):
    """Which image classifier is trained, and from which weights. Without any: a ViT of 4 layers, 64 wide."""

    ignore_mismatched_sizes: bool = HfArg(
        default=False, help="Train a new head if that of the pretrained model is for other classes."
    )

    def __post_init__(self) -> None:
        self.small = not (self.model_name_or_path or self.config_name or self.model_type)
        if self.small:
            self.model_type = "vit"
        super().__post_init__()
        if self.ignore_mismatched_sizes and self.model_name_or_path is None:
            raise SettingsError(
                "--ignore_mismatched_sizes is for the head of a pretrained model: --model_name_or_path."
            )


@dataclass
class ImageArguments:
    """Which pictures are read, and at which resolutions."""

    dataset_name: str = HfArg(
        default="digits",
        help="'digits' for the 1,797 handwritten digits of scikit-learn, a folder with one folder per class, or a "
        "dataset on the hub.",
    )
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of the hub dataset.")
    dataset_split: str = HfArg(default="train", help="The split to train on.")
    validation_split: str | None = HfArg(
        default=None, help="A split to validate on, such as validation, instead of pictures held out."
    )
    validation_split_percentage: float = HfArg(
        default=20.0, help="Percentage of the pictures that is held out for validation."
    )
    split_seed: int = HfArg(
        default=0, help="Selects the pictures held out. Independent of --seed, so that they stay the same."
    )
    image_column: str | None = HfArg(default=None, help="The column of pictures. Default: image or img.")
    label_column: str | None = HfArg(default=None, help="The column of labels. Default: label, labels or fine_label.")
    max_train_samples: int | None = HfArg(default=None, help="Train on at most this many pictures.")
    max_eval_samples: int | None = HfArg(default=None, help="Validate on at most this many pictures.")
    train_resolution: int | None = HfArg(
        default=None,
        help="Pixels along each side while training. Pictures are stretched to a square. Default: that of the "
        "pretrained model or config, and 32 for the small ViT.",
    )
    eval_resolutions: list[int] = field(
        default_factory=list,
        metadata={
            "help": "Resolutions at which the accuracy is measured after training. Default: that of training.",
            "nargs": "+",
        },
    )
    random_crop: float = HfArg(
        default=1.0, help="While training, cut out at least this share of a picture at random; 1 cuts nothing."
    )
    random_flip: bool = HfArg(
        default=False, help="While training, mirror every second picture at random. Not for digits and letters."
    )

    def __post_init__(self) -> None:
        columns = ("dataset_config_name", "validation_split", "image_column", "label_column")
        unused = [name for name in columns if getattr(self, name) is not None]
        unused += ["dataset_split"] if self.dataset_split != "train" else []
        if self.dataset_name == "digits" and unused:
            raise SettingsError(
                f"--{unused[0]} is for a folder or a hub dataset (--dataset_name). The digits have one split and no "
                "columns."
            )
        for name in ("max_train_samples", "max_eval_samples", "train_resolution"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(f"--{name} is {value}; it must be at least 1.")
        if self.eval_resolutions and min(self.eval_resolutions) < 1:
            raise SettingsError(f"--eval_resolutions holds {min(self.eval_resolutions)}; it must be at least 1.")
        if not 0 < self.validation_split_percentage < 100:
            raise SettingsError(
                f"--validation_split_percentage is {self.validation_split_percentage}; it must be between 0 and 100."
            )
        if not 0 < self.random_crop <= 1:
            raise SettingsError(f"--random_crop is {self.random_crop}; it must be more than 0 and at most 1.")
