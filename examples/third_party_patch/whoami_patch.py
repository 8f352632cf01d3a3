"""A patch distribution of your own: what rich prints starts with the id of the process that prints it.

Eight workers share one terminal, and you see who speaks. Install it beside FlashPatch (``pip install .``) and
it is one more name: ``FLASHPATCH=whoami``, ``flashpatch.enable("whoami")``, ``flashpatch list``.
"""

import os

from flashpatch import Family, Patches

patches = Patches(
    "whoami",
    "rich>=13",
    evidence="optional",  # healthy while never called: not every process prints
)


@patches.wrap(
    "rich.console:Console.print",
    params="objects",
    why="Lines of many processes on one terminal look alike.",
    remove_when="rich can prefix messages by itself.",
)
def print(original, console, *objects, **keywords):
    """Put the process id in front of the objects that are printed."""
    return original(console, f"{os.getpid()}:", *objects, **keywords)


FAMILY = Family("whoami", "rich prints the process id in front of every message", tuple(patches))
