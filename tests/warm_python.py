"""Runs Python programs in forks of a process that has imported TensorFlow.

Importing TensorFlow takes seconds, and more than a hundred tests start a
program. This process imports it once, before any thread that a fork would lose,
and then forks for each program. A fork differs from a new interpreter only by
the modules that are already imported: it has its own arguments, environment,
folder and files, and it ends as the interpreter ends.

tests/programs.py starts this program and sends it requests.
"""

import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import types


def main() -> None:
    door = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    # Collections in the forks then write to no page of these objects.
    gc.freeze()
    # Ctrl-C in a terminal is for the tests. They close the door.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    arguments = serve(door)
    if arguments is not None:
        run(arguments)


def serve(door: socket.socket) -> list[str] | None:
    """Forks for each request.

    Returns:
        In a fork, the program's arguments; None when the door is closed.
    """
    status_of = {}  # By the number of a file that names a process.
    with selectors.DefaultSelector() as selector:
        selector.register(door, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not door:
                    selector.unregister(key.fd)
                    (_, code) = os.waitpid(key.data, 0)
                    os.close(key.fd)
                    with os.fdopen(status_of.pop(key.fd), "w") as status:
                        print(os.waitstatus_to_exitcode(code), file=status)
                    continue
                message, files, _, _ = socket.recv_fds(door, 1 << 20, 4)
                if not message:
                    return None
                *standard_files, status = files
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    for file in (door.detach(), status):
                        os.close(file)
                    for file in (*status_of, *status_of.values()):
                        os.close(file)
                    return become(json.loads(message), standard_files)
                for file in standard_files:
                    os.close(file)
                os.write(status, b"%d\n" % pid)
                process = os.pidfd_open(pid)
                status_of[process] = status
                selector.register(process, selectors.EVENT_READ, pid)


def become(request: dict, standard_files: list[int]) -> list[str]:
    """Takes on what a new process would have been given."""
    for number, file in enumerate(standard_files):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Not that of the other forks.
    return request["arguments"]


def run(arguments: list[str]) -> None:
    """Does what the interpreter does with its arguments."""
    kind, *rest = arguments
    sys.path[0] = {"-c": "", "-m": os.getcwd()}.get(kind, os.path.dirname(kind))
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    if kind == "-m":
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    module = types.ModuleType("__main__")
    if kind == "-c":
        name, program = "<string>", rest[0]
        sys.argv[:] = ["-c", *rest[1:]]
    else:
        name = module.__file__ = kind
        with open(kind, encoding="utf-8") as file:
            program = file.read()
        sys.argv[:] = arguments
    sys.modules["__main__"] = module
    exec(compile(program, name, "exec"), module.__dict__)


if __name__ == "__main__":
    main()
