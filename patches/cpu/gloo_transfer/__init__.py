"""Send weights between processes through host memory: the parts of `flashpatch.patches.cpu.checkpoint_engine`."""
