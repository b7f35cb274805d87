"""What is made for NVIDIA GPUs alone: Triton kernels, CUDA graphs, batches that are copied ahead."""
