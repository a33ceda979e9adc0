"""`accelerate launch eval/resolution.py MODEL --resolutions 24 32 48`: `hf-posenc eval resolution` on its device."""

import launched_script

if __name__ == "__main__":
    launched_script.run(__file__)
