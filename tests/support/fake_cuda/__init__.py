"""A CUDA device without a GPU, for tests of the storage that vLLM's CUDA branch keeps. See README.md."""
