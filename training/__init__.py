"""Training scripts: run them with `accelerate launch`, or as plain Python files."""

from hf_posenc.installation import TRAINING, require

require("The training scripts", *TRAINING)
