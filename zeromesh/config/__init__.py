"""From a JSON file in DeepSpeed's format to frozen settings: the only package that knows DeepSpeed's key names."""
