"""Train language models with GRPO from a YAML file and a Python reward function."""

__version__ = "0.1.0"
