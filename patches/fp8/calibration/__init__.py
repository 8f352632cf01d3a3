"""Make profiles: per tensor, the scales that turn a bf16 model into its smoothed, quantized form."""
