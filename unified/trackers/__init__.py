"""Trackers that people keep runs in: TensorBoard, MLflow, Weights & Biases, trackio. Loaded only if a job names one."""
