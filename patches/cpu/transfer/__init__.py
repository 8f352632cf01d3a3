"""Send weights between processes through Ray's object store: the parts of `flashpatch.patches.cpu.checkpoint_engine`."""
