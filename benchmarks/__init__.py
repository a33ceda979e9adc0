"""What position encoding costs: ratios to the same model without any, measured side by side in one run.

`python -m benchmarks.price` measures, `python -m benchmarks.profile_scheme` shows where one scheme's time goes, and
`python -m benchmarks.long` runs one forward and backward pass at a length where a tensor of `length x length` would not
fit.
"""
