"""A process that has verl and vLLM imported and forks the job's other processes.

Ray starts each worker, and vLLM each engine process, as a new interpreter, which imports torch,
transformers, verl and vLLM again. On a few cores these imports are most of the time until a job's first
step. Here one process per job, the *server*, imports them once. In place of the interpreter Ray and
``multiprocessing`` get a small script, the *launcher*, which asks the server to fork: the child takes over
the launcher's environment, working directory, files, signals, limits and process group, and then runs what
the command line says. The launcher stays until the child ends, passes signals on and ends the way the child
did. A command line or an environment that the server cannot serve is run by a new interpreter, as without
this package.

    commands    which command lines a fork can serve, and how each is run
    launcher    runs in place of the interpreter; imports the standard library only
    request     what the launcher sends, and how a forked child takes it over
    server      imports, listens, forks
    session     starts a server for the Ray node that this process starts
    variables   whether an environment allows a fork
"""
