"""Evaluation of trained models: held-out text, multiple choice, tasks of lm-evaluation-harness."""
