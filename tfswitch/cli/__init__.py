"""The command line of tfswitch."""

from tfswitch import _installation

# The other package's command imports `tfswitch.cli`, too, and must fail here.
_installation.check_files()
