"""`accelerate launch eval/image_sensitivity.py MODEL --schemes none rope`: `hf-posenc eval image-sensitivity` there."""

import launched_script

if __name__ == "__main__":
    launched_script.run(__file__)
