"""Native code for CPUs and GPUs."""
