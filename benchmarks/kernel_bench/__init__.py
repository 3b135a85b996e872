"""What the scripts of ``benchmarks`` share: inputs, peers, timing and result files."""
