"""Device properties, operand formats, compute paths, kernel launches and launch plans."""
