# bash completion for fastsafetensors                                      -*- shell-script -*-
# SPDX-License-Identifier: Apache-2.0
# `fastsafetensors __complete` prints the candidates, and ":files" for file names.

_fastsafetensors() {
    local words line prefix=""
    # Bash splits --mode=load at the '='. The command gets one word, and bash the part after '='.
    local current=${COMP_WORDS[COMP_CWORD]}
    words=("${COMP_WORDS[@]:1:COMP_CWORD}")
    if [[ $current == "=" ]]; then
        current="" prefix="${COMP_WORDS[COMP_CWORD-1]}="
        words=("${COMP_WORDS[@]:1:COMP_CWORD-2}" "$prefix")
    elif ((COMP_CWORD > 2)) && [[ ${COMP_WORDS[COMP_CWORD-1]} == "=" ]]; then
        prefix="${COMP_WORDS[COMP_CWORD-2]}="
        words=("${COMP_WORDS[@]:1:COMP_CWORD-3}" "$prefix$current")
    fi
    COMPREPLY=()
    while IFS= read -r line; do
        if [[ $line == ":files" ]]; then
            mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -- "$current")
        else
            COMPREPLY+=("${line#"$prefix"}")
        fi
    done < <("${COMP_WORDS[0]}" __complete "${words[@]}" 2>/dev/null)
}
complete -o filenames -F _fastsafetensors fastsafetensors
