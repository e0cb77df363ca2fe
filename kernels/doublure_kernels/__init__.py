"""The differentiable rasterizer of soft triangles."""
