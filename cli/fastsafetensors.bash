# bash completion for fastsafetensors                                      -*- shell-script -*-
# SPDX-License-Identifier: Apache-2.0
# The command itself knows its words: __complete prints them, ":files" for names of files.

_fastsafetensors() {
    local words line
    # Bash takes --mode=load apart at the '='; the command wants it whole.
    local current=${COMP_WORDS[COMP_CWORD]}
    words=("${COMP_WORDS[@]:1:COMP_CWORD}")
    if [[ $current == "=" ]]; then
        current="" words=("${COMP_WORDS[@]:1:COMP_CWORD-1}" "")
    elif ((COMP_CWORD > 2)) && [[ ${COMP_WORDS[COMP_CWORD-1]} == "=" ]]; then
        words=("${COMP_WORDS[@]:1:COMP_CWORD-2}" "$current")
    fi
    COMPREPLY=()
    while IFS= read -r line; do
        if [[ $line == ":files" ]]; then
            mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -- "$current")
        else
            COMPREPLY+=("$line")
        fi
    done < <("${COMP_WORDS[0]}" __complete "${words[@]}" 2>/dev/null)
}
complete -o filenames -F _fastsafetensors fastsafetensors
