"""The rasterizer on NVIDIA GPUs, for torch CUDA tensors: compiled at run time, no copies."""
