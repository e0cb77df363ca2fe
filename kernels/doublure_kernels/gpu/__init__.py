"""The rasterizer on GPUs: one set of kernels, run through Vulkan or CUDA."""
