"""The specification in torch: attention and its gradient, on any device."""
