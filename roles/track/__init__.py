"""Copies of jobs' metrics for W&B, TensorBoard, MLflow and files of JSON lines. The seed writes them."""
