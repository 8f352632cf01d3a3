"""Leave LoRA adapters to verl: on PYTHONPATH, FlashPatch takes every job for one without any.

Stock verl on a CPU is no job to compare with: its engines cannot load weights twice there.
"""

from flashpatch.patches.fp8.verl import adapters

adapters.asked = lambda model_config: ""
