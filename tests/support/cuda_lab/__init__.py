"""Laboratory for vLLM's CUDA branch on the fake device: is storage after an update that of a fresh load, byte for byte?"""
