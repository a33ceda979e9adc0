"""Where the parameters of a new scheme start in a pretrained model: at what the old scheme did."""
