"""The rasterizer's kernels as Vulkan compute shaders, on any vendor's GPU and on lavapipe."""
