# bash completion for fastsafetensors                                      -*- shell-script -*-
# SPDX-License-Identifier: Apache-2.0

_fastsafetensors() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} words=""
    if ((COMP_CWORD == 1)); then
        mapfile -t COMPREPLY < <(compgen -W "inspect verify load convert extract split merge diff hash bench engines --help --version" -- "$current")
        return
    fi
    case $previous in
        --mode) words="auto load map" ;;
        --engine)
            words="auto pread direct uring mmap"
            [[ ${COMP_WORDS[1]} != load ]] && words="auto buffered direct uring" ;;
        --dtype) words="F64 F32 F16 BF16 F8_E4M3 F8_E5M2 I64 I32" ;;
        --numa) words="default local interleave" ;;
        --ring) words="auto place slots" ;;
        --device) words="cpu cuda cuda:0 hip hip:0 gpu pinned" ;;
        --gds) words="auto off strict" ;;
        --order) words="reference name given" ;;
        --algorithm) words="xxh3 sha256" ;;
        --select | --threads | --budget | --repeat | --runs | --align | --size | --count | --stem) return ;;
    esac
    if [[ -z $words && $current == -* ]]; then
        case ${COMP_WORDS[1]} in
            inspect) words="--json --tree --lenient --help" ;;
            verify) words="--lenient --quiet --hash --help" ;;
            convert | extract) words="--select --dtype --align --order --quick --engine --dry-run --lenient --no-progress --help" ;;
            merge) words="--dtype --align --order --quick --engine --dry-run --lenient --no-progress --help" ;;
            split) words="--size --count --by-layer --stem --select --dtype --align --order --quick --engine --dry-run --lenient --no-progress --help" ;;
            diff) words="--values --no-metadata --quiet --no-progress --help" ;;
            hash) words="--algorithm --write --embed --dry-run --no-progress --help" ;;
            load) words="--device --gds --mode --engine --dtype --ring --numa --select --threads --budget --repeat --lenient --no-progress --json --help" ;;
            bench) words="--cold --runs --help" ;;
            engines) words="--help" ;;
        esac
    fi
    if [[ -n $words ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
    else
        mapfile -t COMPREPLY < <(compgen -f -- "$current")
    fi
}
complete -o filenames -F _fastsafetensors fastsafetensors
