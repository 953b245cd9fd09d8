"""The command `gradsurg run|report|reproduce|fetch`, also `python -m gradsurg`.

A command's module is imported when it is called, so help needs no other library.
"""

import os
import re
import sys
from importlib import import_module

import gradsurg
from gradsurg.plugins.messages import nearest
from gradsurg.plugins.pipes import ignore_closed_pipes

COMMANDS = {
    "run": ("gradsurg.run", "train with and without a surgery, and compare"),
    "report": ("gradsurg.report.__main__", "write the report of a study"),
    "reproduce": ("gradsurg.reproduce.command", "check a paper's claim again"),
    "fetch": ("gradsurg.tasks.fetch.__main__", "store data sets for the tasks"),
}
"""Each command with its module, which has a function `main`, and its purpose."""
COMPLETION, COMPLETE = "--shell-completion", "--complete"
WRONG_INPUT = 2

HELP = f"""\
usage: gradsurg COMMAND ...

{chr(10).join(f"  {name:<10} {purpose}" for name, (_, purpose) in COMMANDS.items())}

  gradsurg run transform=clip
  gradsurg report runs/default

gradsurg COMMAND --help shows more; gradsurg --version the version.
Completion: eval "$(gradsurg {COMPLETION} bash)", the same with zsh;
in fish: gradsurg {COMPLETION} fish | source"""

BASH = f"""\
_gradsurg() {{
    local line=${{COMP_LINE:0:COMP_POINT}} cur=$2
    local word=${{line##*[[:space:]]}} IFS=$'\\n'
    [ "$cur" = = ] && cur=
    COMPREPLY=($(compgen -W "$(gradsurg {COMPLETE} "$line" 2>/dev/null)" -- "$word"))
    [[ ${{#COMPREPLY[@]}} = 1 && $COMPREPLY != *[=./] ]] && compopt +o nospace
    COMPREPLY=("${{COMPREPLY[@]#"${{word%"$cur"}}"}}")
}}
complete -o nospace -o default -F _gradsurg gradsurg"""
ZSH = f"""\
_gradsurg() {{
    local -a choices
    choices=(${{(f)"$(gradsurg {COMPLETE} "$LBUFFER" 2>/dev/null)"}})
    (( $#choices )) && compadd -S '' -a choices || _files
}}
compdef _gradsurg gradsurg"""
FISH = f"""\
complete -c gradsurg -a '(gradsurg {COMPLETE} (commandline -cp) 2>/dev/null)'"""
SHELLS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def main() -> None:
    """Run the command that the first word names, and exit with its code."""
    ignore_closed_pipes()
    match sys.argv[1:]:
        case []:
            print(HELP, file=sys.stderr)
            sys.exit(WRONG_INPUT)
        case ["-h" | "--help", *_]:
            print(HELP)
        case ["--version"]:
            print(f"gradsurg {gradsurg.__version__}")
        case ["--shell-completion", shell] if shell in SHELLS:
            print(SHELLS[shell])
        case ["--complete", line]:
            _complete(line)
        case ["--shell-completion", *rest]:
            shells = nearest(" ".join(rest), [*SHELLS])
            print(f"gradsurg {COMPLETION}: name a shell. {shells}", file=sys.stderr)
            sys.exit(WRONG_INPUT)
        case [name, *words] if name in COMMANDS:
            sys.argv = [f"gradsurg {name}", *words]
            sys.exit(import_module(COMMANDS[name][0]).main())
        case [name, *_]:
            choices = nearest(name, [*COMMANDS])
            print(f"gradsurg: there is no command '{name}'. {choices}", file=sys.stderr)
            sys.exit(WRONG_INPUT)


def _complete(line: str) -> None:
    """Print the words that may end a typed line, each on its own line."""
    words = line.split()[1:]
    current = words.pop() if words and not line[-1].isspace() else ""
    name = words[0] if words else ""
    if name == "run" and not current.startswith("-"):
        # Hydra completes overrides; for fish it prints each on its own line.
        os.environ["COMP_LINE"] = " ".join(["gradsurg", *words[1:], current])
        sys.argv = ["gradsurg run", "--shell-completion", "query=fish"]
        import_module(COMMANDS[name][0]).main()
        return
    choices = [*COMMANDS, "--help", "--version", COMPLETION]
    if name == "run":
        choices = ["--help", "--list", "--multirun"]
    elif name in COMMANDS:
        module = import_module(COMMANDS[name][0])
        choices = ["--help", *re.findall(r"--[\w-]+", module.parser().format_usage())]
        if not current.startswith("-"):
            choices += _names(name)
    elif words:
        choices = [*SHELLS] if name == COMPLETION else []
    print("\n".join(choice for choice in choices if choice.startswith(current)))


def _names(command: str) -> list[str]:
    """Return the papers or data sets that a command takes."""
    match command:
        case "reproduce":
            from gradsurg.experiments import ROOT
            from gradsurg.reproduce.expected import papers

            return papers(ROOT) if ROOT else []
        case "fetch":
            from gradsurg.tasks.fetch.__main__ import DATA_SETS

            return [*DATA_SETS]
    return []


if __name__ == "__main__":
    main()
