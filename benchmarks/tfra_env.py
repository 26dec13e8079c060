"""The Python of TensorFlow Recommenders Addons (TFRA), for comparisons.

TFRA 0.8.1 needs a TensorFlow of its own.
"""

import pathlib
import subprocess
import venv

_PACKAGES = (
    "tensorflow-recommenders-addons==0.8.1",
    "tensorflow-cpu==2.16.2",
    "tf-keras==2.16.0",
)


def python_of(folder: str) -> str:
    """Returns the interpreter of a virtual environment, and makes it before."""
    python = pathlib.Path(folder) / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run(
            [python, "-m", "pip", "install", "-q", *_PACKAGES], check=True
        )
    return str(python)
