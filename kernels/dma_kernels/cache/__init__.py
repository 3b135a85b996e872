"""The KV cache of a layer: quantized storage, and append, decode and chunked prefill over it."""
