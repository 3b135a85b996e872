"""What launches stand on: the chip, the lowering and tile sizes chosen for it, and launches that cost little."""
