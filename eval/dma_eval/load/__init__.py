"""What is measured with: models, texts and attention backends, and how a model reads."""
