"""The model in training and how it scores tokens."""
