"""What launches stand on: the chip, operand formats and compute paths, launches and plans of them."""
