"""`sparrow train`: a GRPO run from flags or a YAML file, for people without a script."""
