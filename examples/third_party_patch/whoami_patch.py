"""A patch distribution of your own: what rich prints starts with the id of the process that prints it.

Eight workers share one terminal, and you see who speaks. Install it beside FlashPatch (``pip install .``) and
it is one more name: ``FLASHPATCH=whoami``, ``flashpatch.enable("whoami")``, ``flashpatch list``.
"""

import os

from flashpatch import Contract, Family, Patch


def print_with_pid(original, console, *objects, **keywords):
    """The wrapper: called instead of the target, with the plain function it replaces as first argument."""
    return original(console, f"{os.getpid()}:", *objects, **keywords)


FAMILY = Family(
    name="whoami",
    summary="rich prints the process id in front of every message",
    names={"whoami": {}},
    patches=(
        Patch(
            id="whoami.rich.print",
            targets=("rich.console:Console.print",),
            requires="rich>=13",
            wrapper=print_with_pid,
            contract=Contract(params=("objects",)),
            evidence="optional",  # healthy while never called: not every process prints
            why="Lines of many processes on one terminal look alike.",
            how="Console.print gets the process id as one more object in front.",
            remove_when="rich can prefix messages by itself.",
        ),
    ),
)
