"""The command line of tfswitch."""

from tfswitch import _installation

# The other package's command also imports `tfswitch.cli`, so it ends here.
_installation.check_files()
