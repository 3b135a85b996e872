"""The key-value cache of one layer: storage in tiles, and append, decoding and chunks over it."""
