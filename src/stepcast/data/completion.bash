_stepcast() {
  local current="${COMP_WORDS[COMP_CWORD]}" words
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="@VERBS@ --help --version"
  else
    case "${COMP_WORDS[1]}" in
@CASES@
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _stepcast stepcast
