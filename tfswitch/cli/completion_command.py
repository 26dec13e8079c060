"""`tfswitch completion bash` prints a script for the shell."""

import re
import subprocess
from collections.abc import Sequence

from tfswitch.cli import main, programs
from tfswitch.cli._arguments import Parser, ParserFoundError

_SCRIPT = """\
_tfswitch() {{
  local words=""
  if ((COMP_CWORD == 1)); then
    words="{commands}"
  else
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _tfswitch tfswitch"""


def run(words: Sequence[str]) -> int:
    """Prints the script."""
    parser = Parser(
        "completion",
        "Prints a script that completes commands and flags. In ~/.bashrc: "
        'eval "$(tfswitch completion bash)"',
    )
    parser.add_argument("shell", choices=("bash",))
    parser.parse_args(words)
    cases = [
        f'      {name}) words="{" ".join(_words_of(name))}" ;;'
        for name in main._COMMANDS
    ]
    print(
        _SCRIPT.format(
            commands=" ".join(main._COMMANDS), cases="\n".join(cases)
        )
    )
    return 0


def _words_of(command: str) -> list[str]:
    """Returns the flags of a command, and the choices of its arguments."""
    Parser.is_collected = True
    try:
        main._COMMANDS[command].run([])
    except ParserFoundError as found:
        parser = found.parser
    finally:
        Parser.is_collected = False
    words: list[str] = []
    for action in parser._actions:
        words += action.option_strings or map(str, action.choices or ())
    if command in ("serve", "repair"):
        # The program of the server has further flags.
        told = subprocess.run(
            programs.server_command(["--help"]), capture_output=True, text=True
        )
        words += re.findall(r"^ *(--\w+)", told.stdout, re.M)
    return sorted(set(words) - {"-h"})
