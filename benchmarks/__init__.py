"""The cost of position encodings, as ratios to the same model without any, measured side by side in one run.

`python -m benchmarks.price` measures, and `python -m benchmarks.profile_scheme` shows where one scheme's time goes.
"""
