"""A server with few imports, for `test_fork_server`: ``python fork_server.py FOLDER [MODULE]``."""

import json
import sys

from flashpatch.patches.cpu.warm import server

server.WITHOUT_RAY, server.WITH_RAY = ("decimal", "no_such_module", *sys.argv[2:]), ()

if __name__ == "__main__":
    sys.path.pop(0)  # as the server itself does
    sys.argv[2:] = [json.dumps(sys.path)]
    server.main()
