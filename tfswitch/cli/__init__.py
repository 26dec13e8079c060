"""The command line of tfswitch."""
