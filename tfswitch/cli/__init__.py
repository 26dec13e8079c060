"""The command line of tfswitch."""

from tfswitch import _installation

# The command of the Terraform tool `tfswitch` imports `tfswitch.cli`, too, and
# must fail here.
_installation.check_files()
