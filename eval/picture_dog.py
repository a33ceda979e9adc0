"""`accelerate launch eval/picture_dog.py MODEL --schemes none rope_nd`: `hf-posenc eval picture-dog` on its device."""

import launched_script

if __name__ == "__main__":
    launched_script.run(__file__)
